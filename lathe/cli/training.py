"""Commands that train, and plan training."""

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    RUN,
    TRAINED_MODEL,
    Data,
    Model,
    Output,
    Overrides,
    RecipeName,
    input_option,
    load,
    located,
    output_option,
    training_paths,
)
from lathe_base.console import show
from lathe_base.errors import Code, StageError, UserError

if TYPE_CHECKING:
    from lathe.train.result import TrainResult
    from lathe_base.config.settings import Recipe

log = logging.getLogger("lathe")


@app.command(epilog="Example: lathe pretrain -r gpt-345m -o Engine.max_steps=1000 --data run/data")
def pretrain(
    ctx: typer.Context,
    data: Data = RUN / "data",
    init: Annotated[
        Path | None, input_option("Folder with the checkpoint or Hugging Face model to start from.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        input_option(
            "Tokenizer of token files that have none beside them: tokenizer.json, or folder with "
            "GPT-2's BPE files."
        ),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "dense",
    is_checked: Annotated[
        bool,
        typer.Option(
            "--try/--no-try", help="Before starting, check that the model fits the GPUs' memory."
        ),
    ] = True,
) -> None:
    """Train a GPT on a token data set; an interrupted run resumes from its last checkpoint.

    With -o Distributed.dp_degree=2 it starts two worker processes; under torchrun it is one of the
    ranks.
    """
    settings = load(recipe, override)
    init = located(ctx, settings, "init", init, ("Model.pretrained",))
    data, output = training_paths(ctx, settings, data, output)
    from lathe_base.config.settings.types import UndeclaredSetting

    if "RANK" not in os.environ:
        with suppress(UndeclaredSetting):  # a step of a pipeline: its settings are no user's choice
            # PaddleFleetX has one command for all. (A pipeline's overrides may enable these for the
            # steps that do them.)
            for group, verb in (("Prune", "prune"), ("Quantization", "quantize")):
                if getattr(settings.Compress, group).enable:
                    log.warning(
                        "Compress.%s.enable is True, but pretrain trains the whole model: use "
                        "`lathe %s`",
                        *(group, verb),
                    )
    # Before the workers are started, and not in each of them.
    if is_checked and not {"RANK", "PET_NNODES"} & os.environ.keys():
        _require_fit(settings, recipe, data, init, tokenizer)
    from lathe.train.pretrain import pretrain

    train(settings, lambda: pretrain(settings, data, output, init, tokenizer))


@app.command(epilog="Example: lathe finetune build/smollm2 --data run/data -r smollm2-chat")
def finetune(
    ctx: typer.Context,
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    recipe: RecipeName = "smollm2-chat",
    override: Overrides = None,
    output: Output = RUN / "finetuned",
) -> None:
    """Finetune a pretrained model on conversations or text, wholly or with LoRA.

    On conversations (prepare -o Prepare.chat=True) the loss counts the assistant's tokens only.
    With -o Finetune.lora.rank=16 only adapters are trained. The output is a checkpoint with the
    adapters merged into its weights; its folder `adapter` is for peft.
    """
    settings = load(recipe, override)
    from lathe.train.finetune import finetune

    model = located(ctx, settings, "model", model, TRAINED_MODEL)
    data, output = training_paths(ctx, settings, data, output)
    train(settings, lambda: finetune(settings, model, data, output))


@app.command(epilog="Example: lathe plan --recipe gpt-6.7b --gpus 16 --memory 80GB")
def plan(
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")],
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each GPU: 80GB, 24g or 40GiB; default: that of --gpu, or of this "
            "machine's GPUs."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Model of the GPUs: V100, A100, H100, H200 or B200; default: this "
            "machine's, or A100."
        ),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="GPUs per node, connected by NVLink.")
    ] = 8,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    is_tried: Annotated[
        bool,
        typer.Option("--try", help="Run the recipe's own layout in fake tensors, without GPUs."),
    ] = False,
    output: Annotated[
        Path | None, output_option("Output JSON file with the results of --try.")
    ] = None,
) -> None:
    """Show the parallel layouts that fit in the memory of the GPUs, and pick the fastest.

    The recipe's global batch size does not change: a layout affects speed and memory, but not what
    is learned. If the batch cannot be divided over all GPUs, some stay idle. Speeds are modeled
    from data sheets and from the time in which a CPU starts a block's kernels (host).

    --try runs the recipe's own layout with the trainer's code: one optimizer step, a validation
    batch, a save and a load for every distinct kind of process. It shows their peak memory, FLOPs
    and collectives, the operations that a step starts, and the time that this machine's CPU takes
    to start them. The exit status is 1 if a process does not fit, or if collectives deadlock or
    their order differs between processes.
    """
    settings = load(recipe, override)
    from rich.console import Console

    from lathe.train.layout import options
    from lathe.train.plan import (
        make_plan,
        parse_memory,
        plan_table,
        precision_advice,
        speed_estimate,
    )
    from lathe.train.speed import GPUS, known_gpu

    # The memory as stated, else that of the stated model or of this machine's GPUs.
    known = known_gpu(gpu)
    if memory is not None:
        size = parse_memory(memory)
    elif known is not None:
        size = known.memory
    else:
        raise UserError(
            "the memory of the GPUs is not known",
            "give --memory 80GB, or --gpu " + ", ".join(GPUS),
            Code.MISSING_OPTION,
        )
    if is_tried:
        _try(settings, gpus, size, output)
        return
    node = known or GPUS["A100"]
    memory_plan = make_plan(settings, gpus, size, gpus_per_node, node)
    Console(width=None if sys.stdout.isatty() else 130).print(plan_table(memory_plan))
    chosen = " ".join(f"-o {option}" for option in options(settings, memory_plan.best.layout))
    show(
        GPUs=memory_plan.idle(),
        pick=str(memory_plan.best.layout),
        options=chosen or "none: this is the recipe's layout",
        recipe=memory_plan.verdict(),
        estimate=speed_estimate(memory_plan, settings, node),
        precision=precision_advice(settings, recipe, known),
    )


def _require_fit(
    recipe: "Recipe", name: str, data: Path, init: Path | None, tokenizer: Path | None
) -> None:
    """Check the layout with the memory of this machine's GPUs, if it is to be trained on them, and
    say what suits these better."""
    import torch

    from lathe.model.config import read_config
    from lathe.model.folder import resolve
    from lathe.train.memory import available_memory
    from lathe.train.plan import precision_advice, require_fit
    from lathe.train.pretrain import data_tokenizer, data_vocab_size
    from lathe.train.shape import model_config
    from lathe.train.speed import known_gpu
    from lathe_launch.shape import required_shape, visible_gpus

    memory = None
    if recipe.Global.device != "cpu" and visible_gpus():
        memory = available_memory(torch.device("cuda", 0))
        gpu = known_gpu(None)
        if gpu and (advice := precision_advice(recipe, name, gpu)):
            log.info("%s", advice)
    if init:
        config = read_config(resolve(init))
    else:
        config = model_config(recipe, data_vocab_size(data, data_tokenizer(data, tokenizer)))
    shape = required_shape(recipe)
    require_fit(config, recipe, shape.processes, memory, shape.processes_per_node)


def _try(recipe: "Recipe", gpus: int, size: float, output: Path | None) -> None:
    from rich.console import Console

    from lathe.plan.trial import (
        as_json,
        figures,
        memory_table,
        step_table,
        traffic_table,
        try_training,
    )
    from lathe.train.plan import USABLE
    from lathe_base.storage import atomic_file

    trial = try_training(recipe, gpus)
    if output is not None:
        with atomic_file(output) as work:
            work.write_text(json.dumps(as_json(trial, size), indent=2), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 140)
    # The empty string is a line between the tables.
    for table in (memory_table(trial, size), traffic_table(trial.fullest), step_table(trial)):
        console.print(table, "")
    show(**figures(trial))
    if trial.mismatch is not None:
        raise StageError(f"collectives deadlock or do not match: {trial.mismatch}", Code.MISMATCH)
    if trial.fullest.peak > USABLE * size:
        raise StageError(
            f"rank {trial.fullest.rank} needs {trial.fullest.peak / 1e9:.1f} GB, but only "
            f"{USABLE * size / 1e9:.1f} of the GPU's {size / 1e9:.1f} GB are usable",
            Code.OUT_OF_MEMORY,
        )


def train(settings: "Recipe", stage: Callable[[], "TrainResult"]) -> None:
    """Run a training stage here, or rerun the whole command in the worker processes that it asks
    for."""
    from lathe.backends import start_workers

    # The workers run this very command, with RANK set, and come back here.
    if start_workers(sys.argv[1:], settings):
        return
    result = stage()
    if os.environ.get("RANK", "0") != "0":  # one of the workers shows the result
        return
    removed = {
        "removed_layers": result.removed_layers,
        "removed_heads": _percent(result.removed_heads),
        "removed_channels": _percent(result.removed_channels),
    }
    if not result.step:  # pruned or quantized without training
        show(
            model=result.folder,
            parameters=result.n_params,
            perplexity=result.eval_perplexity,
            **removed,
        )
        return
    show(
        model=result.folder,
        steps=result.step,
        parameters=result.n_params,
        loss=result.loss,
        first_perplexity=result.first_eval_perplexity,
        perplexity=result.eval_perplexity,
        best_perplexity=_known(result.best_perplexity),
        tokens_per_second=result.tokens_per_second,
        samples_per_second=_known(result.samples_per_second),
        mfu=_percent(result.mfu),
        **removed,
    )


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _known(figure: float) -> float | None:
    """A figure to show; None if it is NaN, as in checkpoints of earlier versions."""
    return None if math.isnan(figure) else figure
