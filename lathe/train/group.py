"""The process group of a run as both backends' training loops use it, and the error for a GPU that
neither finds. Imports neither torch nor Paddle."""

from typing import Any, Protocol

from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError


class Group(Protocol):
    """The process group of a run."""

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""

    @property
    def data_rank(self) -> int:
        """Index of the part of a global batch that this process computes."""

    @property
    def data_size(self) -> int:
        """Number of parts into which a global batch is divided."""

    def gather(self, value: Any) -> list[Any]:
        """Gather every process's value, by rank; pickled, but only between our own processes."""

    def barrier(self) -> None:
        """Wait for all processes."""


def missing_gpu(recipe: Recipe, library: str, has_cuda: bool) -> UserError:
    """The error for a requested GPU that a backend does not find: training on the CPU instead would
    take days before anyone noticed.

    Args:
        library: name and version of the backend's library.
        has_cuda: whether it was built for GPUs.
    """
    gpus = recipe.Launch.gpus_per_node
    asked = f"Launch.gpus_per_node is {gpus}" if gpus else "Global.device is gpu"
    if not has_cuda:
        return UserError(
            f"{asked}, but {library} is a CPU-only build",
            "use CUDA images (make images FLAVOUR=cuda), or GPUS=0 (-o Launch.gpus_per_node=0) to "
            "train on CPUs",
            Code.NO_GPU,
        )
    return UserError(
        f"{asked}, but {library}, a GPU build, finds none on this machine",
        "check that `nvidia-smi` finds a GPU there and, on a cluster, that the pod was assigned "
        "one; GPUS=0 (-o Launch.gpus_per_node=0) trains on CPUs",
        Code.NO_GPU,
    )
