import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from lathe.compress.sensitivity.page import box_plots, ranking_chart, sensitivity_page
from lathe.model.folder import checkpoint_digest
from lathe.report.report import report
from lathe.report.summary import Candidate
from lathe_base.pages.style import DARK, LIGHT, Theme
from lathe_base.storage import sha256
from tests.report.test_figures import words
from tests.report.test_page import Page
from tests.support.report_folders import HOSTILE, sensitivity_analysis, write_json
from tests.support.tables import quick_only

THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)


@THEMES
def test_ranking_marks_the_skips(theme: Theme) -> None:
    linears = [
        {"name": f"h.{i}.mlp.c_proj", "score": 0.1 / (i + 1), "stderr": None} for i in range(40)
    ]
    formats = {str(linear["name"]): "" for linear in linears}
    svg = ranking_chart(linears, formats | {"h.0.mlp.c_proj": "float"}, "nats per token", theme)
    found = words(svg)
    assert {"kept in float", "quantized", "h.0.mlp.c_proj", "h.23.mlp.c_proj"} <= found
    assert "h.24.mlp.c_proj" not in found
    assert "<pattern" in svg  # hatched: distinguishable without colour
    formats = dict.fromkeys(formats, "int4") | {"h.1.mlp.c_proj": "dynamic_int8"}
    mixed = words(ranking_chart(linears, formats, "nats per token", theme))
    assert {"INT4", "INT8, dynamic scales"} <= mixed and "quantized" not in mixed


@pytest.mark.parametrize(
    ("worst", "fraction"),
    [(2.0, ""), (0.02, "thousandths of "), (2e-5, "millionths of "), (0.0, "millionths of ")],
)
def test_the_axis_of_costs_has_figures_that_can_be_read(worst: float, fraction: str) -> None:
    linears = [{"name": "h.0.mlp.c_fc", "score": worst, "stderr": worst / 9}]
    found = words(ranking_chart(linears, {"h.0.mlp.c_fc": ""}, "nats per token", LIGHT))
    assert f"cost ({fraction}nats per token)" in found


@pytest.mark.parametrize(
    ("part", "theme"),
    quick_only(
        product(("weights", "inputs"), (LIGHT, DARK)), [("weights", LIGHT), ("inputs", DARK)]
    ),
)
def test_boxes_are_in_levels(part: str, theme: Theme) -> None:
    linears = sensitivity_analysis(30)["linears"]
    found = words(box_plots(linears, part, theme))
    assert {
        "h.0.mlp.c_fc",
        "h.23.mlp.c_fc",
        "127",
        "levels of INT8 (127: the largest)",
    } <= found
    assert "h.24.mlp.c_fc" not in found
    zeros = dict.fromkeys(("min", "q1", "median", "q3", "max", "absmax"), 0.0)
    assert words(box_plots([{"name": "h.0", part: zeros}], part, theme))


def test_the_page_of_an_analysis(tmp_path: Path) -> None:
    path = tmp_path / "sensitivity.html"
    path.write_text(sensitivity_page(sensitivity_analysis(rule=HOSTILE, mode="qat", metric="kl")))
    page = Page(path)
    assert "script" not in page.tags and HOSTILE not in path.read_text()
    assert page.tags.count("img") == page.tags.count("source") == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    for expected in (
        "Mode qat, metric kl",
        "quantized kl 3.7",
        "h.1.mlp.c_fc",
        "0.75",
        "channel spread",
    ):
        assert expected in page.text


def test_an_analysis_by_estimates_alone_has_no_correlation(tmp_path: Path) -> None:
    path = tmp_path / "sensitivity.html"
    path.write_text(sensitivity_page(sensitivity_analysis(mode="fisher", rank_correlation=None)))
    assert "correlation" not in Page(path).text


@pytest.mark.usefixtures("no_pictures")
def test_predicted_is_put_beside_what_was_achieved(
    make_candidate: Callable[..., Candidate], tmp_path: Path
) -> None:
    dense, int8 = make_candidate("dense", 40.0), make_candidate("INT8", 41.0)

    def restage(model: Path, stage: str) -> None:
        meta = json.loads((model / "lathe.json").read_text())
        (model / "lathe.json").write_text(json.dumps(meta | {"stage": stage}))

    restage(int8.model, "quantize")
    folder, output = tmp_path / "sensitivity", tmp_path / "report.html"
    write_json(folder / "sensitivity.json", sensitivity_analysis())
    inputs = {
        "model": checkpoint_digest(dense.model),
        "sensitivity": sha256(folder / "sensitivity.json"),
    }

    def text() -> str:
        report(output, [dense, int8], folder)
        return " ".join(Page(output).text.split())

    achieved = "Achieved by INT8: +0.025 nats per token"
    assert achieved not in text()  # nothing shows that INT8 is based on this analysis
    write_json(int8.model / "run.json", inputs)
    assert f"{achieved} on the held-out text, from perplexity 40.00 (dense) to 41.00" in text()
    write_json(int8.model / "run.json", inputs | {"sensitivity": "another"})
    assert achieved not in text()
    write_json(int8.model / "run.json", inputs)
    restage(dense.model, "another")
    assert achieved not in text()
