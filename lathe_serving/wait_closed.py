"""Waits until nothing listens on a port of this machine: Triton's preStop hook, so that the gateway
can complete requests in flight.

    python -m lathe_serving.wait_closed --first SECONDS PORT
"""

import argparse
import socket
import sys
import time

from lathe_serving.state import HOST

POLL_SECONDS = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status, 0."""
    parser = argparse.ArgumentParser(prog="python -m lathe_serving.wait_closed")
    parser.add_argument("--first", type=float, default=0.0, help="minimum time to wait, in seconds")
    parser.add_argument("port", type=int)
    given = parser.parse_args(arguments)
    time.sleep(given.first)
    while _is_open(given.port):
        time.sleep(POLL_SECONDS)
    return 0


def _is_open(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=POLL_SECONDS).close()
    except TimeoutError:
        return True  # it is busy
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
