"""Identifying the requests that crash a server."""

import asyncio

import pytest

from lathe_base.errors import Code
from lathe_serving.gateway import triton
from lathe_serving.gateway.errors import TritonDied
from lathe_serving.gateway.triton import CrashQuarantine
from tests.support.errors import raises


async def die(of: CrashQuarantine, *digests: bytes) -> None:
    """Simulate a server that dies while it processes these requests."""

    async def one(digest: bytes) -> None:
        with pytest.raises(TritonDied):
            async with of.watch(digest):
                await asyncio.sleep(0)
                raise TritonDied("gone")

    await asyncio.gather(*map(one, digests))


async def answer(of: CrashQuarantine, digest: bytes) -> None:
    async with of.watch(digest):
        await asyncio.sleep(0)


def test_two_deaths_of_one_request_are_enough() -> None:
    async def run() -> None:
        found = CrashQuarantine()
        await die(found, b"guilty", b"innocent")
        await answer(found, b"other")
        await answer(found, b"innocent")
        await die(found, b"guilty")
        for _ in range(2):
            with raises(Code.INVALID_REQUEST, "twice"):
                await answer(found, b"guilty")
        await answer(found, b"innocent")

    asyncio.run(run())


def test_the_same_request_many_times_in_one_death_is_one_death() -> None:
    async def run() -> None:
        found = CrashQuarantine()
        await die(found, *[b"the same"] * 5)
        await answer(found, b"the same")

    asyncio.run(run())


def test_second_tries_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "TURN_SECONDS", 0.05)

    async def run() -> None:
        found = CrashQuarantine()
        await die(found, b"a", b"b")
        async with found.watch(b"a"):
            with raises(Code.BUSY):
                await answer(found, b"b")
            await answer(found, b"new")
        await answer(found, b"b")

    asyncio.run(run())


def test_a_client_that_leaves_clears_nothing() -> None:
    async def run() -> None:
        found = CrashQuarantine()
        await die(found, b"a")
        with pytest.raises(asyncio.CancelledError):
            async with found.watch(b"a"):
                raise asyncio.CancelledError
        await die(found, b"a")
        with raises(Code.INVALID_REQUEST, "twice"):
            await answer(found, b"a")

    asyncio.run(run())


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MAX_DIGESTS", 2)

    async def run() -> None:
        found = CrashQuarantine()
        for digest in (b"a", b"b", b"c"):
            await die(found, digest)
        await die(found, b"a")  # counts as the first time: earlier ones were dropped
        await answer(found, b"a")

    asyncio.run(run())
