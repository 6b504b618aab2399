"""vLLM beside transformers, and beside Lathe's own runtime, whose sampler is another one: on pruned
models, a GPT-2 and a Llama, whose layers differ in width."""

import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lathe.export.engines import open_engine
from lathe.export.formats import compressed_tensors, write_formats
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe_base.config.settings import ExportSettings
from lathe_base.errors import Code, UserError
from lathe_base.parameters import Params
from lathe_serving.runtime.contract import Receiver, TextBackend
from lathe_serving.runtime.protocol import Chunk, InvalidRequest
from lathe_serving.runtime.text_generator import BACKENDS, TextGenerator
from tests.support.errors import raises
from tests.support.pruned import CASES, GROUPS, pruned
from tests.support.small_export import make_model, write_unproven
from tests.support.vllm_process import VLLMProcess

pytestmark = pytest.mark.slow
POSITIONS = 512
# vLLM has no smaller heads on CPUs.
GPT2 = GPTConfig(384, POSITIONS, 64, 32, (2, 1, 2), (80, 40, 96))
GREEDY: dict[str, Any] = {"decode_strategy": "greedy_search", "max_tokens": 20}
PROMPT = [39, 68, 75, 75, 78, 220, 86, 78, 81, 75, 67]
LETTER, END = 32, 256  # "A" and the end of a text in the tests' tokenizer
LONG = [int(i) for i in np.random.default_rng(0).integers(33, 250, 40)]


@dataclass
class Pair:
    """The same export in vLLM and in onnxruntime."""

    folder: Path
    vllm: TextBackend
    ours: TextBackend


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Tokenizer,
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        model = make_model(GPT2)
    else:
        CASES["llama of 32"] = "llama", GROUPS
        sizes = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": POSITIONS}
        model = pruned("llama of 32", byte_tokenizer, folder / "hf", **sizes).model
    write_unproven(model, byte_tokenizer, folder / "export")
    checkpoint = load_checkpoint(folder / "export" / "checkpoint")
    write_formats(checkpoint, folder / "export", ExportSettings(formats=["compressed-tensors"]))
    vllm = VLLMProcess(folder / "export", 12, threads=2, max_running=4, prefix_bytes=2**24)
    ours = TextGenerator(folder / "export", 12, threads=1, max_running=4)
    yield Pair(folder / "export", vllm, ours)
    vllm.close()
    vllm.end()
    ours.close()


def answer(backend: TextBackend, params: Params, prompt: list[int] = PROMPT) -> list[Chunk]:
    """The chunks of each sequence, joined."""
    got: queue.Queue[Chunk | Exception] = queue.Queue()
    assert backend.submit(prompt, params, Receiver(got.put, lambda: False))
    chunks: dict[int, list[Chunk]] = {i: [] for i in range(params.num_return_sequences)}
    while not all(parts and parts[-1].finish_reason for parts in chunks.values()):
        chunk = got.get(timeout=60)
        if isinstance(chunk, Exception):
            raise chunk
        chunks[chunk.sequence].append(chunk)
    return [
        Chunk(
            "".join(part.text for part in parts),
            [token for part in parts for token in part.tokens],
            parts[-1].finish_reason,
            index,
            [value for part in parts for value in part.log_probabilities],
            [name for part in parts for name in part.names],
            [top for part in parts for top in part.top],
            parts[-1].prompt_tokens,
            parts[-1].cached_tokens,
            [length for part in parts for length in part.lengths],
        )
        for index, parts in chunks.items()
    ]


@torch.no_grad()
def test_greedy_texts_are_those_of_transformers(pair: Pair) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair.folder / compressed_tensors.FOLDER).eval()
    for start in range(0, 30, 6):
        prompt = LONG[start : start + 8]
        tokens = list(prompt)
        for _ in range(20):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[END] = -math.inf  # as with `ignore_eos`
            tokens.append(int(logits.argmax()))
        (got,) = answer(pair.vllm, Params(**GREEDY, ignore_eos=True), prompt)
        assert got.tokens == tokens[8:]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"logit_bias": {LETTER: 100.0}},
        {"logit_bias": {LETTER: 100.0}, "stop": ("AA",)},
        {"logit_bias": {LETTER: 100.0}, "stop_token_ids": (LETTER,), "min_tokens": 3},
        {"logit_bias": {END: 100.0}},
        {"logit_bias": {END: 100.0}, "min_tokens": 5},
        {"logit_bias": {END: 100.0}, "ignore_eos": True},
        {"logit_bias": {END: 100.0}, "stop": ("<|endoftext|>",), "ignore_eos": True},
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 3, "echo": True},
        {"logprobs": True, "logit_bias": {LETTER: 100.0}},
        {"echo": True},
        {"echo": True, "logprobs": True, "max_tokens": 0, "min_tokens": 0},
        {"max_tokens": 0, "min_tokens": 0},
        {"structured_outputs": '{"regex": "[ab]{7}c"}'},
        {"structured_outputs": '{"choice": ["yes", "no"]}'},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_lathes_own_runtime(pair: Pair, given: dict[str, Any]) -> None:
    params = Params(**(GREEDY | given))
    (got,), (wanted,) = answer(pair.vllm, params), answer(pair.ours, params)
    assert (got.text, got.tokens, got.finish_reason) == (
        wanted.text,
        wanted.tokens,
        wanted.finish_reason,
    )
    assert (got.names, got.lengths, got.prompt_tokens) == (
        wanted.names,
        wanted.lengths,
        wanted.prompt_tokens,
    )
    np.testing.assert_allclose(got.log_probabilities, wanted.log_probabilities, atol=1e-3)
    assert [list(top) for top in got.top] == [list(top) for top in wanted.top]
    for mine, theirs in zip(got.top, wanted.top, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), atol=1e-3)


def test_sampling_is_from_the_same_distribution(pair: Pair) -> None:
    """Shares of the first token, of 400 draws with top-k, top-p and a temperature, as computed from
    the log-probabilities."""
    params = Params(
        max_tokens=1, temperature=0.8, top_k=8, top_p=0.9, num_return_sequences=4, logprobs=True
    )
    (first,) = answer(pair.ours, Params(**GREEDY, logprobs=True, top_logprobs=20))
    top = first.top[0]
    names = list(top)[:8]
    weights = np.exp([top[name] / 0.8 for name in names])
    shares = weights / weights.sum()
    kept = np.cumsum(shares) - shares < 0.9
    shares = np.where(kept, shares, 0) / shares[kept].sum()
    counts = dict.fromkeys(names, 0)
    for seed in range(100):
        for chunk in answer(pair.vllm, Params(**{**vars(params), "seed": seed})):
            counts[chunk.names[0]] += 1  # fails for a token beyond the eighth
    drawn = np.array(list(counts.values())) / 400
    assert not drawn[~kept].any()
    assert np.abs(drawn - shares).max() < 4 * math.sqrt(0.25 / 400)


def test_a_seed_repeats_each_sequence(pair: Pair) -> None:
    params = Params(max_tokens=12, top_k=0, top_p=1.0, num_return_sequences=3, seed=7)
    texts = [chunk.text for chunk in answer(pair.vllm, params)]
    assert texts == [chunk.text for chunk in answer(pair.vllm, params)]
    assert len(set(texts)) == 3


def test_json_follows_its_schema(pair: Pair) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    forced = json.dumps({"json": schema})
    answers = [
        answer(pair.vllm, Params(max_tokens=50, structured_outputs=forced, seed=i))[0]
        for i in range(8)
    ]
    ended = [got for got in answers if got.finish_reason == "stop"]  # not all: white space is long
    assert ended and all(set(json.loads(got.text)) == {"a", "b"} for got in ended)
    with raises(Code.INVALID_VALUE, "structured_outputs", kind=InvalidRequest):
        answer(pair.vllm, Params(structured_outputs='{"regex": "["}'))


def test_cached_tokens_of_a_prefix_are_counted(pair: Pair) -> None:
    prompt = [int(i) for i in np.random.default_rng(1).integers(33, 250, 300)]
    params = Params(**GREEDY)
    first, again = (answer(pair.vllm, params, prompt)[0] for _ in range(2))
    (other,) = answer(pair.vllm, params, [LETTER, *prompt])  # not shared as a prefix
    (whole,) = answer(pair.vllm, params, prompt[:256])  # of which the last token is always read
    cached = [got.cached_tokens for got in (first, again, other, whole)]
    assert cached == [0, 256, 0, 128]  # whole blocks, which have 128 tokens on CPUs
    assert again.tokens == first.tokens and again.prompt_tokens == 300


def test_a_timeout_ends_with_what_there_is(pair: Pair) -> None:
    params = Params(max_tokens=50, min_tokens=50, timeout_seconds=0.02)
    try:
        (got,) = answer(pair.vllm, params)
        assert got.finish_reason == "timeout" and 0 < len(got.tokens) < 50
    except UserError as error:  # the machine is slow
        assert error.code is Code.TIMEOUT


def test_a_cancelled_request_gives_its_slot_to_the_next(pair: Pair) -> None:
    cancel, got = threading.Event(), queue.Queue[Any]()

    def deliver(chunk: Chunk | Exception) -> None:
        got.put(chunk)
        cancel.set()  # after the first token

    params = Params(max_tokens=50, min_tokens=50, num_return_sequences=4)
    assert pair.vllm.submit(PROMPT, params, Receiver(deliver, cancel.is_set))
    started = time.monotonic()
    (other,) = answer(pair.vllm, Params(**GREEDY))  # waits for one of four slots
    assert other.finish_reason and time.monotonic() - started < 30
    chunks = []
    while not got.empty():
        chunks.append(got.get())
    assert [chunk.finish_reason for chunk in chunks].count("cancelled") == 1
    assert chunks[-1].finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"decode_strategy": "beam_search"}, "beam_search"),
        ({"temperature": 2.5}, "temperature 2.5"),
        ({"structured_outputs": '{"regex": "a"}', "ignore_eos": True}, "with ignore_eos"),
        ({"structured_outputs": '{"regex": "a"}', "min_tokens": 2}, "with min_tokens"),
        ({"max_tokens": 0, "min_tokens": 0}, "a prompt that fills all positions"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(
    pair: Pair, given: dict[str, Any], what: str
) -> None:
    n_positions = json.loads((pair.folder / "export.json").read_text())["n_positions"]
    prompt = [LETTER] * n_positions if "positions" in what else PROMPT
    with raises(Code.UNSUPPORTED, what, kind=InvalidRequest):
        answer(pair.vllm, Params(**given), prompt)


@torch.no_grad()
def test_the_engine_of_the_proof_computes_the_checkpoints_logits(pair: Pair) -> None:
    checkpoint = load_checkpoint(pair.folder / "checkpoint")
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    engine = open_engine("vllm", pair.folder)
    assert engine.version.startswith("vllm 0.")
    tokens = np.array([LONG])
    expected = model(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(engine.logits(tokens), expected, atol=1e-3)
    text = engine.greedy(PROMPT, 20)
    after = model(torch.tensor([[*PROMPT, *text]]))[0, len(PROMPT) - 1 : -1]
    assert text == after.argmax(-1).tolist()
    assert engine.encode("Hello world") == tokenizer.encode("Hello world").ids


def test_an_export_without_the_folder_is_refused(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_unproven(make_model(GPT2), byte_tokenizer, tmp_path)
    with raises(Code.INCOMPLETE, tmp_path, "compressed-tensors"):
        BACKENDS["vllm"](tmp_path, 12)
