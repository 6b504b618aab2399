"""Whether processes can get through their collectives together, from what each of them calls."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from lathe.trial.record import Collective

POINT_TO_POINT = ("send", "recv")


def find_mismatch(calls: Mapping[int, Sequence[Collective]]) -> str | None:
    """Play all processes' calls against each other.

    A collective ends when every process of its group that is known has come to it, and it must be
    the same for all: kind, shapes and dtypes. NCCL asks for the same order across groups too. Sends
    do not wait, and receives are matched with them in pairs, in order.

    Args:
        calls: of every process that is known, by rank.

    Returns:
        What is wrong, with both ranks, the phase of the step and the line of code; None if nothing.
    """
    return _collectives(calls) or _messages(calls)


def _collectives(calls: Mapping[int, Sequence[Collective]]) -> str | None:
    waiting = {
        rank: iter([c for c in own if c.kind not in POINT_TO_POINT]) for rank, own in calls.items()
    }
    heads = {rank: next(own, None) for rank, own in waiting.items()}
    arrived = list(heads)  # may be where others wait for them
    while arrived:
        rank = arrived.pop()
        head = heads[rank]
        if head is None:
            continue
        members = [other for other in head.ranks if other in calls]
        others = {other: heads[other] for other in members}
        if any(call is None or call.ranks != head.ranks for call in others.values()):
            continue
        for other, call in others.items():
            assert call is not None
            if call.signature != head.signature:
                return f"{_at(rank, head)}, while {_at(other, call)}"
        for other in members:
            heads[other] = next(waiting[other], None)
        arrived += members
    return _stuck(calls, heads)


def _stuck(
    calls: Mapping[int, Sequence[Collective]], heads: Mapping[int, Collective | None]
) -> str | None:
    for rank, head in heads.items():
        if head is None:
            continue
        for other in head.ranks:
            call = heads.get(other)
            if other in calls and (call is None or call.ranks != head.ranks):
                there = _at(other, call) if call else f"rank {other} makes no such call any more"
                return f"{_at(rank, head)}, while {there}"
    return None


def _messages(calls: Mapping[int, Sequence[Collective]]) -> str | None:
    sent: dict[tuple[int, int], list[Collective]] = defaultdict(list)
    received: dict[tuple[int, int], list[Collective]] = defaultdict(list)
    for rank, own in calls.items():
        for call in own:
            if call.peer is not None and call.peer in calls:
                if call.kind == "send":
                    sent[rank, call.peer].append(call)
                elif call.kind == "recv":
                    received[call.peer, rank].append(call)
    for source, target in sorted(sent.keys() | received.keys()):
        pairs = zip_longest(sent[source, target], received[source, target])
        for number, (out, back) in enumerate(pairs, 1):
            if out is None or back is None or out.tensors != back.tensors:
                one = _at(source, out) if out else f"rank {source} sends nothing more"
                two = _at(target, back) if back else f"rank {target} receives nothing more"
                return f"message {number} from rank {source} to {target}: {one}, while {two}"
    return None


def _at(rank: int, call: Collective) -> str:
    with_ranks = f"with rank {call.peer}" if call.peer is not None else f"of ranks {_short(call)}"
    return f"rank {rank} is in {call} {with_ranks} at {call.site} ({call.phase})"


def _short(call: Collective) -> str:
    ranks = call.ranks
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
