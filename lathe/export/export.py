"""The export stage: writes a checkpoint as ONNX and verifies that both compute the same."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import torch
from pydantic import BaseModel

from lathe.data.chat_template import FIX, sample_chat
from lathe.data.tokenizer import save_tokenizer
from lathe.export.fidelity import HALF_NOISE, KL_NOISE
from lathe.export.formats import require_formats, write_formats
from lathe.export.graph import Weight, padded_head
from lathe.export.model_graph import build
from lathe.export.prompts import proof_prompts
from lathe.export.proof import prove
from lathe.export.prove import prove_files, prove_formats
from lathe.model import fake_quant
from lathe.model.checkpoint import Checkpoint, by_projection, load_checkpoint
from lathe.model.config import GPTConfig, write_config
from lathe.model.gpt import GPT
from lathe_base.artifacts.kinds import EXPORT, read_metadata
from lathe_base.artifacts.metadata import ExportMetadata
from lathe_base.config.settings import ExportSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.chain import OF_FORMAT
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder, require_utf8, sha256
from lathe_serving.runtime.exported_model import METADATA, MODEL, PREFIX, n_bytes

log = logging.getLogger("lathe")

FLAVOURS = {"float32": "fp32", "float16": "fp16"}
# Prompts of the proof that `export.json` keeps, to check another runtime by where it serves.
SAMPLES, SAMPLE_TOKENS = 4, 64

AlsoExport = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class ExportResult:
    """A verified export; `export.json` contains all figures of the verification.

    Attributes:
        flavour: `fp32`, `fp16`, `int8` or `int4`.
        n_bytes: size of the graph and its weights.
        integer_kernels: number of integer matrix products in onnxruntime.
        max_error, mean_error: errors of the logits, compared with torch.
        argmax_agreement: share of positions with torch's most likely token.
        ties: number of greedy texts that diverge from torch's at two tokens with nearly equal
            logits.
    """

    folder: Path
    flavour: str
    n_bytes: int
    integer_kernels: int
    max_error: float
    mean_error: float
    argmax_agreement: float
    ties: int


def _proof(folder: Path) -> dict[str, dict[str, Any]]:
    metadata = read_metadata(folder / METADATA, ExportMetadata, "export the model again")
    proofs: dict[str, BaseModel | None] = {"proof": metadata.proof}
    proofs |= {f"{OF_FORMAT}{name}": fmt.proof for name, fmt in metadata.formats.items()}
    proofs |= {f"{OF_FORMAT}{name}": proof for name, proof in metadata.engines.items()}
    return {name: proof.model_dump() for name, proof in proofs.items() if proof}


@attested("export", "model", "data", results=_proof)
def export(
    recipe: Recipe, model: Path, data: Path, output: Path, also: AlsoExport | None = None
) -> ExportResult:
    """Write `model.onnx`, `config.json`, `tokenizer.json` and `export.json`, and verify them.

    Args:
        model: checkpoint folder; its quantization plan, if any, determines the flavour int8 or
            int4.
        data: output of prepare, with the held-out text for prompts.
        output: written only after verification has succeeded.
        also: called with the unfinished folder after verification, to write another format; its
            result is added to `export.json`.

    Raises:
        UserError: not a checkpoint, too little held-out text, float16 for an INT8 checkpoint, a
            chat template that does not render a chat.
        ProofError: the graph and the checkpoint disagree; see `lathe.export.proof.prove`.
    """
    # What can be checked of the input is checked before anything is written.
    require_utf8(output)
    claim_output_folder(output, EXPORT, model, data)
    checkpoint = load_checkpoint(model)
    settings = recipe.Export
    config = checkpoint.model.config
    require_exportable(model, config, settings)
    require_formats(settings, config, model)
    if config.chat_template:
        sample_chat(config.chat_template, str(model), FIX)
    prompts, new_tokens = proof_prompts(checkpoint.tokenizer, data, settings, config.n_positions)
    with atomic_folder(output, EXPORT) as work:
        # Nothing is in its place before it is proved: `work` is renamed at the end.
        metadata = write(checkpoint, work, settings)
        proof = prove(checkpoint.model, work, prompts, new_tokens, settings.tolerance)
        metadata["proof"] = {"tolerance": settings.tolerance, **proof.to_json()}
        metadata["samples"] = [prompt[:SAMPLE_TOKENS] for prompt in prompts[:SAMPLES]]
        # Further formats, each proved in the engine that will read it, if that is installed.
        if formats := write_formats(checkpoint, work, settings):
            required = [x.removeprefix(OF_FORMAT) for x in recipe.Production.require]
            noise = HALF_NOISE if settings.dtype == "float16" else KL_NOISE
            proofs = prove_formats(
                checkpoint, work, [*formats], required, prompts, new_tokens, noise
            )
            metadata["formats"] = {
                name: {"files": files, "proof": proofs.get(name)} for name, files in formats.items()
            }
            if "vllm" in required:
                vllm = prove_files(checkpoint, work, "vllm", prompts, new_tokens, noise)
                metadata["engines"] = {"vllm": vllm.to_json()}
        if also is not None:
            metadata |= also(work)
        _write_metadata(work, metadata)
    result = ExportResult(
        folder=output,
        flavour=metadata["flavour"],
        n_bytes=metadata["bytes"],
        integer_kernels=proof.integer_kernels,
        max_error=proof.max_error,
        mean_error=proof.mean_error,
        argmax_agreement=proof.argmax_agreement,
        ties=len({tie.prompt for tie in proof.ties}),
    )
    log.info(
        "exported %s, %.1f MB, %d integer kernels; logits within %.2g of torch's (mean %.2g), "
        "argmax the same at %.1f %%; %d of %d greedy texts identical; compared with the float "
        "model, KL %.2g nats per token (torch's %.2g) and %.1f %% of greedy tokens the same",
        result.flavour,
        result.n_bytes / 1e6,
        result.integer_kernels,
        result.max_error,
        result.mean_error,
        100 * result.argmax_agreement,
        proof.prompts - result.ties,
        proof.prompts,
        proof.fidelity.kl,
        proof.fidelity.torch_kl,
        100 * proof.fidelity.greedy_agreement,
    )
    return result


def require_exportable(model: Path, config: GPTConfig, settings: ExportSettings) -> None:
    """Raise UserError if the graph does not support the type."""
    if config.quantization and settings.dtype == "float16":
        raise UserError(
            f"{model}: is a quantized checkpoint, but Export.dtype is float16",
            "set Export.dtype=float32, or export the checkpoint from before quantization",
            Code.UNSUPPORTED,
        )


def write(checkpoint: Checkpoint, folder: Path, settings: ExportSettings) -> dict[str, Any]:
    """Write the files of an export without verifying them; returns the metadata."""
    config = checkpoint.model.config
    graph = build(
        config, GraphWeights(checkpoint.model, settings.dtype), config.quantization, settings.opset
    )
    graph.save(folder / MODEL)
    head = padded_head(config)
    if prefix := checkpoint.model.prefix:
        # The heads of all layers' keys come first: (heads, tokens, D).
        stored = torch.cat([x[part] for part in (0, 1) for x in prefix]).numpy()
        if scales := [*fake_quant.cache_scales(checkpoint.model).values()]:
            by_head = torch.cat((*scales[::2], *scales[1::2])).numpy()
            stored = np.rint(stored / by_head[:, None]).astype(np.int8)
        np.save(folder / PREFIX, head.padded(stored, 0))
    write_config(folder, config)  # a Hugging Face folder keeps chat template and ends elsewhere
    save_tokenizer(checkpoint.tokenizer, folder / "tokenizer.json")
    metadata = {
        "flavour": flavour(config, settings),
        "n_head": list(config.n_head),
        **({"n_kv_head": list(config.kv_heads)} if config.kv_heads else {}),
        "head_dim": head.size,
        "n_positions": config.n_positions,
        "vocab_size": config.vocab_size,
        "eos_id": checkpoint.eos_id,
        **({"prefix_tokens": list(config.prefix_tokens)} if config.prefix_tokens else {}),
        **({"end_ids": list(ends)} if len(ends := checkpoint.end_ids) > 1 else {}),
        "opset": max(x.version for x in graph.model.opset_import if not x.domain),
        "bytes": n_bytes(folder),
        "sha256": sha256(folder / MODEL),
        "source": checkpoint.digest,
        "versions": {"torch": torch.__version__, "onnxruntime": ort.__version__},
    }
    _write_metadata(folder, metadata)
    return metadata


def flavour(config: GPTConfig, settings: ExportSettings) -> str:
    """`int8` or `int4`, by the narrowest weights, or the float type."""
    plan = config.quantization
    return f"int{plan.weight_bits}" if plan else FLAVOURS[settings.dtype]


class GraphWeights(Mapping[str, Weight]):
    """A model's tensors by name, as arrays of one type, converted on access. Linears are (in, out),
    and the matrices of a fused one are one after the other."""

    def __init__(self, model: GPT, dtype: str) -> None:
        self._config, self._dtype = model.config, dtype
        self._tensors = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if "observer" not in name and not name.startswith("head_input")
        }
        self._cache_scales = fake_quant.cache_scales(model)

    def __getitem__(self, name: str) -> Weight:
        if name in self._cache_scales:
            return self._cache_scales[name].numpy()  # float32, whatever the type of the weights
        tensor = by_projection(self._tensors[name], self._config, name)
        if name.endswith(".weight") and self._config.architecture.find_linear(name) is not None:
            tensor = tensor.T
        # A view of torch's memory, unless the type changes.
        weight: Weight = tensor.numpy().astype(self._dtype, copy=False)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter({**self._tensors, **self._cache_scales})

    def __len__(self) -> int:
        return len(self._tensors) + len(self._cache_scales)


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    (folder / METADATA).write_text(
        json.dumps(metadata, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
