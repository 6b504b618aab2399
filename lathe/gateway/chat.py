"""/v1/chat/completions: messages become a prompt by the checkpoint's chat template."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from lathe.gateway.answers import DONE, REASONS, Head, Json, bytes_of, event
from lathe.gateway.errors import ApiError
from lathe.gateway.generation import Generation, Task
from lathe.gateway.models import Model
from lathe.gateway.renderer import Renderer
from lathe.gateway.requests import ChatRequest
from lathe.gateway.slots import Slots
from lathe.gateway.triton import Triton
from lathe.runtime.protocol import Chunk


async def prompt_of(request: ChatRequest, model: Model, renderer: Renderer) -> list[int]:
    """Token ids of the prompt that the model's template makes of the messages.

    Raises:
        ApiError: the model has no chat template, or it refuses the messages.
    """
    if not model.has_chat_template:
        what = f"{model.name} has no chat template: ask /v1/completions instead"
        raise ApiError(400, what, param="model", code="no_chat_template")
    return await renderer.ids(
        {
            "messages": [message.model_dump() for message in request.messages],
            "add_generation_prompt": request.add_generation_prompt is not False,
            "continue_final_message": request.continue_final_message,
            "variables": request.chat_template_kwargs,
        }
    )


class Chat:
    """The answer to one request.

    Attributes:
        is_stream: whether a stream is asked for.
        usage: the tokens so far.

    Args:
        prompt: token ids that `prompt_of` has made of the messages.

    Raises:
        ApiError: the prompt leaves no room; more sequences than the model generates at a time.
    """

    def __init__(
        self, request: ChatRequest, prompt: list[int], model: Model, triton: Triton, slots: Slots
    ) -> None:
        room = model.n_positions - len(prompt)
        if room < (request.limit if request.limit is not None else 1):
            asked = "" if request.limit is None else f" and {request.limit} of the answer"
            what = (
                f"{len(prompt)} tokens of messages{asked} exceed the {model.n_positions} positions"
            )
            raise ApiError(400, what, param="messages", code="context_length_exceeded")
        task = Task([prompt], request.of_backend(room), request.n, request.n)
        self._request = request
        self._generation = Generation(task, model, triton, slots)
        self._whole = Head("chat.completion", model, "chatcmpl")
        self._piece = Head("chat.completion.chunk", model, "chatcmpl")
        self.is_stream, self.usage = request.stream, self._generation.usage

    async def whole(self) -> Json:
        """The answer, when all of it is there."""
        choices = []
        for index, chunk in enumerate(await self._generation.whole()):
            message = {"role": "assistant", "content": chunk.text, "refusal": None}
            choices.append(self._choice(index, chunk) | {"message": message})
        return self._whole.to_json(choices, usage=self.usage.to_json())

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer's server-sent events, as it is generated."""
        usage = {"usage": None} if self._request.includes_usage else {}
        begun: set[int] = set()
        async with aclosing(self._generation.pieces()) as pieces:
            async for index, chunk in pieces:
                delta = {"content": chunk.text}
                if index not in begun:
                    begun.add(index)
                    delta = {"role": "assistant", **delta}
                choice = self._choice(index, chunk) | {"delta": delta, "finish_reason": None}
                if chunk.text or chunk.names or "role" in delta:
                    yield event(self._piece.to_json([choice], **usage))
                if reason := REASONS[chunk.finish_reason]:
                    end: Json = {
                        "index": index,
                        "logprobs": None,
                        "delta": {},
                        "finish_reason": reason,
                    }
                    yield event(self._piece.to_json([end], **usage))
        if usage:
            yield event(self._piece.to_json([], usage=self.usage.to_json()))
        yield DONE

    def _choice(self, index: int, chunk: Chunk) -> Json:
        return {
            "index": index,
            "logprobs": _logprobs(chunk) if self._request.logprobs else None,
            "finish_reason": REASONS[chunk.finish_reason],
        }


def _logprobs(chunk: Chunk) -> Json:
    tops = chunk.top or [{} for _ in chunk.names]
    content = []
    for name, value, top in zip(chunk.names, chunk.log_probabilities, tops, strict=True):
        others = [_token(other, chance) for other, chance in top.items()]
        content.append(_token(name, value) | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def _token(name: str, value: float) -> Json:
    return {"token": name, "logprob": value, "bytes": list(bytes_of(name))}
