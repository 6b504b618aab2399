"""Cases of KFP components with invalid artifacts."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from components.step import NAMES, component
from lathe_base.errors import Unavailable
from tests.hostile import damage
from tests.hostile.case import Case
from tests.hostile.commands import FOREIGN, GOOD, PRUNE, QAT, SMALL
from tests.hostile.paths import LONG

STORE = "s3://bucket/releases"
KINDS = {
    "corpus": "corpus",
    "tokenizer": "tokenizer",
    "vocabulary": "vocabulary",
    "shards": "shard",
    "tokens": "shard",
    "data": "data",
    "init": "checkpoint",
    "model": "checkpoint",
    "models": "checkpoint",
    "dense_model": "checkpoint",
    "pruned": "checkpoint",
    "quantized": "checkpoint",
    "finetuned": "checkpoint",
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
"""Kinds of inputs and outputs by name; inputs with other names are not varied."""

VALUES: dict[str, Any] = {
    **{"recipe": SMALL, "prune_recipe": PRUNE, "qat_recipe": QAT, "shard": 1, "of": 2},
    **{"target": "bytes=0.9", "budget": "perplexity=9", "trials": 1, "production": STORE},
}
OWN: dict[str, dict[str, Any]] = {
    "join": {"shards": ["shard-1", "shard-2"]},
    "prune": {"recipe": PRUNE},
    "analyze": {"recipe": QAT, "model": "pruned"},
    "quantize": {"recipe": QAT, "model": "pruned"},
    "gate": {"candidate": "int8-eval"},
    "estimate": {"recipe": QAT},
    "choose": {"models": ["int8"], "evaluations": ["int8-eval"], "exports": ["int8-onnx"]},
}
"""Values that a component needs in place of the usual valid artifacts."""

LEFT_OUT = {"gate": {"production"}, "release": {"model"}}


def _given(name: str) -> dict[str, Any]:
    """Inputs of a component: values, and a valid artifact for each input of a known kind."""
    found: dict[str, Any] = {}
    for key, part in component(name).component_spec.inputs.items():
        if key in LEFT_OUT.get(name, ()):
            continue
        if key in VALUES:
            found[key] = VALUES[key]
        elif key in KINDS:
            good = GOOD[KINDS[key]]
            found[key] = [good] if part.is_artifact_list else good
    return found | OWN.get(name, {})


GIVEN = {name: _given(name) for name in NAMES if name not in ("certify", "inputs", "notify")}
"""Valid inputs by component; `certify` takes minutes, the other two have no artifacts."""

METADATA_FILES = {
    "data": "data/data.json",
    "checkpoint": "dense/lathe.json",
    "evaluation": "dense-eval/metrics.json",
    "export": "dense-onnx/export.json",
    "sensitivity": "sensitivity/sensitivity.json",
    "deployed": "deployed/deploy.json",
    "shard": "shard-1/shard.json",
    "vocabulary": "vocabulary/origin.json",
    "costs": "costs.json",
    "prices": "prices.json",
    "designs": "designs.json",
}


def _folders() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each component's first output that is a folder, with its metadata file's name."""
    for name in GIVEN.keys() - {"choose"}:  # which copies its inputs
        for key in component(name).component_spec.outputs:
            folder, _, file = METADATA_FILES.get(KINDS.get(key, ""), "").rpartition("/")
            if folder:
                yield name, (key, file)
                break


OUTPUTS = dict(_folders())
ODD: dict[str, tuple[str, Callable[[Path], object] | None]] = {
    "missing": ("nope", None),
    "a-file": ("afile", lambda box: (box / "afile").write_text("mine\n")),
    "empty-folder": ("bare", lambda box: (box / "bare").mkdir()),
    "link-loop": ("loop", lambda box: (box / "loop").symlink_to("loop")),
    "long": (LONG, None),
    "another-kind": ("", None),
}
FINE = dict.fromkeys(("tokenize", "tokenizer"), ("a-file", "another-kind"))
"""Odd paths that are a valid corpus for these components, though too short to train on."""
CONTENTS = {"{}": b"{}", "[]": b"[]", "deep lists": b"[" * 100_000}
OPTIONAL = ("corpus", "cloze", "init")
EXPENSIVE = ("deploy", "release", "report", "estimate", "price", "design", "choose")
METRICS = "metrics"

ASK_A_STORE_FIRST = {"release": (Unavailable.status,)}
"""Components that may contact the (absent) store before they detect the invalid input."""


NOT_READ = {("prepare", "model"), ("tokenizer", "model")}
"""Inputs that a component ignores because the tokenizer is given."""


def cases() -> Iterator[Case]:
    for name, given in GIVEN.items():
        for parameter, value in given.items():
            kind = KINDS.get(parameter)
            if kind and (name, parameter) not in NOT_READ:
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
    if kind != "data":  # data sets of other tools have no metadata file
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


assert set(KINDS.values()) - {"vocabulary"} <= set(GOOD)
