"""Runs Triton and the gateway in one container: the entry point of the image `serve`.

    python -m lathe_serving.container [REPOSITORY]

The gateway listens on ports 8000 and 9000, Triton's gRPC on 8001 and its metrics on 8002; its HTTP
is on loopback. SIGTERM first ends the gateway, which completes requests in flight, and then Triton.
If one of them, or a backend of Triton's, ends by itself, so does the container.
"""

import asyncio
import signal
import sys
from contextlib import suppress

from lathe_serving.environment import restrictions
from lathe_serving.stubs import ended_stubs

REPOSITORY = "/models"
STUB_SECONDS = 2.0  # between two looks at Triton's backends
TRITON_PORT = 8003
DRAIN_SECONDS = 25  # of the 30 s that docker and podman are often told to wait


async def run(repository: str) -> int:
    """Run both until one ends; returns the exit status."""
    triton = await asyncio.create_subprocess_exec(
        "tritonserver",
        f"--model-repository={repository}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        "--http-address=127.0.0.1",
        f"--http-port={TRITON_PORT}",
        "--metrics-address=0.0.0.0",
        f"--exit-timeout-secs={DRAIN_SECONDS}",
        *restrictions(),
    )
    gateway = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "lathe_serving.gateway",
        repository,
        f"--triton-http=127.0.0.1:{TRITON_PORT}",
        "--host=0.0.0.0",
        f"--drain-seconds={DRAIN_SECONDS}",
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, gateway.terminate)
    ends = [asyncio.create_task(process.wait()) for process in (gateway, triton)]
    ended = set[int]()
    while not any(end.done() for end in ends):
        await asyncio.wait(ends, timeout=STUB_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        before, ended = ended, ended_stubs(triton.pid)
        if before & ended:
            print("a Python backend has died: killing Triton", file=sys.stderr, flush=True)
            triton.kill()
    for process in (gateway, triton):
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
    return int(any(end.result() for end in ends))


if __name__ == "__main__":
    sys.exit(asyncio.run(run(*sys.argv[1:] or [REPOSITORY])))
