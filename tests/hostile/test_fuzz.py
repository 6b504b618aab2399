"""Random metadata files, recipes and arguments, which must succeed or fail with a proper error."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hostile.__main__ import describe
from tests.hostile.commands import COMMANDS
from tests.hostile.damaged_metadata import READ
from tests.hostile.fuzzed import Drawn
from tests.hostile.pool import Worker

SHORT, FULL = 30, 400
ODD_NUMBERS = [0, -1, 1, 1.5, 10**6, 10**12, 10**30, float("nan"), float("inf"), -0.0, 1e-300]
ODD_TEXTS = ["", ".", "..", "nope", "data", "dense", "a/b", "\x00", "é", "nan", "-1", "${x}"]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_TEXTS),
    st.integers(-5, 400),
    st.floats(),
    st.text(max_size=6),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
changes = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from(["replace", "replace", "remove", "add"]),
    values,
)
metadata_files = st.fixed_dictionaries(
    {
        "metadata": st.sampled_from([c for c in READ if not c.endswith("tokenizer.json")]),
        "changes": st.lists(changes, min_size=1, max_size=2),
    }
)

GROUPS = ["Engine", "Model", "Data", "Global", "Optimizer", "Prepare", "Compress", "Gate", "_base_"]
KEYS = [
    "max_steps",
    "hidden_size",
    "num_layers",
    "lr",
    "seed",
    "dataset",
    "split",
    "Train",
    "tokenizer",
]
pieces = st.one_of(
    st.sampled_from(["Engine", "Model", ": ", "\n", "  ", "- ", "{", "}", "[", "]", "&a ", "*a"]),
    st.sampled_from(["!!int ", "!!python/name:os.system ", "<<", "|", ">", "'", '"', "#", "\t"]),
    st.sampled_from(["${", "}", "oc.env:HOME", "1:30", ".nan", "_base_", "null", "~", "\ufeff"]),
    st.text(max_size=4),
)
yaml_texts = st.lists(pieces, max_size=14).map("".join)
dotted = st.one_of(
    st.sampled_from(["Engine.max_steps", "Model.hidden_size", "Optimizer.lr.max_lr"]),
    st.sampled_from(["Global.seed", "Data.Train.dataset.split", "Compress.Quantization.enable"]),
    st.tuples(st.sampled_from(GROUPS), st.sampled_from(KEYS)).map(".".join),
    st.text(max_size=8),
)
words = st.one_of(
    scalars.map(str),
    st.text(max_size=8),
    st.sampled_from(["[1, 2]", "{a: b}", "[", "1:30", "${Engine}", "!!set {}", "0x7f", "1e400"]),
)
overrides = st.lists(st.tuples(dotted, words).map("=".join), min_size=1, max_size=3)
recipes = st.one_of(
    st.fixed_dictionaries({"verb": st.just("recipe"), "recipe": yaml_texts}),
    st.fixed_dictionaries({"verb": st.sampled_from(["recipe", "plan"]), "settings": overrides}),
)

SLOW = ("serve", "deploy", "compress", "release list")
QUICK = [verb for verb in COMMANDS if verb not in SLOW]
OUTPUTS = (
    "out",
    "data",
    ".",
    "..",
    "data/new",
    "out/",
    "a/b",
    "corpus.jsonl",
    "-o",
    "é",
    " ",
    "out",
)


@st.composite
def arguments(draw: st.DrawFn) -> Drawn:
    """Draw a verb with one or two of its arguments replaced."""
    verb = draw(st.sampled_from(QUICK))
    command = COMMANDS[verb]
    names = [*command.arguments, *command.options]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    paths = st.sampled_from([*OUTPUTS, *ODD_TEXTS[:-4]])
    texts = st.one_of(paths, words)
    drawn: dict[str, Any] = {}
    for name in chosen:
        # Never write outside the sandbox.
        drawn[name] = draw(st.sampled_from(OUTPUTS) if name == "--output" else texts)
    return {"verb": verb, "options": {n: v.replace("\x00", "") for n, v in drawn.items()}}


def budget(examples: int) -> Any:
    """Deterministic settings without shrinking, which would take minutes."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def check(started: list[Worker], drawn: Drawn) -> None:
    verdict = started[0].fuzzed(drawn)
    if verdict.verdict not in ("right", "skipped"):
        pytest.fail(f"{describe(verdict)}\n{verdict.text}", pytrace=False)


@budget(SHORT)
@given(drawn=metadata_files)
@pytest.mark.slow
def test_metadata_files(started: list[Worker], drawn: Drawn) -> None:
    check(started, drawn)


@budget(2 * SHORT)
@given(drawn=recipes)
@pytest.mark.slow
def test_recipes(started: list[Worker], drawn: Drawn) -> None:
    check(started, drawn)


@budget(SHORT)
@given(drawn=arguments())
@pytest.mark.slow
def test_arguments(started: list[Worker], drawn: Drawn) -> None:
    check(started, drawn)


@pytest.mark.long
@budget(FULL)
@given(drawn=st.one_of(metadata_files, recipes, arguments()))
def test_all_at_length(started: list[Worker], drawn: Drawn) -> None:
    check(started, drawn)
