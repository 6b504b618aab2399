"""The pretrain stage: train a GPT from random weights, or continue from a checkpoint."""

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lathe.data.tokenizer import fingerprint, load_tokenizer, vocab_size
from lathe.data.tokens import TokenDataset, without_tokenizer
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import checkpoint_digest
from lathe.model.gpt import GPT, initial_weight
from lathe.train.memory import require_capacity
from lathe.train.result import TrainResult
from lathe.train.run import TrainingJob, run_training
from lathe.train.shape import model_config
from lathe.train.workers import Workers
from lathe_base.config.settings import ModelSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested


@attested("pretrain", "data", "init", "given_tokenizer")
def pretrain(
    recipe: Recipe,
    data: Path,
    output: Path,
    init: Path | None = None,
    given_tokenizer: Path | None = None,
) -> TrainResult:
    """Train on the token data set `data`; write the checkpoint folder `output`.

    Args:
        init: checkpoint or HF GPT-2 folder to start from; its shape overrides the recipe's.
        given_tokenizer: see `data_tokenizer`; not with `init`, whose tokenizer is used.

    Raises:
        UserError: incompatible vocabulary, sequence length or model, too little data, no tokenizer
            for token files of another tool, or an `output` that belongs to something else.
    """
    if init is not None and given_tokenizer is not None:
        raise UserError(
            f"--tokenizer {given_tokenizer}: --init brings its own",
            "omit --tokenizer",
            Code.CONFLICTING_OPTIONS,
        )
    settings = recipe.Model
    tokenizer = None if init is not None else data_tokenizer(data, given_tokenizer)

    def make(workers: Workers) -> TrainingJob:
        if init is not None:
            start = load_checkpoint(init)
            model = with_dropout(start.model, settings)
            return TrainingJob("pretrain", model, start.tokenizer, init)
        assert tokenizer is not None
        config = model_config(recipe, data_vocab_size(data, tokenizer))
        # No process allocates the whole model: each makes the initial tensors of its own stages.
        with torch.device("meta"):
            model = new_model(config, settings)
        weight_initializer = functools.partial(
            initial_weight,
            config=config,
            std=settings.initializer_range,
            seed=recipe.Global.seed,
            scale_residual=settings.scale_residual_init,
        )
        return TrainingJob("pretrain", model, tokenizer, weights=weight_initializer)

    inputs = {"init": checkpoint_digest(init)} if init else {}
    if tokenizer is not None:
        require_capacity(model_config(recipe, data_vocab_size(data, tokenizer)), recipe)
        # Not part of the data set's own identity, as it is where it is beside the tokens:
        if not TokenDataset.open(data).has_vocabulary:
            inputs["tokenizer"] = fingerprint(tokenizer)
    return run_training(recipe, data, output, inputs, make, sources=[init] if init else [])


def data_tokenizer(data: Path, tokenizer_path: Path | None = None) -> Tokenizer:
    """The tokenizer of a token data set: the given one (see `load_tokenizer`), or the one beside
    the tokens.

    Raises:
        UserError: there is neither.
    """
    if tokenizer_path is not None:
        return load_tokenizer(tokenizer_path)
    if not TokenDataset.open(data).has_vocabulary:
        raise without_tokenizer(data)
    return load_tokenizer(data)


def data_vocab_size(data: Path, tokenizer: Tokenizer) -> int:
    """Number of ids of a token data set, by its metadata, or by the tokenizer if it has none."""
    dataset = TokenDataset.open(data)
    return dataset.vocab_size if dataset.has_vocabulary else vocab_size(tokenizer)


def new_model(config: GPTConfig, settings: ModelSettings) -> GPT:
    """A model of this shape with the recipe's dropout, in training mode."""
    return GPT(config, settings.hidden_dropout_prob, settings.attention_probs_dropout_prob)


def with_dropout(model: GPT, settings: ModelSettings) -> GPT:
    """The same model with the recipe's dropout, for training; the tensors are shared."""
    with torch.device("meta"):
        trainable = new_model(model.config, settings)
    trainable.load_state_dict(model.state_dict(), assign=True)
    return trainable
