"""A free TCP port for a server that starts a moment later."""

import random
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)  # below Linux's ephemeral ports and Kubernetes's node ports
ATTEMPTS = 100


def free_port() -> int:
    """A port of the loopback interface that nothing uses.

    The kernel's own choice (port 0) may be given to any other connection before the server is
    there, so this one is taken from ports that the kernel gives to nobody.

    Raises:
        OSError: no port is free.
    """
    for _ in range(ATTEMPTS):
        port = random.SystemRandom().choice(PORTS)  # whatever seeds its caller has set
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            probe.listen()
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free on {LOOPBACK}")
