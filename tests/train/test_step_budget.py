"""A step starts no more operations than it needs, and reads nothing on the host."""

import re
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from torch._ops import OpOverload

from lathe.plan import rank
from lathe.plan.rank import make_job
from lathe.plan.record import Recorder
from lathe_base.config.recipe import load_recipe
from tests.support.operations import VIEWS
from tests.support.small_run import SMALL

LAYERS = 24
BASE = (
    *SMALL,
    "Global.device=cpu",
    f"Model.num_layers={LAYERS}",
    "Model.num_attention_heads=8",
    "Model.hidden_size=64",
    "Model.vocab_size=512",
    "Global.local_batch_size=2",
    "Global.micro_batch_size=2",
    "Engine.max_steps=2",
    "Engine.eval_iters=1",
    "Engine.mix_precision.dtype=bfloat16",
    "Data.Train.dataset.split=[1,1,0]",
    "Data.Eval.dataset.split=[1,1,0]",
)
O2 = "Engine.mix_precision.level=O2"
CASES: dict[str, tuple[int, tuple[str, ...], int, int]] = {
    # processes, overrides, budgets of operations: of the passes, of everything after them
    "one process": (1, (O2,), 800, 20),
    "float16": (1, (O2, "Engine.mix_precision.dtype=float16"), 800, 40),
    "dp8": (8, (O2, "Distributed.dp_degree=8"), 820, 20),
    "sharding8": (
        8,
        (
            O2,
            "Distributed.sharding.sharding_degree=8",
            "Distributed.sharding.sharding_stage=2",
        ),
        1000,
        20,
    ),
    "mp8": (8, ("Distributed.mp_degree=8", "Model.sequence_parallel=True"), 1900, 20),
}


STEP = ("forward and backward", "update", "after the step")


class Counting(Recorder):
    """Counts operations that start a kernel by phase, and where the host reads a value."""

    NO_KERNEL = re.compile(
        f"{VIEWS}|_?(unsafe_)?(lift_fresh|local_scalar_dense|promote_types|wait_tensor)"
    )
    last: ClassVar["Counting"]

    def __init__(self) -> None:
        super().__init__()
        self.by_name = Counter[tuple[str, str]]()  # operations by phase and name
        self.reads: list[str] = []
        Counting.last = self

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func._opname in READS and not self._paused and self.phase in STEP:
            files = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
            if not any("device_mesh" in file for file in files):  # its ranks are on the host
                self.reads.append(next(f for f in reversed(files[:-1]) if "/lathe/" in f))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or self._paused or func.namespace in HOST_ONLY:
            return out
        self.by_name[self.phase, func._opname] += not self.NO_KERNEL.fullmatch(func._opname)
        return out

    def count(self, *phases: str) -> int:
        return sum(n for (phase, _), n in self.by_name.items() if phase in phases)


HOST_ONLY = frozenset({"prim", "profiler"})
READS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "nonzero"})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_stays_within_its_budget(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, overrides, passes, tail = CASES[case]
    monkeypatch.setattr(rank, "Recorder", Counting)
    recipe = load_recipe("tiny", (*BASE, *overrides))
    rank.try_rank(recipe, make_job(recipe), 0, processes, on_gpu=True)
    seen = Counting.last
    counts = seen.count(STEP[0]), seen.count(*STEP[1:])
    assert not seen.reads
    assert counts[0] <= passes and counts[1] <= tail, seen.by_name.most_common(25)
