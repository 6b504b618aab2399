"""Pure 16-bit training in one process against the same in FSDP, which divides it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lathe.train import parallel
from lathe.train.optimizer import HalfWeights
from lathe.train.pretrain import pretrain
from lathe.train.trainer import Trainer
from lathe_base.config.recipe import load_recipe
from tests.support.operations import VIEWS
from tests.support.small_run import SMALL, records, run_layouts
from tests.support.tables import quick_only

PURE = (*SMALL, "Engine.max_steps=6", "Engine.mix_precision.level=O2")
CASES = {
    "bfloat16": ("Engine.mix_precision.dtype=bfloat16",),
    "float16": ("Engine.mix_precision.dtype=float16",),
    "llama": (
        "Engine.mix_precision.dtype=bfloat16",
        "Model.architecture=llama",
        "Model.use_recompute=True",
    ),
}


@pytest.mark.parametrize("case", quick_only(CASES, ["bfloat16"]))
def test_one_process_trains_as_fsdp_does(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    recipe = load_recipe("tiny", (*PURE, *CASES[case]))
    pretrain(recipe, small_data, tmp_path / "copies")
    divide = parallel.divide

    def sharded(model: object, recipe: object, workers: object) -> list[parallel.Stage]:
        stages = divide(model, recipe, workers)  # type: ignore[arg-type]
        for stage in stages:
            parallel._fully_shard(stage, recipe, workers)  # type: ignore[arg-type]
        return stages

    monkeypatch.setattr(parallel, "divide", sharded)
    pretrain(recipe, small_data, tmp_path / "fsdp")
    for key in ("loss", "eval_loss", "grad_norm"):
        assert records(tmp_path / "copies", key) == records(tmp_path / "fsdp", key)


PIPELINES = {
    "pp2": (2, ("Distributed.pp_degree=2",)),
    "interleaved, dp2": (
        4,
        ("Distributed.pp_degree=2", "Distributed.dp_degree=2", "Model.virtual_pp_degree=2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_trains_as_one_process_does(case: str, small_data: Path, tmp_path: Path) -> None:
    """The gradients of micro-batches are added up in float32."""
    count, layout = PIPELINES[case]
    few = ("Model.num_layers=4", "Global.local_batch_size=", "Global.global_batch_size=16")
    options = (*PURE, *CASES["bfloat16"], *few)
    pretrain(load_recipe("tiny", options), small_data, tmp_path / "alone")
    run_layouts(small_data, {tmp_path / "pipeline": ("tiny", *options, *layout)}, count)
    for key in ("loss", "eval_loss", "grad_norm"):
        both = [records(tmp_path / name, key) for name in ("alone", "pipeline")]
        np.testing.assert_allclose(*both, rtol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bfloat16", "float16"])
def test_a_killed_run_is_bitwise_reproducible(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """In float16 the first steps overflow: AdamW counts updates, not steps."""
    overflows = "Engine.mix_precision.scale_loss=1048576"
    recipe = load_recipe("tiny", (*PURE, *CASES[case], overflows))
    pretrain(recipe, small_data, tmp_path / "whole")
    if case == "float16":
        assert 0 < records(tmp_path / "whole", "skipped_steps")[3] < 4
    update = Trainer.update

    def killed(trainer: Trainer, rate: float) -> None:
        if trainer.at.step == 5:
            trainer.poll_pending_save(wait=True)  # else it may begin again from the first step
            raise KeyboardInterrupt
        update(trainer, rate)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "update", killed)
        pretrain(recipe, small_data, tmp_path / "resumed")
    pretrain(recipe, small_data, tmp_path / "resumed")
    weights = "model.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (
        tmp_path / "resumed" / weights
    ).read_bytes()


def test_the_passes_see_copies_and_the_optimizer_weights() -> None:
    table = nn.Embedding(7, 4)
    head = nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Linear(4, 4), head)
    half = HalfWeights(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected: list[torch.Tensor] = [torch.zeros_like(p) for p in model.parameters()]
    for seed in range(2):  # two micro-batches
        torch.manual_seed(seed)
        out = model(torch.randint(7, (3,)))
        assert out.dtype == torch.bfloat16
        out.square().sum().backward()
        grads = [copy.grad for copy in half.copies.values()]
        expected = [e + g.float() for e, g in zip(expected, grads, strict=True) if g is not None]
        half.collect_gradients()
        assert not any(copy.grad is not None for copy in half.copies.values())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
        parameter.data += 1
    half.update()
    for parameter, copy in zip(model.parameters(), half.copies.values(), strict=True):
        assert torch.equal(copy, parameter.bfloat16())


class _Operations(TorchDispatchMode):
    """Counts what would start a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not re.fullmatch(VIEWS, func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_forward_pass_casts_nothing(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FSDP, each of the 24 layers' 12 weights was copied and cast: 982 operations."""
    counts, forward = dict[str, int](), parallel.Stage.forward
    layers = ("Model.num_layers=24", "Engine.max_steps=1", *CASES["bfloat16"])

    def counted(stage: parallel.Stage, x: torch.Tensor) -> torch.Tensor:
        with _Operations() as operations:
            out = forward(stage, x)
        counts["O1" if stage.autocast else "O2"] = operations.count
        return out

    monkeypatch.setattr(parallel.Stage, "forward", counted)
    for level in ("O1", "O2"):
        recipe = load_recipe("tiny", (*SMALL, *layers, f"Engine.mix_precision.level={level}"))
        pretrain(recipe, small_data, tmp_path / level)
    assert counts["O2"] < 300 < counts["O1"]
