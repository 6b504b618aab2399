"""Invalid and malicious recipes and overrides: one message, status 2, quickly, without leaks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe import cli
from lathe_base.config.recipe import load_recipe
from lathe_base.config.text import MAX_RECIPE_BYTES
from lathe_base.errors import Code
from tests.support.command_line import restoring_process_state
from tests.support.errors import raises

SECRET = "hunter2"
LAUGHS = "\n".join(
    ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30)]
)
MERGED = "\n".join(
    ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 30)]
)
DOUBLED = "\n".join(
    ["Prepare:", "  a0: xxxxxxxx"]
    + [f"  a{n}: '${{Prepare.a{n - 1}}}${{Prepare.a{n - 1}}}'" for n in range(1, 30)]
)
GROUPS = "\n".join(
    ["a0: {x: 1}"] + [f"a{n}: {{x: '${{a{n - 1}}}', y: '${{a{n - 1}}}'}}" for n in range(1, 30)]
)
CHAIN = "\n".join(["a0: 1"] + [f"a{n}: '${{a{n - 1}}}'" for n in range(1, 400)])

FILES = {
    # Interpolations never look anything up.
    "env": ("Prepare: {source: '${oc.env:LATHE_TEST_SECRET}'}", "file.yaml:1: Prepare.source"),
    "env with a default": ("Prepare: {source: '${oc.env:NO,x}'}", "Prepare.source"),
    "env in a text": ("Prepare:\n  source: 's3://${oc.env:HOME}/x'", "file.yaml:2: Prepare.source"),
    "env in a reference": ("Prepare: {source: '${Model.${oc.env:HOME}}'}", "${oc.env:...}"),
    "env in an argument": ("Prepare: {source: '${oc.decode:${oc.env:HOME}}'}", "${oc.decode:...}"),
    "env in a list": ("Data: {Train: {dataset: {split: ['${oc.env:HOME}', 1, 1]}}}", "split"),
    "env as a base": ("_base_: '${oc.env:HOME}'", "_base_"),
    "env in an ignored key": ("Profiler: {x: '${oc.env:HOME}'}", "Profiler.x"),
    "decode": ("Model: {num_layers: '${oc.decode:3}'}", "Model.num_layers"),
    "create": ("Model: '${oc.create:{a: 1}}'", "Model"),
    "a resolver of no name": ("Model: {num_layers: '${:3}'}", "Model.num_layers"),
    "an unknown resolver": ("Model: {num_layers: '${eval:3}'}", "${eval:...}"),
    "a reference in a reference": (
        "Model: {num_layers: '${Model.${Global.x}}'}",
        "error[malformed]: file.yaml:1: Model.num_layers",
    ),
    "an open reference": ("Model: {num_layers: '${Model'}", "Model.num_layers"),
    "an empty reference": ("Model: {num_layers: '${}'}", "Model.num_layers"),
    "references in references": (f"Prepare: {{source: '{'${' * 900}a{'}' * 900}'}}", "source"),
    "a long text of references": (f"Prepare: {{source: '{'${a}' * 2000}'}}", "Prepare.source"),
    "a reference to itself": ("Model: {hidden_size: '${Model.hidden_size}'}", "Model.hidden_size"),
    "a reference to its group": ("Model: {hidden_size: '${Model}'}", "Model.hidden_size"),
    "a circle": (
        "Model: {num_layers: '${Model.x}', x: '${Model.num_layers}'}",
        "error[circular]: file.yaml:1: Model.num_layers",
    ),
    "a reference to nothing": ("Model: {num_layers: '${Model.layers}'}", "Model.layers"),
    "a reference into a value": ("Model: {num_layers: '${Engine.x.y}'}\nEngine: {x: 3}", "x.y"),
    "texts that double": (DOUBLED, "error[too-large]: file.yaml:"),
    "groups that double": (GROUPS, "error[too-large]: file.yaml:"),
    "a chain": (CHAIN, "error[too-large]: file.yaml:"),
    # Invalid bases.
    "a base that is no recipe": ("_base_: secret.txt", "error[malformed]: secret.txt"),
    "a base with a secret value": (
        "_base_: broken.txt",
        "error[malformed]: broken.txt: not YAML at line 3",
    ),
    "a base outside": ("_base_: ../outside.yaml", "_base_"),
    "a base by an absolute name": ("_base_: /etc/passwd", "_base_"),
    "a base through a link": ("_base_: link.yaml", "_base_"),
    "a base that is a device": ("_base_: /dev/zero", "_base_"),
    "a base that is a folder": ("_base_: folder", "folder"),
    "a base that is a pipe": ("_base_: pipe", "pipe"),
    "a base that is a number": ("_base_: 3", "_base_"),
    "a base that is a list": ("_base_: [a, b]", "_base_"),
    "a base without a name": ("_base_: ''", "_base_"),
    "a base with a NUL": ('_base_: "a\\0b"', "error[bad-path]: "),
    "a base of a long name": (f"_base_: {'b' * 300}", "error[bad-path]: "),
    "a base that is not there": ("_base_: nowhere.yaml", "nowhere.yaml"),
    # Invalid contents of the file.
    "a number": ("3", "error[malformed]: file.yaml: "),
    "a text": (SECRET, "error[malformed]: file.yaml: "),
    "a list": (f"[{SECRET}]", "error[malformed]: file.yaml: "),
    "brackets": ("[" * 60000, "error[malformed]: file.yaml: "),
    "braces": ("{a: " * 10000, "error[malformed]: file.yaml: "),
    "groups in groups": (
        "\n".join(" " * n + "a:" for n in range(340)),
        "error[malformed]: file.yaml: ",
    ),
    "a duplicate": ("Model: {num_layers: 1, num_layers: 2}", "num_layers"),
    "a numeric key": ("1: 2", "error[malformed]: file.yaml: "),
    "a null key": ("null: x", "error[malformed]: file.yaml: "),
    "a list as a key": ("[a]: b", "error[malformed]: file.yaml: "),
    "a key with a dot": ("Model.num_layers: 3", "Model.num_layers"),
    "a long key": (f"? {'k' * 5000}\n: 1", "error[unknown-key]: file.yaml:1: "),
    "laughs": (LAUGHS, "10000"),
    "merged laughs": (MERGED, "10000"),
    "an alias of itself": ("a: &a [*a]", "error[malformed]: file.yaml: "),
    "an alias of nothing": (f"a: *{SECRET}", "error[malformed]: file.yaml: not YAML at line 1"),
    "a python object": (
        "a: !!python/object/apply:os.getcwd []",
        "error[malformed]: file.yaml: not YAML at line 1",
    ),
    "a path": (
        "Prepare: {source: !!python/object/apply:pathlib.Path [x]}",
        "error[malformed]: file.yaml: ",
    ),
    "binary": ("Prepare: {source: !!binary aGk=}", "Prepare.source"),
    "two documents": ("Model: {}\n---\nEngine: {}", "error[malformed]: file.yaml: "),
    "a tab": ("Model:\n\tnum_layers: 1", "error[malformed]: file.yaml: not YAML at line 2"),
    "a NUL": ("Model: \0", "error[malformed]: file.yaml: "),
    "a large file": ("# x\n" * MAX_RECIPE_BYTES, f"{MAX_RECIPE_BYTES}"),
    "a number of 5000 digits": (
        f"Model: {{num_layers: {'9' * 5000}}}",
        "error[malformed]: file.yaml: ",
    ),
    "a hexadecimal number of 5000": (f"Model: {{num_layers: 0x{'f' * 5000}}}", "Model.num_layers"),
    "a surrogate": ('Offline_Eval: {eval_path: "\\ud800"}', "Offline_Eval.eval_path"),
    "inherited or not": ("Model: {_inherited_: perhaps}", "_inherited_"),
    "a group that is a number": (
        "Engine: 5\nGlobal: {max_steps: 3}",
        "error[unknown-key]: file.yaml:2: ",
    ),
    "a precision that is a text": ("Engine: {mix_precision: {enable: 'False'}}", "enable"),
}

BYTES = {
    "Latin-1": ("Modèle: {}".encode("latin-1"), "error[malformed]: "),
    "UTF-16": ("Model: {}".encode("utf-16"), "error[malformed]: "),
    "noise": (bytes(range(256)), "error[malformed]: "),
}

OVERRIDES = {
    "Prepare.source=${oc.env:LATHE_TEST_SECRET}": "Prepare.source",
    "Prepare={source: '${oc.env:HOME}'}": "Prepare.source",
    "Model.hidden_size=${Model.hidden_size}": "error[circular]: -o Model.hidden_size=",
    "Engine.max_steps=1:30": "Engine.max_steps",
    "Engine.max_steps=true": "Engine.max_steps",
    "Engine.max_steps=off": "Engine.max_steps",
    "Engine.max_steps=1.5": "Engine.max_steps",
    "Engine.max_steps=-2": "Engine.max_steps",
    "Engine.max_steps=1e300": "Engine.max_steps",
    "Engine.max_steps=.inf": "Engine.max_steps",
    "Engine.max_steps=[1]": "Engine.max_steps",
    "Engine.max_steps={a: 1}": "Engine.max_steps",
    "Engine.compile=1": "Engine.compile",
    "Engine.compile='yes'": "Engine.compile",
    "Engine.mix_precision={enable: 1}": "Engine.mix_precision.enable",
    "Engine.mix_precision.scale_loss=1e300": "scale_loss",
    "Optimizer.lr.max_lr=nan": "Optimizer.lr.max_lr",
    "Optimizer.lr.max_lr=.nan": "Optimizer.lr.max_lr",
    "Optimizer.lr.max_lr=1:30.5": "Optimizer.lr.max_lr",
    "Optimizer.lr.max_lr=True": "Optimizer.lr.max_lr",
    "Optimizer.lr.max_lr=-1": "Optimizer.lr.max_lr",
    "Optimizer.epsilon=2": "Optimizer.epsilon",
    "Data.Train.dataset.split=[true, 50, 1]": "split",
    "Data.Train.dataset.split='9,nan,1'": "split",
    "Distributed.sharding.sharding_stage=True": "sharding_stage",
    "Distributed.dp_degree=True": "dp_degree",
    "Distributed.mp_degree=1000000": "mp_degree",
    "Distributed.grace_seconds=1000000": "grace_seconds",
    "Global.seed=-1": "Global.seed",
    "Global.seed=4294967296": "Global.seed",
    "Global.micro_batch_size=9999999999": "micro_batch_size",
    "Model.num_layers=1000000000": "Model.num_layers",
    "Model.hidden_dropout_prob=1": "hidden_dropout_prob",
    "Model.initializer_range=1e30": "initializer_range",
    "Prepare.vocab_size=100000000": "Prepare.vocab_size",
    "Prepare.text_key=''": "Prepare.text_key",
    "Prepare.source=''": "Prepare.source",
    'Prepare.source="a\\0b"': "Prepare.source",
    "Prepare.num_workers=1000000": "Prepare.num_workers",
    "Launch.memory_per_node=lots": "memory_per_node",
    "Launch.memory_per_node=0Gi": "memory_per_node",
    "Launch.shared_memory=-1Gi": "shared_memory",
    "Launch.node_pool=a pool": "Launch.node_pool",
    "Launch.queue=Not_A_Queue": "Launch.queue",
    "Launch.runtime=a/b": "Launch.runtime",
    "Launch.deadline_hours=1e300": "deadline_hours",
    "Generation.temperature=1e-300": "Generation.temperature",
    "Generation.length_penalty=1e300": "length_penalty",
    "Generation.top_p=.nan": "Generation.top_p",
    "Serving.http_port=99999": "Serving.http_port",
    "Serving.grpc_port=8000": "8000",
    "Serving.metrics_port=-1": "Serving.metrics_port",
    "Serving.model_name=../x": "Serving.model_name",
    "Serving.model_name=''": "Serving.model_name",
    f"Serving.model_name={'m' * 300}": "Serving.model_name",
    "Gate.max_accuracy_drop=2": "max_accuracy_drop",
    "Production.namespace=Lathe": "Production.namespace",
    "Production.burst_seconds=.inf": "burst_seconds",
    "Production.rollout_seconds=1e12": "rollout_seconds",
    "_base_=tiny": "_base_",
    "=3": "error[malformed]: -o ",
    "a": "error[malformed]: -o ",
    "": "error[malformed]: -o ",
    "a b=3": "error[malformed]: -o ",
    "${oc.env:HOME}=3": "error[malformed]: -o ",
    ".".join("a" * 5000) + "=3": "error[malformed]: -o ",
    "Model=3": "Model",
    "Engine.max_steps=" + "[" * 5000: "error[malformed]: -o ",
    "Prepare.source=" + "x" * 10**6: f"{MAX_RECIPE_BYTES}",
    "Model={num_layers: 1, num_layers: 2}": "num_layers",
    "Model={1: 2}": "error[malformed]: -o Model=",
    "Prepare.source=!!python/name:os.system": "error[malformed]: -o ",
    "Prepare.source=\udcff": "error[malformed]: ",
    "Offline_Eval.eval_path=\ud800": "error[malformed]: ",
}

NAMES = [
    "",
    ".",
    "/",
    "/dev/zero",
    "/dev/stdin",
    "pipe",
    "n" * 300,
    "a\0b",
    "../../tiny",
    "/etc/shadow/x",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of recipes next to other files that contain a secret."""
    monkeypatch.setenv("LATHE_TEST_SECRET", SECRET)
    inner = tmp_path / "recipes"
    (inner / "folder").mkdir(parents=True)
    (tmp_path / "outside.yaml").write_text(f"Prepare: {{source: {SECRET}}}")
    (inner / "secret.txt").write_text(f"root:{SECRET}:0:0:root:/root:/bin/sh\n")
    (inner / "broken.txt").write_text(f"password: {SECRET}\n{SECRET}: [{SECRET}\n")
    (inner / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    os.mkfifo(inner / "pipe")
    monkeypatch.chdir(inner)
    yield inner


def refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run `lathe` with invalid input, check all guarantees, and return the error message."""
    monkeypatch.setattr(sys, "argv", ["lathe", *arguments])
    start = time.process_time()
    with pytest.raises(SystemExit) as caught, restoring_process_state():
        cli.main()
    assert time.process_time() - start < 5
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("error[")
    assert "\n  hint: " in printed.err
    assert "Traceback" not in printed.err
    assert SECRET not in printed.err
    assert len(printed.err) < 2000
    return printed.err


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_is_one_message(
    case: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, says = FILES[case]
    (folder / "file.yaml").write_text(text)
    assert says in refused(["recipe", "file.yaml"], monkeypatch, capsys).replace("\n  ", " ")


@pytest.mark.parametrize("case", BYTES)
def test_a_binary_file_is_reported_in_one_message(
    case: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, says = BYTES[case]
    (folder / "file.yaml").write_bytes(content)
    message = refused(["recipe", "file.yaml"], monkeypatch, capsys)
    assert "file.yaml" in message
    assert says in message


@pytest.mark.parametrize("override", OVERRIDES, ids=[name[:40] for name in OVERRIDES])
def test_a_hostile_override_is_one_message(
    override: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(["recipe", "tiny", "-o", override], monkeypatch, capsys)
    assert "-o " in message
    assert OVERRIDES[override] in message


@pytest.mark.parametrize("name", NAMES, ids=[repr(name[:20]) for name in NAMES])
def test_paths_that_are_not_files_are_rejected(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "error[not-found]: " in refused(["recipe", name], monkeypatch, capsys)


@pytest.mark.parametrize("name", ["/etc/passwd", "secret.txt", "broken.txt", "/proc/self/environ"])
def test_an_invalid_recipe_is_not_quoted(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(["recipe", name], monkeypatch, capsys)
    assert Path(name).name in message or "environ" in message
    assert "root" not in message.replace(str(folder), "")
    assert "PATH" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_reported(folder: Path) -> None:
    (folder / "mine.yaml").write_text("Model: {}")
    (folder / "mine.yaml").chmod(0)
    with raises(Code.PERMISSION, "mine.yaml"):
        load_recipe("mine.yaml")


def test_a_recipe_is_found_without_a_working_directory(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); "
        "from lathe_base.config.recipe import load_recipe; "
        "print(load_recipe('tiny').Model.num_layers)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "gone")],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "4\n", done.stderr


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "null", "---\n", "\ufeffModel:\n", "Model: {}\r\n"]
)
def test_an_empty_recipe_is_the_defaults(folder: Path, text: str) -> None:
    (folder / "file.yaml").write_text(text)
    assert load_recipe("file.yaml") == load_recipe(folder / "file.yaml", [])


def test_a_plain_reference_is_the_other_keys_value(folder: Path) -> None:
    (folder / "file.yaml").write_text(
        "Prepare: {source: 'data/${Global.seed}-${.text_key}', text_key: body, "
        "license: 'm\\\\${Global.seed}'}\n"
        "Engine: {max_steps: '${Optimizer.lr.decay_steps}'}\n"
        "Optimizer: {lr: {decay_steps: 7}}\nGlobal: {seed: 5}\n"
        "Model: {num_layers: '${Engine[max_steps]}'}\n"
        "Offline_Eval: {eval_path: 'a\\${b}'}\n"
    )
    recipe = load_recipe("file.yaml", ["Optimizer.lr.decay_steps=9"])
    assert recipe.Prepare.source == "data/5-body"
    assert recipe.Prepare.license == "m\\5"
    assert recipe.Engine.max_steps == recipe.Model.num_layers == 9
    assert recipe.Offline_Eval.eval_path == "a${b}"


def test_an_escaped_resolver_stays_text_wherever_it_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file.yaml").write_text(
        "Prepare: {source: '\\${oc.env:LATHE_TEST_SECRET}', tokenizer: '${Prepare.source}'}"
    )
    recipe = load_recipe("file.yaml")
    assert recipe.Prepare.source == recipe.Prepare.tokenizer == "${oc.env:LATHE_TEST_SECRET}"
    assert SECRET not in json.dumps(recipe.model_dump(mode="json"))


def test_a_base_may_be_below_the_recipe_or_ship_with_lathe(folder: Path) -> None:
    (folder / "folder" / "inner.yaml").write_text("_base_: ../common.yaml\nModel: {num_layers: 3}")
    (folder / "common.yaml").write_text("_base_: tiny\nEngine: {max_steps: 5}")
    (folder / "file.yaml").write_text("_base_: folder/inner.yaml")
    recipe = load_recipe("file.yaml")
    assert (recipe.Model.num_layers, recipe.Engine.max_steps) == (3, 5)
    assert recipe.Model.hidden_size == load_recipe("tiny").Model.hidden_size


@pytest.mark.parametrize(
    "text",
    [
        "_inherited_: False\nModel: {num_layers: 3}",
        "Model: {_inherited_: False, num_layers: 3}",
        "Model: {_inherited_: no, num_layers: 3}\nOptimizer: {lr: {_inherited_: False}}",
    ],
)
def test_inherited_false_without_a_base_is_harmless(folder: Path, text: str) -> None:
    (folder / "file.yaml").write_text(text)
    assert load_recipe("file.yaml").Model.num_layers == 3
    child = folder / "child.yaml"
    child.write_text("_base_: file.yaml\n_inherited_: False\n")
    assert load_recipe(child) == load_recipe(folder / "child.yaml", ["Model.num_layers=24"])


def test_numbers_and_booleans_are_yamls(folder: Path) -> None:
    (folder / "file.yaml").write_text(
        "Engine: {max_steps: 010, eval_freq: 1_000, logging_freq: 1e1, compile: yes}\n"
        "Optimizer: {lr: {max_lr: 1e-3, min_lr: 0}}\nGlobal: {seed: 0x10}\n"
        "Model: {use_recompute: off}\nData: {Train: {dataset: {split: '9, 1, 0'}}}\n"
    )
    recipe = load_recipe("file.yaml")
    engine = recipe.Engine
    assert (engine.max_steps, engine.eval_freq, engine.logging_freq) == (10, 1000, 10)
    assert engine.compile is True
    assert recipe.Model.use_recompute is False
    assert (recipe.Optimizer.lr.max_lr, recipe.Global.seed) == (1e-3, 16)
    assert recipe.Data.Train.dataset.split == (9, 1, 0)


def test_aliases_do_not_share_what_changes(folder: Path) -> None:
    (folder / "file.yaml").write_text(
        "Data:\n  Train: &data {dataset: {name: GPTDataset, max_seq_len: 64}, loader: {x: 1}}\n"
        "  Eval: *data\nEngine: {mix_precision: {<<: {use_pure_fp16: True}}}\n"
    )
    recipe = load_recipe("file.yaml")
    assert recipe.Data.Eval.dataset.max_seq_len == 64
    assert recipe.Engine.mix_precision.is_pure
