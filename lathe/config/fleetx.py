"""Translate PaddleFleetX's key names, so that existing PaddleFleetX files can be used unchanged.

PaddleFleetX has several layouts: release 2.4 (`ppfleetx/configs`) has an `Engine` group, the later
`examples/` put those keys under `Global`, and early files have `Prune` and `Quantization` at the
top level.
"""

from collections.abc import Sequence
from typing import Any

from lathe.errors import UserError

# Where another layout says it -> where Lathe does.
MOVED = {
    "Global.max_steps": "Engine.max_steps",
    "Global.accumulate_steps": "Engine.accumulate_steps",
    "Global.logging_freq": "Engine.logging_freq",
    "Global.eval_freq": "Engine.eval_freq",
    "Global.eval_iters": "Engine.eval_iters",
    "Global.mix_precision": "Engine.mix_precision",
    "Global.save_load": "Engine.save_load",
    "Prune": "Compress.Prune",
    "Quantization": "Compress.Quantization",
    "Engine.use_recompute": "Model.use_recompute",
    "Optimizer.adam_beta1": "Optimizer.beta1",
    "Optimizer.adam_beta2": "Optimizer.beta2",
    "Optimizer.adam_epsilon": "Optimizer.epsilon",
}

_OF_A_DATASET = (
    "sampler",
    "loader",
    "collate_fn",
    "sample_split",
    "dataset.name",
    "dataset.input_dir",
)
_OF_A_RUN = ("run_mode", "num_train_epochs", "test_iters")

# Unsupported keys by group; a name includes everything below it.
IGNORED = {
    "": ("Profiler", "Inference", "Fused", "FusedPasses"),
    "Global": _OF_A_RUN,
    "Engine": _OF_A_RUN,
    "Engine.save_load": ("save_epoch", "output_dir", "ckpt_dir"),
    "Engine.mix_precision": ("custom_black_list", "custom_white_list", "use_fp16_guard"),
    "Data": ("Test",),
    "Data.Train": _OF_A_DATASET,
    "Data.Eval": (*_OF_A_DATASET, "dataset.overlapping_eval"),
    "Model": (
        *("module", "name", "type_vocab_size", "fused_linear", "fuse_attn_qkv"),
        "no_recompute_layers",
    ),
    "Distributed": ("fuse_sequence_parallel_allreduce",),
    "Distributed.sharding": ("comm_overlap", "reduce_overlap", "broadcast_overlap"),
    "Optimizer": ("tensor_fusion",),
    "Compress": ("pretrained",),
    "Compress.Prune": ("cal_sens",),
    "Compress.Quantization": (
        *("pretrained", "quantizable_layer_type", "onnx_format", "weight_preprocess_type"),
    ),
    "Generation": ("use_topp_sampling", "inference"),
    "Offline_Eval": ("logging_freq",),
}


def translate(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Rewrite one file's `values` in place into Lathe's keys; returns the keys it ignored.

    `origins` (dotted key -> where it was set) follows the keys that move.
    """
    for old, new in MOVED.items():
        if not _has_room(values, new):
            continue
        found, value = _pop(values, old)
        if found:
            _put(values, new, value)
            for key in [k for k in origins if k == old or k.startswith(f"{old}.")]:
                origins[new + key.removeprefix(old)] = origins[key]
    _read_precision_switches(values, origins)
    ignored = [f"{group}.{key}".lstrip(".") for group, keys in IGNORED.items() for key in keys]
    return [key for key in ignored if _pop(values, key)[0]]


def listed(keys: Sequence[str]) -> str:
    """Ignored keys by group, each once: `Profiler; Data (Test); Model (module, name)`."""
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(keys):
        group, _, name = key.rpartition(".")
        groups.setdefault(group, []).append(name)
    top = groups.pop("", [])
    return "; ".join([*top, *(f"{group} ({', '.join(names)})" for group, names in groups.items())])


def _read_precision_switches(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Translate PaddleFleetX's float16 switches: `use_pure_fp16`, or `enable` with or without a
    dtype."""
    group = "Engine.mix_precision"
    for key in ("enable", "use_pure_fp16"):
        found, on = _pop(values, f"{group}.{key}")
        if not found or on is None:
            continue
        origin = origins.get(f"{group}.{key}", group)
        if not isinstance(on, bool):
            raise UserError(f"{origin}: {group}.{key}: not a boolean", "write True or False")
        if key == "enable" and on is False:
            _pop(values, f"{group}.dtype")
        _put(values, f"{group}.dtype", "float16" if on else "float32")
        origins.setdefault(f"{group}.dtype", origin)
        if key == "use_pure_fp16":
            _put(values, f"{group}.level", "O2" if on else "O1")
            origins.setdefault(f"{group}.level", origin)


def _has_room(values: dict[str, Any], dotted: str) -> bool:
    """Whether the parent groups are mappings, or do not exist yet."""
    for group in dotted.split(".")[:-1]:
        inner = values.get(group)
        if inner is None:
            return True
        if not isinstance(inner, dict):
            return False
        values = inner
    return True


def _pop(values: dict[str, Any], dotted: str) -> tuple[bool, Any]:
    *groups, key = dotted.split(".")
    for group in groups:
        inner = values.get(group)
        if not isinstance(inner, dict):
            return False, None
        values = inner
    return (True, values.pop(key)) if key in values else (False, None)


def _put(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key; a group is merged into an existing one, whose values win."""
    *groups, key = dotted.split(".")
    for group in groups:
        if not isinstance(values.get(group), dict):
            values[group] = {}
        values = values[group]
    present = values.get(key)
    if isinstance(value, dict) and isinstance(present, dict):
        values[key] = value | present
    else:
        values[key] = value if present is None else present
