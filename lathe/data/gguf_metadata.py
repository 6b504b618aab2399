"""The metadata of a GGUF file that describe a tokenizer, for llama.cpp.

llama.cpp knows a tokenizer by names and a few switches. What decides is the tokenizer's definition:
each part of it is written, or else refused by name, so that no text silently gets other ids. Then
`tokenizer_from_gguf`, which reads the metadata as llama.cpp does, has to give sample texts and
every added token the same ids.

Source: `src/llama-vocab.cpp` of llama.cpp.
"""

import json
import logging
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from lathe.data.gguf_tokenizer import (
    BYTE,
    CONTROL,
    DEVIATIONS,
    NORMAL,
    NOT_STRIPPING,
    PREFIX,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    UnknownSplitError,
    defined_split,
    split_names,
    steps,
    tokenizer_from_gguf,
)
from lathe.data.tokenizer import probes
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

HINT = "remove gguf from Export.formats"
SPACE = "\u2581"
"""SentencePiece's character for a space."""
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
STRIPPING_NAME = "Phi-3"
UNMATCHED = "[PAD %d]"
"""Name of a filler in a Unigram vocabulary, where llama.cpp looks for unused tokens in the text
too: this one has a space, and the text's spaces have become U+2581."""


def gguf_metadata(tokenizer: Tokenizer, size: int, source: str) -> dict[str, Any]:
    """The metadata of a GGUF file with this tokenizer.

    Args:
        size: of the vocabulary, which is filled up with tokens that no text has.
        source: name of the model, for errors.

    Raises:
        UserError: a normalizer, pre-tokenizer, model or added token that llama.cpp has no name for.
    """
    state = json.loads(tokenizer.to_str())
    write = _unigram if state["model"]["type"] == "Unigram" else _bpe
    fields = write(tokenizer, state, size, source) | _beginning(tokenizer, source)
    metadata = {f"{PREFIX}{key}": value for key, value in fields.items()}
    if _strips(tokenizer, source):
        metadata["general.name"] = STRIPPING_NAME
    # llama.cpp finds added tokens in the text as it is, not as it is normalized.
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.normalized and tokenizer.normalizer is not None:
            normal = tokenizer.normalizer.normalize_str(token.content)
            if normal != token.content:
                why = f"which makes it {normal!r}, but llama.cpp finds it in the text as it is"
                raise _lost_flag(token, "normalized", why, source)
    written = tokenizer_from_gguf(metadata, source)
    if fields["model"] == "llama":  # scores have to make every token of the same parts as merges
        for token_text in _learned_tokens(tokenizer):
            ours, theirs = (x.model.tokenize(token_text) for x in (tokenizer, written))
            if [x.id for x in ours] != [x.id for x in theirs]:
                raise UserError(
                    f"{source}: its tokenizer makes the token {token_text!r} by other merges than "
                    "SentencePiece's scores, which is all that llama.cpp has",
                    HINT,
                    Code.UNSUPPORTED,
                )
    # What the fields cannot express shows in the ids: the written tokenizer is read back.
    for what, text in probes(tokenizer):
        read, reread = (x.encode(text, add_special_tokens=False) for x in (tokenizer, written))
        if read.ids != reread.ids:
            raise UserError(
                f"{source}: llama.cpp would give {what} other ids", HINT, Code.UNSUPPORTED
            )
    return metadata


def _bpe(tokenizer: Tokenizer, state: Mapping[str, Any], size: int, source: str) -> dict[str, Any]:
    """The fields of a BPE tokenizer, byte-level (`gpt2`) or SentencePiece's (`llama`)."""
    model = state["model"]
    split_steps = steps(state["pre_tokenizer"], "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in split_steps)
    _require_bpe(model, is_byte_level, source)
    # In a byte-level vocabulary every text has tokens.
    unknown = None if is_byte_level else model.get("unk_token")
    fields = _entries(tokenizer, size, unknown, has_bytes=not is_byte_level)
    merges = [x.split(" ") if isinstance(x, str) else x for x in model["merges"]]
    if is_byte_level:
        try:
            split = defined_split(state)
            pre = split_names(split)[0]
        except UnknownSplitError as error:
            what = f"{source}: llama.cpp does not know its tokenizer's {error}"
            raise UserError(what, HINT, Code.UNSUPPORTED) from None
        if SPLITS[pre] != split:
            # It differs in `whole_first` alone, which matters for tokens that no merges make.
            plain = json.loads(tokenizer.to_str())
            plain["model"]["ignore_merges"] = False
            plain["added_tokens"] = []
            merging = Tokenizer.from_str(json.dumps(plain)).model
            learned = _learned_tokens(tokenizer)
            token = next((token for token in learned if len(merging.tokenize(token)) != 1), None)
            if token:
                flag = f"ignore_merges={str(split.whole_first).lower()}"
                raise UserError(
                    f"{source}: llama.cpp does not know its tokenizer's split with {flag}, which "
                    f"matters for {token!r}: no merges make it",
                    HINT,
                    Code.UNSUPPORTED,
                )
        if pre in DEVIATIONS:
            log.warning("%s: llama.cpp %s", source, DEVIATIONS[pre])
        fields |= {"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in merges]}
    elif model.get("byte_fallback"):
        fields |= {"model": "llama", "pre": "default"}
        # A token's score is the rank of the first merge that makes it, negative: the inverse of
        # `sentencepiece_merges`. Tokens that no merge makes have the lowest.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault("".join(pair), rank)
        tokens = fields["tokens"]
        fields["scores"] = [-float(ranks.get(token, len(merges))) for token in tokens]
        fields["add_space_prefix"] = _adds_space_prefix(tokenizer, state, source)
    else:
        raise UserError(
            f"{source}: its tokenizer is neither byte-level nor has byte_fallback, and llama.cpp "
            "knows no other BPE",
            HINT,
            Code.UNSUPPORTED,
        )
    return fields


def _unigram(
    tokenizer: Tokenizer, state: Mapping[str, Any], size: int, source: str
) -> dict[str, Any]:
    """The fields of SentencePiece's Unigram (`t5`), which llama.cpp segments as `tokenizers` does,
    except for bytes of unknown characters and a prefix of texts that are whitespace only."""
    vocab, unk_id = state["model"]["vocab"], state["model"]["unk_id"]
    scores = dict(vocab)
    unknown = None if unk_id is None else vocab[unk_id][0]
    rounded = next((x for x, score in vocab if float(np.float32(score)) != score), None)
    learned = min((scores[token] for token in _learned_tokens(tokenizer)), default=0.0)
    # What llama.cpp's Unigram lacks; the first that applies is named.
    reasons = {
        "byte_fallback": state["model"]["byte_fallback"],
        "no unk_id of an added token": unknown not in _added_tokens(tokenizer),
        f"a score of {rounded!r} that is not a float32": rounded is not None,
        "an added token with the lowest score": learned > min(scores.values()),
    }
    if reason := next((what for what, applies in reasons.items() if applies), None):
        raise UserError(
            f"{source}: its Unigram tokenizer has {reason}, unlike llama.cpp's",
            HINT,
            Code.UNSUPPORTED,
        )
    if _adds_space_prefix(tokenizer, state, source):
        raise UserError(
            f"{source}: its Unigram tokenizer prepends a space to every text, but llama.cpp none "
            "to whitespace between added tokens",
            HINT,
            Code.UNSUPPORTED,
        )
    fields = _entries(tokenizer, size, unknown, has_bytes=False, filler=UNMATCHED)
    fields |= {"model": "t5", "pre": "default", "add_space_prefix": False, "add_eos_token": False}
    fields["scores"] = [scores.get(token, learned) for token in fields["tokens"]]
    return fields


def _require_bpe(model: Mapping[str, Any], is_byte_level: bool, source: str) -> None:
    if model.get("type") != "BPE":
        raise UserError(
            f"{source}: its tokenizer's model is {model.get('type')}, but Lathe writes only BPE "
            "and Unigram to GGUF",
            HINT,
            Code.UNSUPPORTED,
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(
                f"{source}: its tokenizer's model has {key}={model[key]!r}, which llama.cpp does "
                "not know",
                HINT,
                Code.UNSUPPORTED,
            )
    letters = ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    needs_bytes = model.get("unk_token") if is_byte_level else model.get("byte_fallback")
    if needs_bytes and (lacking := sorted(set(letters) - model["vocab"].keys())):
        raise UserError(
            f"{source}: its tokenizer has no token {lacking[0]!r} for a byte, and llama.cpp does "
            "not know its unk_token",
            HINT,
            Code.UNSUPPORTED,
        )


def _learned_tokens(tokenizer: Tokenizer) -> list[str]:
    """The tokens that the model makes, without those added to it."""
    return sorted(tokenizer.get_vocab().keys() - _added_tokens(tokenizer))


def _added_tokens(tokenizer: Tokenizer) -> set[str]:
    return {token.content for token in tokenizer.get_added_tokens_decoder().values()}


def _adds_space_prefix(tokenizer: Tokenizer, state: Mapping[str, Any], source: str) -> bool:
    """Whether every text between added tokens gets a space in front, as `add_space_prefix` says."""
    # Spaces become SentencePiece's by normalizers (Prepend, Replace) or by a pre-tokenizer
    # (Metaspace). All that llama.cpp knows is whether a text gets one in front.
    first = steps(state["normalizer"], "normalizers")
    then = steps(state["pre_tokenizer"], "pretokenizers")
    if REPLACE in first:  # leaves no space to split at
        then = [step for step in then if step.get("pattern") != {"String": " "}]
    if not then and first in ([PREPEND, REPLACE], [REPLACE, PREPEND]):
        return True
    if not then and first == [REPLACE]:
        return False
    if not first and len(then) == 1 and then[0]["type"] == "Metaspace":
        _require_metaspace(then[0], tokenizer, source)
        return False
    kind, what = ("normalizer", first) if then == [] else ("pre_tokenizer", then)
    raise UserError(
        f"{source}: llama.cpp does not know its tokenizer's {kind} {json.dumps(what)}",
        HINT,
        Code.UNSUPPORTED,
    )


def _require_metaspace(step: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> None:
    scheme = step["prepend_scheme"]
    if step["replacement"] != SPACE:
        raise UserError(
            f"{source}: its tokenizer writes spaces as {step['replacement']!r}, but llama.cpp as "
            f"{SPACE!r}",
            HINT,
            Code.UNSUPPORTED,
        )
    if scheme != "never":
        differs = {
            "first": "gives only the beginning of a text a space, but llama.cpp also every text "
            "after an added token",
            "always": "gives no second space to a text that begins with one, but llama.cpp does",
        }
        raise UserError(
            f"{source}: its tokenizer's Metaspace with prepend_scheme={scheme} {differs[scheme]}",
            "train with prepend_scheme=never, or with the normalizers Prepend and Replace in place "
            f"of Metaspace; or {HINT}",
            Code.UNSUPPORTED,
        )
    inside = next((token for token in _learned_tokens(tokenizer) if SPACE in token[1:]), None)
    if step["split"] and inside is not None:
        raise UserError(
            f"{source}: its tokenizer's Metaspace splits at every space, but llama.cpp does not, "
            f"and could make the token {inside!r}",
            HINT,
            Code.UNSUPPORTED,
        )


def _strips(tokenizer: Tokenizer, source: str) -> bool:
    """Whether added tokens take the whitespace after them, in the one way that llama.cpp knows."""
    added = tokenizer.get_added_tokens_decoder().values()
    for flag in ("lstrip", "single_word"):
        if token := next((x for x in added if getattr(x, flag)), None):
            raise _lost_flag(token, flag, "which llama.cpp does not support", source)
    if not (stripping := [token for token in added if token.rstrip]):
        return False
    known = [*sorted(NOT_STRIPPING), "</s>"]  # llama.cpp does not load a Phi-3 without them
    lacking = [name for name in known if tokenizer.token_to_id(name) is None]
    other = [token.content for token in added if token.rstrip == (token.content in NOT_STRIPPING)]
    if lacking or other:
        name = repr((lacking or other)[0])
        why = (
            "which llama.cpp supports only as in Phi-3, where all added tokens have it but "
            f"{', '.join(known[:-1])}; here {name} is {'missing' if lacking else 'different'}"
        )
        raise _lost_flag(stripping[0], "rstrip", why, source)
    return True


def _lost_flag(token: AddedToken, flag: str, why: str, source: str) -> UserError:
    return UserError(
        f"{source}: its tokenizer's added token {token.content!r} has {flag}, {why}",
        f'set "{flag}": false for it in tokenizer.json before training, or {HINT}',
        Code.UNSUPPORTED,
    )


def _entries(
    tokenizer: Tokenizer, size: int, unknown: str | None, has_bytes: bool, filler: str = "[PAD%d]"
) -> dict[str, Any]:
    """Tokens and their types, and the id of the token for unknown characters, if any.

    Args:
        has_bytes: whether tokens such as `<0x0A>` stand for bytes of unknown characters.
        filler: name of an id without a token.
    """
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    for i in range(size):
        token = tokenizer.id_to_token(i)
        if token is None:
            token, type_ = filler % i, UNUSED
        elif token == unknown:
            type_ = UNKNOWN
        elif i in added:
            type_ = CONTROL if added[i].special else USER_DEFINED
        else:
            type_ = BYTE if has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL
        tokens.append(token)
        types.append(type_)
    entries: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if unknown is not None:
        entries["unknown_token_id"] = tokenizer.token_to_id(unknown)
    return entries


def _beginning(tokenizer: Tokenizer, source: str) -> dict[str, Any]:
    """The token that comes before every text, if any. One that comes after it is left out, as in
    Lathe's own prompts: there would be nothing to continue."""
    # The library has no list of these tokens: they are the special ones before an encoded text.
    around = tokenizer.encode("a")
    marked = zip(around.ids, around.special_tokens_mask, strict=True)
    first = [token for token, _ in takewhile(lambda pair: pair[1], marked)]
    if len(first) > 1:
        raise UserError(
            f"{source}: its tokenizer puts {len(first)} tokens before a text, but llama.cpp one",
            HINT,
            Code.UNSUPPORTED,
        )
    return {"add_bos_token": True, "bos_token_id": first[0]} if first else {"add_bos_token": False}
