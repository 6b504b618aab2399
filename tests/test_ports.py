"""Ports for servers that start later."""

import random
import socket

import pytest

from lathe_base import ports
from lathe_base.ports import LOOPBACK, free_port


def test_a_port_in_use_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, free_port())) as other:
        used = other.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(used, used + 1))
        with pytest.raises(OSError, match=f"no port of {used} to {used} is free"):
            free_port()


def test_seeds_do_not_repeat_it() -> None:
    def seeded() -> int:
        random.seed(0)
        return free_port()

    assert len({seeded() for _ in range(5)}) > 1
