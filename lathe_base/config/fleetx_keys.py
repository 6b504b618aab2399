"""What becomes of every key of PaddleFleetX's GPT configurations.

Three layouts are covered: release 2.4 and later (`ppfleetx/configs`), `examples/`, where the keys
of `Engine` are under `Global`, and the first one, with `Data.batch_size`, `Data.dataset` and a
top-level `Quantization`. A row also stands for the keys below its own. `docs/reference/fleetx.md`
is generated from these rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lathe_base.config.settings.types import MAX_INT32


@dataclass(frozen=True)
class Same:
    """A setting of Lathe under the same name and with the same meaning."""


@dataclass(frozen=True)
class Moved:
    """The same setting under another name."""

    to: str


@dataclass(frozen=True)
class Location:
    """A file or folder that a command uses unless an option or argument names one."""

    option: str


@dataclass(frozen=True)
class Translated:
    """A value that is written differently."""

    how: str


@dataclass(frozen=True)
class Ignored:
    """A key that changes no number."""

    why: str


@dataclass(frozen=True)
class Only:
    """A key with one meaning in Lathe: values that ask for it are accepted, others refused."""

    accepts: Callable[[Any], bool]
    accepted: str
    otherwise: str


@dataclass(frozen=True)
class Refused:
    """A key that changes numbers in a way that Lathe does not support."""

    why: str


Fate = Same | Moved | Location | Translated | Ignored | Only | Refused

KERNEL = "a faster kernel with the same result; Lathe chooses its kernels itself"
OVERLAP = "when data is exchanged, not what; Lathe overlaps communication where it can"
LOADER = "how batches are read and collated"
LOGGING = "how often progress is printed"
BUFFERS = "one buffer for all parameters; the updates are the same"
NEVER_TESTED = "a test pass during training; `lathe evaluate` measures the test documents"
MIXTURE = "mixture-of-experts models are not supported"
GLUE = "finetuning a classifier, as on GLUE, is not supported"
PRECISION = (
    "the loss is computed in float32, as with the published lists; lists with other operators are "
    "not supported"
)
FLOAT32_OPS = {
    *("reduce_sum", "reduce_mean", "elementwise_div", "where"),
    "c_softmax_with_cross_entropy",
}
FLOAT16_OPS = {"lookup_table", "lookup_table_v2"}


def one_of(*values: Any) -> Callable[[Any], bool]:
    """A check whether a value is one of these, or empty; True is not 1."""
    return lambda setting: (
        setting in (None, "None")
        or any(type(setting) is type(value) and setting == value for value in values)
    )


def _within(names: set[str]) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, list) and {*map(str, value)} <= names)


_ENGINE = (
    *("max_steps", "accumulate_steps", "logging_freq", "eval_freq", "eval_iters", "mix_precision"),
    *("save_load", "num_train_epochs", "run_mode", "test_iters"),
)
_DATA: dict[str, Fate] = {
    "collate_fn": Ignored(LOADER),
    "loader": Ignored(LOADER),
    "sample_split": Ignored("which inputs of a batch are labels"),
    "sampler.shuffle": Only(
        one_of(False), "False", "samples are drawn once, in Megatron-LM's order, by Global.seed"
    ),
    "sampler": Ignored("a step has a whole batch, of the sizes in `Global`"),
    "dataset.name": Only(
        one_of("GPTDataset", "LM_Eval_Dataset", "Lambada_Eval_Dataset"),
        "GPTDataset, LM_Eval_Dataset or Lambada_Eval_Dataset",
        GLUE,
    ),
    "dataset.max_seq_len": Same(),
    "dataset.split": Same(),
    "dataset.input_dir": Location("--data"),
    "dataset.max_length": Refused(GLUE),
    "dataset.root": Refused(GLUE),
}

KEYS: dict[str, Fate] = {
    # --- batch, device, loop ---
    "Global.device": Same(),
    "Global.seed": Same(),
    "Global.global_batch_size": Same(),
    "Global.local_batch_size": Same(),
    "Global.micro_batch_size": Same(),
    **{f"Global.{key}": Moved(f"Engine.{key}") for key in _ENGINE},
    "Engine.max_steps": Translated("the same setting; -1 is 0: nothing is trained"),
    "Engine.run_mode": Only(
        one_of("step"), "`step`", "training by epochs, as in finetuning on GLUE, is not supported"
    ),
    "Engine.num_train_epochs": Only(
        one_of(1, -1), "1", "Engine.max_steps says how long to train, over any number of epochs"
    ),
    "Engine.accumulate_steps": Same(),
    "Engine.logging_freq": Same(),
    "Engine.eval_freq": Translated(
        f"the same setting; -1, never, is {MAX_INT32}, which no training reaches"
    ),
    "Engine.eval_iters": Translated("the same setting; -1 is the default"),
    "Engine.test_iters": Ignored(NEVER_TESTED),
    "Engine.use_recompute": Moved("Model.use_recompute"),
    "Engine.mix_precision.enable": Translated(
        "True is float16 at O2 unless `dtype` and `level` say otherwise; False is float32"
    ),
    "Engine.mix_precision.use_pure_fp16": Translated("True is float16 at O2, False float32 at O1"),
    "Engine.mix_precision.dtype": Same(),
    "Engine.mix_precision.level": Translated("the same setting; `o2` is `O2`"),
    "Engine.mix_precision.scale_loss": Same(),
    "Engine.mix_precision.custom_black_list": Only(
        _within(FLOAT32_OPS), f"[{', '.join(sorted(FLOAT32_OPS))}]", PRECISION
    ),
    "Engine.mix_precision.custom_white_list": Only(
        _within(FLOAT16_OPS), f"[{', '.join(sorted(FLOAT16_OPS))}]", PRECISION
    ),
    "Engine.mix_precision.use_fp16_guard": Only(
        one_of(False), "False", "the whole model is cast to float16, not a part that code marks"
    ),
    "Engine.save_load.save_steps": Translated(
        f"the same setting; -1, never, is {MAX_INT32}, which no training reaches"
    ),
    "Engine.save_load.save_epoch": Ignored("the end of an epoch is no special step"),
    "Engine.save_load.output_dir": Location(
        "--output of `pretrain`, `prune` and `quantize`, and of `export` unless it is the model's "
        "own folder"
    ),
    "Engine.save_load.ckpt_dir": Location(
        "the model of `evaluate`, `analyze`, `export` and `generate`; a training resumes from its "
        "own --output, so that another folder is refused there"
    ),
    # --- data ---
    "Data.batch_size": Moved("Global"),
    "Data.dataset": Translated("`Data.Train.dataset` and `Data.Eval.dataset`"),
    **{f"Data.{part}.{key}": fate for part in ("Train", "Eval") for key, fate in _DATA.items()},
    "Data.Eval.dataset.overlapping_eval": Moved("Offline_Eval.overlapping_eval"),
    "Data.Test": Ignored(NEVER_TESTED),
    # --- model ---
    **{
        f"Model.{key}": Same()
        for key in (
            *("vocab_size", "vocab_size_divisible_unit", "hidden_size", "num_layers"),
            *("num_attention_heads", "ffn_hidden_size", "hidden_dropout_prob"),
            *("attention_probs_dropout_prob", "max_position_embeddings", "initializer_range"),
            *("use_recompute", "recompute_granularity", "sequence_parallel", "virtual_pp_degree"),
        )
    },
    "Model.max_seq_len": Ignored("the length is `Data.Train.dataset.max_seq_len`"),
    "Model.module": Only(
        one_of(
            *("GPTModule", "GPTModuleAuto", "GPTEvalModule", "GPTGenerationModule"),
            *("GPTEvalModuleAuto", "GPTGenerationModuleAuto"),
        ),
        "GPTModule, GPTEvalModule or GPTGenerationModule, with or without Auto",
        "mixture-of-experts models and classifiers, as for GLUE, are not supported",
    ),
    "Model.name": Ignored("the tokenizer is that of the data and of the model's folder"),
    "Model.type_vocab_size": Ignored("GPT has no token types; no parameter has this size"),
    "Model.fused_linear": Ignored(KERNEL),
    "Model.fuse_attn_qkv": Ignored(KERNEL),
    "Model.use_flash_attn": Ignored(KERNEL),
    "Model.fused_softmax_with_triangular": Ignored(KERNEL),
    "Model.no_recompute_layers": Ignored("which activations are stored, not their values"),
    "Model.scale_qk_by_layer_num": Ignored(
        "queries are divided by the number of layers and scores multiplied by it again before the "
        "softmax: the same result, in float16 with one more rounding. It prevents no overflow, "
        "because the scores are float16 after the multiplication; Lathe's attention keeps them in "
        "float32"
    ),
    "Model.pretrained": Location("--init of `pretrain`, the model of `prune` and `quantize`"),
    "Model.num_experts": Only(one_of(1, [1]), "1", MIXTURE),
    **{
        f"Model.{key}": Refused(MIXTURE)
        for key in (
            *("balance_loss_weight", "enable_expert_tensor_parallelism", "expert_interval"),
            *("moe_eval_capacity_factor", "moe_min_capacity", "moe_token_dropping"),
            *("moe_train_capacity_factor", "moe_use_residual", "topk"),
        )
    },
    "Model.num_classes": Refused(GLUE),
    "Model.loss": Refused(GLUE),
    "Model.metric": Refused(GLUE),
    # --- layout ---
    "Distributed.dp_degree": Same(),
    "Distributed.mp_degree": Same(),
    "Distributed.pp_degree": Same(),
    "Distributed.fuse_sequence_parallel_allreduce": Ignored(OVERLAP),
    "Distributed.sharding.sharding_degree": Same(),
    "Distributed.sharding.sharding_stage": Same(),
    "Distributed.sharding.sharding_offload": Same(),
    "Distributed.sharding.comm_overlap": Ignored(OVERLAP),
    "Distributed.sharding.reduce_overlap": Ignored(OVERLAP),
    "Distributed.sharding.broadcast_overlap": Ignored(OVERLAP),
    "Tuning": Ignored("a search for the fastest layout; `lathe plan` finds it"),
    # --- optimizer ---
    "Optimizer.name": Translated(
        "`FusedAdamW` leaves biases and norms out of weight decay, `AdamW` decays every parameter, "
        "as there; `Adam` of the first layout is `FusedAdamW`, because its trainer read no name. "
        "`Adam` of later layouts is refused: its weight decay is part of the gradient"
    ),
    "Optimizer.weight_decay": Same(),
    "Optimizer.beta1": Same(),
    "Optimizer.beta2": Same(),
    "Optimizer.epsilon": Same(),
    "Optimizer.adam_beta1": Moved("Optimizer.beta1"),
    "Optimizer.adam_beta2": Moved("Optimizer.beta2"),
    "Optimizer.adam_epsilon": Moved("Optimizer.epsilon"),
    "Optimizer.multi_precision": Ignored("the optimizer's weights are always float32"),
    "Optimizer.tensor_fusion": Ignored(BUFFERS),
    "Optimizer.grad_clip": Translated(
        "a plain number is `Optimizer.grad_clip.clip_norm`; 0 disables clipping"
    ),
    "Optimizer.grad_clip.name": Same(),
    "Optimizer.grad_clip.clip_norm": Same(),
    "Optimizer.lr.name": Translated("`consine` is `CosineAnnealingWithWarmupDecay`"),
    "Optimizer.lr.decay_steps": Translated("the same setting; empty is `Engine.max_steps`"),
    "Optimizer.lr.warmup_rate": Same(),
    "Optimizer.lr.max_lr": Same(),
    "Optimizer.lr.min_lr": Same(),
    "Optimizer.lr.use_increments": Only(
        one_of(True),
        "True, which counts samples of a decay that is multiplied by the batch: updates",
        "the original then never leaves its first learning rate, which is 0 with warm-up",
    ),
    "Optimizer.lr.run_mode": Only(one_of("step"), "`step`", "the schedule counts updates"),
    "Optimizer.lr.learning_rate": Refused(f"the schedule LinearDecayWithWarmup: {GLUE}"),
    "Optimizer.lr.warmup": Refused(f"the schedule LinearDecayWithWarmup: {GLUE}"),
    "Gradclip.grad_clip": Moved("Optimizer.grad_clip.clip_norm"),
    "Gradclip.name": Ignored("gradients are clipped by their global norm"),
    "Fused": Ignored(BUFFERS),
    "FusedPasses": Ignored(KERNEL),
    "Profiler": Ignored("a trace of operators"),
    # --- compression ---
    "Prune": Moved("Compress.Prune"),
    "Quantization": Moved("Compress.Quantization"),
    "Compress.pretrained": Location("the model of `prune`, `quantize`, `analyze` and `evaluate`"),
    "Compress.Prune.enable": Same(),
    "Compress.Prune.criterion": Same(),
    "Compress.Prune.ratio": Same(),
    **{
        f"Compress.Quantization.{key}": Same()
        for key in (
            *("enable", "weight_quantize_type", "activation_quantize_type"),
            *("activation_preprocess_type", "weight_bits", "activation_bits", "moving_rate"),
            *("freeze_embedding", "skip_tensor_map"),
        )
    },
    "Compress.Quantization.channel_wise_abs_max": Translated(
        "True is `weight_quantize_type: channel_wise_abs_max`, False `abs_max`"
    ),
    "Compress.Quantization.quantizable_layer_type": Only(
        lambda value: value is None or (isinstance(value, list) and "Linear" in value),
        "a list with Linear",
        "all linears of the blocks are quantized but those in Compress.Quantization."
        "skip_tensor_map",
    ),
    "Compress.Quantization.weight_preprocess_type": Only(
        one_of(), "empty", "weights are not preprocessed"
    ),
    "Compress.Quantization.is_full_quantize": Only(
        one_of(False), "False", "attention's own products are not quantized"
    ),
    "Compress.Quantization.onnx_format": Ignored("an export is always ONNX, with Q/DQ pairs"),
    "Compress.Quantization.for_tensorrt": Ignored("an export is always ONNX, with Q/DQ pairs"),
    "Compress.Quantization.pretrained": Moved("Compress.pretrained"),
    # --- evaluation, generation, inference ---
    "Eval": Moved("Offline_Eval"),
    "Offline_Eval.ckpt_dir": Moved("Engine.save_load.ckpt_dir"),
    "Offline_Eval.eval_path": Location(
        "--cloze of `evaluate` if it ends in .jsonl, otherwise --text"
    ),
    "Offline_Eval.cloze_eval": Same(),
    "Offline_Eval.overlapping_eval": Same(),
    "Offline_Eval.batch_size": Same(),
    "Offline_Eval.max_seq_len": Same(),
    "Offline_Eval.logging_freq": Ignored(LOGGING),
    **{
        f"Generation.{key}": Same()
        for key in (
            *("decode_strategy", "temperature", "top_k", "top_p", "min_dec_len", "max_dec_len"),
            "num_return_sequences",
        )
    },
    "Generation.early_finish": Ignored("decoding ends when every text has; the texts are the same"),
    "Generation.inference": Ignored("how the decoding loop is exported"),
    "Generation.use_topp_sampling": Ignored(KERNEL),
    "Inference.model_dir": Location("the export of `deploy`"),
    "Inference.mp_degree": Ignored("an export runs in one process; the text is the same"),
}
