"""Training checkpoints, from which a killed run resumes bit for bit: one folder per saved step,
committed by a rename.

The shards of every process are torch.distributed.checkpoint's, as safetensors. Tensors are named
after the whole model, so that any other layout of processes can read them.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from lathe.train.state_folder import StateFolder, unwritable
from lathe.train.workers import Workers


class States:
    """Saves of one run. A checkpoint is copied at once and written in a background thread."""

    def __init__(self, folder: Path, keep: int, workers: Workers) -> None:
        self.workers, self.folder = workers, StateFolder(folder, keep, workers)
        self._behind = ThreadPoolExecutor(1, "states")
        self._writing: tuple[Future[None], Path, dict[str, Any]] | None = None
        if not self.folder.is_one_disk:
            self._agreement = dist.new_group(backend="gloo")  # a save uses the other one meanwhile

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        """Begin to write `step_N`; all processes call it, each with its own tensors.

        Args:
            extra: JSON values of the run; those of the first process are kept.
        """
        self.wait()  # one save at a time
        partial = self.folder.partial(step)
        # Returns when the tensors are copied to memory: the next steps may change them.
        future = async_save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=self.workers.files,
        )
        assert isinstance(future, Future)
        self._writing = self._behind.submit(self._write, future, partial), partial, extra

    def _write(self, future: Future[Any], partial: Path) -> None:
        future.result()
        self.folder.seal(partial)

    def poll(self) -> None:
        """Commit a save that has been written; all processes call it regularly."""
        if self._writing is None:
            return
        done = self._writing[0].done()
        # On one disk the first process commits alone. Separate disks need all processes, which
        # agree whether each has written its files.
        if not self.folder.is_one_disk:
            waiting = torch.tensor(float(not done))
            dist.all_reduce(waiting, group=self._agreement)
            done = waiting.item() == 0
        if done:
            self.wait()

    def newest(self) -> Path | None:
        """See `StateFolder.newest`."""
        return self.folder.newest()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            StageError: the save failed, e.g. on a full disk.
            UserError: the upload to the mirror failed.
        """
        if self._writing is None:
            return
        future, partial, extra = self._writing
        self._writing = None
        try:
            future.result()
            self.folder.commit(partial, extra)
        except (CheckpointException, OSError) as error:
            # A CheckpointException has those of all ranks, each with a traceback.
            failures = {} if isinstance(error, OSError) else error.failures
            reason = next((failure for failure, _ in failures.values()), error)
            raise unwritable(partial, reason) from error


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read from a save into `tensors`, in place; each process reads its own shards."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def rng_tensors(workers: Workers) -> dict[str, Tensor]:
    """The states of this process's random generators."""
    states = {f"rng.{workers.rank}.cpu": torch.get_rng_state()}
    if workers.device.type == "cuda":
        states[f"rng.{workers.rank}.cuda"] = torch.cuda.get_rng_state(workers.device)
    return states
