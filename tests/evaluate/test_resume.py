"""Killed evaluations resume."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from lathe.evaluate.evaluate import TorchScorer, evaluate
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support import warm
from tests.support.errors import raises
from tests.support.tables import quick_only


class Scored:
    """Counts the batches that torch scores, and interrupts before batch number `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches, self.stop = 0, -1
        score, logits = TorchScorer.score, TorchScorer.logits

        def count() -> None:
            if self.batches == self.stop:
                raise KeyboardInterrupt
            self.batches += 1

        def counted(scorer: TorchScorer, *batch: np.ndarray) -> object:
            count()
            return score(scorer, *batch)

        monkeypatch.setattr(TorchScorer, "score", counted)
        monkeypatch.setattr(
            TorchScorer, "logits", lambda scorer, *batch: (count(), logits(scorer, *batch))[1]
        )


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Scored:
    return Scored(monkeypatch)


@pytest.fixture
def text(tmp_path: Path, prose: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(prose * 3)
    return path


@pytest.fixture
def cloze(tmp_path: Path, prose: str) -> Path:
    path, words = tmp_path / "cloze.jsonl", prose.split()
    lines = (json.dumps({"text": " ".join(words[i : i + 4 + i % 9])}) for i in range(40))
    path.write_text("\n".join(lines))
    return path


def figures(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "metrics.json").read_text())
    units = {name: (folder / name).read_text() for name in ("blocks.jsonl", "examples.jsonl")}
    return {key: found[key] for key in ("cloze", "text", "protocol", "digests")} | units


def test_an_interrupted_evaluation_scores_only_what_is_left(
    tmp_path: Path, model_folder: Path, recipe: Recipe, text: Path, cloze: Path, scored: Scored
) -> None:
    given = {"text": text, "cloze": cloze, "reference": model_folder}
    evaluate(recipe, model_folder, tmp_path / "whole", **given)  # type: ignore[arg-type]
    total, output = scored.batches, tmp_path / "out"
    assert total > 12
    scored.batches = 0
    for stop in (3, total // 2, total - 1):
        scored.stop = stop
        with pytest.raises(KeyboardInterrupt):
            evaluate(recipe, model_folder, output, **given)  # type: ignore[arg-type]
    assert not output.exists()
    scored.stop = -1
    evaluate(recipe, model_folder, output, **given)  # type: ignore[arg-type]
    # An interruption may hit between the logits of the two models, which loses half a batch.
    assert total <= scored.batches <= total + 2
    assert figures(output) == figures(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("cloze.jsonl", "out", "text.txt", "whole")
    ]


def test_scores_of_another_model_or_window_are_not_reused(
    tmp_path: Path, model_folder: Path, recipe: Recipe, text: Path, scored: Scored
) -> None:
    scored.stop = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(recipe, model_folder, tmp_path / "out", text=text)
    scored.stop = -1
    left = (tmp_path / "out.unfinished.jsonl").read_bytes()
    settings = recipe.Offline_Eval.model_copy(update={"overlapping_eval": 16})
    with raises(Code.STATE_MISMATCH, tmp_path / "out.unfinished.jsonl", "settings"):
        evaluate(Recipe(Offline_Eval=settings), model_folder, tmp_path / "out", text=text)
    text.write_text(text.read_text() + " once more")
    with raises(Code.STATE_MISMATCH, tmp_path / "out.unfinished.jsonl", "data"):
        evaluate(recipe, model_folder, tmp_path / "out", text=text)
    assert (tmp_path / "out.unfinished.jsonl").read_bytes() == left
    evaluate(recipe, model_folder, tmp_path / "elsewhere", text=text)


@pytest.mark.parametrize(
    "finding",
    quick_only(
        ["[]", "[[1], [1]]", "[1, 1]", "[[[1]], [[1]]]", '{"x": 1}'], ["[[1], [1]]", '{"x": 1}']
    ),
)
def test_a_finding_that_fits_no_batch_is_found_again(
    finding: str,
    tmp_path: Path,
    model_folder: Path,
    recipe: Recipe,
    text: Path,
    scored: Scored,
) -> None:
    scored.stop = 1
    with pytest.raises(KeyboardInterrupt):
        evaluate(recipe, model_folder, tmp_path / "out", text=text)
    unfinished = tmp_path / "out.unfinished.jsonl"
    first, second = unfinished.read_text().splitlines()
    name = json.dumps(json.loads(second)["name"])
    unfinished.write_text(f'{first}\n{{"name": {name}, "finding": {finding}}}\n')
    scored.stop = -1
    evaluate(recipe, model_folder, tmp_path / "out", text=text)
    evaluate(recipe, model_folder, tmp_path / "whole", text=text)
    assert figures(tmp_path / "out") == figures(tmp_path / "whole")


def test_a_mistake_leaves_nothing_beside_the_output(
    tmp_path: Path, model_folder: Path, recipe: Recipe, text: Path
) -> None:
    cloze = tmp_path / "cloze.jsonl"
    cloze.write_text(json.dumps({"text": "the " + "x" * 200}))
    with raises(Code.TOO_LONG, "limit is 32"):
        evaluate(recipe, model_folder, tmp_path / "out", text=text, cloze=cloze)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cloze.jsonl", "text.txt"]


@pytest.mark.parametrize(
    ("recipe", "window"), [("base", None), ("tiny", None), ("eval-345m-wikitext", 32)]
)
def test_the_window_advances_by_half_and_in_paddlefleetxs_recipe_by_32(
    recipe: str, window: int | None
) -> None:
    assert load_recipe(recipe).Offline_Eval.overlapping_eval == window


def test_half_of_the_window_reads_every_token_twice(
    tmp_path: Path, model_folder: Path, text: Path
) -> None:
    evaluate(Recipe(), model_folder, tmp_path / "out", text=text)
    assert figures(tmp_path / "out")["protocol"] == {
        **{"max_seq_len": 32, "overlapping_eval": 16, "dtype": "float32"},
    }


@pytest.mark.slow
def test_an_evaluation_that_is_killed_ends_as_if_it_had_not_been(
    tmp_path: Path, model_folder: Path, recipe: Recipe, prose: str
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(prose * 60)
    options = ["-o", "Offline_Eval.overlapping_eval=1", "-o", "Offline_Eval.batch_size=1"]
    command = [*warm.python(), "-m", "lathe", "evaluate", str(model_folder), "--text", str(text)]
    process = subprocess.Popen(
        [*command, *options, "--output", str(output)], stderr=subprocess.PIPE
    )
    unfinished, started = tmp_path / "out.unfinished.jsonl", time.monotonic()
    while not unfinished.exists() or unfinished.read_bytes().count(b"\n") < 40:
        assert process.poll() is None and time.monotonic() - started < 120
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not output.exists()
    kept = unfinished.read_bytes().count(b"\n") - 1
    again = subprocess.run(
        [*command, *options, "--output", str(output)], capture_output=True, text=True, check=True
    )
    assert f"resuming with {kept} results" in again.stderr
    subprocess.run([*command, *options, "--output", str(tmp_path / "whole")], check=True)
    assert figures(output) == figures(tmp_path / "whole")
