"""Requests to the OpenAI API, streamed or not, with responses in a comparable form."""

import json
from typing import Any

import requests

Answer = list[dict[str, Any]]


class OpenAIRequest:
    """Body of a request; compares by identity."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = {"model": "gpt", **body}

    def __repr__(self) -> str:
        return json.dumps(self.body)


class RefusedError(Exception):
    """An error response, with its HTTP status and error code."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


def ask(address: str, request: OpenAIRequest, stream: bool = False, timeout: float = 60) -> Answer:
    """Send a completion request; returns the choices, merged if they are streamed.

    Raises:
        RefusedError: the response is an error, or the stream ends with one.
        ValueError: the stream is incomplete, or continues after its end.
    """
    is_stream = stream and "best_of" not in request.body
    body = request.body | {"stream": is_stream}
    with requests.post(f"{address}/v1/completions", json=body, timeout=timeout) as reply:
        if reply.status_code != 200:
            raise RefusedError(reply.status_code, reply.json()["error"]["code"])
        return _joined(reply.content) if is_stream else reply.json()["choices"]


def _joined(content: bytes) -> Answer:
    *events, end, rest = content.split(b"\n\n")
    pieces = [json.loads(event.removeprefix(b"data: ")) for event in events]
    if rest or end != b"data: [DONE]":
        raise ValueError(f"the stream ends with {end!r} {rest!r}")
    if pieces and "error" in pieces[-1]:
        raise RefusedError(200, pieces[-1]["error"]["code"])
    choices: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            _add(choices, choice)
    return [choice for _, choice in sorted(choices.items())]


def _add(choices: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    whole = choices.setdefault(piece["index"], piece | {"text": "", "finish_reason": None})
    if whole["finish_reason"] is not None:
        raise ValueError(f"more after the end: {piece}")
    whole["finish_reason"] = piece["finish_reason"]
    whole["text"] += piece["text"]
    if piece["logprobs"] is not None and whole["logprobs"] is not piece["logprobs"]:
        for name, values in piece["logprobs"].items():
            whole["logprobs"][name] = (whole["logprobs"][name] or []) + (values or []) or None
