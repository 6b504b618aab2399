"""How a model is trained: the batch, the loop, the architecture and the optimizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.types import NonNegative, Positive, Probability, Processes, Seed


class GlobalSettings(Settings):
    """The device, the seed and the batch size. The group and its keys are PaddleFleetX's.

    With `global_batch_size` = `local_batch_size` x data-parallel ranks (`dp_degree` x
    `sharding_degree`), either of the two sizes may be left empty, or both.
    """

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to compute on; `auto` takes a GPU where there is one."""
    seed: Seed = 1024
    """Seed of the initial weights, the order of the samples, dropout and sampling."""
    global_batch_size: Positive | None = None
    """Sequences of one update, over all data-parallel ranks; null computes it from
    `local_batch_size`."""
    local_batch_size: Positive | None = None
    """Sequences of one update on one data-parallel rank; null divides `global_batch_size` among
    the ranks, or takes `accumulate_steps` micro-batches where that is null too."""
    micro_batch_size: Positive = 1
    """Sequences of one forward and backward pass; it has to divide the local batch. Calibration
    and sensitivity analysis use batches of this size too."""


class MixPrecision(Settings):
    """The precision of the forward and backward pass; the optimizer keeps float32 weights.

    The group is PaddleFleetX's, whose `enable` and `use_pure_fp16` are understood as well.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the forward and backward pass."""
    level: Literal["O1", "O2"] = "O1"
    """O1 casts operations where it is safe (autocast); O2, "pure", computes everything in `dtype`,
    on copies of the float32 weights. The Paddle engine always trains at O1."""
    scale_loss: Annotated[float, Field(gt=0, le=2.0**40)] = 32768.0
    """Loss scale for float16, or the value where dynamic scaling starts; other types ignore it."""
    use_dynamic_loss_scaling: bool = True
    """Whether the float16 loss scale is halved after an overflow and doubled after 2,000 updates
    without one."""

    @property
    def is_pure(self) -> bool:
        """Whether everything is computed in `dtype`."""
        return self.level == "O2" and self.dtype != "float32"


class SaveLoad(Settings):
    """How often the training state is saved. PaddleFleetX's group; `save_minutes`,
    `keep` and `keep_final` are Lathe's own."""

    save_steps: Positive = 1000
    """Updates between two saved states; one more is saved after the last update and when the run
    is told to stop."""
    save_minutes: Annotated[float, Field(gt=0)] = 5.0
    """Minutes after which the state is saved anyway: the most that a killed run loses."""
    keep: Positive = 2
    """Saved states to keep; older ones are deleted."""
    keep_final: bool = False
    """Whether the last state stays in the output after the training, 12 bytes a parameter, so that
    the same command with a larger `max_steps` extends it."""


class EngineSettings(Settings):
    """The training loop. PaddleFleetX's group; `compile` is Lathe's own."""

    max_steps: NonNegative = 500000
    """Updates to train for; 0 leaves a pruned or quantized model as it is, without training. A run
    that was interrupted, or finished with `save_load.keep_final`, can be extended by a larger
    number, with which the decay of the learning rate may become longer."""
    accumulate_steps: Positive | None = None
    """Micro-batches of one update; null computes `local_batch_size` / `micro_batch_size`."""
    logging_freq: Positive = 1
    """Updates between two lines of the log."""
    eval_freq: Positive = 500
    """Updates between two validations; there is always one after the last update."""
    eval_iters: Positive = 10
    """Batches of each validation, the same ones every time: so many times `global_batch_size`
    sequences, whatever the micro-batch size, as in Megatron-LM."""
    compile: bool = False
    """Whether to compile the Transformer blocks with `torch.compile`; the Paddle engine never
    does."""
    mix_precision: MixPrecision = MixPrecision()
    """Precision of the forward and backward pass."""
    save_load: SaveLoad = SaveLoad()
    """Saved training states, from which a stopped run goes on."""


class ModelSettings(Settings):
    """The architecture of a model trained from scratch, and how its activations are handled.

    A stage that starts from a checkpoint takes the shape from there, and from here dropout,
    recomputation, `sequence_parallel` and `virtual_pp_degree`. PaddleFleetX's group;
    `scale_residual_init` is Lathe's own, and so is what the families other than GPT-2 add, whose
    keys are Hugging Face's.
    """

    architecture: Literal[
        "gpt2",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
        "gemma3_text",
        "phi3",
        "olmo2",
        "starcoder2",
        "gpt_neox",
        "opt",
    ] = "gpt2"
    """Family of the model, by Hugging Face's name. Most have rotary positions, RMSNorm and a gated
    feed-forward layer; `qwen2` has biases on queries, keys and values, `qwen3` norms of queries and
    keys. The guide to model families lists what the others have."""
    vocab_size: Positive | None = 50304
    """Rows of the token embedding; null pads the data's vocabulary to a multiple of 128."""
    hidden_size: Positive = 1024
    """Width of the residual stream; it has to be a multiple of `num_attention_heads` unless
    `head_dim` is given."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = 24
    """Number of Transformer blocks."""
    num_attention_heads: Positive = 16
    """Attention heads of each block."""
    num_key_value_heads: Positive | None = None
    """Key-value heads of each block, each shared by as many attention heads; null gives every
    attention head its own. Not for `gpt2`."""
    head_dim: Positive | None = None
    """Width of an attention head; null stands for `hidden_size` / `num_attention_heads`. Not for
    `gpt2`."""
    ffn_hidden_size: Positive | None = None
    """Width of the feed-forward layer; null stands for 4 x `hidden_size`."""
    hidden_dropout_prob: Probability = 0.1
    """Dropout probability on the embeddings and the residual branches during training."""
    attention_probs_dropout_prob: Probability = 0.1
    """Dropout probability on the attention weights during training."""
    max_position_embeddings: Positive = 1024
    """Longest sequence the model can take, in tokens."""
    sliding_window: Positive | None = None
    """Number of tokens that attention sees in the layers that have a window; null stands for 4096
    in `gemma3_text`, and for all tokens in the others. Not for `gpt2`, `llama`,
    `olmo2`, `gpt_neox` and `opt`."""
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] | None = None
    """Base of the frequencies of rotary positions; null stands for the family's, which is 10000 in
    most. Not for `gpt2` and `opt`, whose positions are learned."""
    rope_scaling: dict[str, str | float] = Field(default={})
    """How those frequencies are changed for longer texts, in Hugging Face's words:
    `{rope_type: linear, factor: 2}`, or `llama3` with `factor`, `low_freq_factor`,
    `high_freq_factor` and `original_max_position_embeddings`. Not for `gpt2`."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a head's features that is rotated; null stands for all. Not for `gpt2`."""
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Number added to the mean square in RMSNorm; null stands for 1e-6. Not for `gpt2`, which has
    LayerNorm with 1e-5."""
    tie_word_embeddings: bool | None = None
    """Whether the output layer is the token embedding; null stands for yes in `gpt2`, where it has
    to be, and for no in the others."""
    initializer_range: Annotated[float, Field(gt=0, le=100)] = 0.02
    """Standard deviation of the normal distribution that initial weights are drawn from."""
    scale_residual_init: bool = False
    """Whether to divide that deviation by sqrt(2 x `num_layers`) for the projections into the
    residual stream, as Megatron-LM and GPT-2 do."""
    use_recompute: bool = False
    """Whether to recompute activations in the backward pass rather than keep them, which saves
    memory and costs time."""
    recompute_granularity: Literal["full", "full_attn", "core_attn"] | None = None
    """What `use_recompute` recomputes: the whole block (`full`, and null), its attention
    (`full_attn`), or only the scaled dot-product attention (`core_attn`)."""
    sequence_parallel: bool = False
    """Whether the ranks of tensor parallelism also divide the activations between the linear
    layers along the sequence."""
    virtual_pp_degree: Processes = 1
    """Stages that each pipeline rank holds (interleaved schedule); more than 1 needs a
    `pp_degree` above 1."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "ModelSettings":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def recompute(self) -> Literal["full", "full_attn", "core_attn"] | None:
        """What is recomputed in the backward pass, or None."""
        return (self.recompute_granularity or "full") if self.use_recompute else None


class LearningRate(Settings):
    """Linear warm-up, then half a cosine down to `min_lr`, then constant. PaddleFleetX's group."""

    name: Literal["CosineAnnealingWithWarmupDecay"] = "CosineAnnealingWithWarmupDecay"
    """Name of the only schedule there is; it states a fact and changes nothing."""
    decay_steps: NonNegative = 360000
    """Update at which the learning rate reaches `min_lr`; warm-up is included."""
    warmup_rate: Probability = 0.01
    """Length of the warm-up, as a share of `decay_steps`."""
    max_lr: Annotated[float, Field(gt=0, le=1e38)] = 5.0e-5
    """Peak learning rate after warm-up."""
    min_lr: Annotated[float, Field(ge=0)] = 1.0e-5
    """Learning rate after the decay; at most `max_lr`."""

    @model_validator(mode="after")
    def _min_below_max(self) -> "LearningRate":
        if self.min_lr > self.max_lr:
            raise ValueError(f"min_lr {self.min_lr} is above max_lr {self.max_lr}: swapped?")
        return self

    @property
    def warmup_steps(self) -> float:
        """Update after which the rate falls."""
        return self.warmup_rate * self.decay_steps


class GradClip(Settings):
    """Gradient clipping. PaddleFleetX's group."""

    name: Literal["ClipGradByGlobalNorm"] = "ClipGradByGlobalNorm"
    """Name of the only method there is; it states a fact and changes nothing."""
    clip_norm: Annotated[float, Field(gt=0, le=1e38)] = 1.0
    """Largest L2 norm of all gradients together; larger gradients are scaled down to it."""


class OptimizerSettings(Settings):
    """AdamW. PaddleFleetX's group, whose `adam_beta1` and so on are understood as well."""

    name: Literal["FusedAdamW", "AdamW"] = "FusedAdamW"
    """Name of the optimizer; both mean the same AdamW, so that it changes nothing."""
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.01
    """Decoupled weight decay; there is none on biases, layer norms and PACT bounds."""
    beta1: Probability = 0.9
    """Decay rate of the running mean of gradients."""
    beta2: Probability = 0.999
    """Decay rate of the running mean of squared gradients."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1.0e-8
    """Number added to the denominator of an update, against division by zero."""
    lr: LearningRate = LearningRate()
    """Schedule of the learning rate."""
    grad_clip: GradClip = GradClip()
    """Clipping of gradients."""
