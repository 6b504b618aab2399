"""Chunk size of the losses, which bounds their memory."""

CHUNK_ELEMENTS = 2**26
"""Logits per chunk: 256 MiB in float32. At V = 50304 that is 1,334 tokens: enough for full-speed
matmuls and few additions to the weight's gradient."""

TILE = 128
"""Rows of a matmul that a GPU computes together: a part of a tile costs as much as all of it."""


def chunk_rows(rows: int, vocabulary: int | float, elements: int | None = None) -> int:
    """The rows of each chunk but the last: as equal as multiples of `TILE` allow, with at most
    `elements` logits; default: CHUNK_ELEMENTS."""
    limit = max(1, int((elements or CHUNK_ELEMENTS) // vocabulary))
    tile = TILE if limit >= TILE else 1
    count = -(-rows // (limit // tile * tile))
    return min(rows, -(-rows // (count * tile)) * tile)
