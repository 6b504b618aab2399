"""Deploys small models on a local Triton server, ready for a release."""

from pathlib import Path

from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.model.checkpoint import save_checkpoint
from lathe.model.gpt import GPT
from lathe.release.deploy import deploy
from lathe_base.config.settings import ExportSettings, Recipe, ServingSettings
from lathe_serving.server import ANY_PORTS
from tests.support.small_export import write_held_out
from tests.support.small_models import SERVED

RECIPE = Recipe(
    Serving=ServingSettings(**ANY_PORTS, threads=1, max_running=4),
    Export=ExportSettings(prompts=4, new_tokens=12),
)


def make(folder: Path, tokenizer: Tokenizer, seed: int) -> Path:
    """Make and deploy a model with random weights; returns the output folder of `deploy`."""
    model = GPT(SERVED)
    model.initialize(0.2, seed=seed)
    save_checkpoint(folder / "model", model, tokenizer, "pretrain", Recipe())
    data = write_held_out(folder / "data")
    exported = export(RECIPE, folder / "model", data, folder / "onnx").folder
    deploy(RECIPE, exported, folder / "model", folder / "deployed", data)
    return folder / "deployed"
