"""Reads a DeepSpeed configuration (`ds_config.json`), which overrides some flags of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe_base.config.text import Mistake, parse
from lathe_base.errors import UserError, printable
from lathe_base.inputs import read_text

MAX_NUMBER = 2**63
HINT = "give the JSON file of --deepspeed_config"
REFUSED = {
    "curriculum_learning": "sequences that grow during training are not supported",
    "data_efficiency": "data that changes with the step is not supported",
    "compression_training": "compress with lathe prune and lathe quantize instead",
    "quantize_training": "quantize with lathe quantize instead",
    "progressive_layer_drop": "dropping layers is not supported",
    "sparse_attention": "sparse attention is not supported",
    "amp": "Apex's mixed precision is not supported: use fp16 or bf16",
}
OVERRIDDEN = {
    "optimizer": "Megatron passes its own optimizer",
    "scheduler": "Megatron passes its own schedule",
}
TAKEN = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("gradient_clipping", "fp16", "bf16", "bfloat16", "zero_optimization"),
    )
)
WITHOUT_EFFECT = frozenset(
    (
        *("steps_per_print", "wall_clock_breakdown", "prescale_gradients", "dump_state"),
        *("gradient_predivide_factor", "activation_checkpointing", "comms_logger", "aio"),
        *("flops_profiler", "tensorboard", "wandb", "csv_monitor", "memory_breakdown"),
        *("communication_data_type", "zero_allow_untested_optimizer", "checkpoint"),
        *("zero_force_ds_cpu_optimizer", "sparse_gradients", "elasticity", "autotuning"),
        *("monitor_config", "disable_allgather", "fp32_allreduce", "pipeline"),
    )
)


@dataclass(frozen=True)
class DeepSpeed:
    """The settings of a `ds_config.json` that matter to a recipe; None: not stated.

    Attributes:
        file: its path, for messages.
        clip: maximum gradient norm; 0 does not clip, which is DeepSpeed's default.
        dtype: float16, bfloat16 or float32.
        scale: static loss scale; 0 is dynamic,
        initial_power: and starts at two to this power.
        not_taken: other keys, with what is done about them.
    """

    file: str
    total: int | None
    micro: int | None
    accumulate: int | None
    clip: float
    dtype: str
    scale: float
    initial_power: int
    window: int
    hysteresis: int
    min_scale: float
    stage: int
    offload: bool
    not_taken: dict[str, str]


def read_deepspeed(path: Path) -> DeepSpeed:
    """Read a DeepSpeed configuration.

    Raises:
        UserError: not a JSON object, a value of another type, or a feature that changes the numbers
            and is not supported.
    """
    file = str(path)
    try:
        values, _ = parse(read_text(path, HINT).encode())  # JSON is YAML
    except Mistake as mistake:
        raise UserError(f"{file}: not JSON: {mistake.reason}", HINT) from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: not a JSON object", HINT)
    for key, why in REFUSED.items():
        if _is_on(values.get(key)):
            raise UserError(f"{file}: {key} changes the numbers: {why}", f"remove {key}")
    read = _Reader(file, values)
    half = read.group("fp16")
    if half.values.get("consecutive_hysteresis"):
        what = f"{file}: fp16.consecutive_hysteresis is not supported"
        raise UserError(what, "remove it: hysteresis then counts from one growth to the next")
    brain = read.group("bf16" if "bf16" in values else "bfloat16")
    zero = read.group("zero_optimization")
    dtypes = [
        name
        for name, group in (("float16", half), ("bfloat16", brain))
        if group.values.get("enabled") is True
    ]
    if len(dtypes) > 1:
        raise UserError(f"{file}: enables fp16 and bf16", "disable one of them")
    offloaded = zero.values.get("offload_optimizer", {})
    return DeepSpeed(
        file=file,
        total=read.optional("train_batch_size"),
        micro=read.optional("train_micro_batch_size_per_gpu"),
        accumulate=read.optional("gradient_accumulation_steps"),
        clip=read.number("gradient_clipping", 0.0),
        dtype=dtypes[0] if dtypes else "float32",
        scale=half.number("loss_scale", 0.0),
        initial_power=min(int(half.number("initial_scale_power", 16)), 1000),
        window=int(half.number("loss_scale_window", 1000)),
        hysteresis=int(half.number("hysteresis", 2)),
        min_scale=half.number("min_loss_scale", 1.0),
        stage=int(zero.number("stage", 0)),
        offload=zero.values.get("cpu_offload") is True
        or (isinstance(offloaded, dict) and offloaded.get("device") == "cpu"),
        not_taken={
            **{key: why for key, why in OVERRIDDEN.items() if key in values},
            **{key: "" for key in values if key in WITHOUT_EFFECT},
            **{
                printable(key): "unknown to Lathe: check whether it changes the numbers"
                for key in values.keys() - TAKEN - WITHOUT_EFFECT - OVERRIDDEN.keys()
                if key not in REFUSED
            },
        },
    )


@dataclass(frozen=True)
class _Reader:
    """A group of the configuration, with checks."""

    file: str
    values: dict[str, Any]
    above: str = ""

    def group(self, key: str) -> "_Reader":
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise UserError(f"{self.file}: {key} is not an object", HINT)
        return _Reader(self.file, value, f"{key}.")

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MAX_NUMBER:
            what = (
                f"{self.file}: {self.above}{key} is {printable(value, 60)}, not a number from 0 on"
            )
            raise UserError(what, "give a number")
        return float(value)

    def optional(self, key: str) -> int | None:
        return int(self.number(key, 0)) or None if self.values.get(key) != "auto" else None


def _is_on(value: Any) -> bool:
    """Whether a feature is enabled: its group says so, or there is no switch in it."""
    if isinstance(value, dict):
        return bool(value.get("enabled", bool(value)))
    return bool(value)
