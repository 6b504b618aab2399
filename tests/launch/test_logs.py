"""Following the first node's log over connections that drop."""

import time

import pytest

from lathe_launch.cluster.logs import nanoseconds
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import Pod
from tests.support.launchers import launch, play, succeed

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.slow
def test_a_log_that_breaks_off_is_whole(
    in_pod: FakeKubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"line {number} of many" for number in range(60)] + ["", "the same", "the same"]

    def talk(pod: Pod) -> None:
        pod.start()
        for line in lines:
            pod.say(line)
            time.sleep(0.1)
        pod.end()

    in_pod.log_cuts += [7, 3, 0]
    play(in_pod, talk)
    launch()
    assert capfd.readouterr().out.splitlines() == lines
    assert not in_pod.log_cuts


def test_logs_that_are_forbidden_do_not_stop_it(in_pod: FakeKubernetes) -> None:
    in_pod.denied.add(("get", "pods/log"))
    play(in_pod, succeed)
    launch()


@pytest.mark.parametrize(
    ("stamp", "after"),
    [
        ("1970-01-01T00:00:01.000000001Z", 1_000_000_001),
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T02:00:01.5+02:00", 1_500_000_000),
    ],
)
def test_time_stamps(stamp: str, after: int) -> None:
    assert nanoseconds(stamp) == after
