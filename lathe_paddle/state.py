"""Saved states of the Paddle engine: `step_N/` holds one file for each part of the run's state.

There is one part for each pair of ranks along `sharding` and `mp`. The weights are divided along
`mp` (and are in the files of the first rank along `sharding`), the moments along both.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import paddle
from safetensors import safe_open
from safetensors.numpy import save_file

from lathe_paddle.gpt import GPT
from lathe_paddle.workers import Workers

MODEL, OPTIMIZER = "model.", "optimizer."


def write(folder: Path, model: GPT, optimizer: Any, workers: Workers) -> None:
    """Write this process's part, unless another process writes the same."""
    folder.mkdir(parents=True, exist_ok=True)
    if workers.is_replica:
        return
    tensors = {}
    if workers.sharding_rank == 0:
        tensors = {f"{MODEL}{n}": t.numpy() for n, t in model.state_dict().items()}
    names = {f"{p.name}_": n for n, p in model.named_parameters()}
    for key, tensor in optimizer.state_dict().items():
        if isinstance(tensor, paddle.Tensor):
            tensors[OPTIMIZER + _stable_names(key, names)] = tensor.numpy()
    save_file(tensors, folder / f"sharding_{workers.sharding_rank:03d}_{_part(workers)}")


def read(folder: Path, model: GPT, optimizer: Any, owned: Iterable[Any], workers: Workers) -> None:
    """Read a saved state into `model` and `optimizer`; the degree of sharding may have changed.

    Args:
        owned: the parameters that this process updates.
    """
    weights, moments = {}, {}
    names = {n: p.name for n, p in model.named_parameters()}
    wanted = {p.name for p in owned}
    for path in sorted(folder.glob(f"sharding_*_{_part(workers)}")):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118
                if key.startswith(MODEL):
                    weights[key.removeprefix(MODEL)] = file.get_tensor(key)
                    continue
                name, _, kind = key.removeprefix(OPTIMIZER).partition("/")
                if names[name] in wanted:
                    moments[f"{names[name]}_{kind}"] = file.get_tensor(key)
    model.set_state_dict(weights)
    optimizer.set_state_dict(moments)


def _part(workers: Workers) -> str:
    """Suffix of the files that have this process's part along `mp`."""
    return f"mp_{workers.mp_rank:03d}.safetensors"


def _stable_names(key: str, names: dict[str, str]) -> str:
    """Paddle's parameter names contain a counter of layers; replace them by the path in the model,
    the same in every process: `linear_7.w_0_moment1_0` -> `h.0.mlp.c_fc.weight/moment1_0`."""
    prefix = max((p for p in names if key.startswith(p)), key=len)
    return f"{names[prefix]}/{key.removeprefix(prefix)}"
