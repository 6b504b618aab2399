"""What a step has used: from its cgroup, from its processes, and from its pod's status."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kubernetes.client import ApiClient  # type: ignore[import-untyped]

from lathe_launch.cluster.status import pod_usage, step_usage
from lathe_launch.usage import CPU_HOUR, GPU_HOUR, Usage, leave_usage, left_usage, measure
from tests.support.fake_kubernetes import FakeKubernetes

BEGAN = datetime(2026, 1, 5, 3, tzinfo=UTC)
V2 = {"cpu.stat": "usage_usec 7200000000\nuser_usec 1\n", "memory.peak": f"{3 * 2**30}\n"}
V1 = {
    "cpuacct/cpuacct.usage": "7200000000000\n",
    "memory/memory.max_usage_in_bytes": f"{3 * 2**30}\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2, Usage(cpu_hours=2.0, peak_memory_gib=3.0)),
        (V1, Usage(cpu_hours=2.0, peak_memory_gib=3.0)),
        ({"cpu.stat": V2["cpu.stat"]}, Usage(cpu_hours=2.0)),  # Linux before 5.19
        ({}, Usage()),
    ],
)
def test_a_pods_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: Usage
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    folder, log = write(tmp_path / "cgroup", {"x": ""} | files) if files else tmp_path, None
    assert measure(folder) == expected
    leave_usage(tmp_path / "absent", folder)
    assert not (tmp_path / "absent").exists()
    log = tmp_path / "termination-log"
    log.touch()
    leave_usage(log, folder)
    assert left_usage(log.read_text()) == expected


def test_processes_and_their_children_elsewhere() -> None:
    """Against what a process does that burns a third of a second of CPU and holds 300 MB."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    code = f"""
import subprocess, sys
from lathe_launch.usage import measure
block = bytearray(300 << 20)
subprocess.run([sys.executable, "-c", {burn!r}], check=True)
print(measure().figures)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used = Usage.of_figures(json.loads(said.stdout.replace("'", '"')))
    assert 0.3 <= 3600 * (used.cpu_hours or 0) < 2.0
    assert 0.3 <= 3600 * (used.hours or 0) < 60.0
    assert 300 / 1024 <= (used.peak_memory_gib or 0) < 0.6
    assert used.gpu_hours == 0 and used.waited_seconds is None


def pod(now: dict[str, object], created: datetime = BEGAN) -> dict[str, object]:
    scheduled = created + timedelta(seconds=90)
    condition = {"type": "PodScheduled", "status": "True"}
    limits = {"limits": {"nvidia.com/gpu": "4", "memory": "6Gi"}}
    return {
        "metadata": {"name": "step-2", "creationTimestamp": BEGAN.isoformat()},
        "spec": {"containers": [{"name": "wait"}, {"name": "main", "resources": limits}]},
        "status": {
            "conditions": [condition | {"lastTransitionTime": scheduled.isoformat()}],
            "containerStatuses": [
                {"name": name, "image": "", "imageID": "", "ready": True, "restartCount": 0,
                 "state": now if name == "main" else {}}
                for name in ("wait", "main")
            ],
        },
    }  # fmt: skip


STARTED = (BEGAN + timedelta(seconds=120)).isoformat()
ENDED = (BEGAN + timedelta(seconds=120 + 1800)).isoformat()
TERMINATED = {"exitCode": 0, "startedAt": STARTED, "finishedAt": ENDED}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"terminated": TERMINATED}, Usage(0.5, 90.0, 2.0)),
        (
            {"terminated": TERMINATED | {"message": '{"usage.cpu_hours": 1.5}'}},
            Usage(0.5, 90.0, 2.0, cpu_hours=1.5),
        ),
        ({"terminated": TERMINATED | {"message": "out of memory"}}, Usage(0.5, 90.0, 2.0)),
        ({"running": {"startedAt": STARTED}}, Usage(1.0, 90.0, 4.0)),
        ({"waiting": {"reason": "ContainerCreating"}}, Usage(waited_seconds=90.0)),
    ],
)
def test_a_pods_status(state: dict[str, object], expected: Usage) -> None:
    read = ApiClient()._ApiClient__deserialize(pod(state), "V1Pod")
    now = BEGAN + timedelta(seconds=120 + 3600)
    assert pod_usage(read, "main", now=now) == expected


def test_a_step_knows_its_pod(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("POD_NAME", "step-2")
    server.create("pods", pod({"running": {"startedAt": STARTED}}, datetime.now(UTC)))
    used = step_usage()
    assert 88.0 < (used.waited_seconds or 0) <= 91.0
    assert used.hours and used.gpu_hours == 4 * used.hours
    server.denied.add(("get", "pods"))
    assert step_usage().waited_seconds is None  # and the step does not fail


def test_sums_and_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Usage(1.0, 10.0, 8.0, 4.0, 20.0)
    both = one + Usage(hours=0.5, peak_memory_gib=12.0)
    assert both == Usage(1.5, 10.0, 8.0, 4.0, 20.0)
    assert both.priced() == both
    monkeypatch.setenv(GPU_HOUR, "2.5")
    assert both.priced().price == 8 * 2.5
    monkeypatch.setenv(CPU_HOUR, "0.05")
    assert both.priced().price == pytest.approx(8 * 2.5 + 4 * 0.05)
    assert Usage.of_figures(both.figures | {"loss": 3.0}) == both
