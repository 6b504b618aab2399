"""Progress: updated in place on a terminal, plain lines elsewhere."""

import io
import sys

import pytest

from pipelines.local.run import Screen

LINES = (
    "pretrain",
    "    step 20/900, loss 7.281, 5,434 tokens/s, 3 min left",
    "    step 40/900, loss 6.788, 5,434 tokens/s, 2 min left",
    "    validation at step 100: loss 5.9, perplexity 365.0",
    "    step 60/900, loss 6.788, 5,434 tokens/s, 2 min left",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(request, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "40")
    out = request.param()
    monkeypatch.setattr(sys, "stdout", out)
    screen = Screen()
    for line in LINES:
        screen.show(line)
    screen.close()
    return out.getvalue()


@pytest.mark.parametrize("shown", [io.StringIO], indirect=True)
def test_a_file_gets_every_line_as_it_is(shown):
    assert shown == "".join(f"{line}\n" for line in LINES)


@pytest.mark.parametrize("shown", [Terminal], indirect=True)
def test_a_terminal_keeps_the_last_progress_in_one_row(shown):
    clear = "\r\x1b[K"
    first, second, last = (LINES[i][:39] for i in (1, 2, 4))
    assert shown == f"{LINES[0]}\n{first}{clear}{second}{clear}{LINES[3]}\n{last}\n"
