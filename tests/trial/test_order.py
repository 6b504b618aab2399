"""Which sequences of collectives cannot be run together."""

import torch

from lathe.trial.order import find_mismatch
from lathe.trial.record import Collective


def call(
    kind: str, *ranks: int, size: int = 4, peer: int | None = None, site: str = "a.py:1"
) -> Collective:
    tensors = (((size,), torch.float32),)
    return Collective(kind, ranks, tensors, 4 * size, peer, "update", site)


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
    assert "rank 1 makes no such call any more" in found


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
    assert found is not None and "message 2 from rank 0 to 1" in found
    other = call("recv", 0, 1, peer=0, size=8)
    assert find_mismatch({0: [send], 1: [other]}) is not None


def test_processes_that_are_not_known_are_not_waited_for() -> None:
    assert (
        find_mismatch({0: [call("all_reduce", 0, 1, 2)], 2: [call("all_reduce", 0, 1, 2)]}) is None
    )
