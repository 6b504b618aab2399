"""The generation backend in a real Triton server."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import requests
from tritonclient.grpc import service_pb2, service_pb2_grpc

from lathe.model.checkpoint import Checkpoint
from lathe.model.generate import generate
from lathe.release.deploy import greedy_tokens
from lathe.release.rehearsal import ask, ask_http, ask_together
from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code
from lathe_serving.client import Client
from lathe_serving.client.grpc_transport import request, response_chunks
from lathe_serving.repository import write_repository
from lathe_serving.server import ANY_PORTS, TritonServer, start
from tests.support.errors import raises
from tests.support.server_metrics import expect_cancelled, figures

GREEDY = {"decode_strategy": "greedy_search", "min_tokens": 0}
PROMPTS = ["x", "naïve 🙂 café", "0123456789" * 9]


def post(server: TritonServer, verb: str, body: dict[str, Any], **options: Any) -> Any:
    state = server.state
    url = f"http://{state.http}/v2/models/{state.model_name}/{verb}"
    return requests.post(url, json=body, timeout=30, **options)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_the_checkpoints_own(
    server: TritonServer, client: Client, checkpoint: Checkpoint, prompt: str
) -> None:
    expected = greedy_tokens(checkpoint, prompt, 24)
    assert len(expected) > 1
    whole = client.generate(prompt, max_tokens=24, **GREEDY)
    assert whole.tokens == expected
    assert whole.finish_reason == ("length" if len(expected) == 24 else "stop")
    streamed = ask(client, prompt, max_tokens=24, **GREEDY)
    assert (streamed.text, streamed.tokens) == (whole.text, expected)
    assert checkpoint.tokenizer.decode(expected).startswith(whole.text)
    for stream in (False, True):
        assert ask_http(server.state, prompt, stream, max_tokens=24, **GREEDY) == expected


def test_neighbours_do_not_mix(client: Client, checkpoint: Checkpoint) -> None:
    prompts = [f"client {i} says {'abc' * i}" for i in range(4)]
    answers = ask_together(client, prompts, 4, max_tokens=30, **GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy_tokens(checkpoint, prompt, 30)


def test_a_short_request_overtakes_long_ones(client: Client) -> None:
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(ask, client, f"{i}", max_tokens=1000, min_tokens=1000) for i in "abc"]
        time.sleep(0.05)
        client.generate("short", max_tokens=1)
        assert not any(future.done() for future in long)
        assert [len(future.result().tokens) for future in long] == [1000] * 3


def test_sampling_follows_its_seed(client: Client) -> None:
    drawn = [client.generate("hello", seed=seed, max_tokens=20).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    unseeded = {tuple(client.generate("hello", max_tokens=20).tokens) for _ in range(4)}
    assert len(unseeded) > 1


def test_the_recipes_defaults_and_the_seeds_names(client: Client) -> None:
    assert len(client.generate("hello", min_tokens=12).tokens) == 12  # the recipe's max_dec_len
    assert len(client.generate("hello", max_dec_len=5, min_dec_len=5).tokens) == 5
    one = client.generate("hello", top_k=1, max_tokens=8, temperature=3.0).tokens
    assert one == client.generate("hello", max_tokens=8, decode_strategy="greedy_search").tokens


def test_several_sequences_beams_and_log_probabilities(
    client: Client, checkpoint: Checkpoint
) -> None:
    drawn = client.generate_all("hello", num_return_sequences=3, seed=3, max_tokens=9, min_tokens=9)
    assert [chunk.sequence for chunk in drawn] == [0, 1, 2]
    assert [len(chunk.tokens) for chunk in drawn] == [9] * 3
    streamed: dict[int, list[int]] = {}
    options = {"num_return_sequences": 3, "seed": 3, "max_tokens": 9, "min_tokens": 9}
    for chunk in client.stream("hello", **options):
        streamed.setdefault(chunk.sequence, []).extend(chunk.tokens)
    assert [streamed[i] for i in range(3)] == [chunk.tokens for chunk in drawn]

    beams = {"decode_strategy": "beam_search", "num_return_sequences": 2}
    settings = GenerationSettings(max_dec_len=8, min_dec_len=0, **beams)  # type: ignore[arg-type]
    ids = checkpoint.tokenizer.encode("hello").ids
    expected = generate(checkpoint.model, [ids], settings, checkpoint.eos_id)
    found = client.generate_all("hello", max_tokens=8, min_tokens=0, **beams)
    assert [chunk.tokens for chunk in found] == expected

    chunk = client.generate("hello", max_tokens=4, logprobs=True, **GREEDY)
    index = np.arange(len(chunk.tokens)) + len(ids) - 1
    row = np.array([ids + chunk.tokens])
    scores, is_greedy = client.score(row, index[None], np.array([chunk.tokens]))
    np.testing.assert_allclose(chunk.log_probabilities, scores[0], atol=1e-4)
    assert is_greedy.all()


@pytest.mark.slow
def test_metrics_are_tritons_prometheus_endpoints(
    tmp_path: Path, triton: None, repository: Path, serving: ServingSettings
) -> None:
    expected = {
        "lathe_generated_tokens_total": 7 + 6 + 3,
        "lathe_prompt_tokens_total": len("hello") + len("hi") + 3 * 28,
        "lathe_reused_prompt_tokens_total": 2 * 16,
        "lathe_drafted_tokens_total": 0,
        "lathe_accepted_tokens_total": 0,
        "lathe_first_token_seconds_count": 5,
        "lathe_queue_seconds_count": 5,
        "lathe_running": 0,
        "lathe_waiting": 0,
        "lathe_kv_tokens": 0,
        "lathe_kv_cache_usage": 0,
    }
    with (
        start(repository, serving, tmp_path / "state") as server,
        Client(server.state.grpc, server.state.model_name) as client,
    ):
        client.generate("hello", max_tokens=7, min_tokens=7)
        client.generate("hi", max_tokens=3, min_tokens=3, num_return_sequences=2)
        for _ in range(3):  # a prefix is cached on its second use
            client.generate("a beginning that comes again", max_tokens=1)
        deadline, found = time.monotonic() + 120, figures(server)
        while not expected.items() <= found.items() and time.monotonic() < deadline:
            time.sleep(0.05)  # tokens are counted after the response
            found = figures(server)
    assert {name: found[name] for name in expected} == expected
    assert found["lathe_first_token_seconds_sum"] >= found["lathe_queue_seconds_sum"] >= 0


@pytest.mark.slow
def test_drafts_are_counted_and_change_nothing(
    tmp_path: Path, triton: None, exported: Path, checkpoint: Checkpoint
) -> None:
    serving = ServingSettings(**ANY_PORTS, max_running=2, threads=1, speculation="prompt_lookup")
    repository = write_repository(exported, tmp_path / "models", serving, GenerationSettings())
    prompt, names = "on and on and on and on", ("generated", "drafted", "accepted")
    with (
        start(repository, serving, tmp_path / "state") as server,
        Client(server.state.grpc, "gpt") as client,
    ):
        tokens = client.generate(prompt, max_tokens=200, **GREEDY).tokens
        deadline, counts = time.monotonic() + 120, [0.0, 0.0, 0.0]
        while (counts[0] < len(tokens) or not counts[2]) and time.monotonic() < deadline:
            time.sleep(0.05)  # counters are not updated together
            after = figures(server)
            counts = [after[f"lathe_{name}_tokens_total"] for name in names]
    assert tokens == greedy_tokens(checkpoint, prompt, 200)
    _, drafted, accepted = counts
    assert 0 < accepted <= drafted


def test_parameters_as_input_tensors(server: TritonServer, client: Client) -> None:
    body = {"text_input": "hello", "max_tokens": 9, "min_tokens": 9, "temperature": 0.7}
    reply = post(server, "generate", body | {"top_p": 0.9, "seed": 4, "top_k": 20}).json()
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 4, "top_k": 20}
    assert reply["tokens"] == client.generate("hello", max_tokens=9, min_tokens=9, **options).tokens


@pytest.mark.parametrize(
    ("prompt", "parameters", "code", "texts"),
    [
        ("", {}, Code.INVALID_VALUE, ("text_input",)),
        ("x" * 1024, {}, Code.TOO_LONG, ("1024 tokens", "1024 positions")),
        ("x" * 2000, {}, Code.TOO_LONG, ("text_input", "1024 positions")),
        ("x" * 1000, {"max_tokens": 25}, Code.TOO_LONG, ("1000 tokens", "max_tokens 25")),
        ("x", {"top_p": 1.5}, Code.INVALID_VALUE, ("top_p 1.5", "at most 1")),
        ("x", {"temperature": float("nan")}, Code.INVALID_VALUE, ("temperature nan",)),
        ("x", {"temprature": 1.0}, Code.UNKNOWN_NAME, ("temprature", "temperature")),
        ("x", {"max_tokens": -1}, Code.INVALID_VALUE, ("max_tokens -1", "at least 0")),
    ],
)
def test_a_bad_request_fails_alone(
    client: Client,
    checkpoint: Checkpoint,
    prompt: str,
    parameters: Any,
    code: Code,
    texts: tuple[str, ...],
) -> None:
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(ask, client, "fine", max_tokens=20, **GREEDY)
        with raises(code, *texts):
            client.generate(prompt, **parameters)
        assert neighbour.result().tokens == greedy_tokens(checkpoint, "fine", 20)


def test_errors_over_http_carry_the_message(server: TritonServer) -> None:
    reply = post(server, "generate", {"text_input": "x", "top_p": 1.5})
    assert reply.status_code == 400
    assert "top_p 1.5 is out of range" in reply.json()["error"]
    reply = post(server, "generate_stream", {"text_input": ""})
    assert "text_input is empty" in reply.text
    assert "text_input is missing" in post(server, "generate", {"max_tokens": 3}).json()["error"]
    assert post(server, "generate", {"text_input": 5}).status_code == 500
    assert post(server, "generate", {"text_input": "x", "max_tokens": 2.5}).status_code == 500


def stream_infer(server: TritonServer, inputs: list[dict[str, Any]]) -> Any:
    """Send a message that Lathe's clients never send; returns Triton's response."""
    request = service_pb2.ModelInferRequest(model_name=server.state.model_name, inputs=inputs)
    with grpc.insecure_channel(server.state.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (response,) = stub.ModelStreamInfer(iter([request]))
    return response


def test_bytes_that_are_not_utf8_are_refused(server: TritonServer) -> None:
    inputs: list[dict[str, Any]] = [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]
    inputs[0]["contents"] = {"bytes_contents": [b"ab\xff"]}
    response = stream_infer(server, inputs)
    assert "text_input is not UTF-8: byte 0xff at offset 2" in response.error_message


def test_wrong_shapes_are_tritons_to_refuse(server: TritonServer) -> None:
    inputs: list[dict[str, Any]] = [{"name": "text_input", "datatype": "BYTES", "shape": [2]}]
    inputs[0]["contents"] = {"bytes_contents": [b"a", b"b"]}
    response = stream_infer(server, inputs)
    assert "unexpected shape" in response.error_message


def test_an_unknown_model_is_named(server: TritonServer) -> None:
    with Client(server.state.grpc, "nope") as client, raises(Code.NOT_FOUND, "nope"):
        client.generate("x")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, triton: None, lasting_export: Path) -> Any:
    """A server that runs one request and queues one, with a repository as earlier releases wrote
    it: its `model.py` imports the backend by its former name."""
    serving = ServingSettings(
        http_port=0, grpc_port=0, metrics_port=0, max_running=1, max_queue=1, threads=1
    )
    folder = tmp_path_factory.mktemp("narrow")
    settings = GenerationSettings()
    repository = write_repository(lasting_export, folder / "repository", serving, settings)
    model = repository / serving.model_name / "1" / "model.py"
    model.write_text(model.read_text().replace("lathe_serving", "lathe.serve"))
    with start(repository, serving, folder / "state") as server:
        yield server


LONG = {"max_tokens": 1000, "min_tokens": 1000}


def test_a_full_queue_is_refused_clearly(narrow: TritonServer) -> None:
    with Client(narrow.state.grpc, "gpt") as client, ThreadPoolExecutor(1) as pool:
        running = client.stream("a", max_tokens=16000, min_tokens=16000)
        assert next(running).tokens
        waiting = pool.submit(client.generate, "b", max_tokens=3, min_tokens=3)
        while not figures(narrow)["lathe_waiting"]:
            assert next(running).tokens
        with raises(Code.BUSY, "1 requests"):
            client.generate("c")
        reply = post(narrow, "generate", {"text_input": "d"})
        assert "busy" in reply.json()["error"]
        assert next(running).tokens and not waiting.done()
        running.close()
        assert len(waiting.result().tokens) == 3


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_that_leaves_frees_its_place(narrow: TritonServer, protocol: str) -> None:
    endless = {"max_tokens": 16000, "min_tokens": 16000}
    with Client(narrow.state.grpc, "gpt") as client, expect_cancelled(narrow, 16000):
        if protocol == "grpc":
            stream = client.stream("a", **endless)
            assert next(stream).tokens
            stream.close()
        else:
            body = {"text_input": "a", "stream": True, **endless}
            with post(narrow, "generate_stream", body, stream=True) as reply:
                assert json.loads(next(reply.iter_lines()).removeprefix(b"data: "))["tokens"]
        client.generate("b", max_tokens=1)


def test_tritons_own_timeout_is_in_microseconds(narrow: TritonServer) -> None:
    message = request("gpt", "a", {"max_tokens": 16000, "min_tokens": 16000})
    message.parameters["timeout"].int64_param = 500_000
    with grpc.insecure_channel(narrow.state.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (response,) = stub.ModelStreamInfer(iter([message]), timeout=60)
    (chunk,) = response_chunks(response.infer_response)
    assert chunk.finish_reason == "timeout" and 0 < len(chunk.tokens) < 16000


def test_a_deadline_ends_the_wait(narrow: TritonServer) -> None:
    with (
        Client(narrow.state.grpc, "gpt", timeout_seconds=0.05) as client,
        raises(Code.TIMEOUT, "0.05 s"),
    ):
        client.generate("a", **LONG)
