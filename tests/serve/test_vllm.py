"""The runtime `vllm` behind a real Triton and the gateway: deployed, asked, and rolled back."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.release.deploy import DeployResult, deploy, greedy_tokens
from lathe_base.artifacts.kinds import open_export
from lathe_base.config.settings import (
    ExportSettings,
    GenerationSettings,
    ProductionSettings,
    Recipe,
    ServingSettings,
)
from lathe_base.errors import Code
from lathe_serving import state as serve_state
from lathe_serving.environment import VLLM_VARIABLE, ServeEnvironment, with_vllm
from lathe_serving.repository import served_runtimes, write_repository
from lathe_serving.server import ANY_PORTS
from tests.serve.test_gateway_process import until_health
from tests.support import environments
from tests.support.errors import raises
from tests.support.processes import processes
from tests.support.small_export import make_model, save

MODEL = GPTConfig(384, 256, 128, 32, (4, 2, 3), (96, 40, 64))  # as after pruning


def recipe(runtime: str) -> Recipe:
    return Recipe(
        Serving=ServingSettings(**ANY_PORTS, threads=1, runtime=runtime),  # type: ignore[arg-type]
        Export=ExportSettings(prompts=4, new_tokens=12, formats=["compressed-tensors"]),
        Production=ProductionSettings(require=["proof:vllm"] if runtime == "vllm" else []),
    )


@dataclass
class Export:
    model: Path
    folder: Path


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer, held_out: Path
) -> Export:
    environments.require("vllm")  # the recipe asks for vLLM's proof
    folder = tmp_path_factory.mktemp("vllm")
    save(make_model(MODEL), byte_tokenizer, folder / "model")
    export(recipe("vllm"), folder / "model", held_out, folder / "export")
    return Export(folder / "model", folder / "export")


def test_an_export_that_vllm_cannot_load_is_refused(exported: Path, tmp_path: Path) -> None:
    with raises(Code.INCOMPLETE, exported, "compressed-tensors"):
        write_repository(exported, tmp_path / "r", recipe("vllm").Serving, GenerationSettings())
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_repository_names_its_runtime(exports: Export, tmp_path: Path) -> None:
    for runtime, kind in (("vllm", "KIND_MODEL"), ("onnxruntime", "KIND_CPU")):
        at = tmp_path / runtime
        write_repository(exports.folder, at, recipe(runtime).Serving, GenerationSettings())
        assert served_runtimes(at) == {runtime}
        assert kind in (at / "gpt" / "config.pbtxt").read_text()
        assert (at / "gpt" / "1" / "compressed-tensors" / "model.safetensors").is_file()
        assert "KIND_CPU" in (at / "gpt-score" / "config.pbtxt").read_text()


def test_an_environment_without_vllm_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = ServeEnvironment(tmp_path, tmp_path, tmp_path, tmp_path, "3.11", (), "0.7.0")
    monkeypatch.setenv(VLLM_VARIABLE, str(tmp_path / "python"))
    with raises(Code.NOT_INSTALLED, tmp_path / "python"):
        with_vllm(triton)
    monkeypatch.setenv(VLLM_VARIABLE, sys.executable)
    with raises(Code.NOT_INSTALLED, sys.executable, "vllm"):
        with_vllm(triton)


@pytest.fixture(scope="module")
def deployed(
    triton: None, exports: Export, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeployResult]:
    """Deployed with vLLM, behind the gateway."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("deployed")
        patch.setenv(serve_state.STATE_VARIABLE, str(folder / "state"))
        yield deploy(
            recipe("vllm"), exports.folder, exports.model, folder / "d", held_out, keep_running=True
        )
        serve_state.stop()


@pytest.fixture
def openai(deployed: DeployResult) -> OpenAI:
    state = serve_state.find()
    assert state is not None
    return OpenAI(base_url=state.openai, api_key="none", max_retries=0)


@pytest.mark.slow
def test_vllm_answers_as_the_checkpoint_over_all_interfaces(deployed: DeployResult) -> None:
    assert deployed.identical + deployed.near_ties == deployed.prompts > 0
    assert deployed.identical >= deployed.prompts - 1
    recorded = open_export(deployed.repository / "gpt" / "1").engines["vllm"]
    assert recorded.engine.startswith("vllm 0.") and recorded.kl < 1e-4


@pytest.mark.slow
def test_the_gateway_is_the_same_in_front_of_vllm(openai: OpenAI, exports: Export) -> None:
    checkpoint = load_checkpoint(exports.model)
    ask = openai.completions.create
    expected = checkpoint.tokenizer.decode(greedy_tokens(checkpoint, "hello", 16))
    whole = ask(model="gpt", prompt="hello", temperature=0, max_tokens=16, logprobs=2)
    assert whole.choices[0].text == expected[: len(whole.choices[0].text)]
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == whole.usage.completion_tokens  # type: ignore[union-attr]
    stream = ask(model="gpt", prompt="hello", temperature=0, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    several = ask(model="gpt", prompt="hello", n=3, seed=5, max_tokens=12)
    again = ask(model="gpt", prompt="hello", n=3, seed=5, max_tokens=12)
    assert [c.text for c in several.choices] == [c.text for c in again.choices]
    assert len({c.text for c in several.choices}) > 1
    forced = {
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        }
    }
    shared = "a beginning that comes again " * 6
    usages = [ask(model="gpt", prompt=shared, max_tokens=1).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]  # type: ignore[union-attr]
    assert cached == [0, 128]
    made = ask(model="gpt", prompt="hello", max_tokens=200, extra_body=forced)
    assert list(json.loads(made.choices[0].text)) == ["a"]


def group(leader: int) -> set[int]:
    """The live processes of a process group."""
    members = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has gone meanwhile
            state, _, of_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of_group) == leader and state != "Z":
                members.add(int(path.parent.name))
    return members


@pytest.mark.slow
def test_vllm_ends_with_a_killed_backend_and_both_start_again(deployed: DeployResult) -> None:
    before = serve_state.find()
    assert before is not None
    stubs = processes(before.shared_memory)
    (stub,) = (
        pid
        for pid, line in stubs.items()
        if "backend_stub" in line.split()[0] and "/gpt/1/" in line
    )
    members = group(before.server.pid)
    assert len(members - stubs.keys()) >= 2  # vLLM's, beside the server and its backends
    os.kill(stub, signal.SIGKILL)
    until_health(before, 503)
    until_health(before, 200, seconds=240)
    assert not group(before.server.pid)
    again = serve_state.find()
    assert again is not None and again.restarts == 1
    client = OpenAI(base_url=again.openai, api_key="none", max_retries=0)
    assert client.completions.create(model="gpt", prompt="hello", max_tokens=4).choices[0].text


@pytest.mark.slow
def test_a_deployment_is_rolled_back_to_another_runtime(
    deployed: DeployResult, openai: OpenAI, exports: Export, held_out: Path
) -> None:
    def text() -> str:
        state = serve_state.find()
        assert state is not None
        client = openai.with_options(base_url=state.openai)
        return client.completions.create(model="gpt", prompt="hello", temperature=0).choices[0].text

    with_vllm = text()
    deploy(
        recipe("onnxruntime"),
        exports.folder,
        exports.model,
        deployed.folder,
        held_out,
        keep_running=True,
    )
    assert served_runtimes(deployed.repository) == {"onnxruntime"}
    assert text() == with_vllm
