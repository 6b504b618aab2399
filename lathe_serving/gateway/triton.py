"""The Triton behind the gateway: its models, the streams to it, and the requests that crash it.

Many clients' requests are multiplexed on a few long-lived gRPC streams. If a client disconnects,
its request is cancelled by a message to the backend. The stream stays open, because Triton 2.51
cannot safely abort streams under load. A stream must not carry requests to a model that is missing
or not decoupled: Triton would write the response without waiting for the write in progress, and
abort ("ASSERTION FAILED: !byte_buffer->Valid()").

A request that crashes Triton a second time is rejected from then on. Most of those in flight when
it crashes are innocent, because a crash ends all of them. So suspects are retried one at a time: if
the server crashes again, the current one is the cause.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from google.protobuf import text_format
from tritonclient.grpc import (  # type: ignore[import-untyped]
    model_config_pb2,
    service_pb2,
    service_pb2_grpc,
)

from lathe_base.artifacts.sampling import sampling_defaults
from lathe_base.errors import Code, UserError
from lathe_serving.client.grpc_transport import CHANNEL_OPTIONS, refusal, request, response_chunks
from lathe_serving.client.transport import Parameter
from lathe_serving.gateway.errors import TritonDied, TritonUnavailable
from lathe_serving.reach import require_address
from lathe_serving.runtime.protocol import CANCEL, Chunk

MAX_DIGESTS = 4096
"""Maximum number of digests of requests that are quarantined; the oldest are dropped first."""

TURN_SECONDS = 10.0
"""Maximum time that a retry of a suspect waits for earlier retries."""

STREAMS = 4
READY_SECONDS = 2.0
OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a Triton that starts again is found soon
]


@dataclass(frozen=True)
class Model:
    """A model that generates.

    Attributes:
        created: when it was deployed, in seconds since the epoch.
        digest: SHA-256 of its `model.onnx`.
        max_running: number of sequences that it generates concurrently.
        max_wait: maximum expected wait for a slot, in seconds; None means half the recent time per
            prompt.
        folder: its export.
        n_positions: length of its context.
        chat_template: that of the checkpoint; empty if it has none.
        aliases: its additional names.
        recommended: request parameters that its authors recommend, of `generation_config.json`.
    """

    name: str
    created: int
    digest: str
    max_running: int
    folder: Path
    n_positions: int
    max_wait: float | None = None
    chat_template: str = ""
    aliases: tuple[str, ...] = ()
    recommended: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, name: str) -> dict[str, object]:
        """The model's entry in the list of models, under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "lathe",
            "root": self.name,
            "max_model_len": self.n_positions,  # this and `root` as in vLLM
            "has_chat_template": bool(self.chat_template),
            "generation_config": dict(self.recommended),
        }


def read_models(repository: Path) -> dict[str, Model]:
    """The models that generate, by their names.

    Raises:
        UserError: there are none, or a config.pbtxt was not written by Lathe.
    """
    models = {}
    for path in sorted(repository.glob("*/config.pbtxt")):
        try:
            config = text_format.Parse(
                path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig()
            )
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {error}", "deploy the model again", Code.MALFORMED) from None
        if not config.model_transaction_policy.decoupled:
            continue  # it scores
        texts = {key: value.string_value for key, value in config.parameters.items()}
        # Settings that earlier versions of Lathe did not write have a default.
        known = {"max_wait_seconds": "null", "aliases": "[]", **texts}
        try:
            settings = {
                key: json.loads(known[key])
                for key in ("sha256", "max_running", "max_wait_seconds", "aliases")
            }
        except (KeyError, ValueError):
            raise UserError(
                f"{path}: not written by Lathe", "deploy the model again", Code.WRONG_KIND
            ) from None
        folder = path.parent / "1"
        ours = _read_key(folder / "config.json", "lathe")
        template = ours.get("chat_template")
        source = f"{folder / 'config.json'}: sampling"
        models[config.name] = Model(
            name=config.name,
            created=int(path.stat().st_mtime),
            digest=settings["sha256"],
            max_running=settings["max_running"],
            folder=folder,
            n_positions=_read_key(folder / "export.json", "n_positions"),
            max_wait=settings["max_wait_seconds"],
            chat_template=template if isinstance(template, str) else "",
            aliases=tuple(settings["aliases"]),
            recommended=sampling_defaults(ours.get("sampling", {}), source).for_requests(),
        )
    if not models:
        hint = "give the `repository` folder written by `lathe deploy`, or a downloaded release"
        raise UserError(f"{repository}: no models", hint, Code.WRONG_KIND)
    return models


def _read_key(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: not written by Lathe", "deploy the model again", Code.WRONG_KIND
        ) from None


def models_by_name(models: Iterable[Model]) -> dict[str, Model]:
    """The models by each of their names.

    Raises:
        UserError: two have the same name.
    """
    by_name: dict[str, Model] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if by_name.setdefault(name, model) is not model:
                what = (
                    f"Serving.aliases: {name} is used by both {by_name[name].name} and {model.name}"
                )
                raise UserError(what, "deploy one of them again, without it", Code.DUPLICATE)
    return by_name


class CrashQuarantine:
    """Digests of requests that were in flight when Triton crashed, and whether each was alone."""

    def __init__(self) -> None:
        self._has_crashed_alone: dict[bytes, bool] = {}
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def watch(self, digest: bytes) -> AsyncIterator[None]:
        """Run a request in the block, which raises TritonDied if Triton crashes.

        Raises:
            UserError: the request has crashed Triton twice, or too many retries are waiting.
        """
        if digest not in self._has_crashed_alone:  # the usual case: no wait, no lock
            try:
                yield
            except TritonDied:
                self._remember(digest, False)
                raise
            return
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise UserError(
                "the model server has crashed, and its requests are being retried one by one",
                "try again later",
                Code.BUSY,
            ) from None
        try:
            # Asked again: the same request, sent twice, may have crashed it while this one waited.
            if self._has_crashed_alone.get(digest):
                what = "the model server has crashed twice while answering this request"
                raise UserError(
                    what, "it will not be retried; change the request", Code.INVALID_REQUEST
                )
            yield
        except TritonDied:
            self._remember(digest, True)
            raise
        else:
            self._has_crashed_alone.pop(digest, None)
        finally:
            self._turn.release()

    def _remember(self, digest: bytes, crashed_alone: bool) -> None:
        # Removed and added again, so that the dict is in the order of the latest crashes.
        self._has_crashed_alone[digest] = crashed_alone | self._has_crashed_alone.pop(digest, False)
        if len(self._has_crashed_alone) > MAX_DIGESTS:
            del self._has_crashed_alone[next(iter(self._has_crashed_alone))]


class Triton:
    """A Triton server; its streams are opened by the first requests, and again when they break.

    Args:
        url: gRPC address, `host:port`.
        quarantine: the requests that have crashed it.

    Raises:
        UserError: `url` is not an address.
    """

    def __init__(self, url: str, quarantine: CrashQuarantine) -> None:
        require_address(url)
        self.url, self._quarantine = url, quarantine
        self._channel = grpc.aio.insecure_channel(url, OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._streams: dict[int, _Stream] = {}
        self._turns = cycle(range(STREAMS))

    async def close(self) -> None:
        """Close the connection; requests in flight end with TritonUnavailable."""
        await self._channel.close()

    async def is_ready(self, model_name: str) -> bool:
        """Whether the server confirms within READY_SECONDS that it has loaded the model."""
        message = service_pb2.ModelReadyRequest(name=model_name)
        try:
            return bool((await self._stub.ModelReady(message, timeout=READY_SECONDS)).ready)
        except grpc.RpcError:
            return False

    async def generate(
        self,
        model_name: str,
        prompt: str | Sequence[int],
        parameters: Mapping[str, Parameter | Sequence[str]],
    ) -> AsyncGenerator[Chunk]:
        """Yield the chunks of one request; closing the iterator cancels it.

        Args:
            prompt: a text, or token ids.
            parameters: those of `lathe_base.parameters`; `stop` is a list.

        Raises:
            UserError: the backend rejects the request, or is busy; or the request has crashed
                Triton twice.
            TritonUnavailable: Triton does not answer, or has ended.
        """
        plain = {k: json.dumps(v) if k == "stop" else v for k, v in parameters.items()}
        message = request(model_name, prompt, plain)  # type: ignore[arg-type]
        # Without the message's id, which is new for each: the same request must be recognized.
        digest = sha256(message.SerializeToString(deterministic=True)).digest()
        going = parameters.get("num_return_sequences", 1)  # sequences that have not ended
        async with self._quarantine.watch(digest):
            message.id = uuid.uuid4().hex
            stream = self._stream()
            chunks = stream.ask(message)
            try:
                while going:
                    answer = await chunks.get()
                    if isinstance(answer, Exception):
                        going = 0
                        raise answer
                    for chunk in answer:
                        going -= bool(chunk.finish_reason)  # type: ignore[operator]
                        yield chunk
            finally:
                stream.forget(message.id)
                if going and not stream.has_ended:  # on one stream it cannot overtake the request
                    stream.cancel(model_name, message.id)

    def cancel(self, model_name: str, name: str) -> None:
        """Cancel a request that was not sent by `generate`.

        Args:
            model_name: a model that `generate` supports.
            name: its parameter REQUEST_ID.
        """
        self._stream().cancel(model_name, name)

    def _stream(self) -> "_Stream":
        # A stream that has ended is replaced by the next request that would use it.
        turn = next(self._turns)
        if turn not in self._streams or self._streams[turn].has_ended:
            self._streams[turn] = _Stream(self._stub, self.url)
        return self._streams[turn]


class _Stream:
    """One bidirectional stream; responses are matched to requests by id."""

    def __init__(self, stub: Any, url: str) -> None:
        self._url = url
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._asked: dict[str, asyncio.Queue[list[Chunk] | Exception]] = {}  # by request id
        self._sent: set[str] = set()  # ids of those that gRPC has taken
        self._call = stub.ModelStreamInfer(self._messages())
        self._reader = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    def ask(self, message: Any) -> asyncio.Queue[list[Chunk] | Exception]:
        """Send a request; its responses, or its error, arrive in the returned queue."""
        self._asked[message.id] = asyncio.Queue()
        self._outgoing.put_nowait(message)
        return self._asked[message.id]

    def cancel(self, model_name: str, name: str) -> None:
        """Send the backend a message that cancels the request with this name."""
        # Repositories of earlier versions require a text.
        self._outgoing.put_nowait(request(model_name, "", {CANCEL: name}))

    def forget(self, name: str) -> None:
        """Ignore further responses to a request."""
        self._asked.pop(name, None)
        self._sent.discard(name)

    async def _messages(self) -> AsyncIterator[Any]:
        while True:
            message = await self._outgoing.get()
            yield message
            if message.id in self._asked:  # gRPC asks for the next one when this one is on its way
                self._sent.add(message.id)

    async def _read(self) -> None:
        ended = "the stream has ended"
        try:
            async for response in self._call:
                chunks = self._asked.get(response.infer_response.id)
                if chunks is None:
                    continue  # its client has left, and Triton did not know yet
                if response.error_message:
                    chunks.put_nowait(refusal(response.error_message))
                else:
                    chunks.put_nowait(response_chunks(response.infer_response))
        except grpc.RpcError as error:
            ended = error.details() or error.code().name
        finally:
            # Whatever ended the stream ends all requests on it.
            self._call.cancel()
            for name, chunks in self._asked.items():
                # Only a request that Triton had can have crashed it.
                kind = TritonDied if name in self._sent else TritonUnavailable
                chunks.put_nowait(kind(f"Triton on {self._url}: {ended}"))
