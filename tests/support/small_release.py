"""Two small models, each deployed on a local Triton and ready to be released."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.config.settings import ExportSettings, Recipe, ServingSettings
from lathe.errors import UserError
from lathe.export.export import export
from lathe.model.checkpoint import save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.production.deploy import deploy
from lathe.serve.environment import find_environment
from lathe.serve.server import ANY_PORTS
from tests.support.small_export import write_held_out

SHAPE = GPTConfig(384, 1024, 64, 16, (4, 4), (96, 96))
RECIPE = Recipe(
    Serving=ServingSettings(**ANY_PORTS, threads=1, max_running=4),
    Export=ExportSettings(prompts=4, new_tokens=12),
)


def make(folder: Path, tokenizer: Tokenizer, seed: int) -> Path:
    """The output folder of `deploy`."""
    try:
        find_environment()
    except UserError as error:
        pytest.skip(str(error))
    model = GPT(SHAPE)
    model.initialize(0.2, seed=seed)
    save_checkpoint(folder / "model", model, tokenizer, "pretrain", Recipe())
    data = write_held_out(folder / "data")
    exported = export(RECIPE, folder / "model", data, folder / "onnx").folder
    deploy(RECIPE, exported, folder / "model", folder / "deployed", data)
    return folder / "deployed"


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    return make(tmp_path_factory.mktemp("first"), byte_tokenizer, 1)


@pytest.fixture(scope="session")
def other_deployed(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    return make(tmp_path_factory.mktemp("second"), byte_tokenizer, 2)


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No way to a Kubernetes."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
