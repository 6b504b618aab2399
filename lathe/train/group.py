"""The processes of a run, as far as both engines' training asks."""

from typing import Any, Protocol


class Group(Protocol):
    @property
    def is_first(self) -> bool: ...

    @property
    def data_rank(self) -> int:
        """Of the part of a global batch that this process computes."""

    @property
    def data_size(self) -> int:
        """Parts into which a global batch is divided."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, by rank. It travels as a pickle, between our processes."""

    def barrier(self) -> None: ...
