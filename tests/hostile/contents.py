"""Corpora, cloze sets, texts, tokenizers and prompts with invalid contents."""

import gzip
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS
from tests.hostile.paths import case_needs

Make = Callable[[Path], object]
GOOD_LINE = b'{"text": "Once upon a time there was a lathe."}\n'
LINES: dict[str, bytes] = {
    "deep lists": b"[" * 100_000 + b"\n",
    "deep objects": b'{"text": ' * 50_000 + b"\n",
    "a surrogate": b'{"text": "half \\ud800 of a pair"}\n',
    "a long number": b'{"text": ' + b"9" * 5000 + b"}\n",
    "a number": b"3\n",
    "a list": b'["text"]\n',
    "null": b"null\n",
    "NaN": b"NaN\n",
    "a number as text": b'{"text": 3}\n',
    "null as text": b'{"text": null}\n',
    "another key": b'{"body": "text"}\n',
    "no JSON": b"Once upon a time\n",
    "half a line": GOOD_LINE + b'{"text": "Once',
    "not UTF-8": b'{"text": "caf\xe9"}\n',
    "UTF-16": '{"text": "Once"}\n'.encode("utf-16"),
    "binary": bytes(range(256)) * 20,
    "NUL": b"\0" * 4096,
    "empty": b"",
    "spaces": b" \n\n \n",
    "empty texts": b'{"text": ""}\n{"text": "  "}\n',
}
TEXTS: dict[str, bytes] = {
    "binary": bytes(range(256)) * 20,
    "not UTF-8": b"caf\xe9 " * 500,
    "UTF-16": ("Once upon a time " * 500).encode("utf-16"),
    "empty": b"",
    "spaces": b" \n\n \n",
}
PACKED: dict[str, tuple[str, bytes]] = {
    "no gzip": ("c.jsonl.gz", b"no gzip at all"),
    "half a gzip": ("c.jsonl.gz", gzip.compress(GOOD_LINE * 900)[:-20]),
    "a gzip and more": ("c.jsonl.gz", gzip.compress(GOOD_LINE * 90) + b"more"),
    "an empty gzip": ("c.jsonl.gz", gzip.compress(b"")),
    "no xz": ("c.txt.xz", b"\xfd7zXZ\0 no xz"),
    "no zstd": ("c.jsonl.zst", b"\x28\xb5\x2f\xfd no zstd"),
    "an empty zst": ("c.jsonl.zst", b""),
}
SOURCES = (
    *[
        "https://[::1",
        "http://",
        "https://",
        "http:///x",
        "http://127.0.0.1:1/x.txt",
        "http://a b/c",
    ],
    *["http://127.0.0.1:99999/x", "s3://", "s3:///x", "s3://bucket", "s3://Bad_Bucket!/x"],
    *[
        "ftp://host/x",
        "file:///nowhere",
        "file://host/x",
        "hf://",
        "hf://nope",
        "hf://a:b:c:d",
        "hf://../x",
    ],
    *[
        "newest:",
        "newest:nowhere",
        "newest:s3://",
        "newest:data",
        "newest:/dev/null",
        "newest:.nope",
    ],
)
TOKENIZERS: dict[str, bytes] = {
    "{}": b"{}",
    "deep lists": b"[" * 100_000,
    "not UTF-8": b'{"model": "caf\xe9"}',
    "no tokens": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    "holes in it": b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 999}, "merges": []}}',
}
PROMPTS: dict[str, tuple[str, Literal["any", "refused"]]] = {
    "empty": ("", "any"),
    "a surrogate": ("half \udce9 of a byte", "any"),
    "long": ("word " * 20_000, "any"),
    "a newline": ("\n", "any"),
    "NUL-like": ("\x01\x02", "any"),
    "end of text": ("<|endoftext|>", "any"),
}


def cases() -> Iterator[Case]:
    for name, data in LINES.items():
        yield _with("prepare", "--source", "corpus.jsonl's content", name, "mine.jsonl", data)
        yield _with("evaluate", "--cloze", "cloze.jsonl's content", name, "mine.jsonl", data)
    for name, data in TEXTS.items():
        yield _with("prepare", "--source", "a text's content", name, "mine.txt", data)
        yield _with("evaluate", "--text", "a text's content", name, "mine.txt", data)
        yield _with("bench-serve", "--prompts", "prompts' content", name, "mine.txt", data)
    for name, (file, data) in PACKED.items():
        yield _with("prepare", "--source", "a packed corpus", name, file, data)
    for source in SOURCES:
        changes = {"--source": source}
        yield _case("prepare", "an address that is none", source, changes, status=(1, 2))
    for name, data in TOKENIZERS.items():
        yield _with("prepare", "--tokenizer", "a tokenizer's content", name, "mine.json", data)
    for name, (prompt, expect) in PROMPTS.items():
        yield _case("generate", "an odd prompt", name, {"prompt": prompt}, expect=expect)
    yield from _cloze()
    yield from _journals()


def _cloze() -> Iterator[Case]:
    for name, line in (
        ("one word", b'{"text": "Once"}\n'),
        ("only spaces", b'{"text": "   "}\n'),
        ("a word longer than the window", b'{"text": "Once ' + b"z" * 9000 + b'"}\n'),
        ("a long passage", b'{"text": "' + b"word " * 20_000 + b'end"}\n'),
        ("NUL inside", b'{"text": "Once \\u0000 upon a time"}\n'),
    ):
        case = _with("evaluate", "--cloze", "a cloze example", name, "mine.jsonl", line)
        yield Case(**(vars(case) | {"expect": "any", "names": ""}))


def _journals() -> Iterator[Case]:
    """Damaged journals of an earlier attempt of `analyze` and `pretrain`."""
    command = COMMANDS["analyze"]
    for name, data in (
        ("NaN", b'{"name": "lm_head", "score": NaN}\n'),
        ("text", b"years of work\n"),
        ("deep lists", b"[" * 100_000),
        ("a list", b"[]\n"),
        ("not UTF-8", b"\xe9\n"),
        ("half", b'{"name": "lm_he'),
        ("empty", b""),
    ):
        yield Case(
            "analyze",
            "an earlier attempt's journal",
            name,
            command.argv(),
            needs=case_needs(command),
            make=(partial(_write, "out.unfinished.jsonl", data),),
            expect="any",
            writes=("out", "out.unfinished.jsonl"),
        )
    command = COMMANDS["pretrain"]
    for name, data in (
        ("{}", b"{}"),
        ("[]", b"[]"),
        ("null", b"null"),
        ("text", b"mine"),
        ("deep lists", b"[" * 100_000),
        ("not UTF-8", b"\xe9"),
        ("empty", b""),
    ):
        yield Case(
            "pretrain",
            "an earlier attempt's run.json",
            name,
            command.argv(),
            needs=case_needs(command),
            make=(partial(_write, "out/run.json", data),),
            names="out",
        )


def _with(verb: str, option: str, row: str, name: str, file: str, data: bytes) -> Case:
    names = "" if verb == "bench-serve" else file
    make = (partial(_write, file, data),)
    return _case(verb, row, name, {option: file}, make=make, names=names)


def _case(
    verb: str,
    row: str,
    name: str,
    changes: dict[str, str],
    make: tuple[Make, ...] = (),
    names: str = "",
    expect: Literal["any", "refused"] = "refused",
    status: tuple[int, ...] = (2,),
) -> Case:
    command = COMMANDS[verb]
    return Case(
        verb,
        row,
        name,
        command.argv(**changes),
        needs=case_needs(command),
        make=make,
        names=names,
        expect=expect,
        status=status,
        writes=(command.written,) if command.written else (),
    )


def _write(file: str, data: bytes, box: Path) -> None:
    path = box / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
