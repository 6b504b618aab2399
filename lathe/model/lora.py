"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) in the format of the library `peft`.

A linear with an adapter computes `W x + b + scale B A x`, and only A and B are trained. A fused
linear has an adapter for each matrix that is separate in Hugging Face's files, as in peft, whose
adapters are per module there.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lathe.model.architecture import Architecture
from lathe.model.checkpoint import fused_apart, join_rows, load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.fake_quant import replace_module
from lathe.model.gpt import GPT
from lathe_base.artifacts.kinds import CHECKPOINT, read_json
from lathe_base.config.settings import LoraSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.inputs import require_file
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the name of a module of the base model."""
TARGET = re.compile(r"(.+)\.lora_(A|B)\.(?:default\.)?weight")
ADAPTER = re.compile(r"\.lora_[AB]\.\d+$")


class LoraLinear(nn.Linear):
    """`nn.Linear` with adapters.

    Args:
        linear: the linear, whose tensors are shared.
        rows: of the matrices with an adapter each, (out_i, in); together those of the weight.
        fused: number of row groups and rows of each part, if rows are ordered group by group.
        scale: of the adapters' output.
    """

    def __init__(
        self,
        linear: nn.Linear,
        rows: Sequence[int],
        fused: tuple[int, list[int]] | None,
        settings: LoraSettings,
    ) -> None:
        assert settings.rank is not None
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.fused, self.dropout = fused, settings.dropout
        self.scale = settings.alpha / settings.rank
        rank, device = settings.rank, linear.weight.device
        self.lora_A = nn.ParameterList(
            [torch.empty(rank, self.in_features, device=device) for _ in rows]
        )
        self.lora_B = nn.ParameterList([torch.empty(n, rank, device=device) for n in rows])

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        parts = [
            F.linear(F.linear(F.dropout(x, self.dropout, self.training), a), b)
            for a, b in zip(self.lora_A, self.lora_B, strict=True)
        ]
        return F.linear(x, self.weight, self.bias) + self.scale * self._ordered(parts, -1)

    def merged(self) -> Tensor:
        """The weight with the adapters in it, (out, in) float32."""
        pairs = zip(self.lora_A, self.lora_B, strict=True)
        parts = [b.float() @ a.float() for a, b in pairs]
        return self.weight.float() + self.scale * self._ordered(parts, 0)

    def _ordered(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate the matrices' rows, along `dim`, in the order of the weight's rows."""
        if self.fused is None:
            return torch.cat(list(parts), dim)
        groups, sizes = self.fused
        matrices = torch.split(parts[0], sizes, dim) if len(parts) == 1 else parts
        if dim == 0:
            return join_rows(matrices, groups)
        # Group by group, as `join_rows` does for rows.
        apart = [part.reshape(*part.shape[:-1], groups, -1) for part in matrices]
        return torch.cat(apart, -1).flatten(-2)


def insert(model: GPT, settings: LoraSettings, dtype: torch.dtype = torch.float32) -> None:
    """Give the target linears adapters, in place; their values are `initial_value`.

    Args:
        dtype: of the frozen weights of all linears; bfloat16 is what autocast would round them to
            before every use.
    """
    for name, module in list(model.named_modules()):
        linear = model.config.architecture.find_linear(name)
        if linear is None or not isinstance(module, nn.Linear):
            continue
        module.weight.data = module.weight.data.to(dtype)
        if linear.skip_name in settings.targets:
            fused = fused_apart(model.config, f"{name}.weight")
            is_apart = len(model.config.architecture.stored_names(f"{name}.weight")) > 1
            # An adapter for each matrix that is a file's own, also where Lathe has them fused.
            rows = fused[1] if fused and is_apart else [module.out_features]
            replace_module(model, name, LoraLinear(module, rows, fused, settings))


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return ADAPTER.search(name) is not None


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Initial value of an adapter's parameter, as in peft: B is 0, and A uniform within
    1 / sqrt(in). Independent of the parallel layout."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])  # that of kaiming_uniform_(a=sqrt(5)), which peft calls
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def merge(model: GPT) -> None:
    """Replace the linears with adapters by plain ones that compute the same, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            plain = nn.Linear(1, 1, device="meta")  # takes no memory until it has its weight
            plain.in_features, plain.out_features = module.in_features, module.out_features
            plain.weight = nn.Parameter(module.merged().detach())
            plain.bias = module.bias
            replace_module(model, name, plain)


def adapter_tensors(model: GPT) -> dict[str, Tensor]:
    """The adapters by peft's names."""
    family = model.config.architecture
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            for i, stored in enumerate(family.stored_names(f"{name}.weight")):
                path = PREFIX + family.stored_name(stored).removesuffix(".weight")
                tensors[f"{path}.lora_A.weight"] = module.lora_A[i].detach().float()
                tensors[f"{path}.lora_B.weight"] = module.lora_B[i].detach().float()
    return tensors


def save_adapters(
    folder: Path,
    tensors: Mapping[str, Tensor],
    family: Architecture,
    settings: LoraSettings,
    base: str,
) -> None:
    """Write adapters into a new folder that peft loads.

    Args:
        tensors: see `adapter_tensors`.
        base: name of the base model, for peft's `AutoPeftModel`.
    """
    linears = [linear for linear in family.linears if linear.skip_name in settings.targets]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": [name for x in linears for name in (x.files or (x.name,))],
        "fan_in_fan_out": family.transposed,
        "bias": "none",
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / WEIGHTS, {"format": "pt"})


SUPPORTED = {
    "peft_type": "LORA",
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""Keys of `adapter_config.json` -> the value that Lathe supports, also if the key is absent."""


@torch.no_grad()
def merge_adapters(model: GPT, folder: Path) -> None:
    """Add the adapters of a folder that peft, or Lathe, wrote to the weights of their base model.

    Raises:
        UserError: no such folder, an adapter of another kind, or of another model.
    """
    hint = "give a folder that peft's save_pretrained or `lathe finetune` wrote"
    config = read_json(folder / CONFIG, hint)
    for key, supported in SUPPORTED.items():
        if (value := config.get(key, supported)) not in (supported, None, [], {}):
            raise UserError(
                f"{folder / CONFIG}: {key} {value!r} is not supported",
                "merge it with peft",
                Code.UNSUPPORTED,
            )
    # peft's alpha may be a fraction; `true` would count as 1.
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise UserError(
            f"{folder / CONFIG}: lora_alpha {alpha!r} is not a number", hint, Code.MALFORMED
        )
    parameters = dict(model.named_parameters())
    family = model.config.architecture
    owners = {
        PREFIX + family.stored_name(stored).removesuffix(".weight"): (name, part)
        for name in parameters
        if family.find_linear(name) and name.endswith(".weight")
        for part, stored in enumerate(family.stored_names(name))
    }
    for module, a, b in _pairs(folder / WEIGHTS, hint):
        owner, rank = owners.get(module), len(a)
        if owner is None:
            raise UserError(
                f"{folder / WEIGHTS}: adapts {module.removeprefix(PREFIX)}, which is not a linear "
                "of a block of the base model",
                "give its own base model; adapters of the embedding and the head are not supported",
                Code.MISMATCH,
            )
        weight = parameters[owner[0]]
        fused = fused_apart(model.config, owner[0])
        matrices = list(torch.split(torch.arange(len(weight)), fused[1])) if fused else []
        rows = torch.arange(len(weight))
        if fused:  # where the file's rows are among the model's
            order = join_rows([part[:, None] for part in matrices], fused[0])[:, 0]
            positions = torch.argsort(order)
            is_apart = len(family.stored_names(owner[0])) > 1
            rows = positions[matrices[owner[1]]] if is_apart else positions
        if a.shape[1] != weight.shape[1] or b.shape != (len(rows), rank):
            raise UserError(
                f"{folder / WEIGHTS}: {module.removeprefix(PREFIX)} has adapters "
                f"{tuple(a.shape)} and {tuple(b.shape)} for a weight "
                f"({len(rows)}, {weight.shape[1]})",
                "give the base model that it was trained with",
                Code.MISMATCH,
            )
        # rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) divides by the root of the rank.
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight[rows] += scale * (b.float() @ a.float())


def _pairs(path: Path, hint: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Module, A and B of every adapter in a file."""
    require_file(path, hint)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not safetensors: {error}", hint, Code.MALFORMED) from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TARGET.fullmatch(name)
        if match is None or tensor.ndim != 2 or not bool(tensor.isfinite().all()):
            raise UserError(f"{path}: {name} is not an adapter's matrix", hint, Code.MALFORMED)
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise UserError(f"{path}: contains no adapter", hint, Code.WRONG_KIND)
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise UserError(
                f"{path}: {module} has only one of lora_A and lora_B", hint, Code.INCOMPLETE
            )
        yield module, pair["A"], pair["B"]


@attested("import", "source", "base")
def import_adapters(recipe: Recipe, source: Path, base: Path | None, output: Path) -> GPTConfig:
    """Write the checkpoint `output`: a model with adapters merged into its weights.

    Args:
        source: see `merge_adapters`.
        base: checkpoint or Hugging Face model that the adapters were trained with.

    Raises:
        UserError: see `merge_adapters`; no base, or a quantized one.
    """
    if base is None:
        raise UserError(
            f"{source}: adapters without their base model",
            "give the model that they were trained with as --base",
            Code.MISSING_OPTION,
        )
    claim_output_folder(output, CHECKPOINT, source, base)
    checkpoint = load_checkpoint(base)
    model = checkpoint.model
    if model.config.quantization is not None:
        raise UserError(
            f"{base}: is quantized", "merge adapters first, then quantize", Code.WRONG_KIND
        )
    merge_adapters(model, source)
    with atomic_folder(output, CHECKPOINT) as work:
        save_checkpoint(work, model, checkpoint.tokenizer, "import", recipe)
    return model.config
