"""Pure 16-bit training (O2) of a model that is not divided among processes."""

import torch
from torch import Tensor, nn


class HalfWeights:
    """16-bit copies of a model's float32 weights. The passes compute with the copies, the optimizer
    updates the weights with gradients that were added up in float32: the mixed precision of
    Micikevicius et al. (2018), with the values that FSDP2's `MixedPrecisionPolicy` gives, but in
    three kernels a step where FSDP gathers and casts every block, which one process need not.

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
        self._trained = {w: copy for w, copy in self._copies.items() if w.requires_grad}

    @property
    def copies(self) -> list[Tensor]:
        """The copies, in the order of the weights."""
        return [*self._copies.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Copy the weights again, after they have changed."""
        torch._foreach_copy_([*self._copies.values()], [*self._copies])

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of the copies, of one micro-batch, to those of the weights."""
        first, had = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for weight, copy in self._trained.items():
            if copy.grad is None:
                continue
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                first.append((weight.grad, copy.grad))
            else:
                had.append((weight.grad, copy.grad))
        for pairs, into in ((first, torch._foreach_copy_), (had, torch._foreach_add_)):
            if pairs:
                into([own for own, _ in pairs], [of_copy for _, of_copy in pairs])
        for copy in self._trained.values():
            copy.grad = None
