"""Fixtures of `make test-cluster`, and the table that it prints at its end."""

import os
from collections.abc import Iterator

import pytest

from pipelines.cluster.server import connect, open_cluster
from tests.cluster.site import Site, whole_number

SEEN: dict[str, str] = {}


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The cluster of `KUBECONFIG` and `LATHE_KFP_*`; runs left at the end are terminated."""
    cluster = open_cluster(connect().steps_namespace)
    production = os.environ.get("LATHE_TEST_PRODUCTION", "")
    ui = os.environ.get("LATHE_TEST_UI", "").rstrip("/")
    made = Site(cluster, whole_number("LATHE_TEST_GPUS"), production, ui)
    yield made
    made.end_everything()
    made.until("nothing is left", lambda: not made.left_behind(), 900)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" and "site" in getattr(item, "fixturenames", ()):
        # Of a skipped test: file, line, reason.
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        seen = dict(report.user_properties).get("seen", why)
        SEEN[item.name.partition("[")[2].rstrip("]")] = f"{report.outcome:8} {seen}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, seen in SEEN.items():
        terminalreporter.write_line(f"{name:22} {seen}")
