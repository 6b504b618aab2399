"""Split documents into sentences with the rules of sentencex, which knows some 300 languages."""

import logging
import re
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from lathe_base.config.settings import PrepareSettings

log = logging.getLogger("lathe")

WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
"""White space beyond ASCII. sentencex 1.0.32 takes it for one byte, and panics where a no-break
space is between an initial and its period."""

WINDOW = 4096
"""Number of characters that are split at a time. The time that sentencex takes grows with the
square of a paragraph's length: 0.2 MB/s in a paragraph of 1 MB, and 25 MB/s in windows."""
MAX_WINDOW = 1 << 16


class SentenceSplitter:
    """Splits documents into sentences.

    White space between two sentences begins the second one, as GPT-2's tokens do. So nothing is
    lost, and the ids of the sentences, one after another, are those of the whole document wherever
    the tokenizer itself begins a new token there.

    Args:
        language: code of ISO 639, such as `en`; see `Prepare.sentence_language`.
    """

    def __init__(self, language: str) -> None:
        import sentencex  # type: ignore[import-untyped]  # only few need it

        self.language, self._segment = language, sentencex.segment

    def __call__(self, text: str) -> list[str]:
        """The sentences, whose concatenation is the text; none of them is white space alone.

        Sentences longer than `MAX_WINDOW` characters are cut.
        """
        # As long as the text, so that places in it are places in the text.
        narrow = text if text.isascii() else WIDE_SPACE.sub(" ", text)
        ends, begin, size = [0], 0, WINDOW
        while begin < len(text):
            window = narrow[begin : begin + size]
            window_ends = self._ends(window)
            if begin + size >= len(text):
                window_ends[-1:] = [len(window)]
            elif len(window_ends) > 1:
                window_ends.pop()  # it may go on behind the window
            elif size < MAX_WINDOW or window.isspace():
                size *= 2
                continue
            else:
                window_ends = [len(window)]
            ends += [begin + end for end in window_ends]
            begin, size = ends[-1], WINDOW
        return [text[begin:end] for begin, end in pairwise(ends)]

    def _ends(self, text: str) -> list[int]:
        """Where each sentence of a text ends, without the white space behind it.

        A text that makes sentencex fail is one sentence, with a warning.
        """
        try:
            pieces = self._segment(self.language, text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which pyo3 does not export
                raise
            log.warning("not split into sentences: %.40r...: %s", text, error)
            pieces = [text]
        ends, end = [], 0
        for piece in pieces:
            # Some pieces are white space, and some of it is in no piece.
            if core := piece.strip():
                end = text.index(core, end) + len(core)
                ends.append(end)
        return ends

    def split(self, documents: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
        """All sentences, and (documents,) their number in each document."""
        sentences = list(map(self, documents))
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        return list(chain.from_iterable(sentences)), counts


def sentence_rules(settings: PrepareSettings) -> str | None:
    """Everything that decides where a sentence ends; None if documents are not split."""
    if not settings.split_sentences:
        return None
    return f"sentencex {version('sentencex')} {settings.sentence_language}"
