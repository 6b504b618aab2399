"""The page of a training run."""

import json
import math
from pathlib import Path

from lathe.report.training import training_page
from lathe.train.result import SampleAnswer, write_answers
from lathe_base.errors import Code
from tests.support.errors import raises


def test_a_model_that_was_quantized_without_training_has_a_page(tmp_path: Path) -> None:
    metrics = {"step": 0, "loss": math.nan, "eval_loss": 2.3835}
    (tmp_path / "lathe.json").write_text(json.dumps({"stage": "quantize", "metrics": metrics}))
    training_page(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "2.3835" in page and "nan" not in page.lower()


def test_answers_before_and_after_finetuning_are_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "lathe.json").write_text(json.dumps({"stage": "finetune", "metrics": {"step": 2}}))
    training_page(tmp_path, tmp_path / "page.html")
    assert "before and after" not in (tmp_path / "page.html").read_text()
    answer = SampleAnswer("<b>Two lamps?</b>", "{}", " \n", "{?}")
    write_answers(tmp_path, [answer])
    training_page(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Answers before and after" in page and "&lt;b&gt;Two lamps?" in page
    assert "(only white space)" in page and "{?}" in page
    (tmp_path / "samples.json").write_text('[{"prompt": 1}]')
    with raises(Code.MALFORMED, tmp_path / "samples.json", "0.prompt"):
        training_page(tmp_path, tmp_path / "page.html")
