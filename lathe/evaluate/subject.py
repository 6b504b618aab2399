"""What is measured: a checkpoint, or the ONNX folder that was exported from one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lathe.data.tokenizer import load_tokenizer
from lathe.errors import UserError
from lathe.evaluate.scorers import Scorer, TorchScorer, onnx_scorer, served_scorer
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import GPTConfig, read_config
from lathe.model.folder import WEIGHTS
from lathe.serve.session import MODEL
from lathe.settings import OfflineEvalSettings
from lathe.storage import sha256
from lathe.train.workers import choose_device

# Activations of more tokens fall out of a CPU's caches: a quarter slower for GPT-2 124M.
CPU_BATCH_TOKENS = 2048

Endpoint = tuple[str, str]  # gRPC address and model name


@dataclass(frozen=True)
class Subject:
    """A model behind its scorer.

    Attributes:
        stage: what made it.
        n_bytes: size of its weights.
        checkpoint: what can write samples; None for an ONNX folder.
    """

    folder: Path
    scorer: Scorer
    device: torch.device
    config: GPTConfig
    tokenizer: Tokenizer
    stage: str | None
    n_bytes: int
    digest: str
    checkpoint: Checkpoint | None = None

    def token_budget(self, wanted: int) -> int:
        """Tokens of a batch, `wanted` at most."""
        return min(wanted, CPU_BATCH_TOKENS) if self.device.type == "cpu" else wanted

    def card(self) -> dict[str, Any]:
        """What `metrics.json` says of the model."""
        return {
            "stage": self.stage,
            "n_params": self.config.n_params(),
            "bytes": self.n_bytes,
            "quantized": self.config.quantization is not None,
        }


def open_subject(
    model: Path | str, settings: OfflineEvalSettings, device: str, endpoint: Endpoint | None = None
) -> Subject:
    """Open a folder of `lathe export` with onnxruntime, any other with torch.

    Args:
        device: `auto`, `cpu` or `gpu`; an ONNX file runs on the CPU.
        endpoint: of a server; `model` is then the export that it is meant to serve.

    Raises:
        UserError: neither a checkpoint nor an export, no such device, or a precision that would
            change what is measured.
    """
    onnx = Path(model) / MODEL
    if not onnx.is_file():
        if endpoint is not None:
            raise UserError(f"{onnx}: no such file", "give the export folder that is served")
        return _open_checkpoint(load_checkpoint(model), settings, choose_device(device))
    folder = onnx.parent
    _require_float32(settings, f"{folder} is an ONNX file, with a precision of its own")
    digest = sha256(onnx)
    return Subject(
        folder=folder,
        scorer=served_scorer(*endpoint, digest) if endpoint else onnx_scorer(folder),
        device=torch.device("cpu"),
        config=read_config(folder),
        tokenizer=load_tokenizer(folder),
        stage="export",
        n_bytes=onnx.stat().st_size,
        digest=digest,
    )


def _open_checkpoint(
    checkpoint: Checkpoint, settings: OfflineEvalSettings, device: torch.device
) -> Subject:
    net = checkpoint.model
    if net.config.quantization is not None:
        _require_float32(settings, f"{checkpoint.folder} is quantized, on a grid of float32")
    return Subject(
        folder=checkpoint.folder,
        scorer=TorchScorer(net.to(device), bfloat16=settings.dtype == "bfloat16"),
        device=device,
        config=net.config,
        tokenizer=checkpoint.tokenizer,
        stage=checkpoint.meta.get("stage"),
        n_bytes=(checkpoint.folder / WEIGHTS).stat().st_size,
        digest=checkpoint.digest,
        checkpoint=checkpoint,
    )


def _require_float32(settings: OfflineEvalSettings, what: str) -> None:
    if settings.dtype != "float32":
        raise UserError(
            f"Offline_Eval.dtype is {settings.dtype}, and {what}", "set Offline_Eval.dtype=float32"
        )
