"""Runs the tests of several files at a time: `pytest -p tests.support.forks --forks 4`.

The processes are forks of the one that has collected the tests. (Workers of pytest-xdist collect
all tests each: twenty seconds of a core, as long as a tenth of the quick tests.) A process takes
one file after another, so that fixtures of a module are made once; those of the session are made
once in every process. `PYTEST_XDIST_WORKER` names it, as with pytest-xdist.

Many tests wait for a server, a clock or another process, which takes longer beside other tests.
Those that fail, if they are few, run once more at the end, alone. This result counts; the summary
has the first failure of those that then pass.
"""

import os
import signal
import traceback
import uuid
from collections import defaultdict, deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.capture import CaptureManager

MAX_REPEATED = 10  # more failures have a common cause
CRASHED = "the process of this test ended: its log is above, if it wrote one"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests of so many files at a time, in processes of their own"
    parser.addoption("--forks", type=int, default=0, metavar="N", help=text)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("forks")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    os.environ.setdefault("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    controller = Controller(session, count)
    session.config.pluginmanager.register(controller)
    controller.run()
    return True


class Controller:
    """Gives files to the workers, and reports their tests as if they ran in this process."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._hook = session, session.config.hook
        numbers = range(len(session.items))
        files = groupby(numbers, key=lambda i: session.items[i].path)
        self._files = deque(list(group) for _, group in files)  # numbers of tests
        self._basetemp = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._workers: dict[Connection, tuple[int, list[int]]] = {}  # pid, tests that it has to run
        self._reports = defaultdict[int, list[pytest.TestReport]](list)  # of a test that runs
        self._failed: dict[int, list[pytest.TestReport]] = {}
        self._is_repeating = False
        for number in range(min(count, len(self._files))):
            self._start(number)

    def run(self) -> None:
        try:
            self._run_files()
            self._is_repeating = True
            if 0 < len(self._failed) <= MAX_REPEATED:
                self._files.append(list(self._failed))
                self._start(len(self._session.items))
                self._run_files()
            else:
                for reports in self._failed.values():
                    self._log(reports)
                self._failed.clear()
        finally:
            for pid, _ in self._workers.values():
                os.kill(pid, signal.SIGINT)
                os.waitpid(pid, 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._failed:
            terminalreporter.section("failed beside other tests, passed alone")
        for reports in self._failed.values():
            for report in reports:
                if report.failed:
                    terminalreporter.write_line(f"{report.nodeid} ({report.when})", bold=True)
                    terminalreporter.write_line(report.longreprtext)

    def _run_files(self) -> None:
        while self._workers:
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                try:
                    self._handle(connection, *connection.recv())
                except (EOFError, ConnectionError):
                    self._replace(connection)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)

    def _log(self, reports: list[pytest.TestReport]) -> None:
        for report in reports:
            self._hook.pytest_runtest_logreport(report=report)

    def _start(self, number: int) -> None:
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            for other in (ours, *self._workers):
                other.close()
            name = f"gw{number}"
            os.environ["PYTEST_XDIST_WORKER"] = name
            folder = self._basetemp / f"popen-{name}"
            folder.mkdir(0o700, exist_ok=True)
            self._session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            work(self._session, theirs)
        theirs.close()
        self._workers[ours] = pid, []

    def _handle(self, connection: Connection, kind: str, value: Any) -> None:
        _, tests = self._workers[connection]
        if kind == "idle":
            tests[:] = self._files.popleft() if self._files else []
            connection.send(tests)
        elif kind == "start":
            item = self._session.items[value]
            self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "finish":
            tests.remove(value)
            reports = self._reports.pop(value, [])
            is_failed = any(report.failed for report in reports)
            if is_failed and not self._is_repeating:
                self._failed[value] = reports
                return
            if is_failed:
                self._failed.pop(value, None)
            self._log(reports)
        else:
            number, data = value
            config = self._session.config
            report = self._hook.pytest_report_from_serializable(config=config, data=data)
            if number is None:  # the end of the session's fixtures
                self._log([report])
            else:
                self._reports[number].append(report)

    def _replace(self, connection: Connection) -> None:
        """Report the test in which a worker has crashed; another runs the rest of its file."""
        pid, tests = self._workers.pop(connection)
        os.waitpid(pid, 0)
        if not tests:
            return
        crashed, *rest = tests
        item = self._session.items[crashed]
        self._reports.pop(crashed, None)
        self._log([pytest.TestReport(item.nodeid, item.location, {}, "failed", CRASHED, "call")])
        if rest:
            self._files.appendleft(rest)
        self._start(len(self._session.items) + crashed)


class Sender:
    """A plugin of the workers."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self.test: int | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", (self.test, data)))


def work(session: pytest.Session, connection: Connection) -> None:
    """Run the tests that come over the connection in this process, and end it."""
    config, last = session.config, session.items[-1]
    capture = config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    capture.stop_global_capturing()  # its files are shared with the other processes
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(sender := Sender(config, connection))
    item = last
    try:
        connection.send(("idle", None))
        while tests := connection.recv():
            items = [session.items[i] for i in tests]
            # Which file comes next is not known: that of any other keeps the session's fixtures.
            following = [*items[1:], last if last.path != items[0].path else session.items[0]]
            for number, item, other in zip(tests, items, following, strict=True):
                connection.send(("start", number))
                sender.test = number
                config.hook.pytest_runtest_protocol(item=item, nextitem=other)
                sender.test = None
                connection.send(("finish", number))
            connection.send(("idle", None))
    finally:
        try:
            session._setupstate.teardown_exact(None)
        except Exception:
            error = traceback.format_exc()
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", error, "teardown")
            sender.pytest_runtest_logreport(report)
        finally:
            os._exit(0)
