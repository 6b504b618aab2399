"""The checkpoint folder that passes between stages; an unpruned one is a HF GPT-2 folder too.

`config.json`, `model.safetensors` (HF names and layout), `tokenizer.json`, and `lathe.json`, which
is written last: a folder of ours without it is not a checkpoint. Nothing is ever unpickled.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

import lathe
from lathe.data.tokenizer import eos_id, load_tokenizer, vocab_size
from lathe.errors import UserError
from lathe.model import fake_quant
from lathe.model.config import GPTConfig, read_config
from lathe.model.gpt import GPT
from lathe.settings import Recipe
from lathe.storage import sha256

WEIGHTS = "model.safetensors"
MARKER = "lathe.json"
PREFIX = "transformer."
HF_BUFFERS = (".attn.bias", ".attn.masked_bias", "lm_head.weight")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the model in eval mode, fake-quantized where its plan says so."""

    folder: Path
    model: GPT
    tokenizer: Tokenizer
    meta: dict[str, Any]  # lathe.json; empty for a plain HF folder

    @property
    def digest(self) -> str:
        return checkpoint_digest(self.folder)

    @property
    def eos_id(self) -> int:
        return eos_id(self.tokenizer)


def checkpoint_digest(folder: Path) -> str:
    """Identity of a checkpoint: the digest of its marker, or of a HF folder's weights."""
    marker = folder / MARKER
    return sha256(marker if marker.is_file() else folder / WEIGHTS)


def load_checkpoint(folder: Path | str) -> Checkpoint:
    """Load a checkpoint folder, a HF GPT-2 folder, or `hf://NAME` from the Hugging Face hub.

    Raises:
        UserError: missing, truncated, altered, pickled or non-finite weights; not a GPT-2; a
            tokenizer that speaks more ids than the model has.
    """
    folder = _resolve(folder)
    config = read_config(folder)
    meta = _read_marker(folder)
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(_read_weights(folder / WEIGHTS, config), assign=True)
    if config.quantization is not None:
        fake_quant.insert(model, config.quantization)
    tokenizer = load_tokenizer(folder)
    if vocab_size(tokenizer) > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {vocab_size(tokenizer)} ids, "
            f"the model {config.vocab_size}",
            "put the tokenizer that the model was trained with into the folder",
        )
    return Checkpoint(folder, model.eval(), tokenizer, meta)


def save_checkpoint(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    stage: str,
    recipe: Recipe,
    parent: str | None = None,
    metrics: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint into `folder`, its marker last; other files there stay.

    A fake-quantized model is saved as its float weights and, in `config.json`, its plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".checkpoint.", dir=folder))
    try:
        tensors = {PREFIX + name: t.contiguous() for name, t in HFTensors(model).items()}
        save_file(tensors, work / WEIGHTS, {"format": "pt"})
        (work / "config.json").write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
        tokenizer.save(str(work / "tokenizer.json"))
        names = [WEIGHTS, "config.json", "tokenizer.json"]
        meta = {
            "lathe": lathe.__version__,
            "stage": stage,
            "parent": parent,
            "n_params": model.config.n_params(),
            "metrics": metrics or {},
            "files": {name: sha256(work / name) for name in names},
            "recipe": recipe.model_dump(mode="json"),
        }
        (work / MARKER).write_text(json.dumps(meta, indent=2) + "\n")
        (folder / MARKER).unlink(missing_ok=True)
        for name in [*names, MARKER]:
            os.replace(work / name, folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _resolve(folder: Path | str) -> Path:
    name = str(folder)
    if name.startswith("hf://"):
        from huggingface_hub import snapshot_download

        patterns = ["config.json", WEIGHTS, "tokenizer.json", "vocab.json", "merges.txt"]
        return Path(snapshot_download(name.removeprefix("hf://"), allow_patterns=patterns))
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder", "give the folder of a checkpoint")
    return Path(folder)


def _read_marker(folder: Path) -> dict[str, Any]:
    marker = folder / MARKER
    if not marker.is_file():
        if _is_ours(folder):
            raise UserError(
                f"{folder}: no {MARKER}: the checkpoint was never finished",
                "run the stage that writes it again; it goes on where it was",
            )
        return {}
    meta: dict[str, Any] = json.loads(marker.read_text())
    for name, digest in meta["files"].items():
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            raise UserError(
                f"{path}: missing, truncated or altered since {MARKER} was written",
                "copy the checkpoint again, or run the stage that wrote it again",
            )
    return meta


def _is_ours(folder: Path) -> bool:
    """Whether `config.json` was written by Lathe."""
    return "lathe" in json.loads((folder / "config.json").read_text())


def _read_weights(path: Path, config: GPTConfig) -> dict[str, Tensor]:
    if not path.is_file():
        pickled = [p.name for p in path.parent.glob("*.bin")]
        found = f" (found {', '.join(pickled)}, which Lathe never unpickles)" if pickled else ""
        raise UserError(f"{path}: no such file{found}", "save the model as safetensors")
    try:
        with safe_open(path, "pt") as file:
            stored = [name for name in file.keys() if not name.endswith(HF_BUFFERS)]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not safetensors: {error}", "copy the file again") from None
    state = {}
    for stored_name in stored:
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(stored_name)
        name = stored_name.removeprefix(PREFIX)
        if _is_conv1d(name):
            tensor = tensor.T
        if ".c_attn." in name:
            tensor = by_head(tensor, config.head_dim)
        state[name] = tensor.float().contiguous()
    with torch.device("meta"):
        wanted = GPT(config).state_dict()
    wrong = [
        f"{name}: {tuple(state[name].shape) if name in state else 'absent'}, not {tuple(t.shape)}"
        for name, t in wanted.items()
        if name not in state or state[name].shape != t.shape
    ] + [f"{name}: unknown" for name in state.keys() - wanted.keys()]
    if wrong:
        raise UserError(
            f"{path}: does not fit config.json: {'; '.join(wrong[:3])}",
            "use the config.json that belongs to these weights",
        )
    for name, tensor in state.items():
        if not all(extreme.isfinite() for extreme in tensor.aminmax()):
            raise UserError(f"{path}: {name} holds NaN or infinity", "use an earlier checkpoint")
    return state


class HFTensors(Mapping[str, Tensor]):
    """The float weights under HF's names without `transformer.`, in its layout, linears (in, out):
    views where the layout allows, and copies made when they are asked for. Observers stay out: the
    plan has them."""

    def __init__(self, model: GPT) -> None:
        self._head_dim = model.config.head_dim
        self._parameters = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if "observer" not in name and not name.startswith("head_input")
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._parameters[name]
        if ".c_attn." in name:
            tensor = by_projection(tensor, self._head_dim)
        return tensor.T if _is_conv1d(name) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def by_head(rows: Tensor, head_dim: int) -> Tensor:
    """Rows (3 * H * D, ...) of a fused qkv: all of q, of k, of v -> head by head, as `GPT` has."""
    return rows.view(3, -1, head_dim, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def by_projection(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `by_head`."""
    return rows.view(-1, 3, head_dim, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def _is_conv1d(name: str) -> bool:
    return name.endswith(tuple(f"{linear}.weight" for linear in fake_quant.LINEARS))
