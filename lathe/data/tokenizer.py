"""Tokenizers: read GPT-2's or any `tokenizers` file, or train a byte-level BPE; and texts that tell
tokenizers apart, to which every reader of one has to give the same ids."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lathe_base.artifacts.kinds import DATA
from lathe_base.errors import Code, UserError, explain_os_error, os_errors
from lathe_base.inputs import open_file, parse_json

EOS = "<|endoftext|>"
OTHER_ENDS = (
    *("</s>", "<|end_of_text|>", "<eos>", "[EOS]"),
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>"),
)
"""Names of the special token that ends a document, or a turn of a chat, in tokenizers without that
one."""
ADDED_TOKEN = {"single_word", "lstrip", "rstrip", "normalized", "special"}
"""Keys of an added token in `tokenizer_config.json`."""
ADDED = "added_tokens.json"
PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names of GPT-2's two BPE files: in folders of models, and as downloaded for Megatron-LM."""
FILES = ("tokenizer.json", *(name for pair in PAIRS for name in pair), ADDED)
ID_LIMIT = 1 << 31  # token files hold int32
SPARE_IDS = 65536  # a vocabulary may have gaps, but not be made of them
HINT = "give an intact file"

PROBE_TEXTS = (
    "The strokes of the tool, and the other things; they have turned (twice).",
    "def f(x):\n\tif x != 0x1F:\r\n        return {'a': [1, 2]}  # e.g.\n\n\nclass A_b2: pass\n",
    'SELECT * FROM t WHERE id>=10;\n<div class="x">&amp;</div> https://a.b/c?d=1&e=%20 ../x\\y',
    " It's  they'LL\t don't I'M we'Ve O'Neill's 'tis rock'n'roll\r\n\r\n  x \n",
    "1 22 333 4444 55555 1,000,000.5e-7 x2y 3rd 2026-11-27 \u0663\u0664 \u00bd \u2167",
    "\u6f22\u5b57\u3068\u4eee\u540d\u3001\u4e2d\u6587\u3002 \ud55c\uae00 \u0440\u0443\u0441\u0441"
    "\u043a\u0438\u0439 na\u00efve",
    "\U0001f917\U0001f469\u200d\U0001f467 x\U0001f600\U0001f600 !!?!...///\\\\ #@ HTTPServer",
    "a  b   c    d\t\te \t f\n\n g\n \n\n\nh     ",
    "   leading\u00a0and\u3000wide",
)
"""Prose, code, contractions, digits, CJK, emoji and runs of whitespace. Accents are composed,
because llama.cpp omits Qwen's normalization to NFC."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer: `tokenizer.json`, or GPT-2's `vocab.json` with `merges.txt` beside it, also
    under the names of their download, `gpt2-vocab.json` and `gpt2-merges.txt`.

    Args:
        path: one of those files, or a folder with them (`tokenizer.json` takes precedence).

    Raises:
        UserError: missing, not a tokenizer, without the token `<|endoftext|>` or another that ends
            a document, or with ids too large for an embedding.
    """
    files = tokenizer_files(path)
    if not files:
        raise UserError(
            f"{path}: no tokenizer found",
            "give tokenizer.json, or a folder with it, with vocab.json and merges.txt, or with "
            "gpt2-vocab.json and gpt2-merges.txt; Prepare.tokenizer=train trains one",
            Code.NOT_FOUND,
        )
    if len(files) == 1:
        tokenizer = _parse(files[0], lambda: Tokenizer.from_file(str(files[0])))
    else:
        # `tokenizers` silently truncates ids to 32 bits.
        with open_file(files[0]) as file:
            vocabulary = parse_json(file.read(), f"{files[0]}: not a tokenizer", HINT)
        if not isinstance(vocabulary, dict) or not all(
            type(i) is int and 0 <= i < ID_LIMIT for i in vocabulary.values()
        ):
            raise UserError(
                f"{files[0]}: not a tokenizer: does not map tokens to ids", HINT, Code.MALFORMED
            )
        tokenizer = _parse(path, lambda: _from_pair(*files))
    # Token files need a token that ends a document, and ids that an embedding has rows for.
    end = end_token(tokenizer)
    if end is None:
        raise UserError(
            f"{path}: the tokenizer has no token {EOS}",
            f"add it to the vocabulary, or a special token named {' or '.join(OTHER_ENDS)}",
            Code.INCOMPLETE,
        )
    _require_ids(tokenizer, path, end)
    added = tokenizer.get_added_tokens_decoder().values()
    # Adding it again would reset its flags, such as `rstrip`.
    if not any(token.content == end and token.special for token in added):
        tokenizer.add_special_tokens([end])
    # A file may say to cut texts or to fill them up: here every text has its own length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_files(path: Path) -> tuple[Path, ...]:
    """The files that `load_tokenizer` reads: `tokenizer.json` (or another file that is given), or
    the vocabulary and the merges; empty if there are none."""
    folder, name = (path, "tokenizer.json") if path.is_dir() else (path.parent, path.name)
    if (folder / name).is_file() and not any(name in pair for pair in PAIRS):
        return (folder / name,)
    for vocab, merges in PAIRS:
        both = (folder / vocab, folder / merges)
        if (path.is_dir() or name in (vocab, merges)) and all(file.is_file() for file in both):
            return both
    return ()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's: `<|endoftext|>` is 0, then 256 bytes, then merges.

    The same texts give the same tokenizer, however many threads work. A corpus with few distinct
    words yields fewer than `vocab_size` tokens.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        # All bytes, also those that these texts lack: no text is without tokens.
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
    token_id = tokenizer.token_to_id(end)
    assert isinstance(token_id, int)
    return token_id


def continuation(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` after that of `before`: a tokenizer that marks words by the space before
    them drops it at the beginning of a text."""
    known: str = tokenizer.decode(list(before))
    whole: str = tokenizer.decode([*before, *ids])
    return whole[len(known) :]


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer's full definition."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def require_same_vocabulary(data: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError unless a token data set was made with the ids that a model reads.

    A folder of another tool may have no tokenizer: then its ids are taken to be the model's.
    """
    if not (tokenizer_files(data) or (data / DATA.metadata_file).exists()):
        return
    theirs = load_tokenizer(data)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{data}: was prepared with another tokenizer ({theirs.get_vocab_size():,} tokens) "
            f"than the model's ({tokenizer.get_vocab_size():,} tokens)",
            "prepare the data with the model's tokenizer: `lathe prepare --tokenizer MODEL`",
            Code.WRONG_TOKENIZER,
        )


def vocab_size(tokenizer: Tokenizer) -> int:
    """Number of rows that an embedding needs: the largest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def _from_pair(vocab: Path, merges: Path) -> Tokenizer:
    """GPT-2's tokenizer of two files, with what transformers writes beside them: tokens that were
    added later, and whether a text gets a space before it."""
    settings = _optional(vocab.with_name("tokenizer_config.json"))
    tokenizer = _byte_level(
        models.BPE.from_file(str(vocab), str(merges)), bool(settings.get("add_prefix_space"))
    )
    added = _optional(vocab.with_name(ADDED))
    described = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    # Of a token that only the older file has, nothing but its name is known.
    described |= {i: {"content": name} for name, i in added.items() if i not in described}
    for i, token in sorted(described.items()):
        known = {key: token[key] for key in ADDED_TOKEN & token.keys()}
        tokenizer.add_tokens([AddedToken(token["content"], **known)])
        if (actual_id := tokenizer.token_to_id(token["content"])) != i:
            raise ValueError(
                f"the added token {token['content']} would have id {actual_id}, not {i}"
            )
    return tokenizer


def _optional(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty where there is none."""
    contents = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(contents, dict):
        raise ValueError(f"{path.name} is not an object")
    return contents


def _byte_level(model: models.BPE, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _parse(path: Path, read: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        with os_errors(path), _panics_muted():
            tokenizer = read()
            # Some broken definitions load, and fail or panic at the first text.
            tokenizer.decode(tokenizer.encode("a trial", add_special_tokens=False).ids)
            return tokenizer
    except OSError as error:
        raise explain_os_error(error, path) from error
    except Exception as error:  # `tokenizers` raises plain Exception
        raise UserError(f"{path}: not a tokenizer: {error}", HINT, Code.MALFORMED) from error


@contextmanager
def _panics_muted() -> Iterator[None]:
    """Turn a panic in Rust into ValueError; panics derive from BaseException and print a stack."""
    # Rust writes to the file descriptor itself: replacing `sys.stderr` would not mute it.
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


def _require_ids(tokenizer: Tokenizer, path: Path, eos: str) -> None:
    vocabulary = tokenizer.get_vocab()
    largest, end = max(vocabulary.values()), vocabulary[eos]
    if largest >= min(ID_LIMIT, 2 * len(vocabulary) + SPARE_IDS):
        raise UserError(
            f"{path}: ids up to {largest:,} for {len(vocabulary):,} tokens",
            "number the tokens from 0 without gaps: the embedding has a row for every id",
            Code.MALFORMED,
        )
    if same := [token for token, i in vocabulary.items() if i == end and token != eos]:
        raise UserError(
            f"{path}: {same[0]!r} has the id of {eos}, {end}",
            "give each its own id",
            Code.DUPLICATE,
        )


def probes(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """What a text is, for messages, and the text: `PROBE_TEXTS`, and every added token, alone and
    inside text, where each of its flags changes the ids."""
    for text in PROBE_TEXTS:
        yield described(text), text
    for token in tokenizer.get_added_tokens_decoder().values():
        name = token.content
        for text in (name, f"one{name}two {name} three  {name}\n\n{name}{name}, 4{name} "):
            yield f"the added token {name!r} in {text[:40]!r}", text


def described(text: str) -> str:
    """A text by its beginning, for messages."""
    return f"the text {text[:40]!r}"
