"""Reads PaddleFleetX's configurations: rewrites the keys of a file or an override into Lathe's, by
the rows of `lathe_base.config.fleetx_keys.KEYS`, and rejects what would silently change a result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lathe_base.config.fleetx_keys import KEYS, Ignored, Location, Moved, Only, Refused
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import MAX_INT32
from lathe_base.errors import Code, UserError, printable

NEVER = MAX_INT32
"""In place of -1: an update that no training reaches."""

PRECISION = "Engine.mix_precision"
QUANTIZATION = "Compress.Quantization"
FIRST_LAYOUT = ("Data.batch_size", "Data.dataset", "Optimizer.adam_beta1")
COSINE = "CosineAnnealingWithWarmupDecay"

Values = dict[str, Any]
Origins = dict[str, str]


class IgnoredKey(NamedTuple):
    """A key that changes no number, and where it was set: a file and line, or an override."""

    origin: str
    key: str


def translate(values: Values, origins: Origins) -> list[IgnoredKey]:
    """Rewrite one file or override in place, and return what was ignored.

    Args:
        values: nested groups.
        origins: dotted key -> where it was set; follows the keys that move.

    Raises:
        UserError: a key that changes a result in a way that Lathe does not support.
    """
    # First the names, then the values under their new names; what is left then is ignored, refused,
    # or has a meaning under the same name.
    is_first_layout = any(key in origins for key in FIRST_LAYOUT)
    if isinstance(dataset := _pop(values, "Data.dataset"), dict):
        for part in ("Data.Train.dataset", "Data.Eval.dataset"):
            _put_below(values, origins, part, dict(dataset), "Data.dataset")
    for old, fate in KEYS.items():
        # Without room, as where `Optimizer` is a number, the key stays and is reported as it is.
        if not isinstance(fate, Moved) or not _has_room(values, fate.to):
            continue
        if (value := _pop(values, old)) is not None:
            _put_below(values, origins, fate.to, value, old)
    _translate_values(values, origins, is_first_layout)
    ignored = []
    for key, fate in KEYS.items():
        origin = origins.get(key, key)
        if isinstance(fate, Ignored) and _pop(values, key) not in (None, {}):
            ignored.append(IgnoredKey(origin, key))
        elif isinstance(fate, Only) and not fate.accepts(value := _pop(values, key)):
            raise UserError(
                f"{origin}: {key} is {printable(str(value), 60)}: {fate.otherwise}",
                f"remove the key, or set it to {fate.accepted}",
                Code.UNSUPPORTED,
            )
        elif isinstance(fate, Refused) and _pop(values, key) is not None:
            raise UserError(f"{origin}: {key}: {fate.why}", "remove the key", Code.UNSUPPORTED)
        elif isinstance(fate, Location) and _get(values, key) == "None":
            _pop(values, key)  # the text is Python's None there
    return ignored


def with_locations(recipe: Recipe) -> Values:
    """All settings of a recipe, also the locations, which are no part of what a run computes."""
    values = recipe.model_dump(mode="json")
    for key, fate in KEYS.items():
        if isinstance(fate, Location) and (path := location(recipe, key)):
            _put(values, key, path)
    return values


def location(recipe: Recipe, key: str) -> str | None:
    """The value of a location's key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    assert value is None or isinstance(value, str)
    return value


def listed(ignored: Sequence[IgnoredKey]) -> str:
    """Ignored keys, each once, with file and line: `a.yaml: Profiler (3), Fused (9); -o B.c=d`."""
    keys_by_file: dict[str, list[str]] = {}
    for origin, key in dict.fromkeys(ignored):
        file, _, line = origin.rpartition(":")
        if line.isdecimal():
            keys_by_file.setdefault(file, []).append(f"{key} ({line})")
        else:
            keys_by_file[origin] = []
    return "; ".join(
        f"{file}: {', '.join(keys)}" if keys else file for file, keys in keys_by_file.items()
    )


def enable_precision(values: Values, base: Values) -> None:
    """Give a layer with `mix_precision.enable: True` the type and level that it does not name:
    those of its base, else float16 at O2."""
    if _pop(values, f"{PRECISION}.enable") is not True:
        return
    # Only now, when the layers are merged: the type may be in the base of this layer.
    inherited = _get(base, f"{PRECISION}.dtype")
    dtype = inherited if inherited in ("float16", "bfloat16") else "float16"
    _put(values, f"{PRECISION}.dtype", dtype)
    _put(values, f"{PRECISION}.level", _get(base, f"{PRECISION}.level") or "O2")


def _translate_values(values: Values, origins: Origins, is_first_layout: bool) -> None:
    """Rewrite values that are written differently."""
    # -1 in the place of a number of updates, and a plain number as `grad_clip`.
    for key, replacement in (
        ("Engine.max_steps", 0),
        ("Engine.eval_freq", NEVER),
        ("Engine.save_load.save_steps", NEVER),
        ("Engine.eval_iters", None),
    ):
        if _get(values, key) == -1:
            _pop(values, key)
            _put(values, key, replacement)
    clip = _get(values, "Optimizer.grad_clip")
    if isinstance(clip, int | float) and not isinstance(clip, bool):
        _pop(values, "Optimizer.grad_clip")
        _put_below(
            values, origins, "Optimizer.grad_clip", {"clip_norm": clip}, "Optimizer.grad_clip"
        )
    _translate_precision(values, origins)
    # Names of optimizers and schedules.
    if _get(values, "Optimizer.name") == "Adam":
        if not is_first_layout:  # whose trainer constructs AdamW, and reads no name
            where = origins.get("Optimizer.name", "Optimizer.name")
            raise UserError(
                f"{where}: Optimizer.name is Adam, whose weight decay is part of the gradient: not "
                "supported",
                "use FusedAdamW, or AdamW, which also decays biases and norms",
                Code.UNSUPPORTED,
            )
        _pop(values, "Optimizer.name")
        _put(values, "Optimizer.name", "FusedAdamW")
    if _get(values, "Optimizer.lr.name") == "consine":
        _pop(values, "Optimizer.lr.name")
        _put(values, "Optimizer.lr.name", COSINE)
    # A boolean for the granularity of weight scales.
    by_channel = _get(values, f"{QUANTIZATION}.channel_wise_abs_max")
    if isinstance(by_channel, bool):
        _pop(values, f"{QUANTIZATION}.channel_wise_abs_max")
        kind = "channel_wise_abs_max" if by_channel else "abs_max"
        _put(values, f"{QUANTIZATION}.weight_quantize_type", kind)
        origins.setdefault(
            f"{QUANTIZATION}.weight_quantize_type",
            origins.get(f"{QUANTIZATION}.channel_wise_abs_max", QUANTIZATION),
        )


def _translate_precision(values: Values, origins: Origins) -> None:
    """`enable: False`, `use_pure_fp16` and a level in lower case; for `enable: True` see
    `enable_precision`."""
    enable, pure = (_get(values, f"{PRECISION}.{key}") for key in ("enable", "use_pure_fp16"))
    for key, value in (("enable", enable), ("use_pure_fp16", pure)):
        if value is not None and not isinstance(value, bool):
            where = origins.get(f"{PRECISION}.{key}", PRECISION)
            raise UserError(
                f"{where}: {PRECISION}.{key}: not a boolean",
                "write True or False",
                Code.INVALID_VALUE,
            )
    if enable is not True:  # True stays until `enable_precision` knows the base
        _pop(values, f"{PRECISION}.enable")
    if enable is False:
        _pop(values, f"{PRECISION}.dtype")
        _put(values, f"{PRECISION}.dtype", "float32")
    _pop(values, f"{PRECISION}.use_pure_fp16")
    if pure is not None:
        _put(values, f"{PRECISION}.dtype", "float16" if pure else "float32")
        _put(values, f"{PRECISION}.level", "O2" if pure else "O1")
    level = _get(values, f"{PRECISION}.level")
    if isinstance(level, str):
        _pop(values, f"{PRECISION}.level")
        _put(values, f"{PRECISION}.level", level.upper())
    # An error about a type or a level names the line that it was made from.
    for key in ("dtype", "level"):
        origin = origins.get(f"{PRECISION}.enable", origins.get(f"{PRECISION}.use_pure_fp16"))
        origins.setdefault(f"{PRECISION}.{key}", origin or PRECISION)


def _put_below(values: Values, origins: Origins, new: str, value: Any, old: str) -> None:
    """Set a key that had another name, and note where it was set."""
    _put(values, new, value)
    for key in [key for key in origins if key == old or key.startswith(f"{old}.")]:
        origins.setdefault(new + key.removeprefix(old), origins[key])


def _has_room(values: Values, dotted: str) -> bool:
    """Whether the parent groups are mappings, or do not exist yet."""
    for group in dotted.split(".")[:-1]:
        inner = values.get(group)
        if inner is None:
            return True
        if not isinstance(inner, dict):
            return False
        values = inner
    return True


def _get(values: Values, dotted: str) -> Any:
    """A key's value; None if it is missing."""
    value: Any = values
    for name in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _pop(values: Values, dotted: str) -> Any:
    """Remove a key, and groups that become empty, and return its value; None if it is missing."""
    group, _, key = dotted.rpartition(".")
    inner = _get(values, group) if group else values
    if not isinstance(inner, dict) or key not in inner:
        return None
    value = inner.pop(key)
    if group and not inner:
        _pop(values, group)
    return value


def _put(values: Values, dotted: str, value: Any) -> None:
    """Set a key that is missing or empty; a group is merged into an existing one."""
    *groups, key = dotted.split(".")
    for group in groups:
        if not isinstance(values.get(group), dict):
            values[group] = {}
        values = values[group]
    present = values.get(key)
    if isinstance(value, dict) and isinstance(present, dict):
        for name, inner in value.items():
            _put(present, name, inner)
    elif present is None:
        values[key] = value
