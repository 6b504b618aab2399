"""Checks that processes complete their collectives and messages without mismatches or deadlocks.

Every call is assumed to wait: a collective for the processes of its group, a message for its peer,
and the messages of one batch for all of their peers, in any order. A program that passes works on
any backend, however much it buffers: it is a "safe program" in the words of the MPI standard (MPI
4.1, section 3.5). What does not may hang, on NCCL for instance, whose calls on one communicator run
one after another on its stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from lathe.plan.record import Collective

Open = Mapping[int, Sequence[Collective]]
"""By rank, the calls that a process is waiting in: a collective, or the rest of a batch of
messages; none at its end."""


def find_mismatch(calls: Mapping[int, Sequence[Collective]]) -> str | None:
    """Simulate the calls of all processes.

    Args:
        calls: of every process that is known, by rank; nobody waits for the others.

    Returns:
        The problem, with ranks, phases of the step and lines of code: two calls that differ in
        kind, shape or dtype, or a cycle of waiting processes; None if all calls complete.
    """
    rest = {rank: _batches(rank_calls) for rank, rank_calls in calls.items()}
    waiting = {rank: next(batches, []) for rank, batches in rest.items()}
    # Completing a call never keeps another from completing, so the order of the simulation does not
    # matter: what remains at its end waits on any schedule.
    arrived = set(waiting)  # may be where others wait for them
    while arrived:
        rank = arrived.pop()
        for call in list(waiting[rank]):
            met = _met(rank, call, waiting)
            if met is None:
                continue
            # Everyone is here: do they mean the same call?
            for other, its in met.items():
                same_kind = call.peer is not None or call.kind == its.kind  # a send meets a receive
                if not same_kind or call.tensors != its.tensors:
                    return f"{_at(rank, call)}, while {_at(other, its)}"
            # It completes, and whoever has nothing else to wait for is in its next call.
            for other, its in met.items():
                waiting[other].remove(its)
                if not waiting[other]:
                    waiting[other] = next(rest[other], [])
                    arrived.add(other)
    return _cycle(waiting)


def _batches(calls: Sequence[Collective]) -> Iterator[list[Collective]]:
    """Calls that are waited for together: a batch of messages; consecutive messages of one
    direction, which torch's schedules do not batch; or a collective."""

    def key(numbered: tuple[int, Collective]) -> int | str:
        # A collective is a group of its own: a negative number equals no other key.
        number, call = numbered
        if call.peer is None:
            return -number
        return call.batch or call.kind

    for _, together in groupby(enumerate(calls, 1), key):
        yield [call for _, call in together]


def _met(rank: int, call: Collective, waiting: Open) -> dict[int, Collective] | None:
    """This call and those of the other processes that it waits for; None while one is missing."""
    met = {rank: call}
    for other in _others(rank, call, waiting):
        its = next((one for one in waiting[other] if _meet(rank, call, other, one)), None)
        if its is None:
            return None
        met[other] = its
    return met


def _others(rank: int, call: Collective, waiting: Open) -> list[int]:
    others = call.ranks if call.peer is None else (call.peer,)
    return [other for other in others if other in waiting and other != rank]


def _meet(rank: int, call: Collective, other: int, its: Collective) -> bool:
    if call.peer is None:
        return its.peer is None and its.ranks == call.ranks
    return call.peer == other and its.peer == rank and its.kind != call.kind


def _cycle(waiting: Open) -> str | None:
    """Describes which processes wait for each other, or for one that makes no more calls."""
    rank = next((rank for rank, calls in waiting.items() if calls), None)
    chain: dict[int, str] = {}
    while rank is not None and rank not in chain and waiting[rank]:
        call = waiting[rank][0]
        chain[rank] = _at(rank, call)
        others = _others(rank, call, waiting)
        rank = next(o for o in others if not any(_meet(rank, call, o, its) for its in waiting[o]))
    if rank is None:
        return None
    if rank not in chain:
        return f"{[*chain.values()][-1]}, while rank {rank} makes no more calls"
    first = list(chain).index(rank)  # those before it only wait for the cycle
    return ", while ".join([*chain.values()][first:])


def _at(rank: int, call: Collective) -> str:
    ranks = list(map(str, call.ranks))
    if len(ranks) > 8:
        ranks[2:-1] = ["..."]
    group = ", ".join(ranks)
    with_ranks = f"with rank {call.peer}" if call.peer is not None else f"of ranks {group}"
    return f"rank {rank} is in {call} {with_ranks} at {call.site} ({call.phase})"
