"""The logits that are held at a time, which bound the losses' memory, and those that one operation
works on."""

import torch

CHUNK_ELEMENTS = 2**26
"""Of one chunk of logits: 256 MiB in float32. At V = 50304 that is 1,334 tokens: enough for
full-speed matmuls and few additions to the weight's gradient."""


def chunk_count(elements: int | float) -> int:
    """The number of chunks of at most CHUNK_ELEMENTS logits."""
    return int(-(-elements // CHUNK_ELEMENTS))


BLOCK_ELEMENTS = 2**20
"""Of the rows of a chunk that a CPU takes through all elementwise operations of a loss before the
next: in float32 4 MiB for each operand, which caches hold. At V = 49152 that is 21 tokens, and the
operations take 0.4 of the time that they take on a whole chunk."""


def block_rows(rows: int, vocabulary: int, device: torch.device) -> int:
    """How many rows of a chunk (rows, vocabulary) go through the operations together: all of them
    on a GPU, whose memory is fast and whose kernels are worth launching for many elements only."""
    if device.type != "cpu":
        return rows
    return min(rows, max(1, BLOCK_ELEMENTS // vocabulary))
