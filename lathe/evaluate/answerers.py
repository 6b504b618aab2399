"""What generates answers: an exported graph in the server's own running batch, torch, or a live
server.

The running batch (`lathe_serving.runtime.batcher`) replaces each finished answer by the next prompt
and reads a beginning that prompts share only once, so no row waits for the longest answer. That is
why a checkpoint on a CPU is exported to generate; on a GPU torch generates in batches.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue

import torch
from tokenizers import Tokenizer

from lathe.evaluate.answer_requests import Answerer, AnswerRequest
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe_base.config.settings import GenerationSettings
from lathe_base.errors import Code, UserError
from lathe_base.parameters import Params
from lathe_serving.client import Client
from lathe_serving.runtime.batcher import Batcher
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.exported_model import ExportedModel
from lathe_serving.runtime.protocol import Chunk
from lathe_serving.runtime.sequence_group import Request, Samples, Vocabulary
from lathe_serving.runtime.text import TokenBytes, encode_prompts

PREFIX_BYTES = 1 << 28
"""Keys and values of shared beginnings, such as the examples before each question."""

Found = Iterator[tuple[int, list[int]]]


def graph_answerer(
    model: ExportedModel, tokenizer: Tokenizer, rows: int, is_reversed: bool = False
) -> Answerer:
    """Generates with an exported graph.

    Args:
        rows: answers at a time.
        is_reversed: whether the last request is the first to be answered.
    """

    def run(requests: Sequence[AnswerRequest]) -> Found:
        vocabulary = Vocabulary(model.vocab_size, model.end_ids, TokenBytes(tokenizer))
        chunks: SimpleQueue[tuple[int, Chunk | Exception]] = SimpleQueue()
        groups = []
        for i, one in _ordered(requests, is_reversed):
            params = Params(decode_strategy="greedy_search", min_tokens=0, stop=one.stop)
            receiver = Receiver(lambda chunk, i=i: chunks.put((i, chunk)), lambda: False)  # type: ignore[misc]
            groups.append(
                Samples(Request(one.prompt, one.max_tokens, params, vocabulary, receiver))
            )
        batcher = Batcher(model, min(rows, max(len(groups), 1)), len(groups), PREFIX_BYTES)
        try:
            batcher.submit(*groups)
            answers: dict[int, list[int]] = {i: [] for i in range(len(requests))}
            while answers:
                i, chunk = chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                answers[i] += chunk.tokens
                if chunk.finish_reason:
                    yield i, answers.pop(i)
        finally:
            batcher.close()

    return Answerer(_described(model.runtime, rows, is_reversed), run)


def torch_answerer(
    model: GPT, end_ids: Sequence[int], rows: int, bfloat16: bool = False, is_reversed: bool = False
) -> Answerer:
    """Generates with torch, in batches of prompts of similar length; see `graph_answerer`."""
    device = next(model.parameters()).device

    def run(requests: Sequence[AnswerRequest]) -> Found:
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        if is_reversed:
            order.reverse()
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            prompts = [requests[i].prompt for i in batch]
            longest = max(requests[i].max_tokens for i in batch)
            how = GenerationSettings(
                decode_strategy="greedy_search", max_dec_len=longest, min_dec_len=0
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                answers = generate(model, prompts, how, end_ids)
            for i, ids in zip(batch, answers, strict=True):
                yield i, ids[: requests[i].max_tokens]

    return Answerer(_described(f"torch on {device.type}", rows, is_reversed), run)


def served_answerer(
    client: Client, tokenizer: Tokenizer, rows: int, is_reversed: bool = False
) -> Answerer:
    """Generates with a live server, which gets the prompts as texts; see `graph_answerer`."""

    def ask(request: AnswerRequest) -> list[int]:
        text = tokenizer.decode(request.prompt, skip_special_tokens=False)
        if encode_prompts(tokenizer, [text])[0] != request.prompt:
            raise UserError(
                f"a server cannot be sent the prompt {text[:60]!r}, which contains the text of a "
                "special token",
                "evaluate the export itself, without --endpoint",
                Code.UNSUPPORTED,
            )
        limits = {"max_tokens": request.max_tokens, "min_tokens": 0}
        return client.generate(text, decode_strategy="greedy_search", **limits).tokens

    def run(requests: Sequence[AnswerRequest]) -> Found:
        with ThreadPoolExecutor(rows) as pool:
            asked = {pool.submit(ask, one): i for i, one in _ordered(requests, is_reversed)}
            for done in as_completed(asked):
                yield asked[done], done.result()

    return Answerer(_described("the server", rows, is_reversed), run)


def _ordered(
    requests: Sequence[AnswerRequest], is_reversed: bool
) -> list[tuple[int, AnswerRequest]]:
    order = list(enumerate(requests))
    return order[::-1] if is_reversed else order


def _described(runtime: str, rows: int, is_reversed: bool) -> str:
    return f"{runtime}, {rows} at a time{', in reverse order' if is_reversed else ''}"
