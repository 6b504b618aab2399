import base64
import copy
import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.compress.plan import expectations
from lathe.evaluate.comparison import Check
from lathe.evaluate.gate import GateResult, InformationalMetric
from lathe.model.checkpoint import save_checkpoint
from lathe.model.gpt import GPT
from lathe.report.report import report
from lathe.report.summary import Candidate
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from lathe_base.pages.style import DARK, LIGHT
from lathe_launch.usage import Usage
from tests.support.errors import raises
from tests.support.report_folders import HOSTILE, sensitivity_analysis, write_json

Make = Callable[..., Candidate]


class Page(HTMLParser):
    """Parses a page: tags, attributes that load resources, and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def sensitivity(tmp_path: Path) -> Path:
    write_json(tmp_path / "sensitivity/sensitivity.json", sensitivity_analysis(rule=HOSTILE))
    return tmp_path / "sensitivity"


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    figures = {
        "prompts": 8,
        "identical": 7,
        "near_ties": 1,
        "start_seconds": 2.5,
        "first_token_ms": 6.0,
        "tokens_per_second": 400.0,
        "tokens_per_second_together": 900.0,
        "samples": [{"prompt": "A list of", "text": f" {HOSTILE}"}],
        "serving": {},
    }
    write_json(tmp_path / "deployed/deploy.json", figures)
    return tmp_path / "deployed"


def test_what_an_untrained_format_costs_is_beside_what_was_expected(
    make_candidate: Make, small_gpt: GPT, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    candidates = [make_candidate("dense"), make_candidate("INT8", 41.0)]
    known = expectations()[0]
    config = small_gpt.config
    quantized = copy.copy(small_gpt)
    quantized.config = config.with_quantization(known.plan(config))
    shutil.rmtree(candidates[1].model)
    save_checkpoint(candidates[1].model, quantized, byte_tokenizer, "quantize", Recipe())
    report(tmp_path / "report.html", candidates)
    text = " ".join(Page(tmp_path / "report.html").text.split())
    assert "INT8: perplexity +2.5 %." in text and f"Expected of {known.name}" in text
    assert f"{100 * known.perplexity_increase:+.1f} %" in text and "dense: perplexity" not in text


def test_a_whole_run_is_one_self_contained_page(
    make_candidate: Make, sensitivity: Path, deployed: Path, tmp_path: Path
) -> None:
    candidates = [make_candidate("dense"), make_candidate("INT8", 41.0)]
    latency = {name: {"prefill_ms": 4.0, "decode_ms": 1.0} for name in ("dense", "INT8")}
    flips = InformationalMetric(
        f"flips {HOSTILE}", 0.01, 0.005, 0.02, 99, "examples", "", lost=3, gained=2
    )
    verdict = GateResult(False, ("failed: perplexity", HOSTILE), (), (flips,), confidence=0.95)
    output = tmp_path / "out/report.html"
    used = {"prepare": Usage(0.25, cpu_hours=0.5), "pretrain": Usage(2.0, 90.0, 16.0, 3.0, 24.5)}
    rows = report(
        output, candidates, sensitivity, deployed, latency, verdict, title=HOSTILE, usage=used
    )
    assert [row.name for row in rows] == ["dense", "INT8"]

    page = Page(output)
    assert "script" not in page.tags
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert page.tags.count("img") == page.tags.count("source") == 5 + 2 + 3
    for source in page.sources:
        svg = base64.b64decode(source.split(",")[1])
        assert ET.fromstring(svg).tag.endswith("svg")
    for expected in (
        "INT8:\n    gate failed",
        "0.50% to 2.00%",
        "99 examples, 3 lost, 2 gained",
        "41.00",
        "1.02x",  # perplexity relative to dense
        "h.0.mlp.c_fc",
        "In the beginning",
        f"{HOSTILE} said INT8",
        "7 of 8 greedy texts",
        "max error",
        "3.2e-05",
        "greedy texts that diverge from float's",
        "0.00412",
        "2 h 15 min",  # of both steps
        "1 min 30 s",
        "16.00",
        "24.50 GiB",
        "c" * 64,
        "max_lr",  # from the recipe
    ):
        assert expected in page.text
    assert HOSTILE not in output.read_text()
    assert "{'" not in page.text  # no Python reprs


def test_a_model_passed_without_proof_is_marked_as_such(
    make_candidate: Make, tmp_path: Path
) -> None:
    candidates = [make_candidate("dense"), make_candidate("INT8", 41.0)]
    check = Check("perplexity", "inconclusive", 40, 41, 0.02, -0.1, 0.2, 0.1, 9, "t", "blocks")
    report(tmp_path / "report.html", candidates, gate=GateResult(True, ("a reason",), (check,)))
    page = Page(tmp_path / "report.html")
    assert "INT8:\n    gate NOT PROVEN, passed by the recipe" in page.text


def test_a_pretrained_model_alone_has_a_page(make_candidate: Make, tmp_path: Path) -> None:
    report(tmp_path / "report.html", [Candidate("dense", make_candidate("dense").model)])
    page = Page(tmp_path / "report.html")
    assert page.tags.count("img") == 1
    assert "dense: pretraining" in page.text
    assert "Samples" not in page.text
    assert "Sensitivity to quantization" not in page.text


def test_a_truncated_last_line_of_the_trace_is_skipped(
    make_candidate: Make, tmp_path: Path
) -> None:
    model = make_candidate("dense").model
    with (model / "train.jsonl").open("a") as f:
        f.write('{"step": 41, "lo')
    report(tmp_path / "report.html", [Candidate("dense", model)])
    assert Page(tmp_path / "report.html").tags.count("img") == 1


def test_an_absent_folder_is_named_and_no_page_written(
    make_candidate: Make, tmp_path: Path
) -> None:
    with raises(Code.WRONG_KIND, tmp_path, "sensitivity.json"):
        report(tmp_path / "report.html", [make_candidate("dense")], sensitivity=tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_eight_models_with_a_task_have_a_row_and_a_colour_each(
    make_candidate: Make, tmp_path: Path
) -> None:
    candidates = [make_candidate(f"model-{i}", 40.0 + i, 0.3 - i / 100) for i in range(8)]
    for i, candidate in enumerate(candidates):
        assert candidate.evaluation is not None
        path = candidate.evaluation / "metrics.json"
        figures = {"examples": 9, "acc": 0.4, "acc_norm": 0.5 - i / 100, "acc_norm_stderr": 0.02}
        swag = {"task": "multiple_choice", "source": "swag.jsonl", "sha256": "a" * 64}
        tasks = {"swag": swag | {"figures": figures}}
        write_json(path, json.loads(path.read_text()) | {"tasks": tasks})
    rows = report(tmp_path / "report.html", candidates)
    page = Page(tmp_path / "report.html")
    assert [row.scores["swag.acc_norm"].value for row in rows[:2]] == [0.5, 0.49]
    assert "swag acc_norm, higher is better" in page.text
    assert page.tags.count("img") == 5 + 8
    drawn = base64.b64decode(page.sources[0].split(",")[1]).decode()
    assert len(set(LIGHT.series)) == len(set(DARK.series)) == 8
    pairs = zip(LIGHT.series, DARK.series, strict=True)
    assert all(any(color.lower() in drawn for color in pair) for pair in pairs)
