"""The finetune stage: train a pretrained model on text or conversations, wholly or with LoRA."""

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lathe.data.samples import split_sequences
from lathe.data.tokens import TokenDataset
from lathe.model import lora
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.folder import open_folder
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.train.distill import teacher_folder
from lathe.train.pretrain import with_dropout
from lathe.train.result import SAMPLES, SampleAnswer, TrainResult, write_answers
from lathe.train.run import TrainingJob, run_training
from lathe.train.workers import Workers
from lathe_base.config.settings import GenerationSettings, Recipe
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested

log = logging.getLogger("lathe")

ADAPTER = "adapter"
"""Folder of a checkpoint with its adapters, for peft."""


@attested("finetune", "model", "data", "teacher")
def finetune(recipe: Recipe, model: Path, data: Path, output: Path) -> TrainResult:
    """Train a checkpoint on a token data set; write a checkpoint.

    With `Finetune.lora`, its weights have the adapters merged into them, and `output`/adapter is
    the folder of the adapters alone, for peft. On conversations, the loss is the mean over the
    assistant's tokens of a global batch.

    Args:
        model: checkpoint or Hugging Face model.

    Raises:
        UserError: `model` is quantized; see also `run_training`.
    """
    settings = recipe.Finetune
    parent = open_folder(model)
    inputs = {"model": parent.digest}
    if settings.lora.rank is not None:
        inputs["Finetune.lora"] = settings.lora.model_dump_json()
    teacher = teacher_folder(recipe.Compress.Distill, parent.path)

    def make(workers: Workers) -> TrainingJob:
        start = load_checkpoint(parent)
        if start.model.config.quantization is not None:
            raise UserError(
                f"{model}: is quantized", "finetune first, then quantize", Code.WRONG_KIND
            )
        if settings.lora.rank is not None:
            return _lora_job(recipe, start, data)
        return TrainingJob(
            "finetune",
            with_dropout(start.model, recipe.Model),
            start.tokenizer,
            parent.path,
            write_more=lambda folder, tuned: _write_samples(
                recipe, folder, data, parent.path, tuned
            ),
        )

    return run_training(recipe, data, output, inputs, make, teacher, [parent.path])


def _lora_job(recipe: Recipe, start: Checkpoint, data: Path) -> TrainingJob:
    """Train adapters. The model's own weights are not in the saved states, but read again at the
    end, when the adapters are merged into them."""
    settings = recipe.Finetune.lora
    base: dict[str, Tensor] = start.model.state_dict()
    model = with_dropout(start.model, recipe.Model)
    lora.insert(model, settings, frozen_dtype(recipe))
    count = sum(p.numel() for name, p in model.named_parameters() if lora.is_adapter(name))
    share = count / start.model.config.n_params
    log.info("training adapters of %s parameters, %.2f %% of the model", f"{count:,}", 100 * share)
    # Filled before the adapters are merged into the weights, and written beside the checkpoint.
    adapters: dict[str, Tensor] = {}

    def weights(name: str, shape: torch.Size) -> Tensor:
        if lora.is_adapter(name):
            return lora.initial_value(name, shape, recipe.Global.seed)
        return base[name]

    def rebuild() -> GPT:
        whole = load_checkpoint(start.folder).model
        lora.insert(whole, settings)
        return whole

    def before_save(whole: GPT) -> None:
        adapters.update(lora.adapter_tensors(whole))
        lora.merge(whole)

    def write_more(folder: Path, whole: GPT) -> list[str]:
        lora.save_adapters(
            folder / ADAPTER, adapters, whole.config.architecture, settings, str(start.folder)
        )
        names = [f"{ADAPTER}/{name}" for name in (lora.CONFIG, lora.WEIGHTS)]
        return names + _write_samples(recipe, folder, data, start.folder, whole)

    return TrainingJob(
        "finetune",
        model,
        start.tokenizer,
        start.folder,
        weights=weights,
        before_save=before_save,
        write_more=write_more,
        rebuild=rebuild,
    )


def frozen_dtype(recipe: Recipe) -> torch.dtype:
    """What the frozen weights of linears are kept in, with LoRA."""
    precision = recipe.Engine.mix_precision
    is_narrow = precision.dtype == "bfloat16" and not precision.is_pure
    return torch.bfloat16 if is_narrow else torch.float32


def _write_samples(recipe: Recipe, folder: Path, data: Path, parent: Path, tuned: GPT) -> list[str]:
    """Write greedy answers of a model and of its parent to the first validation conversations that
    fit; returns the file's name, or nothing for data without conversations."""
    settings, checkpoint = recipe.Finetune, load_checkpoint(parent)
    n_positions = checkpoint.model.config.n_positions
    tokens, new = checkpoint.tokenizer, min(settings.sample_tokens, n_positions // 2)
    # Each conversation up to its last answer, and that answer.
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    for part in (part for _, part in TokenDataset.open(data).parts if part.has_mask):
        _, first, end, _ = split_sequences(recipe.Data.Eval.dataset.split, part.arrays)
        for i in range(first, end):
            ids, mask = part[i].tolist(), part.mask(i) != 0
            begin = int(np.flatnonzero(mask & ~np.append(False, mask[:-1]))[-1])
            if 0 < begin <= n_positions - new and len(prompts) < settings.samples:
                prompts.append(ids[:begin])
                length = int(np.argmin(np.append(mask[begin:], False)))
                expected.append(ids[begin : begin + length])
    if not prompts:
        return []
    greedy = GenerationSettings(decode_strategy="greedy_search", max_dec_len=new, min_dec_len=0)
    ends = checkpoint.end_ids
    before, after = (generate(model, prompts, greedy, ends) for model in (checkpoint.model, tuned))
    rows = zip(prompts, expected, before, after, strict=True)
    write_answers(folder, [SampleAnswer(*map(tokens.decode, row)) for row in rows])
    return [SAMPLES]
