"""What a run says about NCCL's network, and where its flight recorder writes. NCCL does not run
here: the lines have the formats that are in its library."""

import logging
import os
from pathlib import Path
from resource import RLIM_INFINITY

import pytest
import torch

from lathe.train.nccl import describe_network, flight_recorder
from lathe.train.result import FLIGHT, remove_states
from lathe_base.artifacts.kinds import STATE

TCP = """node-0:71:71 [0] NCCL INFO NET/IB : No device found.
node-0:71:71 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
node-0:71:71 [0] NCCL INFO Using network Socket
"""
RDMA = """node-0:71:71 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>
node-0:71:71 [0] NCCL INFO Initialized NET plugin IB
node-0:71:71 [0] NCCL INFO Assigned NET plugin IB to comm
node-0:71:71 [0] NCCL INFO Using network IB
"""  # noqa: E501


@pytest.mark.parametrize(
    "text, nodes, locked, told, warned",
    [
        (TCP, 2, RLIM_INFINITY, "Socket ([0]eth0:10.0.0.4<0>)", ["over TCP"]),
        (TCP, 1, RLIM_INFINITY, "Socket", []),
        (RDMA, 2, RLIM_INFINITY, "IB ([0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]", []),
        (RDMA, 2, 8 * 2**20, "IB", ["lock 8 MiB"]),
        ("", 2, RLIM_INFINITY, None, []),
    ],
)
def test_the_network_is_named_and_slow_ones_are_a_warning(
    caplog: pytest.LogCaptureFixture,
    text: str,
    nodes: int,
    locked: int,
    told: str | None,
    warned: list[str],
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    name = describe_network(text, nodes, locked)
    assert name == (told and told.split()[0])
    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(infos) == (told is not None) and all(str(told) in said for said in infos)
    assert len(warnings) == len(warned)
    assert all(word in said for word, said in zip(warned, warnings, strict=True))


def test_the_flight_recorder_writes_beside_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(names[0], "10")  # the user's own
    folder = tmp_path / STATE / FLIGHT
    with flight_recorder(folder):
        assert os.environ[names[0]] == "10" and os.environ[names[1]] == "1"
        assert os.environ[names[2]] == str(folder / "rank_")
    assert os.environ[names[0]] == "10" and not set(names[1:]) & os.environ.keys()
    folder.mkdir(parents=True)
    (folder / "rank_0").touch()
    remove_states(tmp_path)
    assert not (tmp_path / STATE).exists()
