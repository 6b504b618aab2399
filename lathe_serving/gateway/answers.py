"""Builds OpenAI responses, whole or streamed, from the backend's chunks."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.models import Model
from lathe_serving.runtime.protocol import Chunk

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
REASONS = {"": None, "stop": "stop", "length": "length", "timeout": "length"}


def error_events(error: ApiError) -> bytes:
    """The last events of a stream of chunks that an error ends."""
    return event(error.to_json()) + DONE


@dataclass
class Usage:
    """Token counts, added up from chunks."""

    prompt: int = 0
    cached: int = 0  # of the prompt's
    completion: int = 0

    def add(self, chunk: Chunk, is_first: bool, echo: bool) -> None:
        """Count a chunk.

        Args:
            is_first: whether its sequence is the first of its prompt.
            echo: whether the sequence includes the prompt's tokens.
        """
        self.prompt += chunk.prompt_tokens if is_first else 0
        self.cached += chunk.cached_tokens if is_first else 0
        self.completion += len(chunk.tokens) - (chunk.prompt_tokens if echo else 0)

    def to_json(self) -> Json:
        """The field `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Head:
    """Fields that all chunks of a response share."""

    kind: str
    model: Model
    prefix: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, choices: Sequence[Json], **more: Any) -> Json:
        """A response, or a chunk of one."""
        return {
            "id": f"{self.prefix}-{self.name}",
            "object": self.kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"fp_{self.model.digest[:12]}",
            "choices": list(choices),
            **more,
        }


class TextOffsets:
    """Computes the character offsets of tokens as they arrive."""

    def __init__(self) -> None:
        self._length = 0

    def take(self, chunk: Chunk) -> list[int]:
        """The offsets of a chunk's tokens."""
        *offsets, self._length = accumulate(chunk.lengths, initial=self._length)
        return offsets


def token_bytes(name: str) -> bytes:
    """The bytes of a token, given its name from `TokenBytes.name`."""
    if name.startswith("token_id:"):
        return b""
    if name.startswith("bytes:\\x"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def event(piece: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(piece, ensure_ascii=False).encode() + b"\n\n"
