"""The page of a training run."""

import json
import math
from pathlib import Path

from lathe.report.training import training_page


def test_a_model_that_was_quantized_without_training_has_a_page(tmp_path: Path) -> None:
    metrics = {"step": 0, "loss": math.nan, "eval_loss": 2.3835}
    (tmp_path / "lathe.json").write_text(json.dumps({"stage": "quantize", "metrics": metrics}))
    training_page(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "2.3835" in page and "nan" not in page.lower()
