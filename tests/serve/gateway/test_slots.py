"""Order in which requests get slots, and which are rejected."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from lathe_serving.gateway.admission import LOW_SHARE, Slots
from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.triton import Model


def slots(running: int, max_wait: float | None = 1e9) -> Slots:
    return Slots(Model("gpt", 0, "", running, Path(), 64, max_wait))  # one more waits in Triton


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """Task that holds slots until `let_go` is set."""

    def __init__(self, of: Slots, width: int = 1, is_low: bool = False) -> None:
        self.let_go = asyncio.Event()
        self.has_begun = False
        self.task = asyncio.create_task(self._hold(of, width, is_low))

    async def _hold(self, of: Slots, width: int, is_low: bool) -> None:
        async with of.hold(width, True, is_low):
            self.has_begun = True
            await self.let_go.wait()


def test_first_come_first_served_and_a_wide_one_is_not_overtaken() -> None:
    async def check() -> None:
        found = slots(3)
        running = [Holder(found) for _ in range(4)]
        await settle()
        wide, narrow = Holder(found, 2), Holder(found)
        await settle()
        assert found.waiting() == 3
        for holder, begun in zip(running, [(False, False), (True, False)], strict=False):
            holder.let_go.set()
            await settle()
            assert (wide.has_begun, narrow.has_begun) == begun
        running[2].let_go.set()
        await settle()
        assert narrow.has_begun and found.waiting() == 0

    asyncio.run(check())


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_disconnect_while_slots_are_freed_keeps_none(is_admitted: bool) -> None:
    """The request is cancelled just before or just after admission, before its task runs again."""

    async def check() -> None:
        found = slots(1)
        async with found.hold(2, True):
            leaving = Holder(found)
            await settle()
            if not is_admitted:
                leaving.task.cancel()
        leaving.task.cancel()
        await settle()
        assert leaving.task.cancelled() and not leaving.has_begun and found.waiting() == 0
        async with asyncio.timeout(5), found.hold(2, True):
            pass

    asyncio.run(check())


def test_the_prompts_of_a_long_list_take_turns_with_others() -> None:
    async def check() -> None:
        found, order = slots(1), list[str]()

        async def hold(name: str, is_first: bool) -> None:
            async with found.hold(2, is_first):
                order.append(name)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(hold("list", False))
            for _ in range(3):
                group.create_task(hold("other", True))
        assert order == ["list", "other"] * 3 + ["list"]

    asyncio.run(check())


def test_low_priority_waits_for_others_but_does_not_starve() -> None:
    async def check() -> None:
        found, order = slots(1), ""

        async def hold(name: str, is_first: bool, is_low: bool) -> None:
            nonlocal order
            async with found.hold(2, is_first, is_low):
                order += name
                await asyncio.sleep(0)

        running = Holder(found, 2)
        async with asyncio.TaskGroup() as group:
            await settle()
            for _ in range(3):
                group.create_task(hold("l", True, True))
            for _ in range(2 * LOW_SHARE):
                group.create_task(hold("h", True, False))
            await settle()
            running.let_go.set()
        between = "h" * (LOW_SHARE - 1) + "l"
        assert order == between[1:] + between + "hhhl"

    asyncio.run(check())


def test_low_priority_does_not_lengthen_the_wait_of_others() -> None:
    async def check() -> None:
        found = slots(1, max_wait=0.0)
        found._recent = 1.0
        running, low = Holder(found, 2), Holder(found, 1, is_low=True)
        await settle()
        found.require_room()
        with pytest.raises(ApiError):
            found.require_room(is_low=True)
        for holder in (running, low):
            holder.let_go.set()

    asyncio.run(check())


def test_a_disconnect_releases_held_and_requested_slots() -> None:
    async def check() -> None:
        found = slots(1)
        running, waiting, last = Holder(found, 2), Holder(found, 2), Holder(found, 2)
        await settle()
        waiting.task.cancel()
        running.let_go.set()  # at the same time
        await settle()
        assert not waiting.has_begun and last.has_begun
        last.task.cancel()
        with suppress(asyncio.CancelledError):
            await last.task
        async with asyncio.timeout(1), found.hold(2, True):
            pass

    asyncio.run(check())


@pytest.mark.parametrize(("max_wait", "accepted"), [(None, 2), (0.0, 1), (0.05, 3), (9.0, 50)])
def test_a_request_that_would_wait_too_long_is_rejected(
    max_wait: float | None, accepted: int
) -> None:
    """A request takes 0.1 s and four run: with one ahead of it, a request waits for 0.025 s."""

    async def check() -> None:
        found = slots(3, max_wait)
        async with found.hold(1, True):
            await asyncio.sleep(0.1)
        running = [Holder(found) for _ in range(4)]
        await settle()
        burst = [Holder(found) for _ in range(50)]  # each sees those before it
        await settle()
        waiting = [holder for holder in burst if not holder.task.done()]
        assert abs(len(waiting) - (accepted + (max_wait is None))) <= (max_wait == 0.05)
        for holder in running + waiting:
            holder.let_go.set()
        await settle()
        refused = {type(holder.task.exception()) for holder in burst if holder not in waiting}
        assert refused <= {ApiError}

    asyncio.run(check())


def test_the_refusal_says_when_there_will_be_room() -> None:
    async def check() -> None:
        found = slots(1, max_wait=0.0)
        found._recent = 10.0
        holders = [Holder(found) for _ in range(3)]
        await settle()
        with pytest.raises(ApiError) as refused:
            found.require_room()
        assert refused.value.response().headers["Retry-After"] == "5"
        for holder in holders:
            holder.let_go.set()

    asyncio.run(check())
