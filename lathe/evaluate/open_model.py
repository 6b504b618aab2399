"""Open the model to evaluate: a checkpoint, or an ONNX folder that was exported from one."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lathe.artifacts.kinds import open_export
from lathe.config.settings import ExportSettings, OfflineEvalSettings, Recipe
from lathe.data.tokenizer import load_tokenizer
from lathe.errors import UserError
from lathe.evaluate.measure import EvaluatedModel, require_float32
from lathe.evaluate.scorers import OnnxScorer, TorchScorer, onnx_scorer, served_scorer
from lathe.export.export import require_exportable
from lathe.export.export import write as write_export
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import read_config
from lathe.model.folder import weight_bytes
from lathe.model.generate import generate
from lathe.runtime.exported_model import MODEL
from lathe.storage import sha256
from lathe.train.workers import choose_device

log = logging.getLogger("lathe")

Endpoint = tuple[str, str]  # gRPC address and model name


def open_model(
    model: Path | str, recipe: Recipe, endpoint: Endpoint | None = None
) -> EvaluatedModel:
    """Open a folder of `lathe export` with onnxruntime, and any other with torch; a quantized
    checkpoint with onnxruntime too, unless the recipe says otherwise.

    Args:
        endpoint: measures a server's model; `model` is then the export that it should serve.

    Raises:
        UserError: neither a checkpoint nor an export, no such device, or a precision that would
            change what is measured.
    """
    settings = recipe.Offline_Eval
    onnx = Path(model) / MODEL
    if not onnx.is_file():
        if endpoint is not None:
            raise UserError(f"{onnx}: no such file", "give the export folder that is served")
        device = choose_device(recipe)
        return _open_checkpoint(load_checkpoint(model), settings, device, recipe.Global.seed)
    folder = onnx.parent
    open_export(folder)
    require_float32(settings, f"{folder} is an ONNX export, which has its own precision")
    digest = sha256(onnx)
    return EvaluatedModel(
        folder=folder,
        scorer=served_scorer(*endpoint, digest) if endpoint else onnx_scorer(folder),
        config=read_config(folder),
        tokenizer=load_tokenizer(folder),
        stage="export",
        engine="onnxruntime",
        n_bytes=onnx.stat().st_size,
        digest=digest,
    )


def _open_checkpoint(
    checkpoint: Checkpoint, settings: OfflineEvalSettings, device: torch.device, seed: int
) -> EvaluatedModel:
    net, graph = checkpoint.model, None
    if net.config.quantization is not None:
        require_float32(settings, f"{checkpoint.folder} is quantized, with scales for float32")
        if settings.quantized == "onnxruntime" and device.type == "cpu":
            graph = _graph_scorer(checkpoint)
    torch_scorer = TorchScorer(net.to(device), bfloat16=settings.dtype == "bfloat16")
    return EvaluatedModel(
        folder=checkpoint.folder,
        scorer=graph or torch_scorer,
        engine="onnxruntime" if graph else "torch",
        config=net.config,
        tokenizer=checkpoint.tokenizer,
        stage=checkpoint.meta.get("stage"),
        n_bytes=weight_bytes(checkpoint.folder),
        digest=checkpoint.digest,
        on_cpu=device.type == "cpu",
        generate=lambda prompts, how: generate(net, prompts, how, checkpoint.end_ids, seed),
    )


def _graph_scorer(checkpoint: Checkpoint) -> OnnxScorer | None:
    """The scorer of the graph that the checkpoint would be exported as, which is not proven here;
    None if it cannot be exported."""
    settings = ExportSettings()
    try:
        require_exportable(checkpoint.folder, checkpoint.model.config, settings)
        with TemporaryDirectory() as folder:
            write_export(checkpoint, Path(folder), settings)
            return onnx_scorer(Path(folder))
    except UserError as error:
        log.info("%s: not exported to evaluate it: %s", checkpoint.folder, error.what)
        return None
