"""Settings of pruning, distillation, quantization and sensitivity analysis."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe_base.config.settings.types import (
    FORMATS,
    ActivationScales,
    Bits,
    BlockName,
    Factor,
    Format,
    GroupSize,
    LinearName,
    NonNegative,
    Positive,
    Probability,
    SensitivityMetric,
    SensitivityMode,
    Settings,
)


class PruneSettings(Settings):
    """What `lathe prune` removes: whole layers first, then attention heads and FFN channels.

    PaddleFleetX's `enable`, `criterion` and `ratio`; the other keys are Lathe's own.
    """

    enable: bool | None = None
    """Whether pruning is allowed; False makes `lathe prune` fail and `lathe compress` search only
    formats, and null means True."""
    criterion: Literal["l1_norm", "l2_norm", "fpgm", "activation", "taylor"] = "l1_norm"
    """Importance score of heads and channels: mean absolute weight, root mean square weight,
    distance to the other units of the layer, mean activation, or estimated change in loss without
    them."""
    ratio: Probability = 0.125
    """Share of attention heads and FFN channels to remove; with `scope` global, of their
    parameters."""
    scope: Literal["uniform", "global"] = "uniform"
    """Where to remove units: the same share of every layer, or wherever it matters least in the
    whole model."""
    layers: NonNegative = 0
    """Number of whole layers to remove first, one at a time, always the one with the smallest
    effect on the loss."""
    rounds: Positive = 1
    """Number of rounds of pruning and finetuning to reach the ratio; `Engine.max_steps` is divided
    among them."""
    head_unit: Literal["group", "query"] = "group"
    """Unit of head pruning with grouped-query attention: a key-value head with all its query heads
    (`group`), which also shrinks the cache, or one query head in every group of a layer (`query`),
    which keeps all keys and values. Without grouped-query attention both are the same."""
    heads: list[NonNegative] = Field(default=[])
    """Number of attention heads to keep in each layer, counted by `head_unit` (with `query`, per
    group), instead of `ratio`, `scope` and `layers`; 0 here and in `channels` removes the layer."""
    channels: list[NonNegative] = Field(default=[])
    """Number of FFN channels to keep in each layer; requires `heads`."""
    channel_multiple: Positive = 1
    """FFN widths are rounded up to a multiple of this number of channels."""
    calibration_batches: Positive = 16
    """Number of training micro-batches for calibration: for the criteria `activation` and `taylor`,
    and for fitting what stays to what was computed before. Choosing `layers` reads two of them."""

    @model_validator(mode="after")
    def _check_layer_widths(self) -> "PruneSettings":
        pairs = list(zip(self.heads, self.channels, strict=False))
        if len(self.heads) != len(self.channels) or any((h > 0) != (c > 0) for h, c in pairs):
            raise ValueError("heads and channels need one number for every layer, or 0 in both")
        if pairs and (not any(self.heads) or self.layers or self.rounds > 1):
            raise ValueError(
                "heads must keep at least one layer, and cannot be combined with "
                "layers or with more than one round"
            )
        return self


class DistillSettings(Settings):
    """Knowledge distillation while training a pruned or quantized model. Lathe's own group."""

    teacher: str | None = None
    """Folder of the teacher, a checkpoint or Hugging Face model, or `parent` for the stage's input
    model; null disables distillation."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the KL divergence from the teacher in the loss; the rest is cross-entropy."""
    temperature: Factor = 1.0
    """Temperature of both distributions in the KL divergence."""
    hidden: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the cosine distance between the last hidden states in the loss."""


class QuantizationSettings(Settings):
    """Quantization to INT8 or INT4 by `lathe quantize`. PaddleFleetX's group; `quantize_embedding`
    and `group_size` are Lathe's own."""

    enable: bool | None = None
    """Whether quantization is allowed; False makes `lathe quantize` fail, and null means True."""
    weight_quantize_type: Literal["abs_max", "channel_wise_abs_max"] = "channel_wise_abs_max"
    """Granularity of INT8 weight scales in linears with static activation scales: per tensor, or
    per output channel."""
    activation_quantize_type: ActivationScales = "auto"
    """Activation scales of INT8 linears. `moving_average_abs_max` is static, from the largest
    absolute values of calibration texts, and reads prompts fastest. `dynamic` computes scales at
    run time for every token and group of `group_size` inputs, as INT4 linears always do, with
    weight scales in the same groups; pretrained models need it, because a few of their tokens have
    huge activations. `token` computes one scale for every token, with a weight scale per output
    channel: W8A8 as vLLM's integer kernels for GPUs compute it; onnxruntime has no fused kernel for
    it. `auto` measures the cost of static scales on calibration text; if it is more than
    a tenth of `Gate.max_perplexity_increase`, it makes as many layers dynamic as needed to stay
    within that limit. `none` quantizes only the weights: the file is as small, and computation
    stays in float."""
    smoothing: bool = True
    """Whether to move activation outliers into the weights (SmoothQuant) if that reduces a
    linear's error. Applies if weights have group scales, or if static activation scales would cost
    more than `auto` allows; torch engine."""
    prefix: Literal["auto", "none"] | Annotated[int, Field(ge=1, le=8)] = "auto"
    """Number of prefix tokens (PrefixQuant): their constant float keys and values precede every
    text, so that the text's own first token has no massive activations; the maximum text length
    shrinks accordingly. Only for `activation_quantize_type: moving_average_abs_max`, where `auto`
    uses none if static scales cost little, otherwise up to three, as long as each reduces that
    cost by a tenth. `none` disables it. Torch engine, without tensor parallelism."""
    activation_preprocess_type: Literal["PACT"] | None = None
    """PACT clips activations at a learned bound; null disables clipping."""
    moving_rate: Probability = 0.9
    """Decay of the moving average of an activation's largest absolute value while PaddleSlim
    trains (Paddle engine). The torch engine keeps the scales of calibration."""
    weight_bits: Bits = 8
    """Bits of a quantized weight. 4 bits halve the file size again and decode faster, but need
    training to preserve quality, and prompts are read more slowly."""
    group_size: GroupSize = 64
    """Number of inputs that share a scale in INT4 weights and dynamic INT8; smaller groups are
    more precise and make larger files."""
    zero_points: bool = False
    """Whether every group of a 4-bit weight also has a zero point: the group has 4 bits more, and
    less error."""
    rounding: Literal["auto", "nearest", "gptq"] = "auto"
    """Initial rounding of weights: to nearest, or with GPTQ, which rounds one column after another
    so that later columns compensate for the errors of earlier ones. `auto` uses GPTQ for 4-bit
    weights that are not trained (`Engine.max_steps=0`), where it helps."""
    gptq_batches: Positive = 16
    """Number of training micro-batches for GPTQ to read; with too few, it fits the weights to just
    those."""
    generated_batches: NonNegative = 8
    """Number of micro-batches that the model writes for GPTQ to read beside training text, which is
    often narrower than what a pretrained model will read."""
    activation_bits: Literal[8] = 8
    """Bits of a quantized activation; only 8 is supported."""
    kv_cache_bits: Literal[8] | None = None
    """Bits of the keys and values that a server caches: 8, with a calibrated scale for every
    channel, or null for float. A cache of 8 bits is a quarter as large, and prompts are read more
    slowly; onnxruntime only, torch engine."""
    freeze_embedding: bool = False
    """Whether to freeze the token and position embeddings."""
    quantize_embedding: bool = False
    """Whether to quantize the token embedding, which is also the output layer, and, to 8 bits, the
    position embedding."""
    skip_tensor_map: dict[BlockName, list[LinearName]] = Field(default={})
    """Linear layers to keep in float, by block: `{block_0: [qkv, linear2]}`."""
    formats: dict[BlockName, dict[LinearName, Format]] = Field(default={})
    """Formats of individual linear layers, by block: `{block_0: {qkv: int8, linear2: float}}`; the
    default follows `weight_bits`. `int8` means the kind that `activation_quantize_type` selects;
    `static_int8`, `dynamic_int8`, `token_int8` and `weight_only_int8` are explicit."""
    head_format: Format | None = None
    """Format of the output layer, which is also the token embedding; null follows `weight_bits`."""

    @model_validator(mode="after")
    def _pact_clips_what_is_quantized(self) -> "QuantizationSettings":
        if self.activation_preprocess_type and self.activation_quantize_type == "none":
            raise ValueError(
                "activation_preprocess_type PACT clips quantized activations, but "
                "activation_quantize_type none keeps activations in float: leave it empty"
            )
        is_dynamic = self.activation_quantize_type in ("dynamic", "token")
        if self.activation_preprocess_type and (
            is_dynamic or self.named & {"dynamic_int8", "token_int8"}
        ):
            kind = self.activation_quantize_type if is_dynamic else "dynamic"
            raise ValueError(
                "activation_preprocess_type PACT uses one clipping bound, but "
                f"activation_quantize_type {kind} has scales for every token: leave it empty"
            )
        if self.activation_preprocess_type and self.has_int4:
            raise ValueError(
                "activation_preprocess_type PACT uses one clipping bound, but weight_bits 4 uses "
                "scales per token and group: leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _a_prefix_serves_static_scales(self) -> "QuantizationSettings":
        is_static = self.activation_quantize_type == "moving_average_abs_max"
        if isinstance(self.prefix, int) and (not is_static or self.weight_bits == 4):
            raise ValueError(
                f"prefix {self.prefix} requires static scales: set activation_quantize_type to "
                "moving_average_abs_max and weight_bits to 8, or prefix to none"
            )
        return self

    @model_validator(mode="after")
    def _zero_points_are_of_4_bits(self) -> "QuantizationSettings":
        if self.zero_points and not self.has_int4:
            raise ValueError("zero_points are for 4-bit weights: set weight_bits to 4")
        return self

    def uses_gptq(self, max_steps: int | None) -> bool:
        """Whether weights are rounded with GPTQ, given the number of training steps that follow."""
        is_auto = self.rounding == "auto" and self.has_int4 and max_steps == 0
        return is_auto or self.rounding == "gptq"

    @property
    def named(self) -> set[Format]:
        """The formats set explicitly for individual linears."""
        used_formats = {fmt for block in self.formats.values() for fmt in block.values()}
        return used_formats | ({self.head_format} if self.head_format else set())

    @property
    def has_int4(self) -> bool:
        """Whether any linear may be INT4."""
        # `int8` stands for another format, see `Format`, but never for one of 4 bits.
        return 4 in {self.weight_bits, *(FORMATS[x].bits for x in self.named - {"int8"})}


class CompressSettings(Settings):
    """Pruning, distillation and quantization. PaddleFleetX's group; `engine` and `Distill` are
    Lathe's own."""

    pretrained: str | None = Field(default=None, exclude=True)
    """Model to prune, quantize, analyze or evaluate, for commands that are not given one."""
    engine: Literal["torch", "paddle"] = "torch"
    """Backend that prunes, quantizes, analyzes, evaluates and exports: PyTorch, or PaddlePaddle
    with PaddleSlim, which has a separate environment."""
    Prune: PruneSettings = PruneSettings()
    """Pruning of layers, heads and FFN channels."""
    Distill: DistillSettings = DistillSettings()
    """Knowledge distillation from a teacher."""
    Quantization: QuantizationSettings = QuantizationSettings()
    """Quantization to INT8 or INT4."""


class SensitivitySettings(Settings):
    """Lathe's own group: how `lathe analyze` measures the cost of INT8 (or INT4, if `weight_bits`
    is 4) in each linear layer, and how much is acceptable."""

    mode: SensitivityMode = "ptq"
    """Method: `ptq` quantizes one linear layer at a time, `qat` returns one layer at a time of a
    quantized checkpoint to float, `fisher` estimates all layers at once from gradients and, with
    the metric `kl`, scales the estimates to the measured total."""
    metric: SensitivityMetric = "kl"
    """Cost metric: the loss or the KL divergence from the float model, in nats per token, or
    next-token accuracy."""
    calibration_batches: Positive = 8
    """Number of training micro-batches to calibrate activation ranges, also for `lathe
    quantize`."""
    eval_batches: Positive = 8
    """Number of validation micro-batches to measure the metric on."""
    budget: Annotated[float, Field(ge=0)] = 0.01
    """Maximum predicted cost of all quantized layers together, before training, in the unit of
    `metric`: nats per token, or next-token accuracy from 0 to 1."""
    max_skips: NonNegative = 7
    """Maximum number of linear layers to keep in float."""
    bits_per_weight: Annotated[float, Field(gt=0)] | None = None
    """Instead of `budget`: average number of bits that a weight of the analyzed layers may have,
    with scales of 32 bits, as in ONNX, and without zero points. The formats with the lowest
    predicted cost that keep to it are chosen."""

    @model_validator(mode="after")
    def _fisher_estimates_nats(self) -> "SensitivitySettings":
        if self.mode == "fisher" and self.metric == "accuracy":
            raise ValueError("mode fisher estimates nats per token: set metric to kl or loss")
        return self
