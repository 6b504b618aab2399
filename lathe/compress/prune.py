"""The prune stage: remove layers, heads and FFN channels, fit what stays, then finetune."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lathe.compress.criteria import CRITERIA, Importance, importance
from lathe.compress.feasible import removed_figures, require_enabled, require_possible
from lathe.compress.reconstruct import reconstruct, reconstruct_bytes, reconstruct_layers
from lathe.compress.widths import (
    Cost,
    KeptUnits,
    by_rank,
    choose_global,
    choose_layers,
    choose_uniform,
    keep_layers,
    largest_units,
    shrink,
    units_from_ranks,
)
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import MARKER, CheckpointFolder, open_folder
from lathe.model.gpt import GPT
from lathe.train.batches import first_batches, open_data
from lathe.train.distill import teacher_folder
from lathe.train.pretrain import with_dropout
from lathe.train.result import TrainResult, remove_run
from lathe.train.room import BY_BLOCK, device_with_room, pass_bytes
from lathe.train.run import TrainingJob, run_training
from lathe.train.workers import Workers
from lathe_base.config.settings import PruneSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested

log = logging.getLogger("lathe")

MAX_LAYER_BATCHES = 2  # enough to compare what a text loses without one layer or another


@attested("prune", "model", "data", "teacher")
def prune(recipe: Recipe, model: Path, data: Path, output: Path) -> TrainResult:
    """Prune by `Compress.Prune`, finetune by `Engine` and `Optimizer`, write a checkpoint.

    Each round but the last leaves a checkpoint beside `output` until the end, so that a killed run
    resumes in its round.

    The result's `first_eval_loss` is the loss after the last pruning, before finetuning.

    Raises:
        UserError: `model` is already quantized, `Compress.Prune.enable` is False, or
            `Compress.Prune` removes nothing of this model; see also `run_training`.
    """
    settings = recipe.Compress.Prune
    require_enabled("Prune", settings.enable)
    is_first = os.environ.get("RANK", "0") == "0"
    is_pooled = settings.scope == "global" and CRITERIA[settings.criterion].comparable
    dense = open_folder(model)
    for unmet in require_possible(settings, dense.config, is_pooled):
        if is_first:
            log.warning("%s", unmet)
    rounds = settings.rounds
    others = [output.with_name(f"{output.name}.round-{i}") for i in range(1, rounds)]
    start = dense
    if not (output / MARKER).is_file():  # else finished, and only its rounds may be left
        for i, folder in enumerate(others, 1):
            _one_round(recipe, i, dense, start, data, folder)
            start = open_folder(folder)
    result = _one_round(recipe, rounds, dense, start, data, output)
    if is_first:  # the rounds' checkpoints have served
        for folder in others:
            remove_run(folder)
            with suppress(OSError):
                folder.rmdir()
    return result


def _one_round(
    recipe: Recipe,
    index: int,
    parent: CheckpointFolder,
    start: CheckpointFolder,
    data: Path,
    output: Path,
) -> TrainResult:
    """The `index`-th round, from 1: prune `start`, the previous round's model, and finetune."""
    # The finished model is a child of `parent`, whichever round it starts from.
    settings, dense = recipe.Compress.Prune, parent.config
    inputs = {"model": parent.digest}
    teacher = teacher_folder(recipe.Compress.Distill, parent.path)

    def make(workers: Workers) -> TrainingJob:
        start_model = load_checkpoint(start)
        if dense.quantization is not None:
            raise UserError(
                f"{parent.path}: is quantized", "prune first, then quantize", Code.WRONG_KIND
            )
        trainable = with_dropout(start_model.model, recipe.Model)
        tokens = open_data(data, recipe, trainable.config, start_model.tokenizer)
        batches = [*first_batches(recipe, tokens, settings.calibration_batches)]
        size = batches[0].size
        # First the scores, then the fit.
        needed = max(
            pass_bytes(trainable, size, gradients=settings.criterion == "taylor"),
            pass_bytes(trainable, size) + reconstruct_bytes(trainable),
        )
        device, _ = device_with_room(recipe, workers.device, "pruning scores", {BY_BLOCK: needed})
        calibration = [torch.from_numpy(batch).to(device) for batch in batches]
        pruned = cut(trainable, settings, dense, index, calibration)
        before, after = dense.n_params, pruned.config.n_params
        log.info(
            "pruned: heads %s, FFN widths %s, parameters %s -> %s (%.1f %% fewer)",
            list(pruned.config.n_head),
            list(pruned.config.n_inner),
            f"{before:,}",
            f"{after:,}",
            100 * (1 - after / before),
        )
        figures = removed_figures(dense, pruned.config)
        return TrainingJob("prune", pruned, start_model.tokenizer, parent.path, figures=figures)

    # A round has its part of the steps, and of the learning rate's decay.
    share, rounds, steps = recipe, settings.rounds, recipe.Engine.max_steps
    if rounds > 1 and steps:
        round_steps = steps * index // rounds - steps * (index - 1) // rounds
        decay = max(1, recipe.Optimizer.lr.decay_steps * round_steps // steps)
        rate = recipe.Optimizer.lr.model_copy(update={"decay_steps": decay})
        share = recipe.model_copy(
            update={
                "Engine": recipe.Engine.model_copy(update={"max_steps": max(1, round_steps)}),
                "Optimizer": recipe.Optimizer.model_copy(update={"lr": rate}),
            }
        )
    return run_training(share, data, output, inputs, make, teacher, [parent.path, start.path])


def cut(
    model: GPT,
    settings: PruneSettings,
    dense: GPTConfig,
    index: int = 1,
    calibration: Sequence[Tensor] = (),
) -> GPT:
    """The pruned GPT of a round: layers are removed in the first round, and in each round an equal
    proportion of the remaining heads and channels.

    The model's weights change: what stays of a layer is fitted to its output.

    Args:
        dense: the original shape, which `ratio` refers to.
        index: of the round, from 1.
        calibration: tokens (B, T + 1) for criteria that use data, and for removing layers; on the
            device on which units are scored, wherever the model is.
    """
    if settings.heads:
        return _prune_to_widths(model, settings, calibration)
    if index == 1 and settings.layers:
        kept_layers = choose_layers(model, calibration[:MAX_LAYER_BATCHES], settings.layers)
        model = _fit_and_keep_layers(model, kept_layers, calibration)
    of_queries = _prunes_queries(settings, dense)
    # `ratio` refers to the original model: rounds that each keep the same share of what is left
    # multiply to 1 - ratio. Layers that were removed do not count as units that were.
    kept_share = (1 - settings.ratio) ** (index / settings.rounds)
    whole = _block_parameters(dense, of_queries) * model.config.n_layer / dense.n_layer
    ratio = max(0.0, 1 - kept_share * whole / _block_parameters(model.config, of_queries))
    scores, order = _scores(model, settings, calibration, of_queries)
    multiple = settings.channel_multiple
    if settings.scope == "uniform":
        kept = choose_uniform(scores, ratio, multiple)
    else:
        cost = Cost.parameters(model.config, of_queries)
        comparable = CRITERIA[settings.criterion].comparable
        kept = choose_global(scores, cost, ratio, multiple, comparable)
    units = units_from_ranks(kept, order) if of_queries else kept
    return _fit_and_shrink(model, units, calibration)


def _prunes_queries(settings: PruneSettings, config: GPTConfig) -> bool:
    """Whether individual query heads are removed, not key-value heads with their query heads.

    Raises:
        UserError: they should be, but the model does not use grouped-query attention.
    """
    if settings.head_unit == "query" and config.n_head == config.n_kv_head:
        raise UserError(
            "Compress.Prune.head_unit is query, but the model does not use grouped-query attention",
            "set Compress.Prune.head_unit=group",
            Code.UNSUPPORTED,
        )
    return settings.head_unit == "query"


def _scores(
    model: GPT, settings: PruneSettings, calibration: Sequence[Tensor], of_queries: bool
) -> tuple[Importance, list[Tensor]]:
    """Scores of the units that can be removed, and for query heads their order within groups."""
    scores = importance(model, settings.criterion, calibration, of_queries)
    return by_rank(scores, model.config.n_kv_head) if of_queries else (scores, [])


def _prune_to_widths(model: GPT, settings: PruneSettings, calibration: Sequence[Tensor]) -> GPT:
    """Prune to the widths that the recipe gives."""
    config, kept = model.config, [i for i, heads in enumerate(settings.heads) if heads]
    of_queries = _prunes_queries(settings, config)
    have_heads = config.per_group if of_queries else config.n_kv_head
    for name, have in (("heads", have_heads), ("channels", config.n_inner)):
        wanted = getattr(settings, name)
        if len(wanted) != config.n_layer or any(w > h for w, h in zip(wanted, have, strict=True)):
            raise UserError(
                f"Compress.Prune.{name} is {wanted}, but the model's layers have {list(have)}",
                "give one number per layer, at most that large",
                Code.INVALID_VALUE,
            )
    scores, order = _scores(model, settings, calibration, of_queries)
    largest = [
        KeptUnits(
            largest_units(scores.heads[i], settings.heads[i]),
            largest_units(scores.channels[i], settings.channels[i]),
        )
        for i in kept
    ]
    units = units_from_ranks(largest, [order[i] for i in kept]) if of_queries else largest
    return _fit_and_shrink(_fit_and_keep_layers(model, kept, calibration), units, calibration)


def _fit_and_keep_layers(model: GPT, kept: Sequence[int], calibration: Sequence[Tensor]) -> GPT:
    """`keep_layers`, after the layers before gaps have been fitted to calibration tokens (B, T +
    1), if any."""
    if calibration:
        reconstruct_layers(model, kept, [batch[:, :-1] for batch in calibration])
    return keep_layers(model, kept)


def _fit_and_shrink(model: GPT, kept: Sequence[KeptUnits], calibration: Sequence[Tensor]) -> GPT:
    """`shrink`, after the layers have been fitted to calibration tokens (B, T + 1), if any."""
    if calibration:
        reconstruct(model, kept, [batch[:, :-1] for batch in calibration])
    return shrink(model, kept)


def _block_parameters(config: GPTConfig, of_queries: bool) -> float:
    """Number of parameters of all units."""
    cost = Cost.parameters(config, of_queries)
    heads = config.per_group if of_queries else config.n_kv_head
    return cost.head * sum(heads) + cost.channel * sum(config.n_inner)
