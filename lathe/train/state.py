"""What a killed run needs to go on to the same bits: one folder a saved step, committed by rename.

The shards of every process are torch.distributed.checkpoint's, as safetensors. Tensors are named
after the whole model, so that any other layout of processes can read them.
"""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
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

from lathe.errors import StageError, UserError
from lathe.train.mirror import Mirror
from lathe.train.parallel import Stage
from lathe.train.saved import CARD, PARTIAL, committed_steps, saved_steps, step_name
from lathe.train.workers import Workers


class States:
    """Saves of one run. A save is copied at once and written behind the training's back.

    Nodes may share the disk or have one each. On disks of their own each node keeps what its
    processes hold, and the output must have a mirror, where all of it comes together.
    """

    def __init__(self, folder: Path, keep: int, workers: Workers) -> None:
        self.folder, self.keep, self.workers = folder, keep, workers
        self.mirror = Mirror.of(folder.parent)
        self._behind = ThreadPoolExecutor(1, "states")
        self._writing: tuple[Future[None], Path, dict[str, Any]] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._leads_disk, self._one_disk = workers.is_first, True
        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:  # torchrun's number of nodes
            self._leads_disk = _leads_disk(folder, workers)
            disks: list[bool] = [False] * workers.size
            dist.all_gather_object(disks, self._leads_disk, group=workers.files)
            self._one_disk = sum(disks) == 1
            self._agreement = dist.new_group(backend="gloo")  # a save uses the other one meanwhile
        if not self._one_disk and self.mirror is None:
            raise UserError(
                f"{folder.parent}: the nodes do not share this folder",
                "give an address (s3://bucket/prefix) as output, or a folder on a shared disk",
            )
        if self._leads_disk:
            for partial in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(partial)
        workers.barrier()

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        """Begin to write `step_N`; all processes call it, each with what it holds.

        Args:
            extra: JSON values of the run; the first process's are kept.
        """
        self.wait()
        partial = self.folder / f"{step_name(step)}{PARTIAL}"
        future = async_save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=self.workers.files,
        )
        assert isinstance(future, Future)
        self._writing = self._behind.submit(self._write, future, partial), partial, extra

    def _write(self, future: Future[Any], partial: Path) -> None:
        future.result()
        if self.mirror and self._leads_disk:
            self.mirror.copy(_final(partial).name, sorted(partial.iterdir()))

    def poll(self) -> None:
        """Commit a save whose writing has ended; all processes call it now and then."""
        if self._writing is None:
            return
        done = self._writing[0].done()
        if not self._one_disk:  # to commit takes all of them
            waiting = torch.tensor(float(not done))
            dist.all_reduce(waiting, group=self._agreement)
            done = waiting.item() == 0
        if done:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            StageError: the save failed, e.g. on a full disk.
            UserError: the mirror's store did not take it.
        """
        if self._writing is None:
            return
        future, partial, extra = self._writing
        self._writing = None
        try:
            future.result()
            self._commit(partial, extra)
        except (CheckpointException, OSError) as error:
            reason = error if isinstance(error, OSError) else _first_failure(error)
            raise StageError(
                f"{partial}: cannot be written: {reason}\n  cure: free space or repair the "
                "storage, and run the same command again; it goes on from the last saved step"
            ) from error

    def _commit(self, partial: Path, extra: dict[str, Any]) -> None:
        """One disk: the first process alone. Several: all take part, each leader for its disk."""
        files: list[dict[str, int]] = [{}]
        if self._leads_disk:
            files = [{path.name: path.stat().st_size for path in partial.iterdir()}]
        if not self._one_disk:
            mine, files = files[0], [{}] * self.workers.size
            dist.all_gather_object(files, mine, group=self.workers.files)
        if not self._leads_disk:
            return
        final = _final(partial)
        sizes = dict(pair for found in files for pair in found.items())
        card = partial / CARD
        card.write_text(json.dumps({**extra, "files": sizes}))
        shutil.rmtree(final, ignore_errors=True)  # a broken one, passed over on resuming
        os.replace(partial, final)
        for old in committed_steps(self.folder)[: -self.keep]:
            shutil.rmtree(old)
        if self.mirror and self.workers.is_first:
            self.mirror.copy(final.name, [final / CARD])
            self.mirror.commit(final.name, self.keep)

    def newest(self) -> Path:
        """The last saved state, whole, for the first process."""
        if not self._one_disk:
            assert self.mirror is not None
            self.mirror.restore()
        return saved_steps(self.folder)[-1]


def _final(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def _leads_disk(folder: Path, workers: Workers) -> bool:
    """Whether this process does what is done once a disk: it is the first of all, or the first of
    a node that does not see what the first of all writes."""
    token, probe = workers.agree(secrets.token_hex), folder / ".first"
    if workers.is_first:
        probe.write_text(token)
    workers.barrier()
    sees = probe.is_file() and probe.read_text() == token
    workers.barrier()
    if workers.is_first:
        probe.unlink()
    return workers.is_first or (int(os.environ.get("LOCAL_RANK", 0)) == 0 and not sees)


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
