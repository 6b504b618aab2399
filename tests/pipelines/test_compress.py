"""The search as a pipeline has the same designs, trials and report as `lathe compress`."""

import json
import re
import subprocess

import pytest

from lathe.data.prepare import prepare
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from tests.pipelines.test_run import start
from tests.support import warm

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("triton")]

TIMES = ("latency", "prefill")
ROW = re.compile(r"<tr><td>.*?</tr>", re.S)
CELL = re.compile(r"<td.*?>(.*?)</td>", re.S)


def test_the_pipeline_and_the_verb_are_one_search(tmp_path, recipe, corpus):
    settings = load_recipe(str(recipe), [])
    prepare(settings, tmp_path / "data", str(corpus))
    pretrain(settings, tmp_path / "data", tmp_path / "dense")
    recipes = ("--recipe", recipe, "--prune-recipe", recipe, "--qat-recipe", recipe)
    goal = ("--target", "bytes=0.3", "--budget", "perplexity=0.9")
    chosen = (*recipes, *goal, "-o", "Compress.Quantization.quantize_embedding=True")
    inputs = ("--model", tmp_path / "dense", "--corpus", corpus)
    run = start(tmp_path, "compress", *inputs, *chosen, "--quant", "int4", "--name", "search")
    out, err = run.communicate(timeout=1200)
    assert run.returncode == 0, out + err
    folder = tmp_path / "run" / "search"
    (found,) = folder.glob("**/choose/trials/compress.json")
    (data,) = folder.glob("*/prepare/data")
    assert (folder / "report.html").is_file()
    assert (tmp_path / "run" / "deployed" / "deploy.json").is_file()

    verb = [*warm.python(), "-m", "lathe", "compress", "dense", "--data", data, *chosen]
    verb += ["-o", "Compress.Quantization.weight_bits=4", "--output", "out"]
    subprocess.run(list(map(str, verb)), cwd=tmp_path, check=True, timeout=600)
    assert untimed(tmp_path / "out" / "compress.json") == untimed(found)
    assert rows(tmp_path / "out" / "compress.html") == rows(folder / "compress.html")
    best = json.loads(found.read_text())["best"]
    assert best["bytes"] <= 0.3
    assert min(best["design"]["channels"]) < 128
    assert len(set(best["design"]["formats"].values())) > 1


def untimed(path):
    """Result of a search without timings, which vary."""
    result = json.loads(path.read_text())
    for trial in (*result["trials"], result["best"]):
        for time in TIMES:
            del trial[time]
    return result


def rows(page):
    """Rows of the page's tables without timings."""
    found = [CELL.findall(row) for row in ROW.findall(page.read_text())]
    return [cells[:2] + cells[4:] if len(cells) == 9 else cells for cells in found]
