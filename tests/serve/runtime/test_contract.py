"""What every `TextBackend` promises, whatever computes below it."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from lathe.export.formats import write_formats
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe_base.config.settings import ExportSettings
from lathe_base.errors import Code
from lathe_base.parameters import Params
from lathe_serving.runtime.contract import LONG_TEXT, Receiver, TextBackend
from lathe_serving.runtime.protocol import Chunk, InvalidRequest
from lathe_serving.runtime.text_generator import BACKENDS, TextGenerator
from tests.support.errors import raises
from tests.support.small_export import make_model, write_unproven
from tests.support.vllm_process import VLLMProcess

Make = Callable[..., TextBackend]
PROMPT = [5, 6, 7]
MODEL = GPTConfig(384, 64, 64, 32, (2, 1, 2), (80, 40, 96))  # vLLM has no smaller heads on CPUs
KINDS = {"TextGenerator": TextGenerator, "vllm": VLLMProcess}


@pytest.fixture(
    scope="module", params=["TextGenerator", pytest.param("vllm", marks=pytest.mark.slow)]
)
def make(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Tokenizer,
) -> Make:
    folder = tmp_path_factory.mktemp("export")
    write_unproven(make_model(MODEL), byte_tokenizer, folder)
    checkpoint = load_checkpoint(folder / "checkpoint")
    write_formats(checkpoint, folder, ExportSettings(formats=["compressed-tensors"]))
    return lambda **limits: KINDS[request.param](folder, 12, threads=1, **limits)


@pytest.fixture(scope="module")
def backend(make: Make) -> Iterator[TextBackend]:
    made = make(max_running=4, max_queue=8)
    yield made
    made.close()


def test_every_runtime_has_its_contract_tested() -> None:
    assert {kind for name, kind in BACKENDS.items() if name != "vllm"} == {TextGenerator}


class Inbox:
    """Everything that a receiver gets."""

    def __init__(self) -> None:
        self._answers: queue.Queue[Chunk | Exception] = queue.Queue()
        self.cancel = threading.Event()
        self.receiver = Receiver(self._answers.put, self.cancel.is_set)

    def next(self) -> Chunk | Exception:
        return self._answers.get(timeout=60)

    def all(self, sequences: int) -> list[Chunk]:
        chunks = list[Chunk]()
        while sum(bool(chunk.finish_reason) for chunk in chunks) < sequences:
            chunk = self.next()
            assert isinstance(chunk, Chunk), chunk
            chunks.append(chunk)
        return chunks

    @property
    def is_empty(self) -> bool:
        return self._answers.empty()


@pytest.mark.parametrize(
    "given",
    [
        {"decode_strategy": "greedy_search"},
        {"num_return_sequences": 3, "seed": 1},
        {"echo": True, "logprobs": True, "top_logprobs": 2},
        {"max_tokens": 0, "min_tokens": 0, "echo": True},
    ],
    ids=str,
)
def test_each_sequence_ends_once_with_the_length_of_its_prompt(
    backend: TextBackend, given: dict[str, Any]
) -> None:
    inbox, params = Inbox(), Params(**given)
    assert backend.submit(PROMPT, params, inbox.receiver)
    chunks = inbox.all(params.num_return_sequences)
    ended = [chunk for chunk in chunks if chunk.finish_reason]
    assert Counter(chunk.sequence for chunk in ended) == dict.fromkeys(
        range(params.num_return_sequences), 1
    )
    assert all(chunk.prompt_tokens == len(PROMPT) for chunk in ended)
    assert not any(chunk.prompt_tokens for chunk in chunks if not chunk.finish_reason)
    assert inbox.is_empty


def test_beams_are_sequences_or_refused_by_name(backend: TextBackend) -> None:
    params = Params(decode_strategy="beam_search", num_beams=3, num_return_sequences=2)
    inbox = Inbox()
    if isinstance(backend, VLLMProcess):
        with raises(Code.UNSUPPORTED, "beam_search", kind=InvalidRequest):
            backend.submit(PROMPT, params, inbox.receiver)
    else:
        assert backend.submit(PROMPT, params, inbox.receiver)
        assert sum(bool(chunk.finish_reason) for chunk in inbox.all(2)) == 2
    assert inbox.is_empty


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        pytest.param([], Code.INVALID_VALUE, id="[]"),
        pytest.param("", Code.INVALID_VALUE, id="''"),
        pytest.param([10**6], Code.INVALID_VALUE, id="id"),
        pytest.param([5] * 10_000, Code.TOO_LONG, id="long"),
    ],
)
def test_what_the_model_cannot_answer_is_invalid(
    backend: TextBackend, prompt: str | list[int], code: Code
) -> None:
    inbox = Inbox()
    with raises(code, kind=InvalidRequest):
        backend.submit(prompt, Params(), inbox.receiver)
    assert inbox.is_empty


def test_what_takes_longer_to_check_is_an_error_for_the_receiver(backend: TextBackend) -> None:
    inbox = Inbox()
    assert backend.submit("x" * (LONG_TEXT + 1), Params(), inbox.receiver)
    assert isinstance(inbox.next(), InvalidRequest)
    assert inbox.is_empty


def test_a_cancelled_request_ends_with_one_chunk(backend: TextBackend) -> None:
    inbox = Inbox()
    inbox.cancel.set()
    assert backend.submit(PROMPT, Params(num_return_sequences=3), inbox.receiver)
    assert inbox.all(1)[-1].finish_reason == "cancelled"
    assert inbox.is_empty


def test_a_full_queue_and_the_end_of_the_backend(make: Make) -> None:
    backend, inboxes = make(max_running=1, max_queue=1), [Inbox() for _ in range(50)]
    endless = Params(max_tokens=50, min_tokens=50)
    taken = [inbox for inbox in inboxes if backend.submit(PROMPT, endless, inbox.receiver)]
    refused = [inbox for inbox in inboxes if inbox not in taken]
    backend.close()
    assert refused and all(inbox.is_empty for inbox in refused)
    reasons = {inbox.all(1)[-1].finish_reason for inbox in taken}
    assert reasons <= {"cancelled", "length"} and "cancelled" in reasons
    assert not backend.submit(PROMPT, endless, inboxes[0].receiver)
