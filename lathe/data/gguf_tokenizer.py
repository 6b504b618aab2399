"""The tokenizer of a GGUF file: from the file's metadata, and back.

A GGUF file holds tokens, their kinds, and merges (byte-level BPE, `gpt2`) or scores
(SentencePiece's BPE, `llama`), but no rules: how a text is split before merging is a name,
`tokenizer.ggml.pre`, whose meaning is in llama.cpp. The names below are those of the families that
Lathe supports; others are rejected, because a wrong split silently gives wrong ids.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

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
from lathe_base.errors import UserError

HINT = "convert the model again with llama.cpp's convert_hf_to_gguf.py"
PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens. Control tokens are special, user-defined ones are never split, and unused ones
are fillers such as `[PAD7]`."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""`tokenizer.ggml.pre` -> the pattern of pieces; None is GPT-2's, which `tokenizers` has."""
WHOLE_FIRST = {"llama3", "llama-v3", "llama-bpe", "tekken"}
"""Kinds that take a piece which is a token without merging it, and prepend the beginning-of-text
token unless the file says otherwise."""


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
    add_space_prefix: bool = True

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "_Vocabulary":
        n = len(self.tokens)
        if len(self.token_type) != n:
            raise ValueError(f"{n} tokens, but {len(self.token_type)} token types")
        if len(set(self.tokens)) != n:
            raise ValueError("two tokens are the same")
        for name in ("bos_token_id", "unknown_token_id"):
            found = getattr(self, name)
            if found is not None and not 0 <= found < n:
                raise ValueError(f"{name} {found} is not one of {n} tokens")
        if self.model == "llama" and len(self.scores) != n:
            raise ValueError(f"{n} tokens, but {len(self.scores)} scores")
        if self.model == "gpt2" and not self.merges:
            raise ValueError("no merges")
        return self


def tokenizer_of(metadata: Mapping[str, Any], source: str) -> Tokenizer:
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
    if values.get("model") not in ("gpt2", "llama"):
        raise UserError(
            f"{source}: {PREFIX}model is {values.get('model')!r}, but Lathe supports gpt2 "
            "(byte-level BPE) and llama (SentencePiece BPE) only",
            "give a Hugging Face folder of the model",
        )
    found = checked(values, _Vocabulary, f"{source}: tokenizer", HINT)
    try:
        made = _byte_level(found, source) if found.model == "gpt2" else _sentencepiece(found)
        _add_tokens(made, found)
    except Exception as error:  # `tokenizers` raises plain Exception
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source}: not a tokenizer: {error}", HINT) from error
    begins = found.model == "llama" or found.pre in WHOLE_FIRST
    if found.bos_token_id is not None and (
        begins if found.add_bos_token is None else found.add_bos_token
    ):
        bos = found.tokens[found.bos_token_id]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, found.bos_token_id)],
        )
    return made


def _byte_level(found: _Vocabulary, source: str) -> Tokenizer:
    if found.pre not in SPLITS:
        raise UserError(
            f"{source}: {PREFIX}pre is {found.pre!r}, but Lathe supports {', '.join(SPLITS)} only",
            "give a Hugging Face folder of the model"
            if found.pre and found.pre != "default"
            else f"{HINT}, which says how its texts are split",
        )
    merges = [_pair(merge) for merge in found.merges]
    tokenizer = Tokenizer(models.BPE(_ids(found), merges, ignore_merges=found.pre in WHOLE_FIRST))
    split = SPLITS[found.pre]
    first: list[pre_tokenizers.PreTokenizer] = []
    if split:
        first = [pre_tokenizers.Split(Regex(split), "isolated")]
    elif found.pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    if split == _QWEN2:  # which llama.cpp leaves out, but the model was trained with
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise ValueError(f"merge {merge[:40]!r} is not two tokens")
    return left, right


def _sentencepiece(found: _Vocabulary) -> Tokenizer:
    """As Llama 2's `tokenizer.json`. U+2581 stands for a space, and is put before a text and after
    every special token."""
    ids = _ids(found)
    unknown = found.unknown_token_id
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            _merges_of(ids, found.scores),
            unk_token=None if unknown is None else found.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("\u2581")] if found.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if found.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
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


def _ids(found: _Vocabulary) -> dict[str, int]:
    kinds = zip(found.tokens, found.token_type, strict=True)
    return {token: i for i, (token, kind) in enumerate(kinds) if kind != UNUSED}


def _add_tokens(tokenizer: Tokenizer, found: _Vocabulary) -> None:
    """Mark the tokens that a text may hold whole; those of SentencePiece's bytes are not."""
    unknown = found.unknown_token_id if found.model == "llama" else None
    for is_special in (True, False):
        kind = CONTROL if is_special else USER_DEFINED
        tokens = [
            AddedToken(token, normalized=False, special=is_special)
            for i, token in enumerate(found.tokens)
            if found.token_type[i] == kind or (is_special and i == unknown)
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(tokens)


SAMPLE = (
    " It's  they'LL\t don't\r\n\r\n  x \n",
    "1 22 333 4444 1,000,000.5e-7 x2y \u0663\u0664 \u00bd",
    "na\u00efve cafe\u0301 \u6f22\u5b57 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u200b\u00a0",
    "\U0001f917\U0001f469\u200d\U0001f467 !!?!...///\\\\ #@ camelCaseABCdef HTTPServer",
)
"""Texts that each way of splitting splits differently."""


def metadata_of(tokenizer: Tokenizer, size: int, source: str) -> dict[str, Any]:
    """The metadata of a GGUF file with this tokenizer, from which `tokenizer_of` makes one that
    gives a sample of texts the same ids.

    Args:
        size: of the vocabulary, which is filled up with tokens that no text has.
        source: name of the model, for errors.

    Raises:
        UserError: a kind of tokenizer or of splitting that llama.cpp has no name for.
    """
    state = json.loads(tokenizer.to_str())
    kind = state["model"].get("type")
    merges = [x.split(" ") if isinstance(x, str) else x for x in state["model"].get("merges", [])]
    if kind == "BPE":
        found = _entries(tokenizer, size, state["model"].get("unk_token"))
        found |= _beginning(tokenizer)
        if state["model"].get("byte_fallback"):
            found |= _scores(found["tokens"], merges)
            found |= {"model": "llama", "add_space_prefix": "Prepend" in str(state["normalizer"])}
            tries: list[dict[str, Any]] = [found]
        else:
            found |= {"model": "gpt2", "merges": [" ".join(pair) for pair in merges]}
            tries = [{**found, "pre": pre} for pre in _distinct_splits()]
        for values in tries:
            metadata = {f"{PREFIX}{key}": value for key, value in values.items()}
            if _agree(tokenizer, tokenizer_of(metadata, source)):
                return metadata
    raise UserError(
        f"{source}: its tokenizer uses a pre-tokenization that llama.cpp does not know",
        "remove gguf from Export.formats",
    )


def _distinct_splits() -> list[str]:
    """The first name of every way of splitting; `smollm` is GPT-2's with single digits."""
    patterns = {(split, name == "smollm"): name for name, split in reversed(SPLITS.items())}
    return sorted(patterns.values(), key=list(SPLITS).index)


def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    return all(one.encode(text).ids == other.encode(text).ids for text in SAMPLE)


def _entries(tokenizer: Tokenizer, size: int, unknown: str | None) -> dict[str, Any]:
    """Tokens and their types, and the id of the token for unknown characters, if any."""
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    for i in range(size):
        token = tokenizer.id_to_token(i)
        if token is None:
            token, type_ = f"[PAD{i}]", UNUSED
        elif token == unknown:
            type_ = UNKNOWN
        elif i in added:
            type_ = CONTROL if added[i].special else USER_DEFINED
        else:
            type_ = BYTE if unknown and re.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL
        tokens.append(token)
        types.append(type_)
    found: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if unknown is not None:
        found["unknown_token_id"] = tokenizer.token_to_id(unknown)
    return found


def _beginning(tokenizer: Tokenizer) -> dict[str, Any]:
    """The token that comes before every text, if any."""
    ids = tokenizer.encode("").ids
    return {"add_bos_token": True, "bos_token_id": ids[0]} if ids else {"add_bos_token": False}


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Scores of tokens: the rank of the first merge that makes one, negative; the inverse of
    `_merges_of`."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return {"scores": [-float(ranks.get(token, 0)) for token in tokens]}
