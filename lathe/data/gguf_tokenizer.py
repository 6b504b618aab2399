"""The tokenizer that a GGUF file's metadata describes.

A GGUF file holds tokens, their kinds, and merges (byte-level BPE, `gpt2`) or scores
(SentencePiece's BPE, `llama`, and its Unigram, `t5`), but no rules: how a text is split before
merging is a name, `tokenizer.ggml.pre`, whose meaning is in llama.cpp. Names of families that Lathe
does not support are rejected, because a wrong split silently gives wrong ids.

In the other direction, a tokenizer gets a name if its normalizer, its pattern and its lookup of
whole pieces are those of a tokenizer for which llama.cpp made that name.

Source: `src/llama-vocab.cpp` and `conversion/base.py` of llama.cpp.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from lathe_base.artifacts.kinds import checked
from lathe_base.errors import Code, UserError

HINT = "convert the model again with llama.cpp's convert_hf_to_gguf.py"
OTHER = "give a Hugging Face folder of the model"
PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens. Control tokens are special, user-defined ones are never split, and unused ones
are fillers such as `[PAD7]`."""
STRIPPING_NAMES = ("phi-3", "phi3")
"""llama.cpp lets the added tokens of a model whose `general.name` contains one of these take the
whitespace after them (`rstrip`), except for `NOT_STRIPPING`."""
NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN, GPT4O = _CASES % ("", "", ""), _CASES % (_SUFFIX, _SUFFIX, "{1,3}")


class Split(NamedTuple):
    """How a text becomes pieces.

    Attributes:
        pattern: regular expression of a piece, in a spelling of this module.
        digits: whether every digit is a piece of its own, before the pattern is applied.
        nfc: whether the text is normalized to NFC, which llama.cpp omits.
        whole_first: whether a piece that is a token is taken without merging it.
    """

    pattern: str
    digits: bool = False
    nfc: bool = False
    whole_first: bool = False


SPLITS = {
    "gpt-2": Split(GPT2),
    "smollm": Split(GPT2, digits=True),
    "starcoder": Split(GPT2, digits=True),
    "olmo": Split(GPT2, nfc=True),
    "llama3": Split(LLAMA3, whole_first=True),
    "llama-v3": Split(LLAMA3, whole_first=True),
    "llama-bpe": Split(LLAMA3, whole_first=True),
    "dbrx": Split(LLAMA3),
    "smaug-bpe": Split(LLAMA3),
    "qwen2": Split(QWEN2, nfc=True),
    "deepseek-r1-qwen": Split(QWEN2),
    "tekken": Split(TEKKEN, whole_first=True),
    "gpt-4o": Split(GPT4O),
    "llama4": Split(GPT4O),
}
"""`tokenizer.ggml.pre` -> what it stands for."""
PREFERRED = (
    *("gpt-2", "smollm", "olmo", "llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "tekken"),
    "gpt-4o",
)
"""The name that is written, of those with the same meaning."""
_NO_NFC = "does not normalize texts to NFC: decomposed accents get other tokens"
_NO_MARKS = "ends words at combining marks: Devanagari, for example, gets other tokens"
DEVIATIONS = {"olmo": _NO_NFC, "qwen2": _NO_NFC, "tekken": _NO_MARKS, "gpt-4o": _NO_MARKS}
"""What llama.cpp is known to do differently from the tokenizers for which it has made a name."""

SPELLINGS = {
    "\r": r"\r",
    "\n": r"\n",
    r"'(?i:[sdmt]|ll|ve|re)": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?:[sdmt]|ll|ve|re)": "'s|'t|'re|'ve|'m|'ll|'d",
    r"|\s*[\r\n]|": r"|\s*[\r\n]+|",
}
"""Other spellings of a part of a pattern that match the same texts, as in tiktoken's GPT-4."""
POSSESSIVE = re.compile(r"(?<!\\s)([?*+])\+")
"""What follows these quantifiers in the patterns above never matches what they have taken, except
after whitespace and in patterns with marks: to forbid backtracking changes nothing."""


class _Vocabulary(BaseModel):
    """The metadata of a tokenizer, by the last part of its keys."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    pre: str = ""
    tokens: Annotated[list[str], Field(min_length=1)]
    token_type: list[int]
    merges: list[str] = []
    scores: list[float] = []
    bos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool | None = None
    add_space_prefix: bool | None = None
    remove_extra_whitespaces: bool = False
    precompiled_charsmap: list[int] = []

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "_Vocabulary":
        n = len(self.tokens)
        if len(self.token_type) != n:
            raise ValueError(f"{n} tokens, but {len(self.token_type)} token types")
        if len(set(self.tokens)) != n:
            raise ValueError("two tokens are the same")
        for name in ("bos_token_id", "unknown_token_id"):
            token_id = getattr(self, name)
            if token_id is not None and not 0 <= token_id < n:
                raise ValueError(f"{name} {token_id} is not one of {n} tokens")
        if self.model != "gpt2" and len(self.scores) != n:
            raise ValueError(f"{n} tokens, but {len(self.scores)} scores")
        if self.model == "t5" and self.unknown_token_id is None:
            raise ValueError("no unknown_token_id")
        if self.model == "gpt2" and not self.merges:
            raise ValueError("no merges")
        return self


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes.

    An end-of-text token is never appended, whatever the file says: there would be nothing to
    continue.

    Args:
        source: name of the file, for errors.

    Raises:
        UserError: a kind of tokenizer or of splitting that Lathe does not know, or a vocabulary
            that contradicts itself.
    """
    values = {k.removeprefix(PREFIX): v for k, v in metadata.items() if k.startswith(PREFIX)}
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if (model := values.get("model")) not in makers:
        raise UserError(
            f"{source}: {PREFIX}model is {model!r}, but Lathe supports only gpt2 (byte-level BPE), "
            "llama (SentencePiece BPE) and t5 (SentencePiece Unigram)",
            OTHER,
            Code.UNSUPPORTED,
        )
    vocabulary = checked(values, _Vocabulary, f"{source}: tokenizer", HINT)
    try:
        made = makers[vocabulary.model](vocabulary, source)
        name = str(metadata.get("general.name", "")).lower()
        _add_tokens(made, vocabulary, strips=any(known in name for known in STRIPPING_NAMES))
    except Exception as error:  # `tokenizers` raises plain Exception
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source}: not a tokenizer: {error}", HINT, Code.MALFORMED) from error
    # Where the file does not say, llama.cpp puts a token before texts of these tokenizers.
    begins = vocabulary.model == "llama" or (
        vocabulary.model == "gpt2" and SPLITS[vocabulary.pre].whole_first
    )
    if vocabulary.bos_token_id is not None and (
        begins if vocabulary.add_bos_token is None else vocabulary.add_bos_token
    ):
        bos = vocabulary.tokens[vocabulary.bos_token_id]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary.bos_token_id)],
        )
    return made


def _byte_level(vocabulary: _Vocabulary, source: str) -> Tokenizer:
    if vocabulary.pre not in SPLITS:
        raise UserError(
            f"{source}: {PREFIX}pre is {vocabulary.pre!r}, but Lathe supports "
            f"{', '.join(SPLITS)} only",
            OTHER
            if vocabulary.pre and vocabulary.pre != "default"
            else f"{HINT}, which says how its texts are split",
            Code.UNSUPPORTED,
        )
    merges = []
    for merge in vocabulary.merges:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise ValueError(f"merge {merge[:40]!r} is not two tokens")
        merges.append((left, right))
    split = SPLITS[vocabulary.pre]
    tokenizer = Tokenizer(models.BPE(_ids(vocabulary), merges, ignore_merges=split.whole_first))
    # Split texts as the name says, and then only map bytes to letters; GPT-2's pattern is that of
    # `ByteLevel` itself.
    first: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    if split.pattern != GPT2:
        first.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    if split.nfc:  # which llama.cpp leaves out, but the model was trained with
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern == GPT2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary, source: str) -> Tokenizer:
    """As Llama 2's `tokenizer.json`. U+2581 stands for a space, and is put before a text and after
    every special token."""
    ids = _ids(vocabulary)
    unknown = vocabulary.unknown_token_id
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            sentencepiece_merges(ids, vocabulary.scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_prefix = vocabulary.add_space_prefix is not False
    prefix = [normalizers.Prepend("\u2581")] if adds_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    # The prefix disappears again in decoding.
    strip = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _unigram(vocabulary: _Vocabulary, source: str) -> Tokenizer:
    """SentencePiece's Unigram over the text with U+2581 in place of spaces.

    Raises:
        UserError: a normalization of which `tokenizers` has no exact equivalent.
    """
    for key in ("precompiled_charsmap", "remove_extra_whitespaces", "add_space_prefix"):
        if getattr(vocabulary, key):
            raise UserError(
                f"{source}: Lathe does not support {PREFIX}{key} of t5", OTHER, Code.UNSUPPORTED
            )
    scored = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(scored, vocabulary.unknown_token_id))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    return tokenizer


def sentencepiece_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the highest score: merges are all
    pairs of tokens whose union is a token, best score first."""
    merges = []
    for token, index in ids.items():
        cuts = range(1, len(token))
        pairs = [(token[:i], token[i:]) for i in cuts if token[:i] in ids and token[i:] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(-scores[index], pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    kinds = zip(vocabulary.tokens, vocabulary.token_type, strict=True)
    return {token: i for i, (token, kind) in enumerate(kinds) if kind != UNUSED}


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, strips: bool) -> None:
    """Mark the tokens that a text may hold whole; those of SentencePiece's bytes are not.

    Args:
        strips: whether they take the whitespace after them, except for `NOT_STRIPPING`.
    """
    unknown = vocabulary.unknown_token_id if vocabulary.model != "gpt2" else None
    for is_special in (True, False):
        kind = CONTROL if is_special else USER_DEFINED
        tokens = [
            AddedToken(
                token,
                rstrip=strips and token not in NOT_STRIPPING,
                normalized=False,
                special=is_special,
            )
            for i, token in enumerate(vocabulary.tokens)
            if vocabulary.token_type[i] == kind or (is_special and i == unknown)
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(tokens)


class UnknownSplitError(ValueError):
    """llama.cpp has no name for a tokenizer's normalizer or pre-tokenizer."""


def defined_split(state: Mapping[str, Any]) -> Split:
    """The split of a byte-level tokenizer, from its JSON.

    Raises:
        UnknownSplitError: it has a step that is none of a `Split`.
    """
    normalizers = steps(state["normalizer"], "normalizers")
    if normalizers not in ([], [{"type": "NFC"}]):
        raise UnknownSplitError(f"normalizer {json.dumps(state['normalizer'])}")
    *first, last = steps(state["pre_tokenizer"], "pretokenizers") or [{}]
    pre_tokenizer = json.dumps(state["pre_tokenizer"])
    if last.get("type") != "ByteLevel":
        raise UnknownSplitError(f"pre_tokenizer {pre_tokenizer}")
    if last["add_prefix_space"]:
        raise UnknownSplitError("ByteLevel with add_prefix_space")
    digits = False
    if first and first[0]["type"] == "Split":
        digits = _pattern(first[0]) == r"\p{N}" and not first[0]["invert"]
    elif first:
        digits = first[0] == {"type": "Digits", "individual_digits": True}
    patterns = [_pattern(step) for step in first[digits:]]
    if last["use_regex"]:
        patterns.append(GPT2)
    if len(patterns) != 1 or patterns[0] is None:
        raise UnknownSplitError(f"pre_tokenizer {pre_tokenizer}")
    whole_first = bool(state["model"].get("ignore_merges"))
    return Split(patterns[0], digits, bool(normalizers), whole_first)


def split_names(split: Split) -> list[str]:
    """llama.cpp's names for a split, the exact one first; one that differs in `whole_first` is
    equal if merging makes every token.

    Raises:
        UnknownSplitError: there is none.
    """
    other = split._replace(whole_first=not split.whole_first)
    names = [name for wanted in (split, other) for name in PREFERRED if SPLITS[name] == wanted]
    if not names:
        digits = ", digits apart" if split.digits else ""
        nfc = ", after NFC" if split.nfc else ""
        raise UnknownSplitError(f"split pattern {split.pattern}{digits}{nfc}")
    return names


def steps(state: Mapping[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers of a JSON, without the sequences around them."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [dict(state)]
    return [inner for one in state[key] for inner in steps(one, key)]


def _pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern of a step whose matches are pieces, in this module's spelling; else None."""
    if step["type"] != "Split" or "Regex" not in step["pattern"]:
        return None
    # Removing what lies between matches is the same, since the patterns match everything.
    if (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
        return None
    pattern: str = step["pattern"]["Regex"]
    for theirs, ours in SPELLINGS.items():
        pattern = pattern.replace(theirs, ours)
    return pattern if r"\p{M}" in pattern else POSSESSIVE.sub(r"\1", pattern)
