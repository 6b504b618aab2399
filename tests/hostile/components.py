"""KFP components called with odd artifacts."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lathe.errors import Unavailable
from tests.hostile import damage
from tests.hostile.case import Case
from tests.hostile.commands import FOREIGN, GOOD, PRUNE, QAT, SMALL
from tests.hostile.paths import LONG

STORE = "s3://bucket/releases"
# What each is given, and of what kind its artifacts are.
GIVEN: dict[str, dict[str, Any]] = {
    "prepare": {"recipe": SMALL, "corpus": "corpus.jsonl", "model": "dense"},
    "tokenizer": {"recipe": SMALL, "corpus": "corpus.jsonl", "model": "dense"},
    "tokenize": {
        **{"recipe": SMALL, "corpus": "corpus.jsonl", "tokenizer": "tokenizer.json"},
        **{"shard": 1, "of": 2},
    },
    "join": {"recipe": SMALL, "shards": ["shard-1", "shard-2"]},
    "pretrain": {"recipe": SMALL, "data": "data", "init": "dense"},
    "prune": {"recipe": PRUNE, "model": "dense", "data": "data"},
    "analyze": {"recipe": QAT, "model": "pruned", "data": "data"},
    "quantize": {"recipe": QAT, "model": "pruned", "data": "data", "sensitivity": "sensitivity"},
    "evaluate": {"recipe": SMALL, "model": "dense", "data": "data", "cloze": "cloze.jsonl"},
    "gate": {"recipe": SMALL, "baseline": "dense-eval", "candidate": "int8-eval"},
    "export": {"recipe": SMALL, "model": "dense", "data": "data"},
    "deploy": {"recipe": SMALL, "exported": "dense-onnx", "model": "dense", "data": "data"},
    "release": {
        **{"recipe": SMALL, "production": STORE, "deployed": "deployed"},
        **{"evaluation": "dense-eval", "data": "data", "cloze": "cloze.jsonl"},
    },
    "report": {
        **{"recipe": SMALL, "dense_model": "dense", "dense_evaluation": "dense-eval"},
        **{"dense_export": "dense-onnx", "sensitivity": "sensitivity", "deployed": "deployed"},
    },
    "estimate": {"recipe": QAT, "model": "dense", "data": "data"},
    "price": {
        **{"recipe": SMALL, "qat_recipe": QAT},
        **{"model": "dense", "costs": "costs.json", "exported": "dense-onnx"},
    },
    "design": {
        **{"recipe": SMALL, "prune_recipe": PRUNE, "qat_recipe": QAT, "trials": 1},
        **{"target": "bytes=0.9", "budget": "perplexity=9", "model": "dense"},
        **{"exported": "dense-onnx", "costs": "costs.json", "prices": "prices.json"},
    },
    "choose": {
        **{"recipe": SMALL, "target": "bytes=0.9", "budget": "perplexity=9"},
        **{
            "designs": "designs.json",
            "dense_evaluation": "dense-eval",
            "dense_export": "dense-onnx",
            "models": ["int8"],
        },
        **{"evaluations": ["int8-eval"], "exports": ["int8-onnx"]},
    },
}
KINDS = {
    "corpus": "corpus",
    "tokenizer": "tokenizer",
    "shards": "shard",
    "data": "data",
    "init": "checkpoint",
    "model": "checkpoint",
    "models": "checkpoint",
    "dense_model": "checkpoint",
    "sensitivity": "sensitivity",
    "cloze": "cloze",
    "exported": "export",
    "exports": "export",
    "dense_export": "export",
    "baseline": "evaluation",
    "candidate": "evaluation",
    "evaluation": "evaluation",
    "evaluations": "evaluation",
    "dense_evaluation": "evaluation",
    "deployed": "deployed",
    "costs": "costs",
    "prices": "prices",
    "designs": "designs",
}
OUTPUTS = {
    "prepare": ("data", "data.json"),
    "tokenizer": ("vocabulary", "origin.json"),
    "tokenize": ("tokens", "shard.json"),
    "join": ("data", "data.json"),
    "pretrain": ("model", "lathe.json"),
    "prune": ("pruned", "lathe.json"),
    "quantize": ("quantized", "lathe.json"),
    "analyze": ("sensitivity", "sensitivity.json"),
    "evaluate": ("evaluation", "metrics.json"),
    "export": ("exported", "export.json"),
    "deploy": ("deployed", "deploy.json"),
}
ODD: dict[str, tuple[str, Callable[[Path], object] | None]] = {
    "missing": ("nope", None),
    "a-file": ("afile", lambda box: (box / "afile").write_text("mine\n")),
    "empty-folder": ("bare", lambda box: (box / "bare").mkdir()),
    "link-loop": ("loop", lambda box: (box / "loop").symlink_to("loop")),
    "long": (LONG, None),
    "another-kind": ("", None),
}
FINE = dict.fromkeys(("tokenize", "tokenizer"), ("a-file", "another-kind"))
"""What is a corpus for these, though too short to train on."""
METADATA_FILES = {
    "data": "data/data.json",
    "checkpoint": "dense/lathe.json",
    "evaluation": "dense-eval/metrics.json",
    "export": "dense-onnx/export.json",
    "sensitivity": "sensitivity/sensitivity.json",
    "deployed": "deployed/deploy.json",
    "shard": "shard-1/shard.json",
    "costs": "costs.json",
    "prices": "prices.json",
    "designs": "designs.json",
}
CONTENTS = {"{}": b"{}", "[]": b"[]", "deep lists": b"[" * 100_000}
OPTIONAL = ("corpus", "cloze", "init")
EXPENSIVE = ("deploy", "release", "report", "estimate", "price", "design", "choose")
METRICS = "metrics"

ASK_A_STORE_FIRST = {"release": (Unavailable.status,)}
"""Components that may ask a store, which is not there, before they see what is odd."""


def cases() -> Iterator[Case]:
    for name, given in GIVEN.items():
        for parameter, value in given.items():
            kind = KINDS.get(parameter)
            if kind:
                yield from _odd(name, given, parameter, kind)
                yield from _metadata_files(name, given, parameter, kind, value)
        for recipe in ("nope", LONG):
            yield _case(name, "an odd recipe", recipe[:8], given, {"recipe": recipe})
        for override in ("nope", "Prepare.source=${oc.env:AWS_SECRET_ACCESS_KEY}"):
            yield _case(name, "an odd override", override, given, {"overrides": [override]})
    for name in OUTPUTS:
        yield from _outputs(name)
    for target in ("bytes=nan", "beauty=1", ""):
        for name in ("design", "choose"):
            yield _case(name, "a target", target, GIVEN[name], {"target": target})
    for models in ([], ["int8", "int8"]):
        yield _case("choose", "models", str(models), GIVEN["choose"], {"models": models})
    for design in ("x", "[]", "{}", '{"heads": [1], "channels": [1], "formats": {}}'):
        yield _case("prune", "a design", design, GIVEN["prune"], {"design": design})


def _odd(name: str, given: Mapping[str, Any], parameter: str, kind: str) -> Iterator[Case]:
    for odd, (path, make) in ODD.items():
        if (kind == "corpus" and odd in FINE.get(name, ("another-kind",))) or (
            name in EXPENSIVE and odd not in ("missing", "another-kind")
        ):
            continue
        value = path or FOREIGN[kind]
        changes = {parameter: [value] if isinstance(given[parameter], list) else value}
        steps = (make,) if make else ()
        yield _case(name, f"{parameter} is odd", odd, given, changes, steps, (FOREIGN[kind],))


def _metadata_files(
    name: str, given: Mapping[str, Any], parameter: str, kind: str, value: Any
) -> Iterator[Case]:
    if kind not in METADATA_FILES or name in ("release", "prepare", "tokenizer"):
        return
    file = METADATA_FILES[kind]
    artifact = file.split("/")[0]
    changes = {parameter: [artifact] if isinstance(value, list) else artifact}
    row = f"{parameter}'s metadata"
    for content, data in CONTENTS.items():
        steps = (partial(_write, file, data),)
        yield _case(name, row, content, given, changes, steps, (artifact,))
    if kind != "data":  # one of another tool has no metadata file
        steps = (partial(_change, file, damage.absent),)
        yield _case(name, row, "absent", given, changes, steps, (artifact,))


def _outputs(name: str) -> Iterator[Case]:
    output, metadata = OUTPUTS[name]
    given = GIVEN[name]
    places: dict[str, tuple[Callable[[Path], object], ...]] = {
        "users-files-and-a-metadata": (partial(_users_files, metadata),),
        "users-files": (partial(_users_files, "thesis.tex"),),
        "a-file": (partial(_write, "mine", b"years of work"),),
    }
    for place, steps in places.items():
        yield _case(name, "what is at the output", place, given, {output: "mine"}, steps)
    if name not in EXPENSIVE:
        yield _case(name, "what is at the output", "nothing", given, {output: "out"}, works=True)


def _users_files(metadata: str, box: Path) -> None:
    (box / "mine").mkdir()
    (box / "mine" / metadata).write_text('{"title": "mine"}')
    (box / "mine" / "photo.jpg").write_bytes(b"\xff\xd8")


def _write(file: str, data: bytes, box: Path) -> None:
    (box / file).write_bytes(data)


def _change(file: str, change: Callable[[Path], None], box: Path) -> None:
    change(box / file)


def _case(
    name: str,
    row: str,
    what: str,
    given: Mapping[str, Any],
    changes: Mapping[str, Any],
    make: tuple[Callable[[Path], object], ...] = (),
    more: tuple[str, ...] = (),
    works: bool = False,
) -> Case:
    output = OUTPUTS.get(name, ("",))[0]
    outputs = {output: "out"} if output and output not in given else {}
    arguments = {"overrides": [], METRICS: "metrics-file"} | outputs | given | changes
    return Case(
        f"component {name}",
        row,
        what,
        component=arguments,
        needs=_needs(given, more),
        make=make,
        expect="works" if works else "refused",
        status=(1, 2, *ASK_A_STORE_FIRST.get(name, ())),
        writes=("out", "metrics-file", "page", "verdict"),
    )


def _needs(given: Mapping[str, Any], more: tuple[str, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for parameter, value in given.items():
        if parameter.endswith("recipe") or parameter in KINDS:
            names += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys([*names, *more]))


assert set(KINDS.values()) <= set(GOOD)
