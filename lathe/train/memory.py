"""Estimate the GPU memory of a training layout from the recipe alone, and refuse a model that does
not fit before anything is allocated.

Parameters, gradients and Adam's moments are divided as in ZeRO (Rajbhandari et al. 2020,
arXiv:1910.02054), in float32, with whole copies where FSDP2 gathers them. Activations are counted
tensor by tensor, as Korthikanti et al. do ("Reducing Activation Recomputation in Large Transformer
Models", 2022, arXiv:2205.05198, section 4), for the operations that `lathe.model.gpt` really
makes. Attention is taken to be a fused kernel (flash, or memory-efficient), which keeps no scores.

Shapes: N tokens of a micro-batch, C hidden size, W and F a GPU's attention and FFN width, V its
vocabulary rows. `n` is N, or N / mp with sequence parallelism.
"""

import os
from dataclasses import dataclass, replace

import torch

from lathe.model.architecture import Parts, Units
from lathe.model.config import GPTConfig
from lathe.train.layout import Layout, wanted_layout
from lathe.train.loss import CHUNK_ELEMENTS, NARROW_BLOCKS, chunk_rows
from lathe.train.passes import BUCKET_BYTES
from lathe.train.shape import model_config
from lathe.train.workers import choose_device
from lathe_base.config.settings import LoraSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_launch.usage import machine_memory

FLOAT = 4  # bytes
UNITS: tuple[Units, ...] = ("heads", "channels")
SAMPLE_BYTES, TOKEN_BYTES = 12, 8  # of a row of `SampleIndex`, and of an int64 id


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at its peak.

    Attributes:
        weights: this GPU's float32 shard, gathered whole copies, half precision copies of O2.
        activations: what the forward pass keeps for the backward pass, autocast's half precision
            copies of weights (O1) and the buffers between pipeline stages included.
        temporary: logits and the head's gradient, what a block recomputes, gradients in flight.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class _Block:
    """One layer on one GPU: parameters in elements, everything else in bytes."""

    parameters: float
    cast: float  # autocast's copies of the matrices
    kept: float  # from the forward pass to the backward pass
    again: float  # what the backward pass recomputes
    gradients: float  # in flight within its backward pass
    adapters: float | None  # their parameters, which alone are trained; None: all are


def estimate(
    config: GPTConfig, recipe: Recipe, layout: Layout, lora: LoraSettings | None = None
) -> Memory:
    """Peak memory of the GPU that needs most in a training step, without CUDA's and NCCL's own
    buffers.

    An upper bound where `Engine.compile` fuses operations.

    Args:
        config: the shape; every layer as its widest.
        lora: adapters that are trained instead of all weights.
    """
    block = _block(config, recipe, layout, _adapters(config, lora))
    teacher = 0.0
    if recipe.Compress.Distill.teacher is not None:
        # Every process has a full copy. A teacher given as a folder is taken to have the recipe's
        # shape, like the stage's parent.
        element = 2 if recipe.Engine.mix_precision.is_pure else FLOAT
        teacher = float(element * model_config(recipe, config.vocab_size).n_params)
    ranks = (
        _rank_memory(rank, block, teacher, config, recipe, layout) for rank in range(layout.pp)
    )
    return max(ranks, key=lambda memory: memory.total)


def _block(config: GPTConfig, recipe: Recipe, layout: Layout, adapters: float | None) -> _Block:
    C, mp = config.n_embd, layout.mp
    heads, F = max(config.n_head) / mp, max(config.n_inner) / mp
    W, KW = heads * config.head_dim, max(config.n_kv_head) / mp * config.head_dim
    N, n = _tokens(recipe, layout)
    narrow, stream = _bytes(recipe)
    dropout = n * C if recipe.Model.hidden_dropout_prob else 0  # a byte an element

    # A norm keeps its input in float32; a linear keeps its whole input, gathered if `n` is N / mp.
    family = config.architecture
    norms = (len(family.block_norms) + len(family.output_norms)) / 2
    branch = FLOAT * n * C * norms + narrow * N * C + dropout
    qkv = W + 2 * KW + (W + KW if config.rope else 0)  # rotated ones beside what they were made of
    attention = branch + narrow * N * (qkv + W) + FLOAT * N * heads  # output; log-sum-exp
    # The outputs of the documents' kernels, beside all of them as one.
    apart = narrow * N * W if recipe.Data.reset_attention else 0
    attention += apart
    # The activation's input and output, and a gated one's second factor and product.
    mlp = branch + narrow * (4 if family.gated else 2) * N * F
    widths: dict[Parts, float] = {"heads": W, "kv_heads": KW, "channels": F}
    attention_matrices, mlp_matrices = (
        sum(x.n_params(C, widths, x.name in config.biased) for x in config.unit_linears(units))
        for units in UNITS
    )
    if recipe.Compress.Quantization.enable:
        quantization = recipe.Compress.Quantization
        # A byte an element says what was not clipped; nothing is by the largest entry of a group
        # or of a token.
        kind, is_int8 = quantization.activation_quantize_type, quantization.weight_bits == 8
        weight_masks = int(is_int8 and kind != "dynamic")
        masks = int(is_int8 and kind not in ("dynamic", "token"))
        matrix = weight_masks + (
            0 if _is_autocast(recipe) else narrow
        )  # autocast's copy is the rounded one
        attention += masks * N * (C + W) + narrow * N * W + matrix * attention_matrices
        mlp += masks * N * (C + F) + matrix * mlp_matrices
    # Autocast's copies, but of frozen weights that are already in its data type.
    is_frozen_narrow = adapters is not None and recipe.Engine.mix_precision.dtype == "bfloat16"
    autocast = narrow if _is_autocast(recipe) and not is_frozen_narrow else 0
    attention_cast, mlp_cast = autocast * attention_matrices, autocast * mlp_matrices
    everything = attention + mlp + attention_cast + mlp_cast
    kept, again = {
        None: (everything, 0.0),
        "full": (stream * n * C, everything - stream * n * C),
        "full_attn": (stream * n * C + dropout + mlp + mlp_cast, 0.0),  # when the MLP's is free
        "core_attn": (everything - FLOAT * N * heads - apart, 0.0),
    }[layout.recompute]
    weight_gradient = (FLOAT + (narrow if narrow < FLOAT else 0)) * C * F
    if adapters is not None:
        weight_gradient = 0
    parameters = (
        attention_matrices
        + mlp_matrices
        + _norm(config) * (len(family.block_norms) + len(family.output_norms))
        + (W + KW if family.norms_whole else config.head_dim * len(family.head_norms))
    )
    return _Block(
        parameters=parameters,
        cast=attention_cast + mlp_cast,
        kept=kept,
        again=again,
        gradients=stream * n * C + narrow * N * (C + F) + weight_gradient,
        adapters=adapters,
    )


def _adapters(config: GPTConfig, lora: LoraSettings | None) -> float | None:
    """Parameters of a block's adapters; None without LoRA. Every layer as its widest."""
    if lora is None or lora.rank is None:
        return None
    family = config.architecture
    heads, groups = max(config.n_head), max(config.n_kv_head)
    widths: dict[Parts, float] = {
        "heads": heads * config.head_dim,
        "kv_heads": groups * config.head_dim,
        "channels": max(config.n_inner),
    }
    total = 0.0
    for linear in family.linears:
        if linear.skip_name in lora.targets:
            n_in = config.n_embd if linear.style == "column" else widths[linear.units]
            n_out = sum(widths[part] for part in linear.parts) if linear.parts else config.n_embd
            total += lora.rank * (max(1, len(linear.files)) * n_in + n_out)
    return total


def _rank_memory(
    rank: int, block: _Block, teacher: float, config: GPTConfig, recipe: Recipe, layout: Layout
) -> Memory:
    """The memory of the GPU at `rank` of a pipeline, at the candidate moment that needs most.

    Weights, gradients and Adam's moments last through a step (`_state`; ZeRO, section 5);
    activations rise to `kept` in the forward passes and fall block by block in the backward passes;
    a block, the head and the embedding add what they need while they run. Everything is in bytes
    but `table`, `ends` and `parameters`, which are elements.
    """
    C, V = config.n_embd, config.vocab_size / layout.mp
    (N, n), (_, stream) = _tokens(recipe, layout), _bytes(recipe)
    is_first, is_last = rank == 0, rank == layout.pp - 1
    layers = layout.layers(rank, config, recipe.Data.Train.dataset.max_seq_len)
    table, ends = V * C, _ends(config, layout, is_first, is_last)
    parameters = layers * block.parameters + ends
    state = _state(layers, ends, block, recipe, layout)
    trained_table = table if block.adapters is None else 0.0

    # What forward passes keep: as many as go through one of a GPU's stages before the first
    # backward pass, by 1F1B or interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473).
    hops = layout.pp - 1 - rank
    warm_up = hops if layout.virtual_pp == 1 else (layout.virtual_pp - 1) * layout.pp + 2 * hops
    in_flight = min(warm_up + 1, layout.accumulate_steps * layout.virtual_pp)
    before = in_flight < layout.accumulate_steps * layout.virtual_pp  # others have left gradients
    passed = layers / layout.virtual_pp  # layers that a micro-batch goes through at a time
    kept = in_flight * passed * block.kept
    kept += FLOAT * n * C if is_last else 0  # the last norm's input
    fixed = _pipeline_buffers(rank, stream * n * C, in_flight, layout)
    backward = block.again + block.gradients

    def moment(weights: float, gradients: float, activations: float, temporary: float) -> Memory:
        return Memory(
            weights=weights + teacher,
            gradients=gradients,
            optimizer=state.optimizer,
            activations=activations + fixed,
            temporary=temporary + (state.reducing if before else 0),
        )

    first = state.gradients if before else 0.0
    # `linear_cross_entropy` makes the gradients of the table (V, C) and of the hidden states (N, C)
    # together with the loss, in float32; they live until the backward pass has used them.
    head_gradients = FLOAT * (trained_table + N * C) if is_last else 0.0
    # The moments at which memory may peak, in the order of a step.
    moments = []
    # The loss of a micro-batch, or its last block's forward pass with the weights cast for it.
    cast = passed * block.cast if layout.recompute == "full" else 0.0
    head = head_gradients + _head(V, C, recipe, layout) if is_last else 0.0
    moments.append(moment(state.weights, first, kept, max(head, cast)))
    # Backward: the last block's,
    weights = state.weights + state.gathered
    moments.append(moment(weights, first, kept, head_gradients + backward))
    # the first one's, when the gradients of all other blocks are there already,
    late = weights if before else state.late_weights
    rest = kept - (passed - 1) * block.kept
    share = 1 - (block.parameters + ends) / parameters
    others = max(first, state.gradients * share)
    if state.copies_gradients:
        others = first + state.copies_gradients * share
    sums = state.element * trained_table
    moments.append(moment(late, others, rest, sums * is_last + backward + state.reduced))
    # the embedding's: the two gradients of one tied table and their sum;
    rest -= block.kept
    copies = (3 if is_first and is_last and config.tie_word_embeddings else 1) - (not before)
    everything = first + state.copies_gradients or state.gradients
    moments.append(moment(late, everything, rest, copies * sums))
    # when they are added up in float32,
    everything = state.gradients + state.copies_gradients
    moments.append(moment(late, everything, rest, 0.0))
    # then the last block's of the next micro-batch.
    if in_flight > 1:
        moments.append(moment(weights, state.gradients, rest, backward))
    return max(moments, key=lambda memory: memory.total)


def _ends(config: GPTConfig, layout: Layout, is_first: bool, is_last: bool) -> float:
    """Elements outside of the blocks: the token embedding (on the last rank as the tied head, or a
    separate head), the position embedding, and the final norm."""
    C, mp, is_tied = config.n_embd, layout.mp, config.tie_word_embeddings
    tables = (is_first or is_last) if is_tied else is_first + is_last
    ends = config.vocab_size / mp * C * tables
    if config.architecture.positions == "learned":
        ends += config.n_positions / mp * C if is_first else 0
    return ends + (_norm(config) if is_last else 0)


def _norm(config: GPTConfig) -> int:
    """Elements of a norm: a weight, and LayerNorm's bias."""
    return config.n_embd * (2 if config.architecture.norm == "layer_norm" else 1)


@dataclass(frozen=True)
class _State:
    """Bytes of state that lasts from one micro-batch to the next, and of its exchange with other
    replicas."""

    weights: float
    late_weights: float  # when a step's last backward pass comes to its last block
    gradients: float  # what micro-batches add up
    optimizer: float
    element: int  # of a gradient as autograd makes it
    gathered: float  # blocks' weights in the backward pass
    reduced: float  # a block's gradients on their way
    reducing: float  # FSDP2 holds the last ones between micro-batches
    copies_gradients: float = 0.0  # those of `HalfWeights`, of one micro-batch


def _state(layers: float, ends: float, block: _Block, recipe: Recipe, layout: Layout) -> _State:
    parameters = layers * block.parameters + ends
    whole = trained = FLOAT * parameters
    if block.adapters is not None:
        trained = FLOAT * layers * block.adapters
        narrow = 2 if recipe.Engine.mix_precision.dtype == "bfloat16" else FLOAT
        frozen = FLOAT if recipe.Engine.mix_precision.is_pure else narrow
        whole = frozen * layers * block.parameters + FLOAT * ends + trained
    if layout.sharding == 1:
        bucket = min(trained, BUCKET_BYTES) if layout.dp > 1 else 0.0
        is_pure = recipe.Engine.mix_precision.is_pure
        weights = whole + (2 * parameters if is_pure else 0)  # and their 16-bit copies
        return _State(
            weights=weights,
            late_weights=weights,
            gradients=trained,
            optimizer=2 * trained,
            element=2 if is_pure else FLOAT,
            gathered=0.0,
            reduced=bucket,
            reducing=0.0,
            copies_gradients=trained / 2 if is_pure else 0.0,
        )
    # torch's pipeline schedules gather and reduce once a step, whatever the stage.
    stage = layout.sharding_stage if layout.pp == 1 else 1
    once = stage == 1 and layout.accumulate_steps > 1
    is_offloaded = recipe.Distributed.sharding.sharding_offload
    shard = 0 if is_offloaded else whole / layout.sharding
    trained_shard = 0 if is_offloaded else trained / layout.sharding
    element = 2 if recipe.Engine.mix_precision.is_pure else FLOAT
    gathered = 2 * element * block.parameters
    weights = shard + element * (parameters if stage < 3 else ends)
    return _State(
        weights=weights,
        late_weights=shard + element * ends + gathered if layout.pp == 1 else weights,
        gradients=trained if once else trained_shard,
        optimizer=2 * trained_shard,
        element=element,
        gathered=gathered if stage == 3 else 0.0,
        reduced=0.0 if once else FLOAT * (block.adapters or block.parameters),
        reducing=0.0 if stage == 1 or block.adapters is not None else FLOAT * ends,
    )


def _head(V: float, C: int, recipe: Recipe, layout: Layout) -> float:
    """Bytes that `linear_cross_entropy` frees before the backward pass."""
    N, n = _tokens(recipe, layout)
    narrow, _ = _bytes(recipe)
    half = narrow if narrow < FLOAT else 0
    distill = recipe.Compress.Distill
    n_chunk = chunk_rows(N, V * (2 if distill.teacher else 1))
    hidden = FLOAT * n * C + (FLOAT * N * C if layout.sequence_parallel else 0) + half * N * C
    table = half * V * C + (narrow * V * C if _is_autocast(recipe) else 0)
    if distill.teacher:  # its head and hidden states, both models' logits, and three wide buffers
        buffers = 2 * narrow + 3 * FLOAT
        table += (half + (narrow if _is_autocast(recipe) else 0)) * V * C
        return buffers * n_chunk * V + hidden + table + (narrow + half) * N * C
    rows = n_chunk  # whose probabilities are in float32
    if half:
        n_chunk = chunk_rows(N, V, NARROW_BLOCKS * CHUNK_ELEMENTS)
    return (FLOAT * rows + half * n_chunk) * V + narrow * n_chunk * C + hidden + table


def _pipeline_buffers(rank: int, hidden: float, in_flight: int, layout: Layout) -> float:
    """What stages receive and send, but for the received hidden states, which the first block keeps
    anyway.

    The stages keep their outputs of the micro-batches in flight, and for one micro-batch the
    gradient that they receive and the one that they send. torch's interleaved schedule holds all
    that it sends until the end of the step.
    """
    stages = layout.pp * layout.virtual_pp
    local_stages = range(rank, stages, layout.pp)
    links = sum((index > 0) + (index < stages - 1) for index in local_stages)
    if layout.virtual_pp > 1:
        return links * hidden * layout.accumulate_steps
    return (links + in_flight * (rank < layout.pp - 1)) * hidden


def _tokens(recipe: Recipe, layout: Layout) -> tuple[int, float]:
    """Number of tokens in a micro-batch, and number that a GPU holds between the linears."""
    N = layout.micro_batch * recipe.Data.Train.dataset.max_seq_len
    return N, N / layout.mp if layout.sequence_parallel else N


def _bytes(recipe: Recipe) -> tuple[int, int]:
    """Bytes per element of a linear's input, and of the residual stream."""
    narrow = FLOAT if recipe.Engine.mix_precision.dtype == "float32" else 2
    return narrow, narrow if recipe.Engine.mix_precision.is_pure else FLOAT


def _is_autocast(recipe: Recipe) -> bool:
    precision = recipe.Engine.mix_precision
    return precision.dtype != "float32" and not precision.is_pure


def require_capacity(config: GPTConfig, recipe: Recipe) -> None:
    """Check that weights, gradients and optimizer state fit one device.

    Uses the planner's estimate of this process's share; activations are not counted, as
    recomputation and micro-batches of one can make them small.

    Raises:
        UserError: they exceed the device's total memory; see also `wanted_layout`.
    """
    layout = wanted_layout(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    if layout.pp * layout.virtual_pp > config.n_layer:
        return  # an impossible pipeline, which is reported elsewhere
    leanest = replace(layout, micro_batch=1, recompute="full")
    memory = estimate(config, recipe, leanest)
    needed = memory.weights + memory.gradients + memory.optimizer
    device = choose_device(recipe)
    available = available_memory(device)
    if needed > available:
        shape = {
            "hidden_size": config.n_embd,
            "num_layers": config.n_layer,
            "ffn_hidden_size": max(config.n_inner),
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.n_positions,
        }
        sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
        where = "the GPU has" if device.type == "cuda" else "this machine has"
        raise UserError(
            f"Model ({sizes}) takes {needed / 1e9:,.0f} GB per process for weights, gradients and "
            f"optimizer state, but {where} {available / 1e9:,.0f} GB",
            "lower Model.hidden_size or num_layers, or use parallelism: see `lathe plan`",
            Code.OUT_OF_MEMORY,
        )


def require_batches(recipe: Recipe, batch: int) -> None:
    """Check that the order of samples and the tokens of a step fit this machine's memory.

    Args:
        batch: sequences of a step.

    Raises:
        UserError: they exceed its memory.
    """
    samples, length = recipe.Engine.max_steps * batch, recipe.Data.Train.dataset.max_seq_len
    needed, available = (
        SAMPLE_BYTES * samples + TOKEN_BYTES * batch * length,
        available_memory(torch.device("cpu")),
    )
    if needed > available:
        raise UserError(
            f"Engine.max_steps {recipe.Engine.max_steps:,} of {batch:,} sequences take "
            f"{needed / 1e9:,.0f} GB for sample order and tokens, but this machine has "
            f"{available / 1e9:,.0f} GB",
            "lower Engine.max_steps or Global.global_batch_size (local_batch_size)",
            Code.OUT_OF_MEMORY,
        )


def available_memory(device: torch.device) -> int:
    """Memory in bytes of a GPU, or of this machine as far as the process's cgroups allow."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory()
