"""An interactive session: prompts typed one after another, with streamed answers."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress

from lathe_base.errors import Code, StageError, UserError, coded
from lathe_serving.client import Client
from lathe_serving.client.transport import Parameter


def lines() -> Iterator[str]:
    """Yield lines typed or piped in until end of input; empty lines are skipped."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  so that `input` has a history
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:  # meant for an answer that has just ended
            if not sys.stdin.isatty():
                raise
            print()
            continue
        except UnicodeDecodeError:
            raise UserError(
                "the input: not UTF-8",
                "convert it, for instance with iconv -t utf-8",
                Code.MALFORMED,
            ) from None
        if line.strip():
            yield line


def ask(
    client: Client, prompt: str, parameters: Mapping[str, Parameter], goes_on: bool = False
) -> None:
    """Print the prompt and its continuation.

    Args:
        goes_on: more prompts follow, so an error is printed and Ctrl-C only ends this answer.

    Raises:
        UserError, StageError: as `Client.stream`.
    """
    # The prompt is shown with the first chunk: then the request has been accepted.
    start = prompt
    try:
        with closing(client.stream(prompt, **parameters)) as chunks:
            for chunk in chunks:
                print(start + chunk.text, end="", flush=True)
                start = ""
    except (UserError, StageError) as error:
        if not goes_on:
            raise
        print(coded(error), file=sys.stderr)
        return
    except KeyboardInterrupt:
        if not goes_on:
            raise
    print()
