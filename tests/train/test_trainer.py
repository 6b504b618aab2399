"""The training loop against a hand-written one, and with workers and kills."""

import functools
import math
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lathe.compress.prune import prune
from lathe.data.blend import blend
from lathe.data.tokenizer import load_tokenizer
from lathe.data.tokens import TokenDataset
from lathe.model.checkpoint import load_checkpoint
from lathe.train.batches import Batch, TrainBatches, open_data
from lathe.train.loop import Progress
from lathe.train.optimizer import make_optimizer
from lathe.train.pretrain import new_model, pretrain
from lathe.train.result import read_result
from lathe.train.schedule import learning_rate
from lathe.train.shape import model_config
from lathe_base.artifacts.kinds import checked
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_export import UNIFORM
from tests.support.small_run import SMALL, records, run


def test_loss_falls_and_the_checkpoint_loads(small_dense: Path) -> None:
    trace, checkpoint = records(small_dense, "loss"), load_checkpoint(small_dense)
    assert len(trace) == 20 and trace[-1] < trace[0] - 0.5
    assert len(records(small_dense, "eval_loss")) == 3
    assert checkpoint.meta["metrics"]["loss"] == trace[-1]
    assert not (small_dense / "state").exists()


def test_throughput_and_best_validation_loss_are_in_the_metadata(small_dense: Path) -> None:
    metrics = load_checkpoint(small_dense).meta["metrics"]
    assert metrics["samples_per_second"] == pytest.approx(metrics["tokens_per_second"] / 32)
    assert metrics["best_eval_loss"] == min(records(small_dense, "eval_loss"))
    result = read_result(small_dense)
    assert result.best_perplexity == math.exp(metrics["best_eval_loss"])
    assert result.mfu == metrics.get("mfu")


def test_the_best_validation_loss_survives_a_rise_and_a_saved_state() -> None:
    progress = Progress()
    for loss in (4.0, 3.0, 3.5):
        progress.evaluated(loss)
    assert (progress.best_eval_loss, progress.eval_loss) == (3.0, 3.5)
    resumed = checked(asdict(progress), Progress, "trainer.json", "")
    resumed.evaluated(3.2)
    assert resumed.best_eval_loss == 3.0
    older = {key: value for key, value in asdict(progress).items() if key != "best_eval_loss"}
    resumed = checked(older, Progress, "trainer.json", "")
    resumed.evaluated(3.7)
    assert resumed.best_eval_loss == 3.5


def test_without_validation_data_there_is_no_best_loss() -> None:
    progress = Progress()
    progress.evaluated(math.nan)
    assert math.isnan(progress.best_eval_loss)


def test_the_tokens_of_a_blends_parts_are_in_the_metrics(small_data: Path, tmp_path: Path) -> None:
    shutil.copytree(small_data, tmp_path / "copy")
    blend([(small_data, 3.0), (tmp_path / "copy", 1.0)], tmp_path / "blend")
    run("pretrain", tmp_path / "blend", tmp_path / "run", overrides=("Engine.max_steps=3",))
    metrics = load_checkpoint(tmp_path / "run").meta["metrics"]
    seen = {name: count for name, count in metrics.items() if name.startswith("seen_tokens.")}
    assert seen == {"seen_tokens.1-tokens": 18 * 32, "seen_tokens.2-copy": 6 * 32}
    assert records(tmp_path / "run", "seen_tokens")[-1] == {"1-tokens": 576, "2-copy": 192}


def test_steps_equal_a_hand_written_loop(small_data: Path, small_dense: Path) -> None:
    """Plain torch without accumulation or trainer, with batches by Megatron's rule."""
    recipe = load_recipe("tiny", SMALL)
    model = new_model(model_config(recipe, 257), recipe.Model)
    model.initialize(0.02, recipe.Global.seed)
    tokens = TokenDataset.open(small_data)
    batches = TrainBatches(recipe, tokens, Batch(8, 8, 8, 1), 0)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "ln_" not in n]
    plain = [p for n, p in model.named_parameters() if "bias" in n or "ln_" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.999),
    )
    trace = []
    for step in range(5):
        x = torch.from_numpy(batches(step, 0))
        logits = model(x[:, :-1])
        loss = -logits.log_softmax(-1).gather(2, x[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (step + 1) / 2  # 2 warm-up steps of 20
            if step >= 2:
                cosine = 0.5 * (1 + math.cos(math.pi * (step + 1 - 2) / 18))
                group["lr"] = 2e-4 + (2e-3 - 2e-4) * cosine
        optimizer.step()
        trace.append(loss.item())
    np.testing.assert_allclose(records(small_dense, "loss")[:5], trace, atol=1e-4)


def test_two_workers_trace_the_same_losses_as_one(
    small_data: Path, tmp_path: Path, small_dense: Path
) -> None:
    two = tmp_path / "two"
    run("pretrain", small_data, two, overrides=("Global.local_batch_size=4",), workers=2)
    for key in ("loss", "eval_loss"):
        np.testing.assert_allclose(records(two, key), records(small_dense, key), atol=1e-4)


def test_the_micro_batch_changes_no_validation_loss(
    small_data: Path, tmp_path: Path, small_dense: Path
) -> None:
    small = load_recipe("tiny", (*SMALL, "Global.micro_batch_size=1", "Engine.max_steps=1"))
    pretrain(small, small_data, tmp_path / "one")
    before = records(small_dense, "eval_loss")[0]
    np.testing.assert_allclose(records(tmp_path / "one", "eval_loss")[0], before, rtol=1e-6)


def test_a_finished_run_is_not_trained_again(small_data: Path, small_dense: Path) -> None:
    before = (small_dense / "lathe.json").stat().st_mtime_ns
    for elsewhere in ((), ("Production.rollout_seconds=60", "Card.contact=us")):
        result = pretrain(load_recipe("tiny", (*SMALL, *elsewhere)), small_data, small_dense)
    assert result.loss == records(small_dense, "loss")[-1]
    assert (small_dense / "lathe.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(("bfloat16", "auto"), marks=pytest.mark.slow, id="bf16"),
        pytest.param(("float16", "auto"), id="fp16"),
    ],
)
def test_half_precision_follows_float32(
    small_data: Path, tmp_path: Path, small_dense: Path, precision: tuple[str, str]
) -> None:
    half = ("Engine.max_steps=10", "Optimizer.lr.decay_steps=20")
    recipe = load_recipe("tiny", (*SMALL, *half, f"Engine.mix_precision.dtype={precision[0]}"))
    pretrain(recipe, small_data, tmp_path / "half")
    np.testing.assert_allclose(
        records(tmp_path / "half", "loss"), records(small_dense, "loss")[:10], atol=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.filterwarnings("error:Dynamo detected")  # such as an unused cache
def test_recompute_and_compile_leave_the_losses(
    small_data: Path, tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Path(tempfile.gettempdir()) / "lathe-tests-kernels"  # else half a minute each time
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    settings = *SMALL, f"Model.architecture={architecture}"
    pretrain(load_recipe("tiny", settings), small_data, tmp_path / "eager")
    compiled = *settings, "Model.use_recompute=True", "Engine.compile=True"
    pretrain(load_recipe("tiny", compiled), small_data, tmp_path / "compiled")
    np.testing.assert_allclose(
        records(tmp_path / "compiled", "loss"), records(tmp_path / "eager", "loss"), atol=1e-4
    )


def test_compiling_without_a_compiler_is_an_error(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lathe.train.parallel.shutil.which", lambda name: None)
    recipe = load_recipe("tiny", (*SMALL, "Engine.compile=True"))
    with raises(Code.NOT_INSTALLED, "C++ compiler", "Engine.compile=False"):
        pretrain(recipe, small_data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_blocks_of_many_widths_are_all_compiled(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (*SMALL, "Model.num_layers=10", "Engine.max_steps=1")
    pretrain(load_recipe("tiny", layers), small_data, tmp_path / "dense")
    compile_eagerly = functools.partialmethod(nn.Module.compile, backend="eager")
    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)  # inductor takes a minute
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    widths = f"Compress.Prune.channels={[64 + 4 * i for i in range(10)]}"
    settings = *layers, "Engine.compile=True", widths, f"Compress.Prune.heads={[4] * 10}"
    prune(load_recipe("tiny", settings), tmp_path / "dense", small_data, tmp_path / "pruned")
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 10


class TestRefusals:
    def test_foreign_output(self, small_data: Path, tmp_path: Path, small_dense: Path) -> None:
        recipe = load_recipe("tiny", (*SMALL, "Optimizer.lr.max_lr=1e-3"))
        with raises(Code.STATE_MISMATCH, small_dense):
            pretrain(recipe, small_data, small_dense)
        (tmp_path / "diary.txt").write_text("mine")
        with raises(Code.EXISTS, tmp_path, "diary.txt"):
            pretrain(recipe, small_data, tmp_path)
        assert (tmp_path / "diary.txt").read_text() == "mine"

    def test_vocabulary_larger_than_the_model(self, small_data: Path, tmp_path: Path) -> None:
        recipe = load_recipe("tiny", (*SMALL, "Model.vocab_size=128"))
        with raises(Code.WRONG_TOKENIZER, "257 ids", "128"):
            pretrain(recipe, small_data, tmp_path / "out")

    def test_sequence_longer_than_the_model(self, small_data: Path) -> None:
        recipe = load_recipe("tiny", (*SMALL, "Data.Train.dataset.max_seq_len=33"))
        config = replace(UNIFORM, n_positions=32)
        with raises(Code.TOO_LONG, "33 exceeds the model's 32"):
            open_data(small_data, recipe, config, load_tokenizer(small_data))

    def test_loss_that_is_not_finite(self, small_data: Path, tmp_path: Path) -> None:
        recipe = load_recipe(
            "tiny", (*SMALL, "Optimizer.lr.max_lr=1e30", "Optimizer.lr.warmup_rate=0")
        )
        with raises(Code.NOT_FINITE, "rank 0, documents") as caught:
            pretrain(recipe, small_data, tmp_path / "out")
        step = len(records(tmp_path / "out", "loss"))  # the step after those in the trace
        what = str(caught.value).partition("\n")[0]
        assert what.startswith(f"step {step + 1}: ")
        batches = TrainBatches(recipe, TokenDataset.open(small_data), Batch(8, 8, 4, 2), 0)
        documents = [d for i in range(2) for d in batches.documents(step, i)]
        batches.close()
        assert what.endswith(", ".join(documents))


def test_learning_rate_of_the_published_schedule() -> None:
    lr = load_recipe("gpt-345m").Optimizer.lr
    assert learning_rate(1, lr) == pytest.approx(5e-5 / 3600)
    assert learning_rate(3600, lr) == pytest.approx(5e-5)
    assert learning_rate((3600 + 360000) // 2, lr) == pytest.approx(3e-5)
    assert learning_rate(360000, lr) == learning_rate(400000, lr) == 1e-5


def test_weight_decay_spares_biases_and_norms(small_data: Path) -> None:
    recipe = load_recipe("tiny", SMALL)
    model = new_model(model_config(recipe, 257), recipe.Model)
    names = {id(p): n for n, p in model.named_parameters()}
    family = model.config.architecture
    optimizer = make_optimizer(model.named_parameters(), recipe.Optimizer, family)
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.01 and plain["weight_decay"] == 0.0
    assert all(names[id(p)].endswith("weight") for p in decayed["params"])
    assert sum(n.endswith("bias") or "ln_" in n for n in names.values()) == len(plain["params"])


def test_a_training_that_ends_within_the_warm_up_warns(
    small_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = ("Engine.max_steps=1", "Optimizer.lr.decay_steps=20", "Optimizer.lr.warmup_rate=0.5")
    with caplog.at_level("WARNING", "lathe"):
        pretrain(load_recipe("tiny", (*SMALL, *short)), small_data, tmp_path / "short")
    assert "set Optimizer.lr.decay_steps=1" in caplog.text
