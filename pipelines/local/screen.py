"""Displays a run's output: on a terminal, a progress line replaces the previous one."""

import re
import shutil
import sys

PROGRESS = re.compile(r" \d+/\d+, .*left$")  # the format of `lathe_base.progress.Bar.tell`


class Screen:
    """Standard output; if it is not a terminal, no line is replaced."""

    def __init__(self) -> None:
        self._replaces, self._is_open = sys.stdout.isatty(), False

    def show(self, line: str) -> None:
        """Print one or more lines."""
        if self._is_open:
            print("\r\x1b[K", end="")
        self._is_open = self._replaces and PROGRESS.search(line) is not None
        if self._is_open:
            line = line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._is_open else "\n", flush=True)

    def close(self) -> None:
        """Keep the last progress line."""
        if self._is_open:
            print(flush=True)
        self._is_open = False
