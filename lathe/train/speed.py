"""Step time of a training layout, a model to rank layouts and not a prediction; and the peak FLOP/s
of a device, for MFU.

Matrix products take their FLOPs, all else its memory traffic, and the GPU waits where the host
cannot launch kernels as fast. For a DGX A100, Korthikanti et al. (2022, arXiv:2205.05198, table 5)
published step times of 22 to 1000 billion parameters: the model is within 35 % of them, and within
12 % of their ratios between layouts. On one H200, it is within 10 % of what 345M was measured at.

MFU, model FLOPs utilization, is the model's FLOPs per token x tokens/s / peak (PaLM, Chowdhery et
al. 2022, appendix B).
"""

import math
import re
import time
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lathe.model.config import GPTConfig
from lathe.train.layout import Layout
from lathe.train.memory import FLOAT
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError, printable


class Gpu(NamedTuple):
    """A GPU in a DGX or HGX node, by NVIDIA's data sheets.

    Attributes:
        device: as the driver names it.
        memory: bytes.
        bandwidth: bytes/s of its memory.
        nvlink, network: bytes/s in one direction, within a node and between nodes, where every GPU
            has an InfiniBand port.
    """

    device: str
    memory: float
    bandwidth: float
    nvlink: float
    network: float


GPUS = {
    "V100": Gpu("Tesla V100-SXM2", 32e9, 0.9e12, 150e9, 12.5e9),
    "A100": Gpu("NVIDIA A100", 80e9, 2.0e12, 300e9, 25e9),
    "H100": Gpu("NVIDIA H100", 80e9, 3.35e12, 450e9, 50e9),
    "H200": Gpu("NVIDIA H200", 141e9, 4.8e12, 450e9, 50e9),
    "B200": Gpu("NVIDIA B200", 180e9, 8.0e12, 900e9, 50e9),
}
"""By the name that `lathe plan --gpu` takes."""
# Dense TFLOP/s of NVIDIA's data sheets: float16, bfloat16, TF32, float32; 0 where the hardware has
# no such unit. The first name that is found in the device's counts.
DATA_SHEETS: dict[str, tuple[float, float, float, float]] = {
    r"B200": (2250, 2250, 1125, 75),
    r"H20": (148, 148, 74, 44),
    r"H100 PCIe": (756, 756, 378, 51),
    r"H[12]00 NVL": (835, 835, 417, 60),
    r"G?H200|H100": (989, 989, 494, 67),
    r"A100": (312, 312, 156, 19.5),
    r"V100-SXM[23]": (125, 0, 0, 15.7),
    r"V100-PCIE": (112, 0, 0, 14),
    r"L40S": (362, 362, 183, 91.6),
    r"L4": (121, 121, 60, 30.3),
    r"A10": (125, 125, 62.5, 31.2),
    r"T4": (65, 0, 0, 8.1),
}
EFFICIENCY = 0.58  # of the data sheet's FLOP/s, by matrix products of a training's shapes
REACHED = 0.85  # of the data sheet's bytes/s, by elementwise kernels
TRAFFIC = 260  # bytes that these move per token, channel and layer: benchmarks/roofline.py
COMPILED_TRAFFIC = 0.5  # of that, where they are fused: an assumption, not measured
HOST_SECONDS = {"plain": (3.2e-4, 1.6e-4), "mp": (7.4e-3, 3.2e-3)}
"""Seconds in which a CPU starts the kernels of a block and a micro-batch, forward and backward,
eager and compiled. With tensor parallelism, whose operations are DTensors' with layouts to compute,
as measured on one core of a Xeon; without, 40 operations of 8 us, and half of that."""
BLOCK_SECONDS = 8e-5  # between the some 40 kernels of a block and a micro-batch, 2 us each
OVERLAP = 0.9  # of sharding's communication, at most this part is hidden behind compute


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step, by what they are spent on."""

    compute: float
    recompute: float
    communication: float
    bubble: float
    host: float

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.compute + self.recompute + self.communication + self.bubble + self.host


def step_time(
    config: GPTConfig,
    recipe: Recipe,
    layout: Layout,
    gpus_per_node: int = 8,
    gpu: Gpu = GPUS["A100"],
) -> StepTime:
    """The step time of the slowest GPU.

    Micro-batches run one after the other; a pipeline adds the bubble of 1F1B, (pp - 1) /
    (virtual_pp * micro-batches + pp - 1) of the step (Narayanan et al. 2021, section 2.2). Tensor
    parallelism waits for 4 all-reduces per layer, or as many bytes with sequence parallelism;
    sharding's communication overlaps with compute.
    """
    micro_batches, bubble = layout.accumulate_steps, bubble_share(layout)
    ranks = (_compute(rank, config, recipe, layout, gpu) for rank in range(layout.pp))
    compute, again = max(ranks, key=sum)
    seconds = _seconds(layout, volume(config, recipe, layout), gpus_per_node, gpu)
    waiting = (seconds["mp"] + seconds["pp"]) / micro_batches
    # Where the host takes longer to launch a micro-batch's kernels than the GPU to run them.
    launching = launch_seconds(config, recipe, layout, recipe.Engine.compile) / micro_batches
    idle = max(0.0, launching - compute - again - waiting)
    busy = micro_batches * (compute + again + waiting + idle)
    # Sharding's messages hide behind the last micro-batch, or from stage 2 on behind all of them.
    beside = compute + again
    if layout.pp > 1:
        beside = 0  # torch's schedules reduce when all backward passes are through
    elif layout.sharding > 1 and layout.sharding_stage > 1:
        beside *= micro_batches
    replicas = seconds["sharding"] + seconds["dp"]
    exposed = max(replicas - beside, (1 - OVERLAP) * replicas)
    return StepTime(
        compute=micro_batches * compute,
        recompute=micro_batches * again,
        communication=micro_batches * waiting + exposed,
        bubble=busy * bubble / (1 - bubble),
        host=micro_batches * idle,
    )


def launch_seconds(config: GPTConfig, recipe: Recipe, layout: Layout, is_compiled: bool) -> float:
    """Seconds per step in which the CPU starts the kernels of the blocks."""
    eager, compiled = HOST_SECONDS["mp" if layout.mp > 1 else "plain"]
    blocks = _max_layers(config, recipe, layout) * layout.accumulate_steps
    return blocks * (compiled if is_compiled else eager)


def bubble_share(layout: Layout) -> float:
    """Share of a step in which a pipeline's GPU is idle (the bubble)."""
    idle = layout.pp - 1
    return idle / (layout.virtual_pp * layout.accumulate_steps + idle)


def _compute(
    rank: int, config: GPTConfig, recipe: Recipe, layout: Layout, gpu: Gpu
) -> tuple[float, float]:
    """Seconds of compute per micro-batch, and of recomputation, of the GPU at `rank` of a
    pipeline."""
    T, C = recipe.Data.Train.dataset.max_seq_len, config.n_embd
    head = 6.0 * config.vocab_size * C
    layer = (config.flops_per_token(T) - head) / config.n_layer
    widest = config.n_head.index(max(config.n_head))
    width = config.layer_widths(widest)["heads"]
    weights = sum(math.prod(config.linear_shape(x, widest)) for x in config.unit_linears("heads"))
    again = {
        None: 0.0,
        "full": layer / 3,  # the forward pass
        "full_attn": 2.0 * weights + 4.0 * width * T,
        "core_attn": 4.0 * width * T,
    }[layout.recompute]
    layers = layout.layers(rank, config, T)
    is_last = rank == layout.pp - 1
    dtype = getattr(torch, recipe.Engine.mix_precision.dtype)
    tokens = layout.micro_batch * T / layout.mp  # whose operations this GPU computes
    seconds = tokens / (EFFICIENCY * data_sheet_flops(gpu.device, dtype))  # for every operation
    moved = TRAFFIC * (COMPILED_TRAFFIC if recipe.Engine.compile else 1) * C * dtype.itemsize / 2
    memory = layers * tokens * moved / (REACHED * gpu.bandwidth)
    repeated = layers * again * seconds + (memory / 3 if layout.recompute == "full" else 0.0)
    gaps = BLOCK_SECONDS * layers
    return (layers * layer + head * is_last) * seconds + memory + gaps, repeated


def volume(config: GPTConfig, recipe: Recipe, layout: Layout) -> dict[str, float]:
    """Bytes that a GPU exchanges per step along each mesh dimension larger than 1: what is
    gathered, reduce-scattered or sent to another stage counts once, what is all-reduced twice; the
    factor (n - 1) / n of a ring of n is omitted. In a pipeline, the GPU is one of the first stage.
    """
    hidden = layout.micro_batch * recipe.Data.Train.dataset.max_seq_len * config.n_embd
    steps = layout.accumulate_steps
    volumes = {}
    if layout.mp > 1:
        # A forward pass sums the output of every row linear, a backward pass the gradient of every
        # column linear's input.
        rows = sum(linear.style == "row" for linear in config.architecture.linears)
        again = {None: 0, "full": rows, "full_attn": 1, "core_attn": 0}[layout.recompute]
        dtype = getattr(torch, recipe.Engine.mix_precision.dtype)
        # Fake quantization reads what the norms give, see `lathe.train.parallel`.
        column = _element_bytes(recipe) if recipe.Compress.Quantization.enable else dtype.itemsize
        layer = 2 * ((rows + again) * dtype.itemsize + rows * column) * hidden
        volumes["mp"] = float(steps * _max_layers(config, recipe, layout) * layer)
        # The first stage sums the embeddings too and, if it is also the last stage, the head's
        # gradient of the gathered hidden states.
        learned = config.architecture.positions == "learned"
        embedded = 2 * (hidden + hidden // layout.micro_batch * learned)
        head = (2 + layout.sequence_parallel) * hidden if layout.pp == 1 else 0
        volumes["mp"] += steps * float(_element_bytes(recipe) * (embedded + head))
    if layout.pp > 1:  # hidden states and their gradients to and from each of its stages
        size = hidden // layout.mp if layout.sequence_parallel else hidden
        volumes["pp"] = float(steps * 2 * layout.virtual_pp * size * _element_bytes(recipe))
        if config.tie_word_embeddings:  # the first and the last stage sum their gradients of it
            volumes["pp"] += 2.0 * FLOAT * config.vocab_size / layout.mp * config.n_embd
    # Weights gathered and gradients reduced over `sharding`, then over `dp`.
    parameters = config.n_params / (layout.mp * layout.pp)
    if layout.sharding > 1:
        stage = layout.sharding_stage if layout.pp == 1 else 1
        gathers = 2 * steps if stage == 3 else 1
        reductions = steps if stage > 1 else 1
        volumes["sharding"] = parameters * (gathers * _element_bytes(recipe) + reductions * FLOAT)
    if layout.dp > 1:
        volumes["dp"] = 2 * FLOAT * parameters / layout.sharding
    return volumes


def _seconds(
    layout: Layout, sizes: dict[str, float], gpus_per_node: int, gpu: Gpu
) -> dict[str, float]:
    """Seconds per step to send `volume` along each dimension; tensor parallelism is within a
    node."""
    strides = {"mp": 1, "sharding": layout.mp, "dp": layout.mp * layout.sharding}
    seconds = dict.fromkeys(("mp", "pp", "sharding", "dp"), 0.0)
    for dim in sizes.keys() & strides:
        members = getattr(layout, dim)
        bandwidth = gpu.nvlink
        if dim != "mp":
            bandwidth = ring_bandwidth(strides[dim], members, gpus_per_node, gpu)
        # To gather or reduce-scatter along a ring; an all-reduce is both.
        seconds[dim] = (members - 1) / members * sizes[dim] / bandwidth
    if "pp" in sizes:
        bandwidth = ring_bandwidth(layout.gpus // layout.pp, layout.pp, gpus_per_node, gpu)
        seconds["pp"] = sizes["pp"] / min(bandwidth, gpu.nvlink)
    return seconds


def ring_bandwidth(stride: int, members: int, gpus_per_node: int, gpu: Gpu) -> float:
    """Bytes/s around a ring of GPUs whose ranks are `stride` apart: between nodes, it uses the
    network ports of all its members in a node."""
    if stride * members <= gpus_per_node:
        return gpu.nvlink
    return min(gpu.nvlink, gpu.network * max(1, gpus_per_node // stride))


def _max_layers(config: GPTConfig, recipe: Recipe, layout: Layout) -> int:
    length = recipe.Data.Train.dataset.max_seq_len
    return max(layout.layers(rank, config, length) for rank in range(layout.pp))


def _element_bytes(recipe: Recipe) -> int:
    """Bytes per element of weights and hidden states as they are sent."""
    return 2 if recipe.Engine.mix_precision.is_pure else FLOAT


def known_gpu(name: str | None) -> Gpu | None:
    """The GPU of that name, or this machine's, with the memory that it has; None if there is none,
    or none of `GPUS`.

    Raises:
        UserError: an unknown name.
    """
    if name is not None:
        if name.upper() in GPUS:
            return GPUS[name.upper()]
        raise UserError(
            f"--gpu {printable(name)}: unknown model",
            f"choose the nearest of {', '.join(GPUS)}, and give --memory",
            Code.UNKNOWN_NAME,
        )
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    for model, gpu in GPUS.items():
        if model in properties.name:
            return gpu._replace(memory=float(properties.total_memory))
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of matrix products of a GPU in `dtype`: from its data sheet, or for unknown GPUs
    and MIG slices measured with one large product in about 0.2 s; None for a CPU, whose peak other
    processes share.

    float32 counts as TF32 where torch would use it (`torch.set_float32_matmul_precision`).
    """
    if device.type != "cuda":
        return None
    known = data_sheet_flops(torch.cuda.get_device_name(device), dtype)
    return known or measured_flops(device, dtype)


def data_sheet_flops(name: str, dtype: torch.dtype) -> float:
    """FLOP/s of the GPU with this driver name; 0 if it is unknown."""
    is_tf32 = torch.get_float32_matmul_precision() != "highest"
    for pattern, (half, bfloat, tf32, single) in DATA_SHEETS.items():
        if re.search(rf"\b({pattern})\b", name) and "MIG" not in name:
            single = tf32 if is_tf32 and tf32 else single
            peaks = {torch.float16: half, torch.bfloat16: bfloat, torch.float32: single}
            return 1e12 * peaks.get(dtype, 0)
    return 0


@cache
def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product; lower than the peak if other processes share the device."""
    size, seconds = 256, 0.0
    while seconds < 0.01 and size < 16384:  # large enough to make launch overhead negligible
        size *= 2
        matrix = torch.randn(size, size, device=device).to(dtype)
        _product_seconds(matrix)
        seconds = _product_seconds(matrix)
    ends = time.perf_counter() + 0.15
    while time.perf_counter() < ends:
        seconds = min(seconds, _product_seconds(matrix))
    return 2 * size**3 / seconds


def _product_seconds(matrix: Tensor) -> float:
    started = time.perf_counter()
    matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - started
