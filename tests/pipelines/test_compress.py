"""The search as a pipeline: one branch a ratio, the best one deployed."""

import json

import pytest

from lathe.config.recipe import load_recipe
from lathe.data.prepare import prepare
from lathe.train.pretrain import pretrain
from tests.pipelines.test_run import start

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("triton")]


def test_the_best_model_that_is_small_enough_is_deployed(tmp_path, recipe, corpus):
    settings = load_recipe(str(recipe), [])
    prepare(settings, tmp_path / "data", str(corpus))
    pretrain(settings, tmp_path / "data", tmp_path / "dense")
    recipes = ("--recipe", recipe, "--prune-recipe", recipe, "--qat-recipe", recipe)
    goal = ("--target", "parameters=0.8", "--budget", "perplexity=0.9")
    arguments = ("--model", tmp_path / "dense", "--corpus", corpus, *recipes, *goal)
    run = start(tmp_path, "compress", *arguments, "--name", "search")
    out, err = run.communicate(timeout=900)
    assert run.returncode == 0, out + err

    folder = tmp_path / "run" / "search"
    (found,) = folder.glob("**/choose/trials/compress.json")
    result = json.loads(found.read_text())
    names = [trial["name"] for trial in result["trials"]]
    assert names == [f"pruned-{ratio}-int8" for ratio in (0.125, 0.25, 0.375, 0.5)]
    met = [trial for trial in result["trials"] if trial["parameters"] <= 0.8]
    assert result["best"] == min(met, key=lambda trial: trial["perplexity"])
    assert result["best"]["name"] != names[0]
    assert result["best"]["name"] in (folder / "compress.html").read_text()
    assert (tmp_path / "run" / "deployed" / "deploy.json").is_file()
