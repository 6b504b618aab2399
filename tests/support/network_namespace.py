"""A second network namespace, to reach this machine from outside as another pod would."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

SCAN = """
import socket, sys
for port in map(int, sys.argv[2:]):
    with socket.socket() as asking:
        asking.settimeout(2)
        if asking.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


@dataclass(frozen=True)
class Neighbour:
    """A network namespace from which this machine has the address `address`."""

    name: str
    address: str

    def open_ports(self, ports: Iterable[int]) -> set[int]:
        """Return the ports of this machine that accept connections from the namespace."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", SCAN, self.address]
        done = subprocess.run(
            [*command, *map(str, ports)], capture_output=True, text=True, check=True, timeout=60
        )
        return {int(port) for port in done.stdout.split()}


@contextmanager
def neighbour() -> Iterator[Neighbour]:
    """Create a namespace for the `with` block; skips if that is not permitted."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("creating network namespaces requires root and ip (iproute2)")
    number = os.getpid() % 65536
    name, net = f"lathe{number}", f"10.{number % 64 + 64}.{number % 251}"
    ours, theirs = f"la{number}", f"lb{number}"
    steps = (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name],
        ["ip", "address", "add", f"{net}.1/24", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        ["ip", "-n", name, "address", "add", f"{net}.2/24", "dev", theirs],
        ["ip", "-n", name, "link", "set", theirs, "up"],
    )
    try:
        for step in steps:
            if subprocess.run(step, capture_output=True, check=False).returncode:
                pytest.skip(f"cannot create a network namespace: {' '.join(step)}")
        yield Neighbour(name, f"{net}.1")
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", ours], capture_output=True, check=False)
