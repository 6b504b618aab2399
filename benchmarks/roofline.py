r"""What a training step should take on a GPU, operation by operation, without one.

    python benchmarks/roofline.py [--gpu H200] [-o Group.key=value ...]

Every row runs the trainer itself for a step on fake tensors of the true shapes, with the kernels
that a GPU would choose. An operation takes as long as its arithmetic or its memory traffic,
whichever is slower, and 2 us; the CPU takes HOST_SECONDS to start one, and where that is more than
all of them take, the step is bound by the host. What processes exchange is counted whole: it is
exposed where compute does not hide it. `--gpu` and `-o` are for all rows.

A second table has the planner's estimate of whole layouts, whose constants and limits
`lathe.train.speed` names.

The constants are from one run that was measured: GPT 345M with 32 rows, bfloat16 and O1 on an H200,
157,900 tokens/s.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lathe.plan import rank
from lathe.plan.rank import dense_config, make_job
from lathe.plan.record import Recorder, starts_a_kernel
from lathe.train.layout import configured_layout
from lathe.train.speed import GPUS, data_sheet_flops, step_time
from lathe_base.config.recipe import load_recipe

EFFICIENCY = 0.58  # of the data sheet's FLOP/s, of matrix products of a training's shapes
ATTENTION_EFFICIENCY = 0.22  # of attention kernels, forward and backward
REACHED = 0.85  # of the memory's bytes/s, by elementwise kernels
KERNEL_SECONDS = 2e-6  # from one kernel to the next
HOST_SECONDS = 8e-6  # to start an operation from Python, forward or backward
GPUS_PER_NODE = 8


class Case(NamedTuple):
    """A row: the recipe, its overrides, and the number of processes."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    processes: int = 1


STEP = (  # the second of two, after which FSDP has what it keeps
    *("Global.device=cpu", "Engine.max_steps=2", "Engine.eval_iters=1"),
    *("Data.Train.dataset.split=[1,1,0]", "Data.Eval.dataset.split=[1,1,0]"),
)
BF16 = ("Engine.mix_precision.dtype=bfloat16",)
O1, O2 = (*BF16, "Engine.mix_precision.level=O1"), (*BF16, "Engine.mix_precision.level=O2")
ROWS = (
    "Global.global_batch_size=32",
    "Global.local_batch_size=32",
    "Global.micro_batch_size=32",
    "Model.use_recompute=False",
)
DROPOUT = ("Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0")
CASES = (
    Case("345M, 32 rows, O1", "gpt-345m", (*O1, *ROWS, *DROPOUT)),
    Case("345M, 32 rows, O2", "gpt-345m", (*O2, *ROWS, *DROPOUT)),
    Case("345M as the recipe is, but bfloat16", "gpt-345m", BF16),
    Case(
        "345M, dp 8",
        "gpt-345m",
        (*BF16, "Distributed.dp_degree=8", "Global.global_batch_size=64"),
        8,
    ),
    Case("1.3B as the recipe is, but bfloat16", "gpt-1.3b", BF16),
    Case("1.3B, dp 8", "gpt-1.3b-dp8", BF16, 8),
    Case("345M QAT", "qat-345m", BF16),
)

LAYOUTS = (  # recipe, GPUs, published MFU, %
    ("gpt-345m", ("Distributed.dp_degree=8", "Global.global_batch_size=64"), 8, "41 to 46"),
    (
        "gpt-345m",
        (
            *("Distributed.pp_degree=4", "Global.global_batch_size=64"),
            "Global.local_batch_size=64",
        ),
        4,
        "",
    ),
    ("gpt-1.3b", ("Distributed.dp_degree=8",), 8, ""),
    ("gpt-6.7b", (), 16, "33 to 39, 41 to 47"),
    ("gpt-175b-mp8-pp16", (), 128, "42 to 47"),
)


class Roofline(Recorder):  # type: ignore[no-untyped-call]
    """Also estimates the time of the operations that start a kernel."""

    gpu = "H200"
    last: "Roofline"

    def __init__(self) -> None:
        super().__init__()
        self.seconds = defaultdict[tuple[str, str], float](float)  # by phase and kind
        Roofline.last = self

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or self._paused or not starts_a_kernel(func, out):
            return out
        kind, seconds = self._time(func, args, dict(kwargs or {}), out)
        self.seconds[self.phase, kind] += seconds + KERNEL_SECONDS
        return out

    def _time(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[str, float]:
        name = func._opname
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        size = sum({id(x): x.nbytes for x in (*inputs, *outputs)}.values())
        if name in ("gather", "scatter_add_", "embedding"):
            size = 3 * inputs[-1].nbytes if name != "embedding" else 2 * outputs[0].nbytes
        memory = size / (GPUS[self.gpu].bandwidth * REACHED)
        if func._overloadpacket not in flop_registry:
            return "loss" if "softmax" in name or "exp" in name else "elementwise", memory
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        is_attention = "attention" in name
        reached = ATTENTION_EFFICIENCY if is_attention else EFFICIENCY
        # Half of a causal attention's products are never computed.
        arithmetic = (flops / 2 if is_attention else flops) / (
            reached * data_sheet_flops(f"NVIDIA {self.gpu}", inputs[0].dtype)
        )
        return "attention" if is_attention else "matmul", max(arithmetic, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpu", choices=("A100", "H100", "H200", "B200"), default="H200", help="model of the GPU"
    )
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    Roofline.gpu = arguments.gpu
    rank.Recorder = Roofline  # type: ignore[attr-defined]
    kinds = ("matmul", "attention", "elementwise", "loss")
    table = Table("a step on " + arguments.gpu, "operations", *(f"{kind}, ms" for kind in kinds))
    for column in ("GPU, ms", "host, ms", "exchanged, ms", "tokens/s a GPU", "MFU"):
        table.add_column(column)
    for case in CASES:
        table.add_row(case.name, *row(case, arguments.overrides, kinds))
    Console(width=170).print(table)
    Console(width=170).print(layouts(arguments.gpu))


def layouts(gpu: str) -> Table:
    """The planner's estimate of whole layouts: the recipes in bfloat16, eager, and those that are
    compiled. Published are torchtitan's figures, and Megatron-LM's, on H100."""
    table = Table(f"a step on {gpu}", "GPUs")
    shares = ("compute", "recompute", "exposed communication", "host", "bubble")
    for column in (*shares, "MFU", "published MFU, %"):
        table.add_column(column)
    for name, overrides, gpus, published in LAYOUTS:
        for chosen, more in ((name, BF16), (f"{name}-bf16", ())):
            recipe = load_recipe(chosen, [*more, *overrides])
            config = dense_config(recipe)
            layout = configured_layout(config, recipe, gpus)
            time = step_time(config, recipe, layout, GPUS_PER_NODE, GPUS[gpu])
            length = recipe.Data.Train.dataset.max_seq_len
            batch = layout.micro_batch * layout.accumulate_steps * layout.data_parallel
            flops = config.flops_per_token(length) * batch * length / gpus
            mfu = flops / time.total / data_sheet_flops(GPUS[gpu].device, torch.bfloat16)
            parts = (time.compute, time.recompute, time.communication, time.host, time.bubble)
            split = (f"{part / time.total:.0%}" for part in parts)
            degrees = {dim: getattr(layout, dim) for dim in ("dp", "mp", "pp", "sharding")}
            shown = ", ".join([chosen, *(f"{dim} {n}" for dim, n in degrees.items() if n > 1)])
            table.add_row(shown, str(gpus), *split, f"{mfu:.0%}", published)
    return table


def row(case: Case, overrides: list[str], kinds: Sequence[str]) -> list[str]:
    """The figures of a case."""
    recipe = load_recipe(case.recipe, [*case.overrides, *overrides, *STEP])
    trial = rank.try_rank(recipe, make_job(recipe), 0, case.processes, on_gpu=True)
    seen = Roofline.last
    phases = ("forward and backward", "update", "after the step")
    gpu = {kind: sum(seen.seconds[phase, kind] for phase in phases) for kind in kinds}
    operations = sum(seen.operations.get(phase, 0) for phase in phases)
    gpu_links = GPUS[Roofline.gpu]
    link = gpu_links.nvlink if case.processes <= GPUS_PER_NODE else gpu_links.network
    exchanged = sum(x.bytes for x in trial.collectives if x.phase in phases and len(x.ranks) > 1)
    total, host = sum(gpu.values()), HOST_SECONDS * operations
    assert recipe.Global.local_batch_size is not None
    tokens = recipe.Global.local_batch_size * recipe.Data.Train.dataset.max_seq_len
    step = max(total, host)
    dtype = getattr(torch, recipe.Engine.mix_precision.dtype)
    peak = data_sheet_flops(f"NVIDIA {Roofline.gpu}", dtype)
    config = dense_config(recipe)
    flops = config.flops_per_token(recipe.Data.Train.dataset.max_seq_len) * tokens
    return [
        f"{operations:,}",
        *(f"{1e3 * gpu[kind]:.1f}" for kind in kinds),
        f"{1e3 * total:.1f}",
        f"{1e3 * host:.1f}",
        f"{1e3 * exchanged / link:.1f}",
        f"{tokens / step:,.0f}",
        f"{flops / step / peak:.1%}",
    ]


if __name__ == "__main__":
    main()
