"""Verifies a format in the engine that will run it.

Every value of the file is compared with the checkpoint's. Then the engine's logits are compared
with the checkpoint's float model. Their KL divergence may be at most `KL_SHARE` times that of
torch's fake quantization: that of an engine that reads a file wrongly, or rounds more coarsely, is
larger. An engine that leaves activations in float may have less.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe.data.chat_template import FIX, sample_chat
from lathe.data.tokenizer import described, probes
from lathe.export.engines import ENGINES, Engine, NotInstalledError, open_engine
from lathe.export.fidelity import (
    HALF_NOISE,
    KL_NOISE,
    Fidelity,
    compare_with_float,
    spread,
)
from lathe.export.formats import format_module, require_values
from lathe.export.prompts import proof_prompts
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.fake_quant import without_quantization
from lathe_base.artifacts.kinds import EXPORT, open_export
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.progress import track
from lathe_base.storage.ownership import not_ours

log = logging.getLogger("lathe")

TIE = 0.25
"""Maximum distance of a greedy token's logit below the largest, in standard deviations of the
logits: kernels for one token and for many sum in different orders, and round inputs on the edge
between two levels differently. A wrongly read cache results in 1 or more."""


@dataclass(frozen=True)
class EngineProof:
    """The result of verifying an export in an engine.

    Attributes:
        engine: its name and version.
        prompts: number of excerpts of held-out text compared.
        fidelity: comparison with the float model.
    """

    engine: str
    prompts: int
    fidelity: Fidelity

    def to_json(self) -> dict[str, Any]:
        """The figures for `export.json`."""
        return {"engine": self.engine, "prompts": self.prompts, **asdict(self.fidelity)}


def prove_in_engine(
    recipe: Recipe, exported: Path, model: Path, data: Path, engine: str
) -> EngineProof:
    """Compare an export in an engine with its checkpoint.

    Warns of files that `export.json` does not list, and of formats that other engines read.

    Args:
        exported: output of export, with the format that the engine reads.
        model: the checkpoint.
        data: output of prepare, for held-out prompts.
        engine: a name in `lathe.export.engines.ENGINES`.

    Raises:
        UserError: an altered file, or an export of another checkpoint; see also `open_engine` and
            `held_out_prompts`.
        StageError: see `prove_files`.
    """
    metadata = open_export(exported)  # whose files are as `export.json` lists them
    checkpoint = load_checkpoint(model)
    if metadata.source != checkpoint.digest:
        raise UserError(
            f"{exported}: is not an export of {model}",
            "give the checkpoint that was exported",
            Code.MISMATCH,
        )
    prompts, new_tokens = proof_prompts(
        checkpoint.tokenizer, data, recipe.Export, checkpoint.model.config.n_positions
    )
    # State what this proof does not cover.
    if unlisted := not_ours(exported, EXPORT):
        log.warning(
            "%s: %s did not list %s, which an engine may read and this proof does not cover",
            *(exported, EXPORT.metadata_file, ", ".join(unlisted)),
        )
    skipped = []
    # Two engines read compressed-tensors, of which one verifies it in the export.
    read = ENGINES[engine][0] if engine in ENGINES else ""
    for format_name in metadata.formats:
        if engine == format_module(format_name).ENGINE or format_name == read:
            require_values(checkpoint, exported, format_name)
        else:
            skipped.append(f"{format_name} (--engine {format_module(format_name).ENGINE})")
    if skipped:
        log.warning("%s does not compare %s", engine, ", ".join(skipped))
    noise = HALF_NOISE if metadata.flavour == "fp16" else KL_NOISE
    return prove_files(checkpoint, exported, engine, prompts, new_tokens, noise)


@torch.no_grad()
def prove_files(
    checkpoint: Checkpoint,
    folder: Path,
    engine: str,
    prompts: Sequence[list[int]],
    new_tokens: int,
    noise: float = KL_NOISE,
) -> EngineProof:
    """Compare an export as an engine reads it with the checkpoint.

    - The engine's tokenizer encodes the prompts' texts like the checkpoint's, and so it does code
      and other texts, every added token, and a chat; see `proof_texts`.
    - Greedy texts of `new_tokens` tokens agree with the engine's logits, up to ties.
    - The divergence from the float model is within its limit, to which `noise` adds.

    Raises:
        UserError: see `open_engine`.
        StageError: one of these does not hold.
    """
    opened = open_engine(engine, folder)
    require_tokens(opened, checkpoint, prompts, folder)
    texts = []
    for prompt in track(prompts, f"prove in {engine}", len(prompts)):
        text = opened.greedy(prompt, new_tokens)
        texts.append(text)
        # Each token of the text has to be the most likely one, in a pass over all of it.
        logits = opened.logits(np.array([[*prompt, *text]]))[0, len(prompt) - 1 : -1]
        below = logits.max(-1) - logits[np.arange(len(text)), text]
        lost = below / spread(torch.from_numpy(logits)).numpy()
        if not lost.max() <= TIE:
            step = int(lost.argmax())
            raise StageError(
                f"{folder}: in {opened.version} token {step} of a greedy text is {text[step]}, "
                f"whose logit is {lost[step]:.2g} standard deviations below the largest (limit "
                f"{TIE})",
                Code.NOT_PROVED,
            )
    # Equal values and texts do not show coarser rounding; the distance from the float model does.
    plain = without_quantization(checkpoint.model)
    fidelity = compare_with_float(checkpoint.model, plain, opened, prompts, texts, noise)
    if not fidelity.kl <= fidelity.kl_limit:
        raise StageError(
            f"{folder}: in {opened.version} it diverges from the float model by "
            f"{fidelity.kl:.2g} nats per token, of which rounding explains {fidelity.kl_limit:.2g}",
            Code.NOT_PROVED,
        )
    return EngineProof(opened.version, len(prompts), fidelity)


def prove_formats(
    checkpoint: Checkpoint,
    folder: Path,
    formats: Sequence[str],
    required: Sequence[str],
    prompts: Sequence[list[int]],
    new_tokens: int,
    noise: float,
) -> dict[str, dict[str, Any]]:
    """Verify the formats of an export, each in its engine; returns the figures of each.

    A format whose engine is not installed is skipped with a warning.

    Args:
        required: formats that `Production.require` demands.
        noise: see `prove_files`.

    Raises:
        UserError: the engine of a required format is not installed.
        StageError: see `prove_files`.
    """
    results = {}
    for name in formats:
        try:
            engine = format_module(name).ENGINE
            proof = prove_files(checkpoint, folder, engine, prompts, new_tokens, noise)
        except NotInstalledError as error:
            if name in required:
                raise
            log.warning("%s is not verified: %s (%s)", name, error.what, error.hint)
            continue
        log.info(
            "proved %s in %s: KL %.2g nats per token from the float model (torch's %.2g)",
            *(name, proof.engine, proof.fidelity.kl, proof.fidelity.torch_kl),
        )
        results[name] = proof.to_json()
    return results


def require_tokens(
    engine: Engine, checkpoint: Checkpoint, prompts: Sequence[list[int]], folder: Path
) -> None:
    """Raise StageError unless the engine's tokenizer agrees."""
    for what, text in proof_texts(checkpoint, prompts):
        wanted = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
        if (ids := engine.encode(text)) != wanted:
            pairs = zip(ids, wanted, strict=False)
            shorter = min(len(ids), len(wanted))
            step = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            raise StageError(
                f"{folder}: the tokenizer of {engine.version} gives {what} the ids "
                f"{ids[step : step + 8]} from token {step} on, and the checkpoint's "
                f"{wanted[step : step + 8]}",
                Code.NOT_PROVED,
            )


def proof_texts(checkpoint: Checkpoint, prompts: Sequence[list[int]]) -> Iterator[tuple[str, str]]:
    """What a text is, and the text: held-out prompts, code and other texts that tokenizers split
    differently, every added token, and a chat of three turns if the model has a template.

    Raises:
        UserError: the chat template cannot render a chat.
    """
    tokenizer = checkpoint.tokenizer
    for prompt in prompts:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        yield described(text), text
    yield from probes(tokenizer)
    if template := checkpoint.model.config.chat_template:
        yield "a chat of three turns", sample_chat(template, str(checkpoint.folder), FIX)
