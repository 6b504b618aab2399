"""Makes a held-out cloze set from any prose, by LAMBADA's rule.

Source: Paperno et al., "The LAMBADA dataset" (2016), section 3.1: a passage is a target sentence
after the shortest run of whole sentences with at least 50 words. In the
paper, people selected the passages whose last word needs the wider context; here the word must
occur earlier in the passage.
"""

import hashlib
import heapq
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

CONTEXT_WORDS = 50
CONTEXT_SENTENCES = 2
MAX_WORDS = 150
TARGET_LETTERS = 3
PROSE_SHARE = 0.8

PUNCTUATION = string.punctuation + "\u2018\u2019\u201c\u201d\u00ab\u00bb\u2013\u2014\u2026"
JOINTS = re.compile(r"(?<=\w)['\u2019-](?=\w)")  # within "don't" and "read-only"
APART = re.compile(r"\s+([.!?])$")  # "the end ." of tokenized text, as WikiText's
PARAGRAPH = re.compile(r"\n\s*\n")
SENTENCE = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)\]]))"  # ends here, perhaps inside quotes,
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\be\.g\.)(?<!\bi\.e\.)"
    r"\s+(?=[\"'\u201c\u2018(\[]*[A-Z])"  # and another one begins
)


@dataclass(frozen=True)
class Passage:
    """A passage, and the index of its document."""

    text: str
    document: int


def cloze_passages(documents: Iterable[str], limit: int) -> list[Passage]:
    """Unique passages that end with the word to predict, without punctuation.

    The last word has three letters or more, nothing but letters, and occurs earlier in the passage;
    before its sentence stand at least two sentences with at least 50 words. A sentence is the
    target of one passage at most, and may be context of others. Runs of white space become one
    space. Passages of more than 150 words, or with a fifth or more that is not plain words (code,
    tables), are dropped. If there are more than `limit`, the ones with the smallest SHA-256 are
    taken: a uniform and reproducible sample.
    """
    seen: set[bytes] = set()

    def fresh() -> Iterator[tuple[bytes, int, Passage]]:
        for index, document in enumerate(documents):
            for passage in _passages(document):
                digest = hashlib.sha256(passage.encode()).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield digest, len(seen), Passage(passage, index)

    chosen = heapq.nsmallest(limit, fresh(), key=lambda item: item[:2])
    return [passage for _, _, passage in sorted(chosen, key=lambda item: item[1])]


def _passages(document: str) -> Iterator[str]:
    context: list[list[str]] = []  # the sentences before, as words
    for paragraph in PARAGRAPH.split(document):
        for sentence in SENTENCE.split(paragraph.strip()):
            words = APART.sub(r"\1", sentence).split()
            context = _shortest(context)  # what is further back will not be needed again
            if passage := _passage(context, words):
                yield passage
            context.append(words)


def _shortest(sentences: list[list[str]]) -> list[list[str]]:
    """The shortest run of last sentences that is a context, or all if there is none."""
    for count in range(CONTEXT_SENTENCES, len(sentences)):
        if sum(map(len, sentences[-count:])) >= CONTEXT_WORDS:
            return sentences[-count:]
    return sentences


def _passage(context: list[list[str]], sentence: list[str]) -> str | None:
    before = [word for earlier in context for word in earlier]
    if len(context) < CONTEXT_SENTENCES or len(before) < CONTEXT_WORDS or not sentence:
        return None
    last = sentence[-1]
    target = last.rstrip(PUNCTUATION)
    words = [*before, *sentence[:-1]]
    bare = [word.strip(PUNCTUATION) for word in words]
    plain = sum(map(str.isalpha, (JOINTS.sub("", word) for word in bare)))
    if (
        len(words) < MAX_WORDS
        and len(target) >= TARGET_LETTERS
        and target.isalpha()
        and last[len(target) :].startswith((".", "!", "?"))
        and target in bare
        and plain >= PROSE_SHARE * len(bare)
    ):
        return " ".join([*words, target])
    return None
