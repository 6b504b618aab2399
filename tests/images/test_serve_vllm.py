"""The image serve-vllm serves releases of vLLM, and those of onnxruntime."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.release.deploy import greedy_tokens
from lathe_base.config.settings import ExportSettings, GenerationSettings, Recipe, ServingSettings
from lathe_serving.repository import write_repository
from tests.images.conftest import ROOT, build
from tests.images.test_serve import wait_ready
from tests.support.podman import mount, podman, running
from tests.support.small_export import make_model, save, write_held_out

pytestmark = pytest.mark.containers
NEEDED = 20e9
"""Required disk space in bytes for wheels, layers and temporary copies."""
LIMIT = 9e9
MODEL = GPTConfig(384, 256, 128, 32, (4, 2, 3), (96, 40, 64))  # as after pruning


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    if (free := shutil.disk_usage(ROOT).free) < NEEDED:
        pytest.skip(f"{free / 1e9:.0f} GB of disk space are free, {NEEDED / 1e9:.0f} are required")
    return build(tmp_path_factory, "cpu", ("serve", "serve-vllm"))["serve-vllm"]


@pytest.mark.parametrize("runtime", ["vllm", "onnxruntime"])
def test_it_answers_as_the_checkpoint(
    image: str, runtime: str, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save(make_model(MODEL), byte_tokenizer, tmp_path / "model")
    settings = ExportSettings(prompts=1, new_tokens=4, formats=["compressed-tensors"])
    data, exported = write_held_out(tmp_path / "data"), tmp_path / "export"
    export(Recipe(Export=settings), tmp_path / "model", data, exported)
    serving = ServingSettings(runtime=runtime)  # type: ignore[arg-type]
    repository = write_repository(exported, tmp_path / "models", serving, GenerationSettings())
    checkpoint = load_checkpoint(tmp_path / "model")
    expected = checkpoint.tokenizer.decode(greedy_tokens(checkpoint, "hello", 8))
    options = [mount(repository, "/models"), "--publish=127.0.0.1::8000", "--shm-size=1g"]
    with running(image, *options) as server:
        address = podman("port", server, "8000").strip()
        wait_ready(server, f"http://{address}/v2/health/ready", seconds=300)
        question = {"text_input": "hello", "max_tokens": 8, "decode_strategy": "greedy_search"}
        asked = urllib.request.Request(
            f"http://{address}/v2/models/gpt/generate", json.dumps(question).encode()
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            assert json.load(reply)["text_output"] == expected
        logs = subprocess.run(["podman", "logs", server], capture_output=True, text=True)
        assert f"gpt runs with {runtime}" in logs.stdout + logs.stderr
        podman("stop", "--time", "40", server)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", server) == "0\n"


def test_its_size(image: str) -> None:
    about = json.loads(podman("image", "inspect", image))[0]
    print(f"serve-vllm: {about['Size'] / 1e9:.2f} GB")
    assert about["Size"] < LIMIT and about["User"] == "10001:10001"
    assert about["Labels"]["org.opencontainers.image.title"] == "lathe-serve-vllm"
