"""Index of the prompts in a data set of conversations, with which `lathe evaluate` finds questions
that a model was trained on.

N-grams say nothing here: conversations of one template and one format share most of them. A
question is known if a training conversation begins with the same tokens up to the assistant's turn:
the same system prompt, tools and earlier turns.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import UserError, explain_os_error
from lathe_base.progress import bar

FILE = "prompts.keys"
MAX_SHARED = 10
"""A prompt of more training conversations is an instruction that all examples of a task share, as
GPT-3's authors (2020) found for n-grams of more than ten documents."""
HINT = "run prepare again"


class PromptIndex:
    """The prompts of some conversations; a prompt is all that precedes an answer of the assistant.

    Attributes:
        keys: (k,) 64-bit digests of prompts, sorted.
    """

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self.keys = keys

    @staticmethod
    def build(
        tokens: NDArray[Any], mask: NDArray[Any], sizes: NDArray[np.integer[Any]]
    ) -> "PromptIndex":
        """The index of conversations.

        Args:
            tokens: (n,) ids of all of them.
            mask: (n,) nonzero where the assistant writes.
            sizes: (conversations,) their tokens.
        """
        keys: list[int] = []
        end = 0
        with bar("index", len(sizes)) as progress:
            for size in sizes.tolist():
                begin, end = end, end + size
                is_answer = mask[begin:end] != 0
                answers = np.flatnonzero(is_answer & ~np.append(False, is_answer[:-1]))
                keys += [_key(tokens[begin : begin + answer]) for answer in answers.tolist()]
                progress.advance(1)
        found, counts = np.unique(np.array(keys, np.uint64), return_counts=True)
        return PromptIndex(found[counts <= MAX_SHARED])

    @staticmethod
    def read(folder: Path) -> "PromptIndex":
        """The index of a data set.

        Raises:
            UserError: it is missing.
        """
        path = folder / FILE
        try:
            return PromptIndex(np.fromfile(path, "<u8"))
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}", HINT, explain_os_error(error).code
            ) from None

    def write(self, folder: Path) -> int:
        """Write it into a data set's folder; returns the number of prompts."""
        self.keys.astype("<u8", copy=False).tofile(folder / FILE)
        return len(self.keys)

    def __contains__(self, prompt: NDArray[Any]) -> bool:
        """Whether a prompt, (tokens,) ids, is in the index."""
        key = np.uint64(_key(prompt))
        at = int(np.searchsorted(self.keys, key))
        return at < len(self.keys) and bool(self.keys[at] == key)


def _key(tokens: NDArray[Any]) -> int:
    ids = np.ascontiguousarray(tokens, "<u4")
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
