"""The typed settings of every stage, in the groups and key names of PaddleFleetX.

`Launch`, `Prepare`, `Sensitivity`, `Export`, `Serving`, `Gate` and `Production` are Lathe's own
groups.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
BlockName = Annotated[str, Field(pattern=r"^block_\d+$")]


def _split_numbers(value: Any) -> Any:
    return [float(part) for part in value.split(",")] if isinstance(value, str) else value


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, values: Any) -> Any:
        """`dp_degree:` with no value is YAML's null: the default, unless null has a meaning."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if value is not None
            or key not in fields
            or type(None) in get_args(fields[key].annotation)
        }


class GlobalSettings(Settings):
    device: Literal["auto", "cpu", "gpu"] = "auto"
    seed: NonNegative = 1024
    global_batch_size: Positive | None = None
    local_batch_size: Positive | None = None
    micro_batch_size: Positive = 1


class MixPrecision(Settings):
    """What the forward and backward pass compute in; the optimizer keeps float32 weights.

    `level` O1 casts where it is safe (autocast); O2, "pure", computes all of it in `dtype`, on
    copies of the weights. `scale_loss` is the loss scale of float16, or where a dynamic one starts.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    level: Literal["O1", "O2"] = "O1"
    scale_loss: Annotated[float, Field(gt=0)] = 32768.0
    use_dynamic_loss_scaling: bool = True

    @property
    def is_pure(self) -> bool:
        return self.level == "O2" and self.dtype != "float32"


class SaveLoad(Settings):
    save_steps: Positive = 1000
    keep: Positive = 2


class EngineSettings(Settings):
    max_steps: Positive = 500000
    accumulate_steps: Positive | None = None
    logging_freq: Positive = 1
    eval_freq: Positive = 500
    eval_iters: Positive = 10
    compile: bool = False
    mix_precision: MixPrecision = MixPrecision()
    save_load: SaveLoad = SaveLoad()


class Dataset(Settings):
    input_dir: str | None = None
    split: Annotated[
        tuple[float, float, float], Field(strict=False), BeforeValidator(_split_numbers)
    ] = (949.0, 50.0, 1.0)
    max_seq_len: Positive = 1024

    @model_validator(mode="after")
    def _split_is_a_proportion(self) -> "Dataset":
        if min(self.split) < 0 or sum(self.split) <= 0:
            raise ValueError(f"split {self.split} must be three non-negative numbers, not all zero")
        return self


class DataPart(Settings):
    dataset: Dataset = Dataset()


class DataSettings(Settings):
    Train: DataPart = DataPart()
    Eval: DataPart = DataPart()

    @model_validator(mode="after")
    def _one_split(self) -> "DataSettings":
        if "split" not in self.Eval.dataset.model_fields_set:
            split = {"split": self.Train.dataset.split}
            self.Eval = DataPart(dataset=self.Eval.dataset.model_copy(update=split))
        if self.Train.dataset.split != self.Eval.dataset.split:
            raise ValueError(
                f"Train.dataset.split {self.Train.dataset.split} and Eval.dataset.split "
                f"{self.Eval.dataset.split} differ: validation would see training documents"
            )
        return self


class PrepareSettings(Settings):
    source: str = "python"
    text_key: str = "text"
    tokenizer: str = "train"
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    format: Literal["megatron", "paddle"] = "megatron"
    cloze_examples: Positive = 1000
    heldout_characters: Positive = 500_000
    num_workers: NonNegative = 0


class ModelSettings(Settings):
    vocab_size: Positive | None = 50304
    hidden_size: Positive = 1024
    num_layers: Positive = 24
    num_attention_heads: Positive = 16
    ffn_hidden_size: Positive | None = None
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: Positive = 1024
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    scale_residual_init: bool = False
    use_recompute: bool = False
    recompute_granularity: Literal["full", "full_attn", "core_attn"] | None = None
    sequence_parallel: bool = False
    virtual_pp_degree: Positive = 1

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "ModelSettings":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def recompute(self) -> Literal["full", "full_attn", "core_attn"] | None:
        return (self.recompute_granularity or "full") if self.use_recompute else None


class Sharding(Settings):
    sharding_degree: Positive = 1
    sharding_stage: Literal[1, 2, 3] = 1
    sharding_offload: bool = False


class DistributedSettings(Settings):
    dp_degree: Positive | Literal["auto"] = "auto"
    mp_degree: Positive = 1
    pp_degree: Positive = 1
    sharding: Sharding = Sharding()
    grace_seconds: Positive = 30


class LaunchSettings(Settings):
    """The machines that training runs on.

    Several `nodes` are groups of processes on this machine or, within a cluster, the pods of a
    Kubeflow TrainJob, which all other settings are about: `gpus_per_node` (0: processes on the
    CPU), `node_pool` (value of the node label lathe/node-pool), `runtime` (a
    ClusterTrainingRuntime; null: that of the engine that trains), `queue` (a Kueue LocalQueue),
    `priority` (within the queue: a WorkloadPriorityClass), `memory_per_node`, of which
    `shared_memory` is a part, `deadline_hours` from the launcher's start, waiting included, and
    `restarts` after failures of our own; a preemption is not one.
    """

    nodes: Positive = 1
    gpus_per_node: NonNegative = 0
    node_pool: str | None = None
    runtime: str | None = None
    cpus_per_node: Positive = 4
    memory_per_node: str = "32Gi"
    shared_memory: str = "8Gi"
    queue: str | None = None
    priority: str | None = None
    deadline_hours: Annotated[float, Field(gt=0)] = 240.0
    restarts: NonNegative = 2


class LearningRate(Settings):
    name: Literal["CosineAnnealingWithWarmupDecay"] = "CosineAnnealingWithWarmupDecay"
    decay_steps: Positive = 360000
    warmup_rate: Probability = 0.01
    max_lr: Annotated[float, Field(gt=0)] = 5.0e-5
    min_lr: Annotated[float, Field(ge=0)] = 1.0e-5

    @model_validator(mode="after")
    def _min_below_max(self) -> "LearningRate":
        if self.min_lr > self.max_lr:
            raise ValueError(f"min_lr {self.min_lr} is above max_lr {self.max_lr}: swapped?")
        return self


class GradClip(Settings):
    name: Literal["ClipGradByGlobalNorm"] = "ClipGradByGlobalNorm"
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class OptimizerSettings(Settings):
    name: Literal["FusedAdamW", "AdamW"] = "FusedAdamW"
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Probability = 0.9
    beta2: Probability = 0.999
    epsilon: Annotated[float, Field(gt=0)] = 1.0e-8
    lr: LearningRate = LearningRate()
    grad_clip: GradClip = GradClip()


class PruneSettings(Settings):
    """`ratio` of heads and FFN channels goes: of every layer (`uniform`), or of the whole model,
    where it matters least (`global`). `layers` are removed whole, before. With `rounds` the ratio
    is reached in as many steps, `Engine.max_steps` of finetuning divided among them."""

    enable: bool = False
    criterion: Literal["l1_norm", "l2_norm", "fpgm", "activation", "taylor"] = "l1_norm"
    ratio: Probability = 0.125
    scope: Literal["uniform", "global"] = "uniform"
    layers: NonNegative = 0
    rounds: Positive = 1
    channel_multiple: Positive = 1
    calibration_batches: Positive = 16


class DistillSettings(Settings):
    """`teacher`: a checkpoint or HF GPT-2 folder, or `parent` for the model that the stage was
    given; empty: none. `alpha` is the share of the teacher's distribution in the loss, `hidden` the
    weight of its hidden states."""

    teacher: str | None = None
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0)] = 1.0
    hidden: Annotated[float, Field(ge=0)] = 0.0


class QuantizationSettings(Settings):
    enable: bool = False
    weight_quantize_type: Literal["abs_max", "channel_wise_abs_max"] = "channel_wise_abs_max"
    activation_quantize_type: Literal["moving_average_abs_max"] = "moving_average_abs_max"
    activation_preprocess_type: Literal["PACT"] | None = None
    moving_rate: Probability = 0.9
    weight_bits: Literal[4, 8] = 8
    activation_bits: Literal[8] = 8
    freeze_embedding: bool = False
    quantize_embedding: bool = False
    skip_tensor_map: dict[BlockName, list[Literal["qkv", "out", "linear1", "linear2"]]] = {}


class CompressSettings(Settings):
    """`engine`: what prunes, quantizes, analyzes, evaluates and exports; `paddle` is PaddlePaddle
    with PaddleSlim, in an environment of its own."""

    engine: Literal["torch", "paddle"] = "torch"
    pretrained: str | None = None
    Prune: PruneSettings = PruneSettings()
    Distill: DistillSettings = DistillSettings()
    Quantization: QuantizationSettings = QuantizationSettings()


class SensitivitySettings(Settings):
    """How to find what INT8 costs in each linear, and how much of it to bear.

    `mode` ptq quantizes one linear at a time, qat starts from a quantized checkpoint and takes one
    at a time back to float, fisher estimates all at once from gradients. `budget` is in the unit
    of `metric`: nats a token (loss, kl), or a share of next tokens from 0 to 1 (accuracy).
    """

    mode: Literal["ptq", "qat", "fisher"] = "ptq"
    metric: Literal["loss", "accuracy", "kl"] = "kl"
    calibration_batches: Positive = 8
    eval_batches: Positive = 8
    budget: Annotated[float, Field(ge=0)] = 0.01
    max_skips: NonNegative = 7

    @model_validator(mode="after")
    def _fisher_estimates_nats(self) -> "SensitivitySettings":
        if self.mode == "fisher" and self.metric == "accuracy":
            raise ValueError("mode fisher estimates nats a token: set metric to kl or loss")
        return self


class GenerationSettings(Settings):
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = "sampling"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: NonNegative = 50
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.75
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    min_dec_len: NonNegative = 1
    max_dec_len: Positive = 200
    num_return_sequences: Positive = 1
    num_beams: Annotated[int, Field(ge=2)] = 4
    length_penalty: float = 1.0


class OfflineEvalSettings(Settings):
    eval_path: str | None = None
    cloze_eval: bool = True
    overlapping_eval: Positive = 32
    batch_size: Positive = 8
    max_seq_len: Positive = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"


class ExportSettings(Settings):
    opset: Annotated[int, Field(ge=20, le=22)] = 21
    dtype: Literal["float32", "float16"] = "float32"
    prompts: Positive = 64
    new_tokens: Positive = 24
    tolerance: Annotated[float, Field(gt=0)] = 1e-3


class ServingSettings(Settings):
    model_name: str = "gpt"
    http_port: NonNegative = 8000
    grpc_port: NonNegative = 8001
    metrics_port: NonNegative = 8002
    max_running: Positive = 8
    max_queue: Positive = 64
    threads: NonNegative = 0


class GateSettings(Settings):
    max_accuracy_drop: Annotated[float, Field(ge=0)] = 0.02
    max_perplexity_increase: Annotated[float, Field(ge=0)] = 0.10
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    on_inconclusive: Literal["pass", "fail"] = "pass"


class ProductionSettings(Settings):
    """Where models go live, and what a release must stand before it does.

    `releases` is an address in an object store, `s3://bucket/prefix`. A burst of `burst_clients`,
    each asking again when it is answered, goes on for `burst_seconds`; the 99th percentiles are
    those of its requests. `deployment` null: there is none to roll.
    """

    releases: str | None = None
    burst_seconds: Annotated[float, Field(gt=0)] = 10.0
    burst_clients: Positive = 8
    p99_first_token_ms: Annotated[float, Field(gt=0)] = 2000.0
    p99_between_tokens_ms: Annotated[float, Field(gt=0)] = 500.0
    namespace: str = "lathe"
    deployment: str | None = "lathe-serve"
    rollout_seconds: Annotated[float, Field(gt=0)] = 900.0


class Recipe(Settings):
    """All settings of a run; a stage reads the groups it needs."""

    Global: GlobalSettings = GlobalSettings()
    Engine: EngineSettings = EngineSettings()
    Prepare: PrepareSettings = PrepareSettings()
    Data: DataSettings = DataSettings()
    Model: ModelSettings = ModelSettings()
    Distributed: DistributedSettings = DistributedSettings()
    Launch: LaunchSettings = LaunchSettings()
    Optimizer: OptimizerSettings = OptimizerSettings()
    Compress: CompressSettings = CompressSettings()
    Sensitivity: SensitivitySettings = SensitivitySettings()
    Generation: GenerationSettings = GenerationSettings()
    Offline_Eval: OfflineEvalSettings = OfflineEvalSettings()
    Export: ExportSettings = ExportSettings()
    Serving: ServingSettings = ServingSettings()
    Gate: GateSettings = GateSettings()
    Production: ProductionSettings = ProductionSettings()
