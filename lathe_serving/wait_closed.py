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
    args = parser.parse_args(arguments)
    time.sleep(args.first)
    while True:
        try:
            socket.create_connection((HOST, args.port), timeout=POLL_SECONDS).close()
        except TimeoutError:
            pass  # it is busy
        except OSError:
            return 0
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
