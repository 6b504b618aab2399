"""How a model is made smaller: pruning, distillation, quantization, and what INT8 may cost."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.types import (
    ActivationScales,
    BlockName,
    Factor,
    Format,
    LinearName,
    NonNegative,
    Positive,
    Probability,
)


class PruneSettings(Settings):
    """What `lathe prune` removes: whole layers first, then attention heads and FFN channels.

    PaddleFleetX's `enable`, `criterion` and `ratio`; the other keys are Lathe's own.
    """

    enable: bool | None = None
    """Whether this recipe may prune; False makes `lathe prune` refuse and `lathe compress` choose
    formats alone, and null means True."""
    criterion: Literal["l1_norm", "l2_norm", "fpgm", "activation", "taylor"] = "l1_norm"
    """How the importance of heads and channels is scored: by the mean absolute value of their
    weights, by their root mean square, by the distance to the others of the layer, by their
    activations, or by the estimated change of the loss without them."""
    ratio: Probability = 0.125
    """Share of the attention heads and FFN channels to remove; with `scope` global, of their
    parameters."""
    scope: Literal["uniform", "global"] = "uniform"
    """Where to remove them: the same share of every layer, or wherever it matters least in the
    whole model."""
    layers: NonNegative = 0
    """Whole layers to remove first, one after the other, each time the one that costs the least
    loss."""
    rounds: Positive = 1
    """Rounds of pruning and finetuning in which the ratio is reached; `Engine.max_steps` is
    divided among them."""
    head_unit: Literal["group", "query"] = "group"
    """What is removed as a head where query heads share keys and values: a key-value head with all
    its query heads (`group`), which shortens the cache too, or a query head of every group of a
    layer (`query`), which keeps all keys and values. Elsewhere a head is a group of one."""
    heads: list[NonNegative] = Field(default=[])
    """Attention heads that each layer keeps, as `head_unit` counts them, instead of `ratio`,
    `scope` and `layers`; 0 here and in `channels` removes the layer. With `query`, of every
    group."""
    channels: list[NonNegative] = Field(default=[])
    """FFN channels that each layer keeps; goes with `heads`."""
    channel_multiple: Positive = 1
    """FFN widths are rounded up to a multiple of this many channels."""
    calibration_batches: Positive = 16
    """Training micro-batches to calibrate on, for the criteria `activation` and `taylor` and for
    `layers`."""

    @model_validator(mode="after")
    def _widths_are_of_layers(self) -> "PruneSettings":
        pairs = list(zip(self.heads, self.channels, strict=False))
        if len(self.heads) != len(self.channels) or any((h > 0) != (c > 0) for h, c in pairs):
            raise ValueError("heads and channels have a number each for every layer, or 0 and 0")
        if pairs and (not any(self.heads) or self.layers or self.rounds > 1):
            raise ValueError("heads must keep a layer, and go without layers and with one round")
        return self


class DistillSettings(Settings):
    """Knowledge distillation while a pruned or quantized model is trained. Lathe's own group."""

    teacher: str | None = None
    """Folder of the teacher, a checkpoint or HF GPT-2 model, or `parent` for the model that the
    stage starts from; null trains without distillation."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the KL divergence from the teacher in the loss; the rest is cross-entropy."""
    temperature: Factor = 1.0
    """Temperature of both distributions in the KL divergence."""
    hidden: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight in the loss of the cosine distance between the last hidden states."""


class QuantizationSettings(Settings):
    """What `lathe quantize` makes INT8 or INT4, and how. PaddleFleetX's group; `quantize_embedding`
    and `group_size` are Lathe's own."""

    enable: bool | None = None
    """Whether this recipe may quantize; False makes `lathe quantize` refuse, and null means
    True."""
    weight_quantize_type: Literal["abs_max", "channel_wise_abs_max"] = "channel_wise_abs_max"
    """Scales of an INT8 weight whose input has a static scale: one for all of it, or one for each
    output channel."""
    activation_quantize_type: ActivationScales = "auto"
    """Scale of an INT8 linear's input. `moving_average_abs_max` is static, from a moving average of
    the largest absolute value, and reads prompts fastest. `dynamic` gives every token and group of
    `group_size` inputs a scale of its own when the model runs, as INT4 linears always do, and
    weights a scale in the same groups; pretrained models, which have a few tokens with huge
    activations, need it. `auto` measures what static scales cost on calibration text; where that is
    more than a tenth of what `Gate.max_perplexity_increase` allows, it gives as many layers dynamic
    ones as it takes to stay within that.
    `none` leaves activations in float and quantizes the weights alone: the file shrinks as much,
    and nothing is computed in integers."""
    smoothing: bool = True
    """Whether to move ranges of activations into weights (SmoothQuant) where that makes a linear's
    error smaller. It is done where weights have scales for groups of inputs, or static scales of
    activations would cost more than `auto` allows; torch engine."""
    prefix: Literal["auto", "none"] | Annotated[int, Field(ge=1, le=8)] = "auto"
    """Number of tokens whose keys and values, float constants, come before every text
    (PrefixQuant), so that the text's own first token has no massive activations; the longest text
    is that much shorter. Only for `activation_quantize_type: moving_average_abs_max`, where `auto`
    takes up to three: none if static scales cost little, else as long as each makes that cost a
    tenth smaller. `none` takes none. Torch engine, without tensor parallelism."""
    activation_preprocess_type: Literal["PACT"] | None = None
    """PACT clips activations at a bound that is learned; null does not clip."""
    moving_rate: Probability = 0.9
    """Weight of the past in the moving average of an activation's largest absolute value."""
    weight_bits: Literal[4, 8] = 8
    """Bits of a quantized weight. 4 bits halve the file once more and decode faster, but need
    training to stay as good; prompts are read more slowly."""
    group_size: Literal[32, 64, 128] = 64
    """Inputs that share a scale in an INT4 weight, and in dynamic INT8; smaller groups are more
    precise and larger in the file."""
    rounding: Literal["auto", "nearest", "gptq"] = "auto"
    """How the integers of a weight are first chosen: each nearest to its value, or with GPTQ, one
    column after the other so that later ones make up for the errors of earlier ones. `auto` takes
    GPTQ for weights of 4 bits that are not trained (`Engine.max_steps=0`), where it pays."""
    activation_bits: Literal[8] = 8
    """Bits of a quantized activation; it states a fact, there are no others."""
    freeze_embedding: bool = False
    """Whether to leave the token and position embeddings untrained."""
    quantize_embedding: bool = False
    """Whether to quantize the token embedding, which is also the output layer, and the position
    embedding, which has 8 bits."""
    skip_tensor_map: dict[BlockName, list[LinearName]] = Field(default={})
    """Linear layers to leave in float, by block: `{block_0: [qkv, linear2]}`."""
    formats: dict[BlockName, dict[LinearName, Format]] = Field(default={})
    """Formats of single linear layers, by block: `{block_0: {qkv: int8, linear2: float}}`; the
    others' is that of `weight_bits`. `int8` is the kind that `activation_quantize_type` says, and
    `static_int8`, `dynamic_int8` and `weight_only_int8` name one."""
    head_format: Format | None = None
    """Format of the output layer, which is the token embedding too; null means that of
    `weight_bits`."""

    @model_validator(mode="after")
    def _pact_clips_what_is_quantized(self) -> "QuantizationSettings":
        if self.activation_preprocess_type and self.activation_quantize_type == "none":
            raise ValueError(
                "activation_preprocess_type PACT clips activations that activation_quantize_type "
                "none leaves in float: leave it empty"
            )
        is_dynamic = self.activation_quantize_type == "dynamic" or "dynamic_int8" in self.named
        if self.activation_preprocess_type and is_dynamic:
            raise ValueError(
                "activation_preprocess_type PACT clips activations at one bound, but "
                "activation_quantize_type dynamic gives every token's groups scales of their own: "
                "leave it empty"
            )
        if self.activation_preprocess_type and self.has_int4:
            raise ValueError(
                "activation_preprocess_type PACT clips activations at one bound, but weight_bits 4 "
                "gives every token's groups scales of their own: leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _a_prefix_serves_static_scales(self) -> "QuantizationSettings":
        is_static = self.activation_quantize_type == "moving_average_abs_max"
        if isinstance(self.prefix, int) and (not is_static or self.weight_bits == 4):
            raise ValueError(
                f"prefix {self.prefix} is for static scales alone: set activation_quantize_type to "
                "moving_average_abs_max and weight_bits to 8, or prefix to none"
            )
        return self

    def uses_gptq(self, max_steps: int | None) -> bool:
        """Whether weights are rounded with GPTQ, if they are then trained for so many steps."""
        is_auto = self.rounding == "auto" and self.has_int4 and max_steps == 0
        return is_auto or self.rounding == "gptq"

    @property
    def named(self) -> set[Format]:
        """The formats that are named for single linears."""
        found = {form for block in self.formats.values() for form in block.values()}
        return found | ({self.head_format} if self.head_format else set())

    @property
    def has_int4(self) -> bool:
        """Whether a linear may be INT4."""
        return self.weight_bits == 4 or "int4" in self.named


class CompressSettings(Settings):
    """Pruning, distillation and quantization. PaddleFleetX's group; `engine` and `Distill` are
    Lathe's own.

    The model to compress is an argument of the stage; `pretrained` is ignored.
    """

    engine: Literal["torch", "paddle"] = "torch"
    """Engine that prunes, quantizes, analyzes, evaluates and exports: PyTorch, or PaddlePaddle
    with PaddleSlim, in an environment of its own."""
    Prune: PruneSettings = PruneSettings()
    """Removal of layers, heads and FFN channels."""
    Distill: DistillSettings = DistillSettings()
    """Teacher for the finetuning."""
    Quantization: QuantizationSettings = QuantizationSettings()
    """Quantization-aware training to INT8."""


class SensitivitySettings(Settings):
    """How `lathe analyze` measures what INT8 costs in each linear layer, or INT4 and INT8 where
    `weight_bits` is 4, and how much of it is acceptable. The group is Lathe's own."""

    mode: Literal["ptq", "qat", "fisher"] = "ptq"
    """Way to measure: `ptq` quantizes one linear layer at a time, `qat` takes one at a time of a
    quantized checkpoint back to float, `fisher` estimates all at once from gradients and, with the
    metric `kl`, scales that to what all together are measured to cost."""
    metric: Literal["loss", "accuracy", "kl"] = "kl"
    """What gets worse: the loss or the KL divergence from the float model, in nats a token, or the
    share of next tokens that are predicted right."""
    calibration_batches: Positive = 8
    """Training micro-batches that find the ranges of activations, in `lathe quantize` too."""
    eval_batches: Positive = 8
    """Validation micro-batches that the metric is measured on."""
    budget: Annotated[float, Field(ge=0)] = 0.01
    """Largest predicted cost of all quantized layers together, before they are trained, in the unit
    of `metric`: nats a token, or a share of next tokens from 0 to 1."""
    max_skips: NonNegative = 7
    """Largest number of linear layers to leave in float."""

    @model_validator(mode="after")
    def _fisher_estimates_nats(self) -> "SensitivitySettings":
        if self.mode == "fisher" and self.metric == "accuracy":
            raise ValueError("mode fisher estimates nats a token: set metric to kl or loss")
        return self
