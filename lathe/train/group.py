"""The process group of a run, as both backends' training loops use it."""

from typing import Any, Protocol


class Group(Protocol):
    """The process group of a run."""

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""

    @property
    def data_rank(self) -> int:
        """Index of the part of a global batch that this process computes."""

    @property
    def data_size(self) -> int:
        """Number of parts into which a global batch is divided."""

    def gather(self, value: Any) -> list[Any]:
        """Gather every process's value, by rank; pickled, but only between our own processes."""

    def barrier(self) -> None:
        """Wait for all processes."""
