"""Pruning with PaddleSlim's filter pruners, and finetuning what is left."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddleslim.dygraph import L1NormFilterPruner, L2NormFilterPruner

from lathe.backends.paddle_support import require_supported
from lathe.compress.feasible import removed_figures, require_enabled, require_possible
from lathe.model.folder import open_folder
from lathe.train.result import TrainResult
from lathe_base.config.settings import PruneSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_paddle.checkpoint import float_weights, load_checkpoint, set_weights
from lathe_paddle.gpt import GPT
from lathe_paddle.trainer import TrainingJob, new_model, run_training
from lathe_paddle.workers import Workers, divide

log = logging.getLogger("lathe")

PRUNERS = {"l1_norm": L1NormFilterPruner, "l2_norm": L2NormFilterPruner}


@dataclass(frozen=True)
class KeptIndices:
    """Indices of the heads and FFN channels that one layer keeps, ascending."""

    heads: NDArray[np.int64]
    channels: NDArray[np.int64]


def prune(recipe: Recipe, model: Path, data: Path, output: Path) -> TrainResult:
    """Prune by `Compress.Prune`, finetune by `Engine` and `Optimizer`, write a checkpoint.

    Raises:
        UserError: `model` is quantized or already pruned, `Compress.Prune.enable` is False, nothing
            of the model can be removed, or the recipe asks for what PaddleSlim's pruners do not
            support; see also `run_training`.
    """
    settings = recipe.Compress.Prune
    require_enabled("Prune", settings.enable)
    require_supported("prune", recipe)
    parent = open_folder(model)
    for unmet in require_possible(settings, parent.config):
        log.warning("%s", unmet)

    def make(workers: Workers) -> TrainingJob:
        dense = load_checkpoint(parent)
        pruned, kept = cut(dense.model, settings, model)
        small = _filled(new_model(pruned.config, recipe.Model), float_weights(pruned), model)
        divide(small, workers)
        before, after = dense.model.config.n_params, pruned.config.n_params
        log.info(
            "pruned by PaddleSlim: heads %s, FFN widths %s, parameters %s -> %s (%.1f %% fewer)",
            [len(layer.heads) for layer in kept],
            [len(layer.channels) for layer in kept],
            f"{before:,}",
            f"{after:,}",
            100 * (1 - after / before),
        )
        figures = removed_figures(dense.model.config, pruned.config)
        return TrainingJob("prune", small, dense.tokenizer, parent.path, figures=figures)

    inputs = {"model": parent.digest}
    return run_training(recipe, data, output, inputs, make, [parent.path])


def cut(model: GPT, settings: PruneSettings, source: Path) -> tuple[GPT, list[KeptIndices]]:
    """The smaller GPT, and what every layer keeps; `model` itself is changed.

    PaddleSlim removes columns of the fused qkv and of the first FFN linear, and the rows of the
    second linears that read them.

    Args:
        source: the folder of the model, for messages.

    Raises:
        UserError: the model is quantized or already pruned.
    """
    config = model.config
    full = config.n_embd // config.head_dim
    if config.quantization is not None:
        raise UserError(f"{source}: is quantized", "prune first, then quantize", Code.WRONG_KIND)
    if set(config.n_head) != {full}:
        raise UserError(
            f"{source}: is already pruned, but PaddleSlim supports only a qkv that is three times "
            "the hidden size",
            "prune the dense model, or use Compress.engine=torch",
            Code.UNSUPPORTED,
        )
    # PaddleSlim knows parameters by Paddle's names, such as `linear_7.w_0`.
    names = {name: parameter.name for name, parameter in model.named_parameters()}
    masks: dict[str, Any] = {}
    qkv, ffn = (config.architecture.column(units).name for units in ("heads", "channels"))
    for linear, n_head in ((qkv, full), (ffn, -1)):
        pruner = PRUNERS[settings.criterion](
            model,
            [[1, min(16, config.n_positions)]],  # the shape of the tokens to trace it with
            skip_leaves=False,
            prune_type="fc",
            input_dtype="int64",
            num_head=n_head,
        )
        targets = [names[f"h.{i}.{linear}.weight"] for i in range(config.n_layer)]
        plan = pruner.prune_vars(dict.fromkeys(targets, settings.ratio), axis=1)
        masks |= {target: plan.masks[target][0].mask for target in targets}
    kept = []
    for i in range(config.n_layer):
        columns = np.asarray(masks[names[f"h.{i}.{qkv}.weight"]]).astype(bool)
        heads = columns.reshape(full, 3 * config.head_dim)
        assert (heads.all(1) | ~heads.any(1)).all()  # whole heads
        channels = np.asarray(masks[names[f"h.{i}.{ffn}.weight"]]).astype(bool)
        kept.append(KeptIndices(heads[:, 0].nonzero()[0], channels.nonzero()[0]))
    small = replace(
        config,
        n_head=tuple(len(layer.heads) for layer in kept),
        n_inner=tuple(len(layer.channels) for layer in kept),
    )
    return _filled(GPT(small), float_weights(model), source), kept


def _filled(model: GPT, weights: Any, source: Path) -> GPT:
    set_weights(model, weights, source)
    return model
