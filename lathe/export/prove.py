"""The proof of a format in the engine that will run it.

The engine's logits are compared with the float model that the checkpoint was quantized from. It may
lose at most `KL_SHARE` times what fake quantization in torch loses: an engine that reads a file
wrongly, or rounds more coarsely than the file says, loses more. An engine that leaves activations
in float may lose less.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lathe.config.settings import Recipe
from lathe.errors import StageError, UserError
from lathe.export.engines import Engine, open_engine
from lathe.export.fidelity import Fidelity, compare_with_float, without_quantization
from lathe.export.prompts import proof_prompts
from lathe.model.checkpoint import load_checkpoint
from lathe.progress import track
from lathe.storage.artifacts.kinds import open_export


@dataclass(frozen=True)
class EngineProof:
    """What an engine has computed.

    Attributes:
        engine: its name and version.
        prompts: excerpts of held-out text that were compared.
        fidelity: figures against the float model.
    """

    engine: str
    prompts: int
    fidelity: Fidelity


@torch.no_grad()
def prove_in_engine(
    recipe: Recipe, exported: Path, model: Path, data: Path, engine: str
) -> EngineProof:
    """Compare an export in an engine with the checkpoint that it was made of.

    Args:
        exported: output of export, with the format that the engine reads.
        model: the checkpoint.
        data: output of prepare, for held-out prompts.
        engine: a name in `lathe.export.engines.ENGINES`.

    Raises:
        UserError: an export of another checkpoint; see also `open_engine` and `held_out_prompts`.
        StageError: the engine loses more than the rounding of the file explains.
    """
    metadata = open_export(exported)
    checkpoint = load_checkpoint(model)
    if metadata.source != checkpoint.digest:
        raise UserError(f"{exported}: is not an export of {model}", "give its own checkpoint")
    opened = open_engine(engine, exported)
    prompts, new_tokens = proof_prompts(
        checkpoint.tokenizer, data, recipe.Export, checkpoint.model.config.n_positions
    )
    texts = [_greedy(opened, prompt, new_tokens) for prompt in track(prompts, engine, len(prompts))]
    plain = without_quantization(checkpoint.model)
    fidelity = compare_with_float(checkpoint.model, plain, opened, prompts, texts)
    if not fidelity.kl <= fidelity.kl_limit:
        raise StageError(
            f"{exported}: in {opened.version} it diverges from the float model by "
            f"{fidelity.kl:.2g} nats a token, of which rounding explains {fidelity.kl_limit:.2g}"
        )
    return EngineProof(opened.version, len(prompts), fidelity)


def _greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    """The most likely next token, n times, each from a pass over the whole text."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(engine.logits(np.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
