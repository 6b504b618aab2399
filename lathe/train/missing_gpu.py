"""The error for a requested GPU that is missing, instead of silently training on the CPU."""

from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError


def missing_gpu(recipe: Recipe, library: str, has_cuda: bool) -> UserError:
    """The error for a backend that finds no GPU.

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
