"""Check that all ids of a data set are valid for its tokenizer."""

from pathlib import Path

import numpy as np

from lathe.data.megatron import TokenArrays
from lathe_base.errors import UserError

BLOCK = 1 << 24  # tokens


def check_ids(arrays: TokenArrays, vocab_size: int, where: Path) -> None:
    """Read all tokens once, a block in memory at a time: about a second for a billion of them.

    Args:
        where: the data set, for the message.

    Raises:
        UserError: an id that is negative, or not below `vocab_size`; names the first one's
            document, counted from 0.
    """
    for begin in range(0, len(arrays.tokens), BLOCK):
        block = arrays.tokens[begin : begin + BLOCK]
        if int(block.min()) >= 0 and int(block.max()) < vocab_size:
            continue
        first = int(np.argmax((block < 0) | (block >= vocab_size)))
        position = begin + first
        inside = (arrays.starts <= position) & (position < arrays.starts + arrays.sizes)
        document = arrays.containing_document(int(np.argmax(inside)))
        raise UserError(
            f"{where}: document {document} contains token {int(block[first])}, but "
            f"the largest id of the vocabulary is {vocab_size - 1}",
            "use tokens and tokenizer of the same data set, or prepare it again",
        )
