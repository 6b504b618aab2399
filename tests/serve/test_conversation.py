"""`lathe client` in an interactive terminal."""

import os
import pty
import select
import signal
import subprocess
import time

import pytest

from lathe_serving.client import Client
from tests.support import warm

LONG = ["--max-tokens", "900", "--seed", "1"]


def client_command(url: str, *options: str) -> list[str]:
    return [*warm.python(), "-m", "lathe", "client", "--url", url, *options]


def test_lines_of_a_pipe_are_prompts(url: str, client: Client) -> None:
    typed = "one\n\n" + "x" * 2000 + "\ntwo\n"
    command = client_command(url, "--greedy", "--max-tokens", "8")
    run = subprocess.run(command, input=typed, capture_output=True, text=True, check=True)
    options = {"decode_strategy": "greedy_search", "max_tokens": 8}
    texts = [prompt + client.generate(prompt, **options).text for prompt in ("one", "two")]
    assert run.stdout == "".join(f"{text}\n" for text in texts)
    assert "error[too-long]" in run.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(url: str) -> None:
    ours, theirs = pty.openpty()
    command = client_command(url, *LONG)
    run = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, close_fds=True
    )
    os.close(theirs)
    try:
        read_until(ours, b"> ")
        os.write(ours, b"begin\n")
        read_until(ours, b"begin\r\nbegin")
        time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        read_until(ours, b"\n> ")  # the text itself may contain `> `
        while select.select([ours], [], [], 2)[0]:  # Ctrl-C after the response discards typed input
            os.read(ours, 4096)
        os.write(ours, b"again\n")
        read_until(ours, b"again\r\nagain")
        read_until(ours, b"\n> ")
        os.write(ours, b"\x04")
        assert run.wait(60) == 0
    finally:
        run.kill()
        os.close(ours)


def read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        try:
            seen += os.read(terminal, 4096)
        except OSError:
            raise AssertionError(seen) from None
