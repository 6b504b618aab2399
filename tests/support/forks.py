"""Runs the tests of several files at a time: `pytest -p tests.support.forks --forks 4`.

The processes are forks of the one that has collected the tests. (Workers of pytest-xdist collect
all tests each: twenty seconds of a core, as long as a tenth of the quick tests.) A process takes
one file after another, so that fixtures of a module are made once; those of the session are made
once in every process. `PYTEST_XDIST_WORKER` names it, as with pytest-xdist.

The collection keeps one core busy. Meanwhile the first process runs what had been collected when it
began; after that, another that knows all tests takes its place.

Many tests wait for a server, a clock or another process, which takes longer beside other tests.
Those that fail, if they are few, run once more at the end, alone. This result counts; the summary
has the first failure of those that then pass.
"""

import os
import signal
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.capture import CaptureManager

NAME = "forks"
MAX_REPEATED = 10  # more failures have a common cause
CRASHED = "the process of this test ended: its log is above, if it wrote one"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests of so many files at a time, in processes of their own"
    parser.addoption("--forks", type=int, default=0, metavar="N", help=text)
    text = "begin the first process when so many tests have been collected"
    parser.addoption("--early", type=int, default=500, metavar="N", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    count = session.config.getoption("forks")
    if count and not session.config.option.collectonly:
        os.environ.setdefault("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
        session.config.pluginmanager.register(Controller(session, count), NAME)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    controller = session.config.pluginmanager.get_plugin(NAME)
    if controller is None or session.testsfailed:
        return None  # pytest's own loop
    controller.run()
    return True


def by_file(items: Iterable[pytest.Item]) -> list[list[str]]:
    """The identities of the tests, a list for each file."""
    return [[item.nodeid for item in group] for _, group in groupby(items, key=lambda i: i.path)]


class Controller:
    """Gives files to the workers, and reports their tests as if they ran in this process."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._hook, self._count = session, session.config.hook, count
        self._collected: list[pytest.Item] = []
        self._items: dict[str, pytest.Item] = {}
        self._files = deque[list[str]]()
        self._basetemp = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._workers: dict[Connection, tuple[int, list[str]]] = {}  # pid, tests that it has to run
        self._number = 0  # of the next worker
        self._early: Connection | None = None
        self._known = deque[list[str]]()  # files of the early worker that it has not begun
        self._messages: list[tuple[Connection, str, Any]] = []  # from it, during the collection
        self._reports = defaultdict[str, list[pytest.TestReport]](list)  # of a test that runs
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._is_repeating = False

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._collected.append(item)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if not isinstance(collector, pytest.Module):
            return
        if self._early is not None:
            self._listen(self._early)
        elif len(self._collected) >= self._session.config.getoption("early"):
            self._early = self._start(list(self._collected))

    def pytest_sessionfinish(self) -> None:
        self._end()

    def run(self) -> None:
        """Run the collected tests."""
        items, begun = self._session.items, set[str]()
        self._items = {item.nodeid: item for item in items}
        if self._early is not None:
            self._listen(self._early)
            begun = {x for _, kind, value in self._messages if kind == "given" for x in value}
        files = [[test for test in file if test not in begun] for file in by_file(items)]
        self._files.extend(filter(None, files))
        try:
            for _ in range(min(self._count, len(self._files)) - len(self._workers)):
                self._start(items)
            with suppress(ConnectionError):  # it has crashed, as the next lines find
                for message in self._messages:
                    self._take(*message)
            self._run_files()
            self._is_repeating = True
            if 0 < len(self._failed) <= MAX_REPEATED:
                self._files.append(list(self._failed))
                self._start(items)
                self._run_files()
            else:
                for reports in self._failed.values():
                    self._log(reports)
                self._failed.clear()
        finally:
            self._end()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._failed:
            terminalreporter.section("failed beside other tests, passed alone")
        for reports in self._failed.values():
            for report in reports:
                if report.failed:
                    terminalreporter.write_line(f"{report.nodeid} ({report.when})", bold=True)
                    terminalreporter.write_line(report.longreprtext)

    def _end(self) -> None:
        for pid, _ in self._workers.values():
            os.kill(pid, signal.SIGINT)
            os.waitpid(pid, 0)
        self._workers.clear()

    def _listen(self, early: Connection) -> None:
        """Keep what the early worker says for later, and give it the files that it knows."""
        with suppress(EOFError, ConnectionError):  # it has crashed, which `run` finds again
            while early.poll():
                kind, value = early.recv()
                if kind == "known":
                    self._known.extend(value)
                elif kind == "idle" and self._known:
                    given = self._known.popleft()
                    self._messages.append((early, "given", given))
                    early.send(given)
                else:
                    self._messages.append((early, kind, value))

    def _run_files(self) -> None:
        while self._workers:
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                try:
                    self._take(connection, *connection.recv())
                except (EOFError, ConnectionError):
                    self._replace(connection)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)

    def _log(self, reports: list[pytest.TestReport]) -> None:
        for report in reports:
            self._hook.pytest_runtest_logreport(report=report)

    def _start(self, items: list[pytest.Item]) -> Connection:
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            for other in (ours, *self._workers):
                other.close()
            name = f"gw{self._number}"
            os.environ["PYTEST_XDIST_WORKER"] = name
            folder = self._basetemp / f"popen-{name}"
            folder.mkdir(0o700, exist_ok=True)
            self._session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            self._session.config.pluginmanager.unregister(self)
            work(self._session, items, theirs)
        theirs.close()
        self._number += 1
        self._workers[ours] = pid, []
        return ours

    def _next(self, connection: Connection) -> list[str]:
        """The tests of the next file for this worker; none ends it."""
        if connection is not self._early:
            return self._files.popleft() if self._files else []
        while self._known:
            if (file := self._known.popleft()) in self._files:
                self._files.remove(file)
                return file
        if self._files:
            self._start(self._session.items)
        return []

    def _take(self, connection: Connection, kind: str, value: Any) -> None:
        """Do what a message asks for."""
        _, tests = self._workers[connection]
        if kind == "idle":
            tests[:] = self._next(connection)
            connection.send(tests)
        elif kind == "known":  # only now, because the collection was short
            self._known.extend(value)
        elif kind == "given":
            tests[:] = value
        elif kind == "start":
            item = self._items[value]
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
            test, data = value
            config = self._session.config
            report = self._hook.pytest_report_from_serializable(config=config, data=data)
            if test is None:  # the end of the session's fixtures
                self._log([report])
            else:
                self._reports[test].append(report)

    def _replace(self, connection: Connection) -> None:
        """Report the test in which a worker has crashed; another runs the rest of its file."""
        pid, tests = self._workers.pop(connection)
        os.waitpid(pid, 0)
        if not tests:
            return
        crashed, *rest = tests
        item = self._items[crashed]
        self._reports.pop(crashed, None)
        self._log([pytest.TestReport(item.nodeid, item.location, {}, "failed", CRASHED, "call")])
        if rest:
            self._files.appendleft(rest)
        self._start(self._session.items)


class Sender:
    """A plugin of the workers."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self.test: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", (self.test, data)))


def work(session: pytest.Session, items: list[pytest.Item], connection: Connection) -> None:
    """Run the tests that come over the connection in this process, and end it.

    Args:
        items: those that have been collected; all of them if that is complete.
    """
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    capture.stop_global_capturing()  # its files are shared with the other processes
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(sender := Sender(config, connection))
    if items is not session.items:
        session.items = items
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=items)
        config.hook.pytest_collection_finish(session=session)
        connection.send(("known", by_file(items)))
    known, item = {item.nodeid: item for item in items}, items[-1]
    try:
        connection.send(("idle", None))
        while tests := connection.recv():
            chosen = [known[test] for test in tests]
            # Which file comes next is not known: that of any other keeps the session's fixtures.
            after = items[-1] if items[-1].path != chosen[-1].path else items[0]
            for item, following in zip(chosen, [*chosen[1:], after], strict=True):
                connection.send(("start", item.nodeid))
                sender.test = item.nodeid
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                sender.test = None
                connection.send(("finish", item.nodeid))
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
