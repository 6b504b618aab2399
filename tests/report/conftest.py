import json
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from lathe.model.checkpoint import save_checkpoint
from lathe.model.gpt import GPT
from lathe.report.summary import Candidate
from lathe_base.config.settings import Recipe
from tests.support.report_folders import HOSTILE, write_json


def train_lines(steps: int) -> str:
    lines: list[dict[str, float]] = [{"step": 0, "eval_loss": 8.0, "eval_perplexity": 2981.0}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": 4 + 4 / step, "lr": 1e-3, "tokens_per_second": 9e3})
    lines.append({"step": steps, "eval_loss": 4.125, "eval_perplexity": 61.9})
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing figures, which takes most of the time; test_page.py has them."""
    monkeypatch.setattr(Figure, "savefig", lambda self, out, **_: out.write("<svg/>"))


@pytest.fixture
def make_candidate(
    tmp_path: Path, small_gpt: GPT, byte_tokenizer: Tokenizer
) -> Callable[..., Candidate]:
    """Factory of stage outputs for a candidate: a real checkpoint, with the given metrics."""

    def make(
        name: str, perplexity: float = 40.0, accuracy: float = 0.3, mb: float = 1.0
    ) -> Candidate:
        model, evaluation = tmp_path / name / "model", tmp_path / name / "eval"
        exported = tmp_path / name / "onnx"
        save_checkpoint(model, small_gpt, byte_tokenizer, "pretrain", Recipe())
        (model / "train.jsonl").write_text(train_lines(40))
        digests = {"cloze": "c" * 64, "text": "t" * 64, "tokenizer": "k" * 64, "model": "m" * 64}
        metrics = {
            "model": {"n_params": 9, "bytes": 36},
            "cloze": {"examples": 10, "accuracy": accuracy, "accuracy_stderr": 0.01},
            "text": {"blocks": 10, "perplexity": perplexity, "perplexity_stderr": 0.5},
            "protocol": {},
            "sources": {},
            "digests": digests,
            "seconds": 1,
        }
        write_json(evaluation / "metrics.json", metrics)
        samples = [{"prompt": "In the beginning", "text": f" {HOSTILE} said {name}"}]
        write_json(evaluation / "samples.json", samples)
        fidelity = {
            "kl": 0.00412,
            "greedy_agreement": 0.98,
            "flips": [{"prompt": 3}, {"prompt": 9}],
        }
        proof = {"max_error": 3.2e-05, "ties": [], "fidelity": fidelity}
        write_json(exported / "export.json", {"flavour": "fp32", "opset": 21, "proof": proof})
        (exported / "model.onnx").write_bytes(bytes(int(mb * 1e6)))
        return Candidate(name, model, evaluation, exported)

    return make
