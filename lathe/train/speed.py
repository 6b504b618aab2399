"""Step time of a training layout: a model to rank layouts, not a prediction.

The reference is a DGX A100. Korthikanti et al. (2022, arXiv:2205.05198, table 5) published step
times on it, for 22 to 1000 billion parameters: the model is within 35 % of them, and within 10 % of
their ratios between layouts. On a GPU that computes faster, communication matters more.
"""

import math
from dataclasses import dataclass

import torch

from lathe.model.config import GPTConfig
from lathe.train.flops import data_sheet_flops
from lathe.train.layout import Layout
from lathe.train.memory import FLOAT
from lathe_base.config.settings import Recipe

GPU = "A100"
EFFICIENCY = 0.55  # of the data sheet's FLOP/s: 42 to 57 % of whole steps in that table
BLOCK_SECONDS = 3e-4  # some 60 kernels of a layer and a micro-batch, 5 us each to start
NVLINK = 300e9  # bytes/s of a GPU in one direction (NVIDIA DGX A100 data sheet: 600 GB/s in both)
NETWORK = 25e9  # the same between nodes: one 200 Gb/s HDR InfiniBand port a GPU
OVERLAP = 0.9  # of sharding's communication, at most this part is hidden behind compute


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step, by what they are spent on."""

    compute: float
    recompute: float
    communication: float
    bubble: float

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.compute + self.recompute + self.communication + self.bubble


def step_time(
    config: GPTConfig, recipe: Recipe, layout: Layout, gpus_per_node: int = 8
) -> StepTime:
    """The step time of the slowest GPU.

    Micro-batches run one after the other; a pipeline adds the bubble of 1F1B, (pp - 1) /
    (virtual_pp * micro-batches + pp - 1) of the step (Narayanan et al. 2021, section 2.2). Tensor
    parallelism waits for 4 all-reduces per layer, or as many bytes with sequence parallelism;
    sharding's communication overlaps with compute.
    """
    micro_batches, bubble = layout.accumulate_steps, bubble_share(layout)
    compute, again = _compute(config, recipe, layout)
    seconds = _seconds(layout, volume(config, recipe, layout), gpus_per_node)
    waiting = (seconds["mp"] + seconds["pp"]) / micro_batches
    busy = micro_batches * (compute + again + waiting)
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
    )


def bubble_share(layout: Layout) -> float:
    """Share of a step in which a pipeline's GPU is idle (the bubble)."""
    idle = layout.pp - 1
    return idle / (layout.virtual_pp * layout.accumulate_steps + idle)


def _compute(config: GPTConfig, recipe: Recipe, layout: Layout) -> tuple[float, float]:
    """Seconds of compute per micro-batch, and of recomputation."""
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
    layers = _max_layers(config, layout)
    dtype = getattr(torch, recipe.Engine.mix_precision.dtype)
    speed = EFFICIENCY * data_sheet_flops(GPU, dtype)
    seconds = layout.micro_batch * T / layout.mp / speed  # for every operation a token
    launch = BLOCK_SECONDS * layers
    return (layers * layer + head) * seconds + launch, layers * again * seconds


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
        column = _element(recipe) if recipe.Compress.Quantization.enable else dtype.itemsize
        layer = 2 * ((rows + again) * dtype.itemsize + rows * column) * hidden
        volumes["mp"] = float(steps * _max_layers(config, layout) * layer)
        volumes["mp"] += steps * _ends(config, recipe, layout, hidden)
    if layout.pp > 1:  # hidden states and their gradients to and from each of its stages
        size = hidden // layout.mp if layout.sequence_parallel else hidden
        volumes["pp"] = float(steps * 2 * layout.virtual_pp * size * _element(recipe))
        if config.tie_word_embeddings:  # the first and the last stage sum their gradients of it
            volumes["pp"] += 2.0 * FLOAT * config.vocab_size / layout.mp * config.n_embd
    # Weights gathered and gradients reduced over `sharding`, then over `dp`.
    parameters = config.n_params / (layout.mp * layout.pp)
    if layout.sharding > 1:
        stage = layout.sharding_stage if layout.pp == 1 else 1
        gathers = 2 * steps if stage == 3 else 1
        reductions = steps if stage > 1 else 1
        volumes["sharding"] = parameters * (gathers * _element(recipe) + reductions * FLOAT)
    if layout.dp > 1:
        volumes["dp"] = 2 * FLOAT * parameters / layout.sharding
    return volumes


def _ends(config: GPTConfig, recipe: Recipe, layout: Layout, hidden: int) -> float:
    """Bytes that tensor parallelism sums per micro-batch at the first stage: the embeddings and, if
    it is also the last stage, the head's gradient of the gathered hidden states."""
    learned = config.architecture.positions == "learned"
    embedded = 2 * (hidden + hidden // layout.micro_batch * learned)
    head = (2 + layout.sequence_parallel) * hidden if layout.pp == 1 else 0
    return float(_element(recipe) * (embedded + head))


def _seconds(layout: Layout, sizes: dict[str, float], gpus_per_node: int) -> dict[str, float]:
    """Seconds per step to send `volume` along each dimension; tensor parallelism is within a
    node."""
    strides = {"mp": 1, "sharding": layout.mp, "dp": layout.mp * layout.sharding}
    seconds = dict.fromkeys(("mp", "pp", "sharding", "dp"), 0.0)
    for dim in sizes.keys() & strides:
        members = getattr(layout, dim)
        bandwidth = NVLINK if dim == "mp" else _bandwidth(strides[dim], members, gpus_per_node)
        seconds[dim] = _ring(members, sizes[dim], bandwidth)
    if "pp" in sizes:
        bandwidth = _bandwidth(layout.gpus // layout.pp, layout.pp, gpus_per_node)
        seconds["pp"] = sizes["pp"] / min(bandwidth, NVLINK)
    return seconds


def _max_layers(config: GPTConfig, layout: Layout) -> int:
    return max(layout.layers(rank, config.n_layer) for rank in range(layout.pp))


def _element(recipe: Recipe) -> int:
    """Bytes per element of weights and hidden states as they are sent."""
    return 2 if recipe.Engine.mix_precision.is_pure else FLOAT


def _ring(members: int, size: float, bandwidth: float) -> float:
    """Seconds to gather or reduce-scatter `size` bytes; an all-reduce is both."""
    return (members - 1) / members * size / bandwidth


def _bandwidth(stride: int, members: int, gpus_per_node: int) -> float:
    """Bytes/s around a ring of GPUs whose ranks are `stride` apart: between nodes, it uses the
    network ports of all its members in a node."""
    if stride * members <= gpus_per_node:
        return NVLINK
    return min(NVLINK, NETWORK * max(1, gpus_per_node // stride))
