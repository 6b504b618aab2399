"""llama.cpp's names for the ways in which byte-level tokenizers split a text before merging.

A GGUF file has the name only, `tokenizer.ggml.pre`; its meaning is in llama.cpp. A tokenizer gets a
name if its normalizer, its pattern and its lookup of whole pieces are those of a tokenizer for
which llama.cpp made that name.

Source: `src/llama-vocab.cpp` and `conversion/base.py` of llama.cpp.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

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
    digits = bool(first) and _splits_digits(first[0])
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


def _splits_digits(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Split":
        return _pattern(step) == r"\p{N}" and not step["invert"]
    return step == {"type": "Digits", "individual_digits": True}


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
