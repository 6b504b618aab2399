"""Byte-level BPE: read GPT-2's or any `tokenizers` file, or train one on a corpus."""

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lathe.errors import UserError

EOS = "<|endoftext|>"


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer: `tokenizer.json`, or GPT-2's `vocab.json` with `merges.txt` beside it.

    Args:
        path: one of those files, or a folder that holds them (`tokenizer.json` wins).

    Raises:
        UserError: nothing there, not a tokenizer, or one without the token `<|endoftext|>`.
    """
    folder, name = (path, "tokenizer.json") if path.is_dir() else (path.parent, path.name)
    file, vocab, merges = folder / name, folder / "vocab.json", folder / "merges.txt"
    is_pair = vocab.is_file() and merges.is_file() and (path.is_dir() or file in (vocab, merges))
    if file.is_file() and file not in (vocab, merges):
        tokenizer = _parse(file, lambda: Tokenizer.from_file(str(file)))
    elif is_pair:
        tokenizer = _parse(path, lambda: _byte_level(models.BPE.from_file(str(vocab), str(merges))))
    else:
        raise UserError(
            f"{path}: no tokenizer there",
            "give tokenizer.json, or a folder with it or with vocab.json and merges.txt; "
            "Prepare.tokenizer=train trains one",
        )
    if tokenizer.token_to_id(EOS) is None:
        raise UserError(f"{path}: the tokenizer has no token {EOS}", "add it to the vocabulary")
    tokenizer.add_special_tokens([EOS])
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


def eos_id(tokenizer: Tokenizer) -> int:
    """The id of `<|endoftext|>`."""
    found = tokenizer.token_to_id(EOS)
    assert isinstance(found, int), "load_tokenizer and train_tokenizer promise it"
    return found


def vocab_size(tokenizer: Tokenizer) -> int:
    """The number of rows an embedding needs: one more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _parse(path: Path, read: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        return read()
    except Exception as error:  # `tokenizers` raises plain Exception
        raise UserError(f"{path}: not a tokenizer: {error}", "give an unbroken file") from error
