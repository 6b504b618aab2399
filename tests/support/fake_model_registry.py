"""A fake Kubeflow Model Registry (REST API of 0.3) on the loopback interface.

Implements registered models, their versions and the artifacts of a version.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback import JSONHandler, LoopbackServer

API = "/api/model_registry/v1"

Json = dict[str, Any]


@dataclass
class ModelRegistry:
    """State of the registry.

    Attributes:
        broken: answer every request with status 500.
        artifacts: artifacts by id of their version.
    """

    url: str = ""
    broken: bool = False
    models: list[Json] = field(default_factory=list)
    versions: list[Json] = field(default_factory=list)
    artifacts: dict[str, list[Json]] = field(default_factory=dict)

    def answer(self, method: str, address: str, body: Json) -> tuple[int, Json]:
        """Return the status and JSON of a response."""
        parts = urlsplit(address)
        path = parts.path.removeprefix(API)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if self.broken:
            return 500, {"code": "500", "message": "the database is gone"}
        match method, path:
            case "GET", "/registered_models":
                return 200, {"items": self.models, "size": 0, "pageSize": 1, "nextPageToken": ""}
            case "GET", "/registered_model":
                return _found(self.models, name=query["name"])
            case "GET", "/model_version":
                of = {"name": query["name"], "registeredModelId": query["parentResourceId"]}
                return _found(self.versions, **of)
            case "POST", "/registered_models":
                return _added(self.models, body, name=body["name"])
            case "POST", "/model_versions":
                same = {key: body[key] for key in ("name", "registeredModelId")}
                return _added(self.versions, body, **same)
        if (match := re.fullmatch("/model_versions/([0-9]+)/artifacts", path)) and method == "POST":
            return _added(self.artifacts.setdefault(match[1], []), body, name=body["name"])
        return 404, {"code": "404", "message": f"no such path: {method} {path}"}


def _found(rows: list[Json], **fields: str) -> tuple[int, Json]:
    for row in rows:
        if fields.items() <= row.items():
            return 200, row
    return 404, {"code": "404", "message": f"nothing has {fields}"}


def _added(rows: list[Json], body: Json, **unique: str) -> tuple[int, Json]:
    if any(unique.items() <= row.items() for row in rows):
        return 409, {"code": "409", "message": f"{unique} exists"}
    rows.append(body | {"id": str(len(rows) + 1)})
    return 201, rows[-1]


@contextmanager
def serve() -> Iterator[ModelRegistry]:
    """Serve a registry on a free port while the block runs."""
    registry = ModelRegistry()

    class Handler(JSONHandler):
        def _handle(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, answer = registry.answer(self.command, self.path, json.loads(raw or b"{}"))
            self.reply(json.dumps(answer).encode(), code)

        do_GET = do_POST = _handle

    with LoopbackServer(Handler) as server:
        registry.url = server.url
        yield registry
