"""Passes of a whole model one block after the other, on the device of its tokens.

The model may stay in the host's memory: the device holds one block, with what it computes for one
batch. A block is moved once for all batches, and the hidden states between two blocks wait on the
host, in pinned memory. A model that is on the tokens' device already is not moved, and computes
what it would as a whole, bit by bit.

Shapes: B batch, T tokens, C hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lathe.model.block import Block, Half
from lathe.model.gpt import GPT
from lathe.model.integer_weights import QuantizedWeight
from lathe_base.progress import track


@contextmanager
def on(device: torch.device, *modules: nn.Module | None) -> Iterator[None]:
    """Hold modules on a device for the duration of a `with` block; what is on it already stays.

    Afterwards parameters and buffers are where they were, with the values that were written in
    place meanwhile. Their gradients are not moved.
    """
    present = [module for module in modules if module is not None]
    tensors = {id(t): t for x in present for t in (*x.parameters(), *x.buffers())}
    moved = []
    with torch.inference_mode(False), torch.no_grad():  # else parameters would be of that mode
        for tensor in tensors.values():
            if tensor.device != device:
                moved.append((tensor, tensor.data, tensor._version))
                tensor.data = tensor.data.to(device, non_blocking=True)
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, home, version in moved:
                if tensor._version != version:
                    home.copy_(tensor.data)
                tensor.data = home
        if moved:  # else the rounded weights of all blocks would stay on the device
            for module in present:
                for part in module.modules():
                    if isinstance(quantized := getattr(part, "quantized", None), QuantizedWeight):
                        quantized.clear()


def to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory of what is on a GPU; any other tensor itself."""
    if x.device.type != "cuda":
        return x
    # The copy is waited for, because a host that reads it earlier would read anything.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def for_each(
    device: torch.device, compute: Callable[..., Tensor], *states: Sequence[Tensor]
) -> list[Tensor]:
    """`compute` every batch's states on a device; inputs and results wait on the host, unless there
    is only one batch."""
    results = []
    for inputs in zip(*states, strict=True):
        result = compute(*(x.to(device, non_blocking=True) for x in inputs))
        results.append(to_host(result) if len(states[0]) > 1 else result)
    return results


def embed(model: GPT, batches: Sequence[Tensor]) -> list[Tensor]:
    """The inputs (B, T, C) of the first block, of batches of tokens (B, T)."""
    device = batches[0].device
    with on(device, *_embeddings(model)):
        return for_each(device, model.embed, batches)


@torch.no_grad()
def hidden_states(model: GPT, batches: Sequence[Tensor], title: str = "") -> list[Tensor]:
    """Final hidden states (B, T, C) of batches of tokens (B, T), by `GPT.hidden`; on the host if
    there are several batches.

    Args:
        title: that of a progress bar, which counts blocks.
    """
    device = batches[0].device
    states = embed(model, batches)
    for block in track(model.blocks, title, len(model.blocks)) if title else model.blocks:
        with on(device, block):
            states = for_each(device, block, states)
    with on(device, model.final_norm):
        return for_each(device, model.final_norm, states)


@torch.no_grad()
def by_halves(
    device: torch.device,
    block: Block,
    states: Sequence[Tensor],
    run: Callable[[Half, Sequence[Tensor]], Sequence[Tensor]],
) -> list[Tensor]:
    """Run several batches (B, T, C) through a block on `device`, one half after the other.

    Args:
        run: computes the input of a half's second linear from the hidden states before its norm,
            for every batch.
    """
    after, read = list(states), states
    for half in block.halves:
        second: nn.Module = getattr(half.part, half.part.names[1])

        def add(x: Tensor, inner: Tensor, half: Half = half, second: nn.Module = second) -> Tensor:
            out: Tensor = x + half.output_norm(second(inner))
            return out

        after = for_each(device, add, after, run(half, read))
        read = read if block.is_parallel else after
    return after


def backward(model: GPT, tokens: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
    """Add the gradients of a batch's loss to the `.grad` of everything that requires them.

    Gradients of a block's parameters are dropped when the block has been passed:
    `Tensor.register_post_accumulate_grad_hook` sees them before. Those of tables and of the final
    norm remain, on the device of the tokens. The blocks of a model that is elsewhere compute their
    outputs twice, the first time without gradients.

    Args:
        tokens: (B, T).
        loss: of the final hidden states (B, T, C).
    """
    device = tokens.device
    stays = model.embedding.weight.device == device
    tables = *_embeddings(model), model.final_norm, model.output, model.head_input
    passed: list[tuple[Tensor, Tensor | None]] = []  # every block's input, and output if it is kept
    with on(device, *tables):
        with torch.no_grad():
            y = model.embed(tokens)
        for block in model.blocks:
            x = y.detach().requires_grad_()
            with on(device, block), torch.set_grad_enabled(stays):
                y = block(x)
            passed.append((x, y) if stays else (to_host(x.detach()), None))
        x = y.detach().requires_grad_()
        loss(model.final_norm(x)).backward()  # type: ignore[no-untyped-call]
        gradient = x.grad
        for block in reversed(model.blocks):
            x, kept = passed.pop()
            with on(device, block):
                if kept is None:
                    x = x.to(device, non_blocking=True).requires_grad_()
                    kept = block(x)
                kept.backward(gradient)
                block.zero_grad(set_to_none=True)
            gradient = x.grad
        if model.embedding.weight.requires_grad:
            model.embed(tokens).backward(gradient)  # type: ignore[no-untyped-call]


def _embeddings(model: GPT) -> list[nn.Module]:
    return [model.get_submodule(name) for name in model.config.architecture.embeddings]
