"""The training of a recipe: its stage's model on the meta device, teacher and hook."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lathe.compress.plan import named_formats
from lathe.compress.prune import cut
from lathe.compress.quantize import insert_fake_quantization
from lathe.compress.widths import keep_layers
from lathe.model import lora
from lathe.model.config import GPTConfig, read_config
from lathe.model.fake_quant import fold_observers
from lathe.model.gpt import GPT
from lathe.train.finetune import frozen_dtype
from lathe.train.parallel import Stage
from lathe.train.pretrain import new_model
from lathe.train.shape import model_config, recipe_stage
from lathe.train.workers import Workers
from lathe_base.config.settings import Recipe


@dataclass(frozen=True)
class TrialJob:
    """A model without values, and what else its training needs.

    Attributes:
        model: on the meta device.
        teacher: on the meta device; None without distillation.
        observe: see `lathe.train.trainer.Trainer`.
    """

    model: GPT
    teacher: GPT | None = None
    observe: Callable[[Workers], Callable[[Stage], None]] | None = None


def dense_config(recipe: Recipe) -> GPTConfig:
    """Shape of the model that the recipe trains, or that its stage starts from, with the recipe's
    vocabulary."""
    return model_config(recipe, recipe.Prepare.vocab_size)


def make_job(recipe: Recipe) -> TrialJob:
    """The training of the recipe's stage.

    Choices that depend on data are approximated: global pruning by the same share of every layer,
    several rounds by the first, which leaves the most, the least important layers by the last ones,
    and `auto` scales by static ones.

    Raises:
        UserError: a setting or a linear that the model's family does not have.
    """
    config, stage = dense_config(recipe), recipe_stage(recipe)
    with torch.device("meta"):
        model, teacher = new_model(config, recipe.Model), None
        if folder := recipe.Compress.Distill.teacher:
            teacher = GPT(config if folder == "parent" else read_config(Path(folder)))
        if stage == "finetune":
            lora.insert(model, recipe.Finetune.lora, frozen_dtype(recipe))
        if stage == "prune":
            settings = recipe.Compress.Prune
            if settings.layers:
                model = keep_layers(model, range(max(1, config.n_layer - settings.layers)))
            known = {"criterion": "l1_norm", "scope": "uniform", "layers": 0}
            model = cut(model, settings.model_copy(update=known), config)
        if stage == "quantize":
            formats = named_formats(config, recipe.Compress.Quantization, None)
            model = insert_fake_quantization(model, recipe, formats)[0]
    if stage != "quantize":
        return TrialJob(model, teacher)
    rate = recipe.Compress.Quantization.moving_rate

    def observe(workers: Workers) -> Callable[[Stage], None]:
        return lambda stage: fold_observers(stage.gpt, rate, workers.replicas)

    return TrialJob(model, teacher, observe)
