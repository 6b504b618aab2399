"""Flags of the parallel layout and of the batch, as settings."""

from collections.abc import Iterator
from typing import Any

from lathe_base.config.megatron.command import Command
from lathe_base.errors import UserError


def _model_parallel(command: Command) -> tuple[int, int]:
    """The tensor- and the pipeline-parallel size."""
    tensor = command.required_size("tensor-model-parallel-size")
    return tensor, command.required_size("pipeline-model-parallel-size")


def _data_parallel(command: Command, gpus: int | None) -> int | None:
    """Number of data-parallel ranks, if the number of GPUs is known."""
    tp, pp = _model_parallel(command)
    if gpus is None:
        return None
    if not tp * pp or gpus % (tp * pp):
        raise UserError(
            f"--gpus {gpus} is not a multiple of {tp} * {pp}, the tensor- and pipeline-parallel "
            "sizes",
            "give the number of all GPUs of the training",
        )
    return gpus // (tp * pp)


def distributed(command: Command, gpus: int | None) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and comment of the settings of the layout; `gpus` as in
    `recipe_from_megatron`.

    Raises:
        UserError: a number of GPUs that the layout does not divide, or that is needed.
    """
    ds, replicas = command.deepspeed, _data_parallel(command, gpus)
    tp, pp = _model_parallel(command)
    stage = command.size("zero-stage") or 0
    if ds is not None:
        if "zero-stage" in command and ds.stage != stage:
            command.refuse("zero-stage", f"{ds.file} has stage {ds.stage}", "make them agree")
        stage = ds.stage
    if stage and replicas is None:
        raise UserError(
            f"{command.source}: ZeRO stage {stage} shards over all data-parallel ranks, whose "
            "number is not in the flags",
            "give the number of GPUs, such as --gpus 8",
        )
    yield "Distributed.dp_degree", "auto" if replicas is None else 1 if stage else replicas, ""
    yield "Distributed.mp_degree", tp, ""
    yield "Distributed.pp_degree", pp, ""
    if stage:
        yield "Distributed.sharding.sharding_degree", replicas, f"ZeRO stage {stage}"
        yield "Distributed.sharding.sharding_stage", stage, ""
        if "cpu-optimizer" in command or (ds and ds.offload):
            yield "Distributed.sharding.sharding_offload", True, ""


def batch(command: Command, gpus: int | None) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and comment of the batch sizes.

    A pipeline in Lathe (1F1B) needs a micro-batch for each stage: where there are fewer, they are
    made smaller, which does not change the numbers of a step.

    Raises:
        UserError: no micro-batch, or sizes that contradict `ds_config.json`.
    """
    ds, replicas = command.deepspeed, _data_parallel(command, gpus)
    total, micro = command.size("global-batch-size"), command.size("micro-batch-size")
    if ds is not None:
        _require_equal(command, "global-batch-size", total, ds.total, "train_batch_size")
        same = "train_micro_batch_size_per_gpu"
        _require_equal(command, "micro-batch-size", micro, ds.micro, same)
        total, micro = total or ds.total, micro or ds.micro
    if not micro:
        raise UserError(f"{command.source}: no --micro-batch-size", "add it: it has no default")
    pp = command.required_size("pipeline-model-parallel-size")
    if total is None and replicas is not None:
        total = micro * replicas * ((ds and ds.accumulate) or 1)
    used, comment = micro, ""
    if total is not None and replicas and total % replicas == 0:
        fitting = _micro_batch(total // replicas, micro, pp)
        if fitting not in (None, micro):
            used = fitting or micro
            comment = f"{micro} there, which leaves fewer micro-batches than the {pp} stages"
    elif pp > 1:
        command.notes.append(
            f"a pipeline needs {pp} or more micro-batches per data-parallel rank: give --gpus to "
            "check micro_batch_size"
        )
    yield "Global.global_batch_size", total, ""
    yield "Global.micro_batch_size", used, comment


def _micro_batch(local: int, micro: int, pp: int) -> int | None:
    """The largest micro-batch up to `micro` of which a pipeline of `pp` stages has enough."""
    fits = (m for m in range(micro, 0, -1) if local % m == 0 and (pp == 1 or local // m >= pp))
    return next(fits, None) if local % micro == 0 else micro


def _require_equal(
    command: Command, flag: str, given: int | None, other: int | None, key: str
) -> None:
    if given and other and given != other:
        assert command.deepspeed is not None
        command.refuse(flag, f"{command.deepspeed.file} has {key} {other}", "make them agree")
