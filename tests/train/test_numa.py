"""Binding to the CPUs beside a GPU, with the files of a machine of two sockets."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lathe.train import workers


@pytest.mark.parametrize(
    "node, allowed, bound",
    [
        (1, range(16), {4, 5, 6, 7, 12}),
        (1, (0, 5), {5}),  # the pod's CPUs
        (1, (0, 1), None),  # none beside the GPU
        (1, (4, 5), None),  # only such
        (-1, range(16), None),  # a machine with one node
    ],
)
def test_the_cpus_beside_the_gpu(
    node: int,
    allowed: range | tuple[int, ...],
    bound: set[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = tmp_path / "bus/pci/devices/0001:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    cpus = tmp_path / "devices/system/node/node1"
    cpus.mkdir(parents=True)
    (cpus / "cpulist").write_text("4-7,12\n")
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
    found: list[set[int]] = []
    monkeypatch.setattr(workers, "SYSTEM", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: found.append(cpus))
    workers.bind_to_gpu(torch.device("cuda", 0))
    assert found == ([] if bound is None else [bound])
