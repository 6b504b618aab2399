"""The group of processes of a run: what both backends' training loops need of it."""

from typing import Any, Protocol


class Group(Protocol):
    @property
    def is_first(self) -> bool: ...

    @property
    def data_rank(self) -> int:
        """Index of the part of a global batch that this process computes."""

    @property
    def data_size(self) -> int:
        """Number of parts into which a global batch is divided."""

    def gather(self, value: Any) -> list[Any]:
        """Gather every process's value, by rank; pickled, but only between our own processes."""

    def barrier(self) -> None: ...
