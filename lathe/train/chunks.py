"""Chunk size of the losses, which bounds their memory."""

CHUNK_ELEMENTS = 2**26
"""Logits per chunk: 256 MiB in float32. At V = 50304 that is 1,334 tokens: enough for full-speed
matmuls and few additions to the weight's gradient."""


def chunk_count(elements: int | float) -> int:
    """The number of chunks of at most CHUNK_ELEMENTS logits."""
    return int(-(-elements // CHUNK_ELEMENTS))
