"""The command line: a verb a stage, the same functions as the pipeline components call.

Stages import torch: the verb that runs imports its own, after its recipe has been read, so that
help and a mistake in the settings come at once.
"""

import os
import signal
import sys

from lathe.cli.app import add_verbs, app
from lathe_base.console import end_cleanly_on_sigterm, log_to_stderr, print_any_text
from lathe_base.errors import (
    EXPECTED_ERRORS,
    Code,
    Preempted,
    UserError,
    coded,
    explain,
    explain_missing_package,
    printable,
)
from lathe_launch.parent import report_preemption

__all__ = ["app", "main"]

add_verbs()


def main() -> None:
    """Run the command line; a user's mistake is one message and status 2, no traceback."""
    print_any_text()
    log_to_stderr()
    end_cleanly_on_sigterm()
    try:
        app(prog_name="lathe")
    except BrokenPipeError:  # as in `lathe recipe tiny | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except UnicodeEncodeError as error:  # raised by a library written in Rust
        wrong = UserError(
            f"{printable(error.object)}: not UTF-8", "rename the file or folder", Code.BAD_PATH
        )
        print(coded(wrong), file=sys.stderr)
        sys.exit(wrong.status)
    except ModuleNotFoundError as error:
        missing = explain_missing_package(error)
        if missing is None:
            raise
        print(coded(missing), file=sys.stderr)
        sys.exit(missing.status)
    except EXPECTED_ERRORS as error:
        told = explain(error)
        if isinstance(told, Preempted):
            report_preemption(str(told))
        print(coded(told), file=sys.stderr)
        sys.exit(told.status)
