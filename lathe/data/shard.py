"""Decides which documents of a corpus belong to a shard, without reading the others.

Every shard is an equal range of the corpus's bytes. A file within a range belongs to that shard
alone; the documents of a file that several ranges share are distributed in proportion, in blocks.
So a shard reads only its own files; a shared file, which cannot be split before it is read
(compressed, or text without separators), is read by all, but each shard parses and tokenizes only
its own documents.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from lathe_base.errors import Code, UserError

BLOCK = 64
"""Number of documents that are distributed together."""
SLOTS, STRIDE = 1 << 16, 40503
"""Places of a file at which blocks are put, and the step from one to the next: the golden ratio
(Knuth's multiplicative hashing), so that any number of blocks is spread evenly."""
MAX_SHARDS = 256


class Span(NamedTuple):
    """The bytes of a file among those of its corpus."""

    begin: int
    end: int
    total: int


@dataclass(frozen=True)
class Shard:
    """Shard `number`, from 1, of `of`."""

    number: int = 1
    of: int = 1

    @staticmethod
    def parse(text: str) -> "Shard":
        """Parse `2/8`; raises UserError if it is malformed."""
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        if not match:
            raise UserError(
                f"--shard {text}: not NUMBER/OF", "write --shard 2/8", Code.INVALID_VALUE
            )
        return Shard(int(match[1]), int(match[2])).checked()

    def checked(self) -> "Shard":
        """The shard; raises UserError if there is no such one."""
        if not 1 <= self.number <= self.of <= MAX_SHARDS:
            raise UserError(
                f"shard {self}: no such shard",
                f"count from 1, to {MAX_SHARDS} shards at most",
                Code.INVALID_VALUE,
            )
        return self

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def reads(self, span: Span) -> bool:
        """Whether documents of this file may belong to the shard."""
        first, end = span.begin * SLOTS, span.end * SLOTS
        return self._owner(first, span) <= self.number <= self._owner(max(first, end - 1), span)

    def takes(self, span: Span, block: int) -> bool:
        """Whether this block of the file belongs to the shard."""
        slot = block * STRIDE % SLOTS
        slot_begin = span.begin * SLOTS + (span.end - span.begin) * slot
        return self.number == self._owner(slot_begin, span)

    def _owner(self, position: int, span: Span) -> int:
        """The shard of a place, in slots: those of a byte are shared where there are few bytes, as
        of a corpus whose size is not known."""
        return min(position * self.of // (max(span.total, 1) * SLOTS), self.of - 1) + 1


WHOLE = Shard()
