"""The stage that makes a model INT8 by quantization-aware training."""

import json
import logging
from dataclasses import replace
from pathlib import Path

from torch.distributed import ProcessGroup

from lathe.errors import UserError
from lathe.model import fake_quant
from lathe.model.checkpoint import checkpoint_digest, load_checkpoint
from lathe.model.config import GPTConfig, QuantizationPlan
from lathe.model.gpt import GPT
from lathe.settings import QuantizationSettings, Recipe
from lathe.storage import sha256
from lathe.train.batches import calibration_batches, open_data
from lathe.train.distill import teacher_folder
from lathe.train.pretrain import new_model
from lathe.train.stage import TrainResult, Work, run_training

log = logging.getLogger("lathe")

# The seeds' names in `skip_tensor_map`.
SEED_NAMES = {
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
}


def quantize(
    recipe: Recipe, model: Path, data: Path, output: Path, sensitivity: Path | None = None
) -> TrainResult:
    """Insert fake quantization, calibrate it, train through it, write a checkpoint with its plan.

    Args:
        sensitivity: a folder of `analyze`; its skips stay float, as do `skip_tensor_map`'s.

    Raises:
        UserError: `model` is already quantized, a skip names no linear of it; see also
            `run_training`.
    """
    inputs = {"model": checkpoint_digest(model)}
    if sensitivity is not None:
        inputs["sensitivity"] = sha256(sensitivity / "sensitivity.json")
    settings = recipe.Compress.Quantization
    teacher = teacher_folder(recipe.Compress.Distill, model)

    def make() -> Work:
        start = load_checkpoint(model)
        config = start.model.config
        if config.quantization is not None:
            raise UserError(f"{model}: is already quantized", "start from its parent checkpoint")
        trainable = new_model(config, recipe.Model)
        trainable.load_state_dict(start.model.state_dict())
        plan = make_plan(config, settings, skip_names(config, settings, sensitivity))
        fake_quant.insert(trainable, plan, settings.activation_preprocess_type == "PACT")
        tokens = open_data(data, recipe, config.vocab_size, config.n_positions)
        fake_quant.calibrate(trainable, calibration_batches(recipe, tokens))
        log.info("%d linears are INT8", len(plan.activation_scales))

        def after_step(part: GPT, group: ProcessGroup) -> None:
            fake_quant.fold_observers(part, settings.moving_rate, group)

        def before_save(whole: GPT) -> None:
            write_scales(whole, plan)

        return Work(
            "quantize",
            trainable,
            start.tokenizer,
            start.digest,
            after_step=after_step,
            before_save=before_save,
        )

    return run_training(recipe, data, output, inputs, make, teacher)


def quantizable(config: GPTConfig, settings: QuantizationSettings) -> list[str]:
    """Paths of all linears that may be INT8; the tied head only with the embedding."""
    head = [fake_quant.HEAD] if settings.quantize_embedding else []
    return fake_quant.linear_names(config) + head


def make_plan(
    config: GPTConfig, settings: QuantizationSettings, skip: frozenset[str] = frozenset()
) -> QuantizationPlan:
    """A plan for every quantizable linear but `skip`, its scales not known yet (0)."""
    names = [name for name in quantizable(config, settings) if name not in skip]
    return QuantizationPlan(
        weight_quantize_type=settings.weight_quantize_type,
        weight_bits=settings.weight_bits,
        activation_bits=settings.activation_bits,
        quantize_embedding=fake_quant.HEAD in names,
        activation_scales=dict.fromkeys(names, 0.0),
    )


def skip_names(
    config: GPTConfig, settings: QuantizationSettings, sensitivity: Path | None
) -> frozenset[str]:
    """Linears to leave in float, from the recipe's map and from a sensitivity analysis."""
    names = set()
    for block, linears in settings.skip_tensor_map.items():
        index = block.removeprefix("block_")
        if not index.isdigit() or int(index) >= config.n_layer:
            raise UserError(
                f"Compress.Quantization.skip_tensor_map names {block!r}",
                f"the model's blocks are block_0 to block_{config.n_layer - 1}",
            )
        names |= {f"h.{int(index)}.{SEED_NAMES[linear]}" for linear in linears}
    if sensitivity is not None:
        chosen = json.loads((sensitivity / "sensitivity.json").read_text())["skip"]
        unknown = set(chosen) - {*quantizable(config, settings), fake_quant.HEAD}
        if unknown:
            raise UserError(
                f"{sensitivity}: skips {sorted(unknown)}, which this model does not have",
                "analyze this model, not another one",
            )
        names |= set(chosen)
    return frozenset(names)


def write_scales(model: GPT, plan: QuantizationPlan) -> None:
    """Put the observers' quanta into the model's configuration."""
    scales = {name: observer.scale for name, observer in fake_quant.observers(model)}
    ordered = {name: scales[name] for name in plan.activation_scales}
    model.config = model.config.with_quantization(replace(plan, activation_scales=ordered))
