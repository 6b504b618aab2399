"""Requests to OpenAI's interface whose answers can be compared, streamed or whole."""

import json
from typing import Any

import requests

Answer = list[dict[str, Any]]


class OpenAIRequest:
    """The body of a request; two are equal only if they are one."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = {"model": "gpt", **body}

    def __repr__(self) -> str:
        return json.dumps(self.body)


class RefusedError(Exception):
    """An answer with an error, which has this status and code."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


def ask(address: str, asked: OpenAIRequest, stream: bool = False, timeout: float = 60) -> Answer:
    """The choices of the answer; those of a stream are put together.

    Raises:
        RefusedError: an error is the answer, or ends it.
        ValueError: the answer is not whole, or is more than one.
    """
    is_stream = stream and "best_of" not in asked.body
    body = asked.body | {"stream": is_stream}
    with requests.post(f"{address}/v1/completions", json=body, timeout=timeout) as reply:
        if reply.status_code != 200:
            raise RefusedError(reply.status_code, reply.json()["error"]["code"])
        return _joined(reply.content) if is_stream else reply.json()["choices"]


def _joined(content: bytes) -> Answer:
    *events, end, rest = content.split(b"\n\n")
    pieces = [json.loads(event.removeprefix(b"data: ")) for event in events]
    if rest == b"" and b'"error"' in end[:20]:
        raise RefusedError(200, json.loads(end.removeprefix(b"data: "))["error"]["code"])
    if rest or end != b"data: [DONE]":
        raise ValueError(f"the stream ends with {end!r} {rest!r}")
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
