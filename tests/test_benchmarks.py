"""The benchmarks run; their measurements are not checked."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from lathe.model.architecture import Rope
from lathe.model.config import GPTConfig
from lathe.model.families import QWEN2
from tests.support import warm
from tests.support.small_export import UNIFORM, make_model, random_tokens, save

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GROUPED = replace(UNIFORM, architecture=QWEN2, kv_heads=(1, 1), rope=Rope())


@pytest.fixture
def league(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules of `benchmarks/league.py` importable."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.slow
def test_all_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [*warm.python(), "-c", code, *names], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_planted_fault_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from faults import FAULTS, ROOT

    for name, fault in FAULTS.items():
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, name
        assert all((ROOT / "tests" / path).is_file() for path in fault.tests.split()), name
    assert len(FAULTS) >= 30


def gpu(output: Path, *more: str) -> tuple[dict[str, Any], str]:
    """The results and the output of a rehearsal of the plan for a GPU."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry", "--output", str(output), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())["parts"], done.stdout


@pytest.mark.slow
def test_the_plan_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    parts = ("345M, profiled", "gpt-345m", "exact resume", "losses", "QAT", "7B by block")
    found, _ = gpu(tmp_path / "gpu.json", *(word for part in parts for word in ("--only", part)))
    assert not any("failed" in part for part in found.values())
    assert found["345M, profiled"]["tokens_per_second"] > 0
    assert found["gpt-345m"]["as it is: tokens_per_second"] > 0
    assert found["exact resume"]["eager: same weights"]
    assert found["losses"]["Lathe: error"] < 1e-5
    assert found["QAT"]["with a teacher: tokens_per_second"] > 0
    assert found["7B by block"]["GPTQ, GB estimated"] > 0


@pytest.mark.slow
def test_another_call_continues_the_plan_for_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    found, _ = gpu(output, "--only", "ceilings")
    assert found["ceilings"]["345M: matmul TFLOP/s"] > 0
    parts = ["--only", "ceilings", "--only", "documents"]
    found, said = gpu(output, *parts)
    assert "ceilings:" not in said and "documents: window, difference" in said
    assert set(found) == {"ceilings", "documents"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [UNIFORM, GROUPED], ids=["GPT-2", "Qwen2"])
def test_engines_agree_with_torch(
    tmp_path: Path, byte_tokenizer: Tokenizer, league: None, shape: GPTConfig
) -> None:
    from peers.entries import ENTRIES, FLOAT, TRUTH
    from peers.process import Worker, convert

    model = make_model(shape)
    checkpoint = save(model, byte_tokenizer, tmp_path / "model")
    tokens = random_tokens(2, 40)
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    with torch.no_grad():
        rows = [(model(row[None])[0, :-1], row[1:]) for row in tokens]
    expected = [F.cross_entropy(*row, reduction="none").tolist() for row in rows]
    for entry in (entry for entry in ENTRIES if entry.title in (FLOAT, TRUTH)):
        folder = tmp_path / entry.key
        convert(entry, tmp_path, checkpoint, tmp_path / "tokens.npy", folder)
        with Worker(entry, tmp_path, folder, shape.vocab_size, threads=2) as worker:
            found = worker.ask("score", str(tmp_path / "tokens.npy"))
            assert worker.ask("prefill", 16)[0] > 0
        assert np.allclose(found, expected, atol=1e-5), entry.title


def test_engines_are_given_matrices_by_their_roles(
    tmp_path: Path, byte_tokenizer: Tokenizer, league: None
) -> None:
    from peers.weights import Matrix, Weights

    x = random_tokens(5, 48).float() / 384
    for shape in (UNIFORM, GROUPED):
        model = make_model(shape)
        w = Weights.read(save(model, byte_tokenizer, tmp_path / shape.architecture.model_type))
        block = w.block(1)
        assert (w.n_head, w.n_kv_head, w.n_inner) == (3, shape.n_kv_head[0], 96)
        assert (block.gate is not None) == (w.positions is None) == (w.theta is not None)
        name = f"{shape.unit_linears('channels')[1].name}.weight"
        down = dict(model.blocks[1].named_parameters())[name]
        assert np.array_equal(block.down.weight, down.detach().numpy())
        qkv = Matrix.joined([block.query, block.key, block.value])
        assert qkv.bias is not None
        heads = model.blocks[1].attention.qkv(x).detach().numpy()
        found = np.sort(x.numpy() @ qkv.weight.T + qkv.bias, axis=1)
        assert np.allclose(found, np.sort(heads, axis=1), atol=1e-5)


def test_an_engine_without_the_model_gets_no_row(
    tmp_path: Path, league: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from league import League
    from peers.entries import ENTRIES, TRUTH
    from peers.subjects import Subject

    random = np.random.default_rng(0)
    truth = random.normal(size=(2, 9))
    noise = {TRUTH: 0.0, "CTranslate2 int8": 0.1, "llama.cpp Q8_0": 0.9, "llama.cpp Q4_0": 0.9}
    monkeypatch.setattr(
        League,
        "losses",
        lambda _, entry, __: truth + noise[entry.title] * random.normal(size=truth.shape),
    )
    made = League(tmp_path, [e for e in ENTRIES if e.title in noise], 1, "league")
    made.prove(Subject.below(tmp_path, "shape"))
    assert 0 < made.found["CTranslate2 int8"]["difference"] < 0.3
    assert "does not have the model: " in made.found["llama.cpp Q8_0"]["failed"]
    assert made.found["llama.cpp Q4_0"]["failed"] == "llama.cpp Q8_0 does not have the model"


@pytest.mark.slow
def test_an_engine_that_does_not_install_says_why(tmp_path: Path, league: None) -> None:
    from peers.entries import Entry
    from peers.process import Failed, make_environment

    with pytest.raises(Failed, match=r"missing\.whl"):
        make_environment(Entry("none", "none", "none", 8, ("missing.whl",)), tmp_path)


def test_speeds_are_compared_within_their_round(league: None) -> None:
    from peers.page import table

    found = {
        "Lathe float32": {"losses": [1.0, 2.0, 3.0]},
        "Lathe INT8": {"decode 8": [0.1, 0.2, 0.4]},
        "peer": {"decode 8": [0.2, 0.4, 0.8], "losses": [1.01, 2.01, 3.01], "bytes": 7e6},
        "other": {"failed": "no compiler"},
    }
    lines = {line.split(" | ")[0].strip("| "): line for line in table(found).splitlines()}
    assert "20.0 tok/s, 0.50x (0.50 to 0.50)" in lines["peer"] and "| 7 |" in lines["peer"]
    assert "+1.01% ± 0.00%" in lines["peer"] and "no compiler" in lines["other"]


def test_a_row_counts_if_it_is_as_good_as_the_best_of_its_width(league: None) -> None:
    from peers.page import table

    def row(bits: int, loss: float, seconds: float) -> dict[str, Any]:
        cloze = [[-1.0, True], [-3.0, False]]
        return {"bits": bits, "losses": [loss, loss], "cloze": cloze, "decode 1": [seconds]}

    found = {
        "Lathe float32": row(32, 3.0, 0.9),
        "Lathe INT8": row(8, 3.005, 0.4),
        "Lathe INT8, static scales": row(8, 3.5, 0.1),
        "Lathe INT4": row(4, 3.105, 0.2),
        "Lathe INT4, coarse": row(4, 3.2, 0.1),
        "llama.cpp Q4_0": row(4, 3.1, 0.3),
    }
    lines = {line.split(" | ")[0].strip("| "): line for line in table(found).splitlines()}
    assert "~~10.0 tok/s" in lines["Lathe INT8, static scales"]  # fastest, but not a valid result
    assert "**2.5 tok/s**" in lines["Lathe INT8"] and "**5.0 tok/s" in lines["Lathe INT4"]
    assert "~~10.0 tok/s" in lines["Lathe INT4, coarse"]
    assert "| 3.3 tok/s" in lines["llama.cpp Q4_0"]  # valid, but slower
    assert "50.0% ± 35.4% | 7.4 |" in lines["Lathe INT4"]  # exp(2)


def test_last_words_are_those_that_greedy_decoding_gives(
    tmp_path: Path, byte_tokenizer: Tokenizer, league: None
) -> None:
    from peers.transformers import Transformers
    from peers.worker import Measured

    model = make_model(GROUPED)
    folder = save(model, byte_tokenizer, tmp_path / "model")
    context = random_tokens(1, 12)
    said = []
    with torch.no_grad():
        for _ in range(3):
            row = torch.cat([context[0], torch.tensor(said, dtype=torch.long)])
            said.append(int(model(row[None])[0, -1].argmax()))
        wrong = [*said[:2], (said[2] + 1) % GROUPED.vocab_size]
        logits = model(torch.tensor([[*context[0].tolist(), *said[:2]]]))[0, -3:]
    expected = logits.log_softmax(-1)[range(3), said].sum().item()
    words = tmp_path / "cloze.json"
    words.write_text(json.dumps([[context[0].tolist(), word] for word in (said, wrong)]))
    measured = Measured(Transformers(folder, threads=1), GROUPED.vocab_size)
    (right, is_right), (_, is_wrong) = measured.cloze(str(words))
    assert right == pytest.approx(expected, abs=1e-4)
    assert is_right and not is_wrong


def test_the_clock_of_several_threads_is_that_of_the_busiest(league: None) -> None:
    from peers.worker import elapsed, of_threads

    assert elapsed({1: 1.0, 2: 5.0}, {1: 4.0, 2: 6.0, 3: 0.5}) == 3.0
    before, started = of_threads(), time.thread_time()
    while time.thread_time() < started + 0.05:
        pass
    assert elapsed(before, of_threads()) >= 0.05


def test_a_runtime_is_compared_with_onnxruntime_within_its_round(league: None) -> None:
    from runtimes import CASES, table

    def seconds(*values: float) -> dict[str, list[float]]:
        return {case: list(values) for case in CASES}

    other = {"difference": 0.012, **seconds(0.2, 0.4, 0.8)}
    lines = table({"INT8": {"onnxruntime": seconds(0.1, 0.2, 0.4), "other": other}}).splitlines()
    assert "| 200 ms | 200 ms | 5.0 tok/s | 40.0 tok/s |  |" in lines[2]
    assert "20.0 tok/s, 0.50x (0.50 to 0.50) | 0.012 |" in lines[3]
