"""Recipes with references to secrets, forbidden bases and invalid contents."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from tests.hostile.case import SECRET, Case
from tests.hostile.values import setting

ENV = "${oc.env:AWS_SECRET_ACCESS_KEY}"
REFERENCES = (
    f"Prepare.source={ENV}",
    f"Prepare.source=x{ENV}y",
    "Prepare.source=${oc.env:HOME}",
    "Prepare.source=${oc.env:NOPE,fallback}",
    "Prepare.source=${oc.decode:${oc.env:AWS_SECRET_ACCESS_KEY}}",
    "Prepare.source=${oc.create:${oc.env:AWS_SECRET_ACCESS_KEY}}",
    "Prepare.source=${oc.deprecated:Prepare.tokenizer}",
    "Prepare.source=${oc.select:Prepare.tokenizer}",
    "Prepare.source=${oc.dict.keys:Prepare}",
    "Prepare.source=${AWS_SECRET_ACCESS_KEY}",
    "Prepare.source=${Prepare.source}",
    "Prepare.source=${nope}",
    "Prepare.source=${",
    "Prepare.source=${}",
    "Prepare.source=${a:b}",
    f"Engine.max_steps={ENV}",
    f"Serving.model_name={ENV}",
    f"Compress.Distill.teacher={ENV}",
)
BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)
CONTENTS: dict[str, bytes] = {
    "a number": b"3\n",
    "a list": b"[]\n",
    "a text": b"text\n",
    "a date": b"2020-01-01\n",
    "two colons": b"a: b: c\n",
    "a tab": b"Engine:\n\tmax_steps: 3\n",
    "binary": bytes(range(256)),
    "UTF-16": "Engine:\n  max_steps: 3\n".encode("utf-16-le"),
    "deep lists": b"Engine: " + b"[" * 20_000,
    "deep mappings": b"Engine: " + b"{a: " * 5_000 + b"1" + b"}" * 5_000,
    "a bomb": BOMB.encode(),
    "a circle": b"Engine: &a [*a]\n",
    "python": b'Engine: !!python/object/apply:os.system ["touch pwned"]\n',
    "another tag": b"Engine: !!set {a, b}\n",
    "a list as a key": b"? [a, b]\n: c\n",
    "a number as a key": b"1: 2\n",
    "null as a key": b"null: 2\n",
    "true as a key": b"true: 2\n",
    "a merge of a number": b"<<: 3\n",
    "two documents": b"Engine: {max_steps: 3}\n---\nEngine: {max_steps: 4}\n",
    "an unknown group": b"Motor:\n  max_steps: 3\n",
    "an unknown key": b"Engine:\n  max_step: 3\n",
    "a group that is a number": b"Engine: 3\n",
    "a group that is a list": b"Engine: [1]\n",
    "max_steps: true": b"Engine:\n  max_steps: true\n",
    "max_steps: 1:30": b"Engine:\n  max_steps: 1:30\n",
    "max_steps: 0x10": b"Engine:\n  max_steps: .inf\n",
    "an open quote": b'Engine: {max_steps: "3}\n',
    "an unknown anchor": b"Engine: *nope\n",
    "NUL": b"Engine:\n  max_steps: 3\0\n",
    "keys twice": b"Engine: {max_steps: 3}\nEngine: {max_steps: 4}\n",
    "a long line": b"# " + b"x" * 3_000_000 + b"\nEngine: {max_steps: yes}\n",
}
MAY_WORK = ("keys twice",)
BASES = (
    *["/etc/shadow", "/etc/passwd", "/etc", "/dev/zero", "/dev/stdin", "/proc/self/environ"],
    *["../outside.yaml", "creds", "nope.yaml", ".", "mine.yaml", "pipe", "3", "[a]", "{a: b}"],
    *["https://example.com/x.yaml", "s3://bucket/x.yaml", "x" * 300, "~/.bashrc", "hole/x.yaml"],
)
CREDENTIALS = f"[default]\naws_secret_access_key = {SECRET}: [ {{ :\n"


def cases() -> Iterator[Case]:
    for reference in REFERENCES:
        yield setting("recipe", "-o with a reference", reference)
        yield _file("a reference in it", reference, _yaml(reference).encode())
    for verb in ("prepare", "pretrain", "evaluate", "compress"):
        yield setting(verb, "-o with a reference", f"Prepare.source={ENV}")
    for name, content in CONTENTS.items():
        expect: Literal["any", "refused"] = "any" if name in MAY_WORK else "refused"
        yield _file("its content", name, content, expect)
    for base in BASES:
        yield _file("its base", base[:40], f"_base_: {base}\n".encode())
    for name in ("creds", "/etc/shadow", "/etc", "/proc/self/environ", "secret.yaml"):
        yield Case("recipe", "a file of secrets", name, ("recipe", name), make=(_credentials,))
    for name, text in (
        ("_inherited_ without a base", "_inherited_: False\nEngine: {max_steps: 3}\n"),
        ("a group's _inherited_", "Engine: {_inherited_: False, max_steps: 3}\n"),
        ("a shipped base", "_base_: tiny\nEngine: {max_steps: 3}\n"),
        ("a base beside it", "_base_: good.yaml\n"),
        ("a base below it", "_base_: sub/good.yaml\n"),
        ("a reference within", "Engine: {max_steps: 3}\nGlobal: {seed: '${Engine.max_steps}'}\n"),
        ("an empty group", "Engine:\n"),
        ("unicode", "# Größe\nPrepare: {source: Größe-模型.txt}\n"),
    ):
        yield _file("what is right", name, text.encode(), "works")


def _yaml(override: str) -> str:
    key, _, value = override.partition("=")
    *groups, last = key.split(".")
    opened = "".join(f"{group}: {{" for group in groups)
    return f"{opened}{last}: '{value}'{'}' * len(groups)}\n"


def _file(
    row: str, name: str, content: bytes, expect: Literal["any", "refused", "works"] = "refused"
) -> Case:
    make: Callable[[Path], None] = partial(_lay_out, content)
    argv = ("recipe", "mine.yaml")
    return Case("recipe", row, name, argv, make=(make, _credentials), expect=expect)


def _lay_out(content: bytes, box: Path) -> None:
    (box / "mine.yaml").write_bytes(content)
    (box.parent / "outside.yaml").write_text("Engine: {max_steps: 3}\n")
    (box / "hole").symlink_to(box.parent)
    (box.parent / "x.yaml").write_text("Engine: {max_steps: 3}\n")
    (box / "sub").mkdir()
    for good in ("good.yaml", "sub/good.yaml"):
        (box / good).write_text("Engine: {max_steps: 3}\n")
    os.mkfifo(box / "pipe")


def _credentials(box: Path) -> None:
    """Create files with secrets; quoting them is a leak, while the files themselves are not."""
    (box / "creds").write_text(CREDENTIALS)
    (box / "secret.yaml").write_text(f"aws_secret_access_key: {SECRET}\n")
