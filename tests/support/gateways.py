"""Runs a gateway in this process, on the loopback interface."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lathe_serving.gateway.admission import ApiKeys, Limits
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.connections import Server
from lathe_serving.gateway.telemetry import Tracing
from lathe_serving.gateway.triton import read_models
from lathe_serving.server import TritonServer


@contextmanager
def running(
    gateway: Gateway,
    origins: list[str],
    drain_seconds: float = 3,
    hosts: list[str] | None = None,
    tls: tuple[Path, Path] | None = None,
) -> Iterator[str]:
    app = gateway.app(origins, hosts or ())
    server = Server(app, gateway.admission, drain_seconds, tls=tls)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http{'s' * bool(tls)}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def opened(
    server: TritonServer,
    limits: Limits | None = None,
    keys: Path | None = None,
    origins: list[str] | None = None,
    tracing: Tracing | None = None,
    hosts: list[str] | None = None,
    tls: tuple[Path, Path] | None = None,
    **changes: Any,
) -> Iterator[str]:
    models = read_models(Path(server.state.repository))
    models = {name: replace(model, **changes) for name, model in models.items()}
    known = ApiKeys(keys) if keys else None
    state = server.state
    gateway = Gateway(models, state.grpc, state.http, limits or Limits(), known, tracing)
    with running(gateway, origins or [], hosts=hosts, tls=tls) as address:
        yield address


def with_chat_template(server: TritonServer, template: str, folder: Path) -> dict[str, Any]:
    """Arguments for `opened` that add a chat template to the served model."""
    export = Path(server.state.repository) / "gpt/1"
    config = json.loads((export / "config.json").read_text())
    config["lathe"]["chat_template"] = template
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "export.json"):
        (folder / name).write_bytes((export / name).read_bytes())
    return {"folder": folder, "chat_template": template}
