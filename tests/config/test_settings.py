"""Every setting is documented, on the command line and on the reference page."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lathe_base.config.explain import explain, groups, page
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe, Settings
from lathe_base.errors import Code
from tests.support import warm
from tests.support.errors import raises
from tests.support.sources import ROOT, python_files

SETTINGS = [setting for group in groups() for setting in group.settings]


def classes(model: type[Settings] = Recipe) -> Iterator[type[Settings]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from classes(field.annotation)


def test_every_field_has_a_description_in_a_sentence() -> None:
    for model in set(classes()):
        assert model.__doc__, model
        for name, field in model.model_fields.items():
            text = field.description or ""
            assert len(text.split()) >= 3 and text.endswith("."), f"{model.__name__}.{name}: {text}"


def test_every_group_says_whose_it_is() -> None:
    for group in groups():
        assert re.search("PaddleFleetX|Lathe's own", group.description), group.key


def test_a_key_that_no_code_reads_says_so() -> None:
    files = python_files()
    code = "".join(f.read_text() for f in files if f.parent.name != "settings")
    own = "".join(f.read_text() for f in files if f.parent.name == "settings")
    for setting in SETTINGS:
        name = setting.key.rpartition(".")[2]
        is_read = re.search(rf"""[."']{name}\b""", code) or f"self.{name} *" in own
        assert is_read or "changes nothing" in setting.description, setting.key


def test_the_reference_page_is_what_is_generated() -> None:
    committed = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert committed == page() + "\n", "run `make reference`"


def test_a_key_is_explained_with_its_values_and_default() -> None:
    assert explain("Compress.Prune.ratio").splitlines()[-3:] == [
        "  type: number",
        "  values: 0 to below 1",
        "  default: 0.125",
    ]
    assert "  values: sampling, greedy_search, beam_search\n" in explain(
        "Generation.decode_strategy"
    )
    assert "  values: above 0, up to 1\n" in explain("Optimizer.epsilon")
    assert "  values: 1 to 65536 or auto\n" in explain("Distributed.dp_degree")
    assert "  values: 1 to 2^31 - 1 or null\n" in explain("Global.global_batch_size")


def test_a_group_is_explained_with_all_that_it_holds() -> None:
    text = explain("Engine")
    for key in ("Engine", "Engine.max_steps", "Engine.mix_precision", "Engine.save_load.keep"):
        assert re.search(rf"^{re.escape(key)}$", text, re.MULTILINE), key
    assert "Optimizer" not in text


def test_the_value_in_a_recipe_is_shown_with_overrides() -> None:
    recipe = load_recipe("tiny-prune", ["Engine.max_steps=7"])
    assert explain("Engine.max_steps", recipe, "tiny-prune").endswith("\n  in tiny-prune: 7")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("Compress.Prun.ratio", "Compress.Prune.ratio"),
        ("max_lr", "Optimizer.lr.max_lr"),
        ("engine", "Engine"),
        ("Engin", "Engine"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with raises(Code.UNKNOWN_KEY, f"{key}\n") as caught:
        explain(key)
    assert nearest in caught.value.hint


def test_the_command_line_explains(tmp_path: Path) -> None:
    command = [*warm.python(), "-m", "lathe", "recipe", "tiny", "--explain"]
    done = subprocess.run(
        [*command, "Serving.http_port"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith("Serving.http_port\n  Port of the HTTP endpoint")
    assert done.stdout.endswith("\n  in tiny: 8000\n")
    done = subprocess.run([*command, "Serving.port"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[unknown-key]: unknown key Serving.port\n")


def test_an_override_without_a_recipe_is_a_mistake(tmp_path: Path) -> None:
    command = [*warm.python(), "-m", "lathe", "recipe", "-o", "Engine.max_steps=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Engine.max_steps=3: no recipe is given" in done.stderr
