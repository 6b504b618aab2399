"""AdamW with PaddleFleetX's parameter groups, under any parallel layout.

In the order of a step: gradients of 16-bit copies are added up in float32 (`HalfWeights`), those of
which processes have parts of a sum are summed (`settle_partial`, `TiedEmbedding`), the norm is
measured (`squared_norm`), they are unscaled and clipped (`clip_gradients`), and `update` takes the
step of AdamW.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lathe.model.architecture import Architecture
from lathe.train.parallel import Stage
from lathe.train.schedule import PACT_LR_FACTOR, LossScale, is_decayed
from lathe.train.workers import Workers
from lathe_base.config.settings import OptimizerSettings


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


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    settings: OptimizerSettings,
    architecture: Architecture,
) -> torch.optim.AdamW:
    """No weight decay on clipping bounds and, with `FusedAdamW`, on biases and norms; each group
    keeps its `lr_factor`."""
    decayed, plain, bounds = [], [], []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if name.endswith("alpha"):
            bounds.append(parameter)
        elif is_decayed(name, architecture, settings):
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay, "lr_factor": 1.0},
        {"params": plain, "weight_decay": 0.0, "lr_factor": 1.0},
        {"params": bounds, "weight_decay": 0.0, "lr_factor": PACT_LR_FACTOR},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr.max_lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
    # torch makes the moments in the first `optimizer.step`, which is never called (see `update`),
    # and a saved state is read into moments that exist.
    for parameter in (*decayed, *plain, *bounds):
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class HalfWeights:
    """16-bit copies of a model's float32 weights. The passes compute with the copies, the optimizer
    updates the weights with gradients that were added up in float32: the mixed precision of
    Micikevicius et al. (2018), with the values that FSDP2's `MixedPrecisionPolicy` gives, but in
    three kernels a step where FSDP gathers and casts every block.

    Args:
        model: its weights keep their names and remain what `named_parameters` and `state_dict`
            give; weights that are frozen later must be frozen before.

    Attributes:
        copies: the copy of each weight, in the order of the model.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.copies: dict[nn.Parameter, Tensor] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None:
                    continue
                if weight not in self.copies:  # a tied table is one weight in several modules
                    copy = weight.detach().to(dtype)
                    self.copies[weight] = copy.requires_grad_(weight.requires_grad)
                # Python finds an instance's attribute before `nn.Module` looks up its parameters,
                # which stay registered, so that `state_dict` has the float32 weights.
                module.__dict__[name] = self.copies[weight]
        self._trained = [weight for weight in self.copies if weight.requires_grad]

    @torch.no_grad()
    def update(self) -> None:
        """Copy the weights again, after they have changed."""
        copies, weights = self.copies.values(), self.copies.keys()
        torch._foreach_copy_([local(copy) for copy in copies], [local(w) for w in weights])

    @torch.no_grad()
    def collect_gradients(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Add the gradients of the copies, of one micro-batch, to those of these weights; default:
        of all."""
        # The first micro-batch's are copied, later ones added: one kernel for all weights of each.
        first, had = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for weight in self._trained if weights is None else weights:
            copy = self.copies[weight]
            if copy.grad is None:
                continue
            if weight.grad is None:
                weight.grad = placed_as(
                    copy.grad, torch.empty_like(local(copy.grad), dtype=weight.dtype)
                )
                first.append((local(weight.grad), local(copy.grad)))
            else:
                had.append((local(weight.grad), local(copy.grad)))
            copy.grad = None  # else autograd would add the next micro-batch's to it in 16 bits
        for pairs, into in ((first, torch._foreach_copy_), (had, torch._foreach_add_)):
            if pairs:
                into([total for total, _ in pairs], [part for _, part in pairs])


@torch.no_grad()
def settle_partial(parameters: Sequence[nn.Parameter]) -> None:
    """Sum gradients for which each process of a mesh has only the contribution of its own tokens:
    those of norms and biases with sequence parallelism, in one message."""
    sums: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        gradient, weight = parameter.grad, parameter.data
        if not isinstance(gradient, DTensor) or not isinstance(weight, DTensor):
            continue
        if gradient.placements == weight.placements:
            continue
        pairs = zip(gradient.placements, weight.placements, strict=True)
        changed = [(dim, *pair) for dim, pair in enumerate(pairs) if pair[0] != pair[1]]
        dim, placement, wanted = changed[0]
        # What is a plain sum along one dimension waits for the message; all else torch rearranges.
        if len(changed) == 1 and placement.is_partial("sum") and wanted.is_replicate():
            sums[gradient.device_mesh.get_group(dim), gradient.dtype].append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=weight.placements)
    # One all-reduce of the concatenated gradients: alone, each would be a few KB.
    for (group, _), partial in sums.items():
        parts = [local(parameter.grad) for parameter in partial]
        flat = torch.cat([x.flatten() for x in parts])
        dist.all_reduce(flat, group=group)
        settled = torch.split(flat, [x.numel() for x in parts])
        for parameter, sum_ in zip(partial, settled, strict=True):
            weight = parameter.data
            parameter.grad = placed_as(weight, sum_.view_as(local(weight)))


class TiedEmbedding:
    """Sum the gradients of the tied embedding, which the first and last pipeline stage share."""

    def __init__(self, stages: Sequence[Stage], workers: Workers) -> None:
        self.group: dist.ProcessGroup | None = None
        self.table: Tensor | None = None
        self.is_second_copy = False
        tied = stages[0].gpt.config.tie_word_embeddings
        if workers.mesh["pp"].size() == 1 or not tied:
            return
        # `pp` is the outermost dimension: the ranks of the first and of the last stage, in which
        # those at the same place hold the same part of the table.
        first, last = workers.mesh.mesh[0].flatten(), workers.mesh.mesh[-1].flatten()
        for ends in zip(first.tolist(), last.tolist(), strict=True):
            # A collective call: all processes make all groups, also those of others.
            group = dist.new_group(list(ends))
            if workers.rank in ends:
                self.group = group
                self.is_second_copy = stages[-1].is_last
                end = stages[-1] if self.is_second_copy else stages[0]
                self.table = end.gpt.output.weight

    def settle(self) -> None:
        """Replace the gradients of both copies by their sum."""
        if self.table is not None and self.table.grad is not None:
            dist.all_reduce(local(self.table.grad), group=self.group)


@torch.no_grad()
def squared_norm(parameters: Sequence[nn.Parameter], replicas: int, device: torch.device) -> Tensor:
    """This process's share of the squared global gradient norm, () float32; the shares of all
    processes add up to it.

    Args:
        replicas: processes with the same layers; a gradient that k of them have counts 1/k.
    """
    pieces: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        shards = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
        # By the number of processes that have the same values, so that each counts once.
        pieces[replicas // shards].append(local(gradient))
    total = torch.zeros((), device=device)
    for copies, tensors in pieces.items():
        norms = torch._foreach_norm([t for t in tensors if t.numel()], 2, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum().to(device) / copies
    return total


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[nn.Parameter], norm: Tensor, limit: float, loss_scale: Tensor
) -> None:
    """Undo the loss scale and clip to a global norm, in one pass over the gradients, in place.

    As `torch.nn.utils.clip_grad_norm_` does, but with a norm that is still on the device.

    Args:
        norm: () float64 of the gradients without the loss scale.
        limit: 0 to leave them as they are.
    """
    factor = torch.ones_like(norm)
    if limit:
        factor = (torch.full_like(factor, limit) / (norm + 1e-6)).clamp(max=1.0)
    factor = (factor / loss_scale).float()
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        # Those of offloaded weights are on the CPU, which must wait for the value.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, rate: float, skip: Tensor) -> None:
    """One step of AdamW at this learning rate, times the factor of each group.

    `optimizer.step` would compute with DTensors, whose every operation the host computes the layout
    of; AdamW treats each element alone, so this process's own ones suffice.

    Args:
        skip: () 1.0 if nothing may change, else 0.0.
    """
    for group in optimizer.param_groups:
        # Small tensors in many shards leave some processes without an element.
        updated = [p for p in group["params"] if p.grad is not None and local(p).numel()]
        states = [optimizer.state[p] for p in updated]
        if not updated:
            continue
        adamw(
            [local(p) for p in updated],
            [local(p.grad) for p in updated],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            # The kernel itself skips the update: the host does not wait for the value, except for
            # offloaded weights, which are on the CPU.
            found_inf=skip.to(updated[0].device),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=rate * group["lr_factor"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class DeviceLossScale:
    """The value of a `LossScale` on the device, which adapts it without the host: the next step is
    launched before the host knows whether this one has overflowed."""

    def __init__(self, scale: LossScale, device: torch.device) -> None:
        self._rule = scale
        self.value = torch.tensor(scale.value, device=device)
        self._good_steps = torch.tensor(scale.good_steps, device=device)
        self._overflows = torch.tensor(scale.overflows, device=device)

    def update(self, overflow: Tensor) -> None:
        """`LossScale.update` in tensors; `overflow` is () 1.0 or 0.0."""
        if not self._rule.adapts:
            return
        # No `if` on a value: that would wait for the device. Both branches are computed.
        fails = overflow > 0
        self._good_steps = torch.where(fails, 0, self._good_steps + 1)
        self._overflows = self._overflows + fails
        grows = ~fails & (self._good_steps % self._rule.window == 0)
        shrinks = fails & (self._overflows >= self._rule.hysteresis)
        smaller = torch.where(shrinks, (self.value / 2).clamp(min=1.0), self.value)
        self.value = torch.where(grows, self.value * 2, smaller)
        self._overflows = torch.where(grows, 0, self._overflows)
