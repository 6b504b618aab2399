"""Detecting sequences of collectives that would deadlock."""

import torch

from lathe.plan.order import find_mismatch
from lathe.plan.record import Collective


def call(
    kind: str,
    *ranks: int,
    size: int = 4,
    peer: int | None = None,
    site: str = "a.py:1",
    batch: int | None = None,
) -> Collective:
    tensors = (((size,), torch.float32),)
    return Collective(kind, ranks, tensors, 4 * size, peer, "update", site, batch)


def test_the_same_calls_on_all_processes_are_in_order() -> None:
    step = [call("all_reduce", 0, 1), call("all_gather", 0, 1)]
    assert find_mismatch({0: step, 1: step}) is None


def test_groups_that_meet_in_one_order_are_in_order() -> None:
    rows, columns = call("all_reduce", 0, 1), call("all_reduce", 2, 3)
    across = call("all_reduce", 0, 1, 2, 3)
    calls = {0: [rows, across], 1: [rows, across], 2: [columns, across], 3: [columns, across]}
    assert find_mismatch(calls) is None


def test_a_call_that_one_process_leaves_out_is_found() -> None:
    step = [call("all_reduce", 0, 1, site="b.py:7")]
    found = find_mismatch({0: step, 1: []})
    assert found is not None and "rank 0" in found and "b.py:7" in found
    assert "rank 1 makes no more calls" in found


def test_other_shapes_are_found() -> None:
    found = find_mismatch({0: [call("all_reduce", 0, 1)], 1: [call("all_reduce", 0, 1, size=8)]})
    assert found is not None and "[4] float32" in found and "[8] float32" in found


def test_two_groups_in_another_order_are_found() -> None:
    pair, triple = (
        call("all_reduce", 0, 1, site="c.py:1"),
        call("all_reduce", 0, 1, 2, site="d.py:2"),
    )
    found = find_mismatch({0: [pair, triple], 1: [triple, pair], 2: [triple]})
    assert found is not None and "c.py:1" in found and "d.py:2" in found


def test_messages_are_matched_in_pairs() -> None:
    send, receive = call("send", 0, 1, peer=1), call("recv", 0, 1, peer=0)
    assert find_mismatch({0: [send, send], 1: [receive, receive]}) is None
    found = find_mismatch({0: [send], 1: [receive, receive]})
    assert found is not None and "recv([4] float32) with rank 0" in found
    assert "rank 0 makes no more calls" in found
    found = find_mismatch({0: [send, send], 1: [receive]})
    assert found is not None and "rank 1 makes no more calls" in found
    other = call("recv", 0, 1, peer=0, size=8)
    found = find_mismatch({0: [send], 1: [other]})
    assert found is not None and "[4] float32" in found and "[8] float32" in found


def test_a_message_and_a_collective_that_wait_for_each_other_are_found() -> None:
    total, send, receive = (
        call("all_reduce", 0, 1, site="b.py:7"),
        call("send", 0, 1, peer=1, site="c.py:1"),
        call("recv", 0, 1, peer=0, site="d.py:2"),
    )
    assert find_mismatch({0: [send, total], 1: [receive, total]}) is None
    found = find_mismatch({0: [total, send], 1: [receive, total]})
    assert found is not None and "b.py:7" in found and "d.py:2" in found
    assert "rank 0 is in all_reduce" in found and "rank 1 is in recv" in found


def test_a_cycle_over_three_groups_is_found() -> None:
    a, b, c = call("all_reduce", 0, 1), call("all_reduce", 1, 2), call("all_reduce", 0, 2)
    assert find_mismatch({0: [a, c], 1: [a, b], 2: [b, c]}) is None
    found = find_mismatch({0: [a, c], 1: [b, a], 2: [c, b]})
    assert found is not None and all(f"rank {rank} is in all_reduce" in found for rank in range(3))


def test_messages_of_a_batch_are_waited_for_together() -> None:
    def both(batch: int | None) -> dict[int, list[Collective]]:
        return {
            rank: [call(kind, 0, 1, peer=1 - rank, batch=batch) for kind in ("send", "recv")]
            for rank in range(2)
        }

    assert find_mismatch(both(1)) is None
    found = find_mismatch(both(None))
    assert found is not None and found.count("is in send") == 2


def test_processes_that_are_not_known_are_not_waited_for() -> None:
    assert (
        find_mismatch({0: [call("all_reduce", 0, 1, 2)], 2: [call("all_reduce", 0, 1, 2)]}) is None
    )
