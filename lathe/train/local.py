"""The part of a tensor that this process holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()  # else a view is recorded for the backward pass
def local(tensor: Tensor | None) -> Tensor:
    """This process's part of a DTensor; another tensor itself."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor of the same placement, whose part in this process is `part`."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(
        part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
