"""Pure 16-bit training (O2) of weights that are not sharded."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lathe.train.local import local, placed_as


class HalfWeights:
    """16-bit copies of a model's float32 weights. The passes compute with the copies, the optimizer
    updates the weights with gradients that were added up in float32: the mixed precision of
    Micikevicius et al. (2018), with the values that FSDP2's `MixedPrecisionPolicy` gives, but in
    three kernels a step where FSDP gathers and casts every block.

    Args:
        model: its weights keep their names and remain what `named_parameters` and `state_dict`
            give; weights that are frozen later must be frozen before.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._copies: dict[nn.Parameter, Tensor] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None:
                    continue
                if weight not in self._copies:  # a tied table is one weight in several modules
                    copy = weight.detach().to(dtype)
                    self._copies[weight] = copy.requires_grad_(weight.requires_grad)
                # Python finds an instance's attribute before `nn.Module` looks up its parameters.
                module.__dict__[name] = self._copies[weight]
        self._trained = [weight for weight in self._copies if weight.requires_grad]

    @property
    def copies(self) -> list[Tensor]:
        """The copies, in the order of the weights."""
        return [*self._copies.values()]

    def copy(self, weight: nn.Parameter) -> Tensor:
        """The copy of a weight."""
        return self._copies[weight]

    @torch.no_grad()
    def update(self) -> None:
        """Copy the weights again, after they have changed."""
        copies, weights = self._copies.values(), self._copies.keys()
        torch._foreach_copy_([local(copy) for copy in copies], [local(w) for w in weights])

    @torch.no_grad()
    def collect_gradients(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Add the gradients of the copies, of one micro-batch, to those of these weights; default:
        of all."""
        first, had = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for weight in self._trained if weights is None else weights:
            copy = self._copies[weight]
            if copy.grad is None:
                continue
            if weight.grad is None:
                weight.grad = placed_as(
                    copy.grad, torch.empty_like(local(copy.grad), dtype=weight.dtype)
                )
                first.append((local(weight.grad), local(copy.grad)))
            else:
                had.append((local(weight.grad), local(copy.grad)))
            copy.grad = None
        for pairs, into in ((first, torch._foreach_copy_), (had, torch._foreach_add_)):
            if pairs:
                into([own for own, _ in pairs], [of_copy for _, of_copy in pairs])
