"""The memory that a process may use, and the number of processes that it suffices for."""

from pathlib import Path

from lathe_base.errors import Code
from lathe_launch.usage import cgroup_limits, machine_memory, require_processes
from tests.support.errors import raises


def test_processes_without_number_are_refused() -> None:
    require_processes(2)
    with raises(Code.OUT_OF_MEMORY, "60000"):
        require_processes(60000)


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/pod/container\n0::/slice/unit\n1:cpu:/pod\n")
    limits = {
        "memory/pod/memory.limit_in_bytes": "9223372036854771712",
        "memory/pod/container/memory.limit_in_bytes": "2000000000",
        "slice/memory.max": "1000000000",
        "slice/unit/memory.max": "max",
    }
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert sorted(cgroup_limits(tmp_path, own)) == [10**9, 2 * 10**9, 9223372036854771712]
    assert list(cgroup_limits(tmp_path, tmp_path / "none")) == []
    assert machine_memory() > 10**9
