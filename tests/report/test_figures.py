"""Figures are SVG with text kept as text, so that it can be read back."""

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from lathe.report.report import ComparedFigure, comparison_chart
from lathe.report.training import loss_curve, smooth
from lathe_base.pages.style import DARK, LIGHT, Theme

SVG = "{http://www.w3.org/2000/svg}"
THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)


def words(svg: str) -> set[str]:
    root = ET.fromstring(svg.encode())
    assert root.tag == f"{SVG}svg"
    return {"".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")}


@THEMES
def test_loss_curve_names_axes_units_and_the_last_validation_loss(theme: Theme) -> None:
    records: list[dict[str, Any]] = [{"step": s, "loss": 8.0 / s} for s in range(1, 30)]
    records += [{"step": 0, "eval_loss": 8.1}, {"step": 29, "eval_loss": 3.456}]
    found = words(loss_curve(records, 0, theme))
    assert {"step", "loss (nats per token)", "training", "validation", "3.456"} <= found


@pytest.mark.parametrize(
    "records", [[{"step": 1, "loss": 3.0}], [{"step": 1, "eval_loss": 3.0}]], ids=["train", "eval"]
)
def test_a_curve_of_one_point_is_drawn(records: list[dict[str, float]]) -> None:
    assert "step" in words(loss_curve(records, 1, LIGHT))


@THEMES
@pytest.mark.parametrize("from_zero", [True, False])
def test_comparison_leaves_out_what_was_not_measured(theme: Theme, from_zero: bool) -> None:
    measure = ComparedFigure(
        title="Perplexity",
        unit="per token",
        names=["dense", "pruned", "INT8 $5^"],
        values=[40.0, None, 41.0],
        labels=["40.00", "-", "41.00 (1.02x)"],
        intervals=[(39.0, 41.0), None, None],
        from_zero=from_zero,
    )
    found = words(comparison_chart(measure, theme))
    assert {"dense", "INT8 $5^", "40.00", "41.00 (1.02x)", "per token"} <= found
    assert "pruned" not in found


def test_pictures_are_the_same_every_time() -> None:
    records = [{"step": s, "loss": 8.0 / s} for s in range(1, 30)]
    assert loss_curve(records, 0, LIGHT) == loss_curve(records, 0, LIGHT)


def testsmoothing_keeps_lines_straight_where_its_window_is_whole() -> None:
    line = np.linspace(5.0, 1.0, 200)
    np.testing.assert_allclose(smooth(line)[:190], line[:190])
    assert smooth(np.array([2.0])) == [2.0]
