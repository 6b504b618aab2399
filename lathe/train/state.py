"""What a killed run needs to go on to the same bits: one folder a saved step, committed by rename.

`state/step_00000200/` holds the shards of every process (torch.distributed.checkpoint, as
safetensors) and, written last, `trainer.json`. Tensors are named after the whole model, so that
any other layout of processes can read them.
"""

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from lathe.errors import StageError
from lathe.train.parallel import Stage
from lathe.train.workers import Workers

log = logging.getLogger("lathe")

STEP = re.compile(r"step_(\d{8})")
CARD = "trainer.json"
PARTIAL = ".partial"


def saved_steps(folder: Path) -> list[Path]:
    """Committed and whole states, oldest first; a broken one is passed over with a warning."""
    found = sorted(p for p in folder.glob("step_*") if STEP.fullmatch(p.name))
    return [path for path in found if _is_whole(path)]


def _is_whole(path: Path) -> bool:
    try:
        sizes = json.loads((path / CARD).read_text())["files"]
        broken = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError) as error:
        broken = [str(error)]
    if broken:
        log.warning("%s is broken (%s): not used", path, ", ".join(broken))
    return not broken


class States:
    """Saves of one run. A save is copied at once and written behind the training's back."""

    def __init__(self, folder: Path, keep: int, workers: Workers) -> None:
        self.folder, self.keep, self.workers = folder, keep, workers
        self._writing: tuple[Future[Any], Path, dict[str, Any]] | None = None
        if workers.is_first:
            for partial in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(partial)
            folder.mkdir(parents=True, exist_ok=True)
        workers.barrier()

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        """Begin to write `step_N`; all processes call it, each with what it holds.

        Args:
            extra: JSON values of the run; the first process's are kept.
        """
        self.wait()
        partial = self.folder / f"step_{step:08d}{PARTIAL}"
        future = async_save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=self.workers.files,
        )
        assert isinstance(future, Future)
        self._writing = future, partial, extra

    def poll(self) -> None:
        """Commit a save whose writing has ended; call it now and then."""
        if self._writing and self._writing[0].done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            StageError: the save failed, e.g. on a full disk.
        """
        if self._writing is None:
            return
        future, partial, extra = self._writing
        self._writing = None
        try:
            future.result()
            if self.workers.is_first:
                self._commit(partial, extra)
        except (CheckpointException, OSError) as error:
            reason = error if isinstance(error, OSError) else _first_failure(error)
            raise StageError(
                f"{partial}: cannot be written: {reason}\n  cure: free space or repair the "
                "storage, and run the same command again; it goes on from the last saved step"
            ) from error

    def _commit(self, partial: Path, extra: dict[str, Any]) -> None:
        files = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / CARD).write_text(json.dumps({**extra, "files": files}))
        final = partial.with_name(partial.name.removesuffix(PARTIAL))
        shutil.rmtree(final, ignore_errors=True)  # a broken one, passed over on resuming
        os.replace(partial, final)
        for old in saved_steps(self.folder)[: -self.keep]:
            shutil.rmtree(old)


def read_card(path: Path) -> dict[str, Any]:
    """The `extra` of a save."""
    card: dict[str, Any] = json.loads((path / CARD).read_text())
    return card


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read from a save into `tensors`, in place, each process what it holds of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def model_tensors(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Weights and buffers by their names in the whole model."""
    return {
        f"model.{name}": tensor
        for stage in stages
        for name, tensor in stage.gpt.state_dict().items()
    }


def optimizer_tensors(
    stages: Sequence[Stage], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Moments by the names of their weights."""
    return {
        f"optimizer.{name}.{key}": optimizer.state[parameter][key]
        for stage in stages
        for name, parameter in stage.gpt.named_parameters()
        if parameter in optimizer.state
        for key in ("exp_avg", "exp_avg_sq")
    }


def rng_tensors(workers: Workers) -> dict[str, Tensor]:
    """The states of this process's random generators."""
    states = {f"rng.{workers.rank}.cpu": torch.get_rng_state()}
    if workers.device.type == "cuda":
        states[f"rng.{workers.rank}.cuda"] = torch.cuda.get_rng_state(workers.device)
    return states


def set_rng(states: Mapping[str, Tensor], workers: Workers) -> None:
    torch.set_rng_state(states[f"rng.{workers.rank}.cpu"])
    if workers.device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng.{workers.rank}.cuda"], workers.device)


def _first_failure(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]
