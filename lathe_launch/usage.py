"""This machine's memory, as far as the process may use it, and what a step has used: time, CPUs,
GPUs and memory, from its cgroup or its processes.

In a pod the cgroup is the step's own and counts every process that it has started, restarts
included. Elsewhere it is the session's, so the process and the children that it has waited for are
counted, the peak of memory is that of the largest one, and GPUs are those that torch finds.
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lathe_base.errors import Code, UserError
from lathe_launch.shape import visible_gpus

BEGAN = time.monotonic()

CGROUP = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup v2 and v1
PEAKS = ("memory.peak", "memory/memory.max_usage_in_bytes")  # of cgroup v2 and v1
PROCESS = 128e6  # bytes: less than torch itself takes of its own
PREFIX = "usage."
"""Prefix of these figures among a step's metrics."""
TERMINATION_LOG = Path("/dev/termination-log")
"""What a container writes there is in its pod's status after it has ended."""
GPU_HOUR, CPU_HOUR = "LATHE_GPU_HOUR_PRICE", "LATHE_CPU_HOUR_PRICE"
"""Environment variables: the prices of an hour of a GPU and of a CPU, in any currency."""
GIB = 2**30


def require_processes(count: int) -> None:
    """Check that this machine can run this many training processes.

    Raises:
        UserError: torch alone would fill its memory.
    """
    available = machine_memory()
    if count * PROCESS > available:
        raise UserError(
            f"Distributed asks for {count} processes on this machine, which has "
            f"{available / 1e9:,.0f} GB, enough for at most {available // PROCESS:.0f} even "
            "without a model",
            "lower the degrees, or distribute the processes over several machines with "
            "Launch.nodes",
            Code.OUT_OF_MEMORY,
        )


def machine_memory() -> int:
    """Memory in bytes of this machine, as far as the process's cgroups allow."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()])


def cgroup_limits(
    root: Path = CGROUP, cgroup_file: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Memory limits in bytes of the process's cgroup and its ancestors."""
    try:
        lines = cgroup_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:  # v2 has one, 0::/path; v1 one for each controller, 4:memory:/path
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                for text in (_read(folder / name).strip() for name in LIMITS):
                    if text.isdigit():  # else "max"
                        yield int(text)


@dataclass(frozen=True)
class Usage:
    """What a step, or several, have used; None where it is not known.

    Attributes:
        hours: how long the step ran.
        waited_seconds: until its pod, or all of its workers, had nodes.
        gpu_hours: hours of GPUs that were reserved for it, busy or not.
        cpu_hours: CPU time.
        peak_memory_gib: maximum memory of a pod in GiB, cached files and /dev/shm included; outside
            of pods, of a process.
        price: by the prices of an hour that the step's environment gives.
    """

    hours: float | None = None
    waited_seconds: float | None = None
    gpu_hours: float | None = None
    cpu_hours: float | None = None
    peak_memory_gib: float | None = None
    price: float | None = None

    def __add__(self, other: "Usage") -> "Usage":
        """The sum; of memory, the maximum."""
        mine, others = asdict(self), asdict(other)
        known = {
            name: [value for value in (mine[name], others[name]) if value is not None]
            for name in mine
        }
        return Usage(**{
            name: (max if name == "peak_memory_gib" else sum)(values)
            for name, values in known.items()
            if values
        })  # fmt: skip

    @property
    def figures(self) -> dict[str, float]:
        """What is known, as metrics of a step."""
        return {f"{PREFIX}{name}": x for name, x in asdict(self).items() if x is not None}

    @staticmethod
    def of_figures(metrics: Mapping[str, float]) -> "Usage":
        """The usage among the metrics of a step; nothing if they have none."""
        names = Usage.__dataclass_fields__
        return Usage(**{name: metrics[key] for name in names if (key := PREFIX + name) in metrics})

    def priced(self) -> "Usage":
        """With the price of its hours, if the environment gives prices."""
        costs = []
        for name, hours in ((GPU_HOUR, self.gpu_hours), (CPU_HOUR, self.cpu_hours)):
            with suppress(ValueError):  # not set, or not a number
                costs.append(float(os.environ.get(name, "")) * (hours or 0.0))
        return Usage(**asdict(self) | {"price": sum(costs) if costs else None})


def measure(cgroup: Path = CGROUP) -> Usage:
    """CPU time and memory of this step so far: of its pod, or of this process and its children,
    with the hours since this module was imported."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        # cgroup v2 counts CPU time in microseconds, v1 in nanoseconds.
        v2 = re.search(r"^usage_usec (\d+)$", _read(cgroup / "cpu.stat"), re.MULTILINE)
        v1 = _read(cgroup / "cpuacct/cpuacct.usage").strip()
        spent = int(v2[1]) / 1e6 if v2 else int(v1) / 1e9 if v1.isdigit() else None
        # Linux before 5.19 does not record the peak with cgroup v2.
        texts = (_read(cgroup / name).strip() for name in PEAKS)
        return Usage(
            cpu_hours=None if spent is None else spent / 3600,
            peak_memory_gib=next((int(text) / GIB for text in texts if text.isdigit()), None),
        )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    peaks = [one.ru_maxrss * unit for one in used]
    # Linux counts in ru_maxrss what the parent had when it started this process.
    if match := re.search(r"^VmHWM:\s+(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE):
        peaks[0] = 1024 * int(match[1])
    hours = (time.monotonic() - BEGAN) / 3600
    return Usage(
        hours=hours,
        gpu_hours=hours * visible_gpus() if "torch" in sys.modules else 0.0,
        cpu_hours=seconds / 3600,
        peak_memory_gib=max(peaks) / GIB,
    )


def leave_usage(path: Path = TERMINATION_LOG, cgroup: Path = CGROUP) -> None:
    """Leave what this container has used where its pod's status shows it; nothing outside of
    one."""
    with suppress(OSError):
        if path.exists():
            path.write_text(json.dumps(measure(cgroup).figures), encoding="utf-8")


def left_usage(message: str | None) -> Usage:
    """What a container has left; nothing if it was killed before."""
    try:
        figures = json.loads(message or "")
    except ValueError:
        return Usage()
    return Usage.of_figures(figures) if isinstance(figures, dict) else Usage()


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
