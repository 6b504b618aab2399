"""Tokenizers: read GPT-2's or any `tokenizers` file, or train a byte-level BPE."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lathe.errors import UserError, explain_os_error, os_errors
from lathe.inputs import open_file, parse_json

EOS = "<|endoftext|>"
OTHER_ENDS = ("</s>", "<|end_of_text|>", "<eos>")
"""How tokenizers without that token call the end of a document, as a special token."""
FILES = ("tokenizer.json", "vocab.json", "merges.txt")
ID_LIMIT = 1 << 31  # token files hold int32
SPARE_IDS = 65536  # a vocabulary may have gaps, but not be made of them
HINT = "give an unbroken file"


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer: `tokenizer.json`, or GPT-2's `vocab.json` with `merges.txt` beside it.

    Args:
        path: one of those files, or a folder with them (`tokenizer.json` takes precedence).

    Raises:
        UserError: missing, not a tokenizer, without the token `<|endoftext|>` or another that ends
            a document, or with ids too large for an embedding.
    """
    folder, name = (path, "tokenizer.json") if path.is_dir() else (path.parent, path.name)
    file, vocab, merges = folder / name, folder / "vocab.json", folder / "merges.txt"
    is_pair = vocab.is_file() and merges.is_file() and (path.is_dir() or file in (vocab, merges))
    if file.is_file() and file not in (vocab, merges):
        tokenizer = _parse(file, lambda: Tokenizer.from_file(str(file)))
    elif is_pair:
        _require_vocabulary(vocab)
        tokenizer = _parse(path, lambda: _byte_level(models.BPE.from_file(str(vocab), str(merges))))
    else:
        raise UserError(
            f"{path}: no tokenizer there",
            "give tokenizer.json, or a folder with it or with vocab.json and merges.txt; "
            "Prepare.tokenizer=train trains one",
        )
    end = end_token(tokenizer)
    if end is None:
        raise UserError(
            f"{path}: the tokenizer has no token {EOS}",
            f"add it to the vocabulary; {', '.join(OTHER_ENDS)} would do too, as special tokens",
        )
    _require_ids(tokenizer, path, end)
    tokenizer.add_special_tokens([end])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train GPT-2's kind of byte-level BPE: `<|endoftext|>` is 0, then 256 bytes, then merges.

    The same texts give the same tokenizer, however many threads work. A corpus with too few
    different words yields fewer than `vocab_size` tokens.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write `tokenizer.json`.

    Raises:
        OSError: the file cannot be written.
    """
    with os_errors(path):
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def end_token(tokenizer: Tokenizer) -> str | None:
    """The token that ends a document: `<|endoftext|>`, or else the first of `OTHER_ENDS` that is a
    special token; None if there is none."""
    if tokenizer.token_to_id(EOS) is not None:
        return EOS
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    return next((name for name in OTHER_ENDS if name in special), None)


def eos_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document."""
    end = end_token(tokenizer)
    assert end is not None, "load_tokenizer and train_tokenizer promise it"
    found = tokenizer.token_to_id(end)
    assert isinstance(found, int)
    return found


def continuation(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` after that of `before`: a tokenizer that marks words by the space before
    them drops it at the beginning of a text."""
    known: str = tokenizer.decode(list(before))
    whole: str = tokenizer.decode([*before, *ids])
    return whole[len(known) :]


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of everything that the tokenizer does."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def vocab_size(tokenizer: Tokenizer) -> int:
    """Number of rows that an embedding needs: the largest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _parse(path: Path, read: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        with os_errors(path), _panics_muted():
            tokenizer = read()
            tokenizer.decode(tokenizer.encode("a trial", add_special_tokens=False).ids)
            return tokenizer
    except OSError as error:
        raise explain_os_error(error, path) from error
    except Exception as error:  # `tokenizers` raises plain Exception
        raise UserError(f"{path}: not a tokenizer: {error}", HINT) from error


@contextmanager
def _panics_muted() -> Iterator[None]:
    """Turn a panic in Rust into ValueError; panics derive from BaseException and print a stack."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _require_vocabulary(path: Path) -> None:
    """Check ids, which `tokenizers` silently truncates to 32 bits."""
    with open_file(path) as file:
        vocabulary = parse_json(file.read(), f"{path}: not a tokenizer", HINT)
    if not isinstance(vocabulary, dict) or not all(
        type(i) is int and 0 <= i < ID_LIMIT for i in vocabulary.values()
    ):
        raise UserError(f"{path}: not a tokenizer: no table of tokens and their ids", HINT)


def _require_ids(tokenizer: Tokenizer, path: Path, eos: str) -> None:
    vocabulary = tokenizer.get_vocab()
    largest, end = max(vocabulary.values()), vocabulary[eos]
    if largest >= min(ID_LIMIT, 2 * len(vocabulary) + SPARE_IDS):
        raise UserError(
            f"{path}: ids up to {largest:,} for {len(vocabulary):,} tokens",
            "number the tokens from 0 on: the embedding has a row for every number",
        )
    if same := [token for token, i in vocabulary.items() if i == end and token != eos]:
        raise UserError(f"{path}: {same[0]!r} has the id of {eos}, {end}", "give each its own id")
