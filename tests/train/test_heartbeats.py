"""A process works alone for longer than a collective may take, and one that stops is named by
another."""

import logging
import os
import subprocess
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lathe.train import heartbeats
from lathe.train.heartbeats import Heartbeats
from lathe_base.errors import Code, StageError
from lathe_base.ports import free_port
from tests.support import warm
from tests.support.errors import raises

WORK_ALONE = """
import time
import torch
from lathe.train import heartbeats
heartbeats.BEAT_SECONDS = 0.1
heartbeats.SILENT_SECONDS = 1.0
from lathe.train.workers import join_workers
from lathe_base.config.recipe import load_recipe
from lathe_base.console import log_to_stderr

log_to_stderr()
settings = ["Distributed.timeout_minutes=0.02", "Distributed.dp_degree=2", "Global.device=cpu"]
with join_workers(load_recipe("tiny", settings)) as workers:
    print(workers.agree(lambda: time.sleep(2.5) or "written"), flush=True)
    weight = torch.nn.Parameter(torch.full((2,), float(workers.rank)))
    workers.share([weight])
    print(weight.tolist(), flush=True)
    if workers.rank == 1:  # as the leader of another disk, which uploads a checkpoint
        time.sleep(2.5)
    print(workers.gather(workers.rank), flush=True)
    if workers.rank == 0:
        time.sleep(2.5)
    workers.barrier()
"""


def start(rank: int, port: int) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    return subprocess.Popen(
        [*warm.python(), "-c", WORK_ALONE],
        env=environment | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_process_may_work_longer_than_a_collective() -> None:
    """2.5 s alone, with a timeout of 1.2 s; then both have what it has."""
    port = free_port()
    processes = [start(rank, port) for rank in range(2)]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert [out for out, _ in ended] == ["written\n[0.0, 0.0]\n[0, 1]\n"] * 2


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "alive"])
def test_a_process_without_a_heartbeat_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_stopped: bool
) -> None:
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "SILENT_SECONDS", 0.3)
    caplog.set_level(logging.WARNING)
    with TCPStoreOfTest() as store:
        frozen = threading.Event()
        second = Heartbeats(store.clone(), 1, 3)
        if is_stopped:  # as SIGSTOP does to all threads
            beat = second._beat
            second._beat = lambda: frozen.wait(10) if frozen.is_set() else beat()  # type: ignore
        with Heartbeats(store.clone(), 0, 3), second, Heartbeats(store.clone(), 2, 3):
            time.sleep(0.1)
            frozen.set()
            time.sleep(0.8)
            said = [line for line in caplog.messages if "has not responded" in line]
            second._beat = second._beat if not is_stopped else beat
    assert len(said) == is_stopped
    if is_stopped:
        assert said[0].startswith("rank 1 (") and f"process {os.getpid()}" in said[0]


def test_who_waits_for_a_process_that_has_stopped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.02)
    with TCPStoreOfTest() as store, Heartbeats(store.clone(), 0, 2) as own:
        with Heartbeats(store.clone(), 1, 2):  # it works for longer than the timeout
            done = iter([False] * 4 + [True])
            heartbeats.wait_for(lambda: next(done), lambda: [0, 1], store.clone(), own, 0.1)
        with raises(Code.TIMEOUT, "rank 1 (", kind=StageError):
            heartbeats.wait_for(lambda: False, lambda: [0, 1], store.clone(), own, 0.3)


class TCPStoreOfTest:
    def __enter__(self) -> TCPStore:
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
        )
        return self._store

    def __exit__(self, *_: object) -> None:
        del self._store
