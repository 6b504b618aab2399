"""The tokenizer that a GGUF file's metadata describes.

A GGUF file holds tokens, their kinds, and merges (byte-level BPE, `gpt2`) or scores
(SentencePiece's BPE, `llama`, and its Unigram, `t5`), but no rules: how a text is split before
merging is a name, `tokenizer.ggml.pre`, whose meaning is in llama.cpp. Names of families that Lathe
does not support are rejected, because a wrong split silently gives wrong ids.
"""

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

from lathe.data.gguf_splits import GPT2, SPLITS
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
    merges = [_pair(merge) for merge in vocabulary.merges]
    split = SPLITS[vocabulary.pre]
    tokenizer = Tokenizer(models.BPE(_ids(vocabulary), merges, ignore_merges=split.whole_first))
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


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise ValueError(f"merge {merge[:40]!r} is not two tokens")
    return left, right


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
