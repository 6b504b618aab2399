"""Quality cost of every choice in a design, estimated from gradients: nats per token, before
training.

Removing a set of units changes the loss of a sequence by about s, the sum of the slopes of their
gates. To second order, by the Fisher information, that is a KL divergence from the dense model of T
/ 2 * E[s^2] per token for sequences of T tokens. Adding the slopes of a set before squaring
accounts for the units' joint effect: individual squares, as in `lathe.compress.criteria`, are ten
times too small for FFN channels. The cost of quantization is estimated by
`lathe.compress.sensitivity.measure`, in the same unit. The costs of a design's parts are assumed to
be additive.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from lathe.compress.criteria import gate_slopes
from lathe.compress.sensitivity.analyze import TorchModel
from lathe.data.tokens import TokenDataset
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.folder import CheckpointFolder
from lathe_base.artifacts.journal import Journal
from lathe_base.artifacts.kinds import read_as
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, UserError
from lathe_base.storage import atomic_file

HINT = "delete the file: the costs are then estimated again"


@dataclass(frozen=True)
class Costs:
    """Predicted KL divergences from the dense model, nats per token.

    Attributes:
        heads, channels: by layer and by the number of units kept, from 0 to all.
        formats: by format and linear, for all its weights. These are the formats that designs may
            use: dynamic INT8 is among them if static scales alone would cost too much (see
            `lathe.compress.activation`).
    """

    heads: Sequence[Sequence[float]]
    channels: Sequence[Sequence[float]]
    formats: Mapping[Format, Mapping[str, float]]

    def of_linear(self, name: str, fmt: Format) -> float:
        """Cost of a linear's format."""
        return 0.0 if fmt == "float" else self.formats[fmt][name]

    def of_layer(self, i: int) -> float:
        """Cost of removing a layer."""
        return self.heads[i][0] + self.channels[i][0]

    def totals(self) -> dict[str, float]:
        """The total cost of having every linear in a format, by format."""
        return {fmt: sum(costs.values()) for fmt, costs in self.formats.items()}


def write_costs(recipe: Recipe, model: Path | CheckpointFolder, data: Path, output: Path) -> Costs:
    """Estimate all costs and write them to a JSON file; a killed estimate resumes.

    Args:
        recipe: that of quantization; `Compress.Quantization` determines the formats.
    """
    checkpoint, tokens = load_checkpoint(model), TokenDataset.open(data)
    findings = output.with_name(f"{output.name}.findings.jsonl")
    journal = Journal(findings, {"model": checkpoint.digest, "data": tokens.digest})
    costs = estimate(recipe, checkpoint, tokens, journal)
    with atomic_file(output) as work:
        work.write_text(json.dumps(asdict(costs)) + "\n", encoding="utf-8")
    journal.close()
    return costs


def read_costs(path: Path) -> Costs:
    """Read the file of `write_costs`."""
    costs = read_as(path, Costs, HINT)
    if "float" not in costs.formats:
        raise UserError(f"{path}: formats lack the cost of float", HINT, Code.INCOMPLETE)
    return costs


def estimate(recipe: Recipe, checkpoint: Checkpoint, data: TokenDataset, journal: Journal) -> Costs:
    """Estimate all costs, with two passes over the calibration batches."""
    model = TorchModel(recipe, checkpoint, data, journal, named=True)
    slopes = gate_slopes(model.model, model.calibration)
    tokens = model.calibration[0].shape[1] - 1
    return Costs(
        heads=[_removed(layer, tokens) for layer in slopes.heads],
        channels=[_removed(layer, tokens) for layer in slopes.channels],
        formats={**model.estimates(), "float": dict.fromkeys(model.names, 0.0)},
    )


def _removed(slopes: Tensor, tokens: int) -> list[float]:
    """The cost by number of units kept, lowest scores removed first, given slopes (N, units) of N
    sequences."""
    order = slopes.square().mean(0).argsort()
    sums = slopes.double()[:, order].cumsum(1)
    gone = (tokens / 2 * sums.square().mean(0)).cpu().numpy()
    # A larger set costs at least as much; slopes of opposite sign may make its estimate smaller.
    return [*np.maximum.accumulate(gone)[::-1].tolist(), 0.0]
