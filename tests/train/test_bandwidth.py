"""The bandwidth of an all-reduce, measured between two processes, and what is said of it."""

import os
import subprocess
from dataclasses import replace

import pytest

from lathe.train.bandwidth import AllReduce
from lathe.train.speed import GPUS, ring_bandwidth
from lathe_base.checks import Finding
from tests.support import warm

NODES = AllReduce(
    processes=16,
    nodes=2,
    device="NVIDIA H100 80GB HBM3",
    network="IB",
    size=2**30,
    seconds=2**30 / 160e9,
    link=400e9,
)


def test_two_processes_measure_it_with_gloo() -> None:
    command = [*warm.python(), "-m", "lathe", "all-reduce", "--json", "--seconds=0.05"]
    command += ["-o", "Distributed.dp_degree=2", "-o", "Launch.nodes=2"]
    environment = {**os.environ, **warm.for_children()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    finding = Finding.of_line(line.removeprefix("[rank0]:"))
    assert finding and finding.state == "ok"
    speed, unit, *said = finding.said.split()
    assert float(speed) > 0 and unit == "GB/s"
    assert " ".join(said) == "bus bandwidth between 2 processes on 2 nodes (CPU)"


def test_one_process_is_an_error() -> None:
    command = [*warm.python(), "-m", "lathe", "all-reduce"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "error[layout]" in done.stderr
    assert "Distributed.dp_degree=2" in done.stderr


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert NODES.bus == pytest.approx(160e9 * 2 * 15 / 16)  # of 300 GB/s, each byte goes twice
    assert NODES.finding().state == "ok"
    assert "300.0 GB/s" in NODES.finding().said and "should give 400 GB/s" in NODES.finding().said


def test_links_between_nodes_are_one_port_for_each_gpu() -> None:
    assert ring_bandwidth(1, 16, 8, GPUS["H100"]) == 8 * GPUS["H100"].network == NODES.link
    assert ring_bandwidth(1, 2, 1, GPUS["H100"]) == GPUS["H100"].network
    assert ring_bandwidth(1, 8, 8, GPUS["H100"]) == GPUS["H100"].nvlink


@pytest.mark.parametrize(
    "result, words",
    [
        (replace(NODES, network="Socket"), ["TCP", "Launch.extra_resources"]),
        (replace(NODES, seconds=2**30 / 10e9), ["18.8 GB/s", "NCCL_DEBUG=INFO"]),
    ],
)
def test_tcp_and_slow_links_are_a_warning(result: AllReduce, words: list[str]) -> None:
    finding = result.finding()
    assert finding.state == "warning"
    assert all(word in finding.said + finding.hint for word in words)


def test_the_network_between_nodes_does_not_matter_on_one_node() -> None:
    alone = replace(NODES, network="Socket", nodes=1, processes=8, link=None)
    assert alone.finding().state == "ok" and "Socket" not in alone.finding().said
