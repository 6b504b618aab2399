"""The pretrain stage: train a GPT from random weights, or continue from a checkpoint."""

import functools
from pathlib import Path

import torch

from lathe.config.settings import ModelSettings, Recipe
from lathe.data.tokenizer import load_tokenizer
from lathe.data.tokens import TokenDataset
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import checkpoint_digest
from lathe.model.gpt import GPT, initial_weight
from lathe.provenance.step import attested
from lathe.train.capacity import require_capacity
from lathe.train.result import TrainResult
from lathe.train.run import TrainingJob, run_training
from lathe.train.shape import model_config
from lathe.train.workers import Workers


@attested("pretrain", "data", "init")
def pretrain(recipe: Recipe, data: Path, output: Path, init: Path | None = None) -> TrainResult:
    """Train on the token data set `data`; write the checkpoint folder `output`.

    Args:
        init: checkpoint or HF GPT-2 folder to start from; its shape overrides the recipe's.

    Raises:
        UserError: incompatible vocabulary, sequence length or model, too little data, or an
            `output` that belongs to something else.
    """

    settings = recipe.Model

    def make(workers: Workers) -> TrainingJob:
        if init is not None:
            start = load_checkpoint(init)
            model = with_dropout(start.model, settings)
            return TrainingJob("pretrain", model, start.tokenizer, init)
        config = model_config(recipe, TokenDataset.open(data).vocab_size)
        with torch.device("meta"):
            model = new_model(config, settings)
        start_of = functools.partial(
            initial_weight,
            config=config,
            std=settings.initializer_range,
            seed=recipe.Global.seed,
            scale_residual=settings.scale_residual_init,
        )
        return TrainingJob("pretrain", model, load_tokenizer(data), weights=start_of)

    if init is None:
        require_capacity(model_config(recipe, TokenDataset.open(data).vocab_size), recipe)
    inputs = {"init": checkpoint_digest(init)} if init else {}
    return run_training(recipe, data, output, inputs, make, sources=[init] if init else [])


def new_model(config: GPTConfig, settings: ModelSettings) -> GPT:
    """A model of this shape with the recipe's dropout, in training mode."""
    return GPT(config, settings.hidden_dropout_prob, settings.attention_probs_dropout_prob)


def with_dropout(model: GPT, settings: ModelSettings) -> GPT:
    """The same model with the recipe's dropout, for training; the tensors are shared."""
    with torch.device("meta"):
        trainable = new_model(model.config, settings)
    trainable.load_state_dict(model.state_dict(), assign=True)
    return trainable
