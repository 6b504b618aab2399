"""What every part of a design costs: in quality, estimated from gradients, and in terms of the
target (bytes, seconds or parameters), measured.

Quality costs are nats per token, before training. Removing a set of units changes the loss of a
sequence by about s, the sum of the slopes of their gates. To second order, by the Fisher
information, that is a KL divergence from the dense model of T / 2 * E[s^2] per token for sequences
of T tokens. Adding the slopes of a set before squaring accounts for the units' joint effect:
individual squares, as in `lathe.compress.criteria`, are ten times too small for FFN channels. The
cost of quantization is estimated by `lathe.compress.sensitivity.measure`, in the same unit. The
costs of a design's parts are assumed to be additive.

For the prices, a dozen exports of the model, pruned and quantized in different ways, are measured
side by side, and the prices of parts are fitted to the results. So prices are those of parts within
a whole model on this machine, whose weights come from memory rather than a cache.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import scipy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from lathe.compress.criteria import gate_slopes
from lathe.compress.plan import make_plan
from lathe.compress.sensitivity.analyze import TorchModel
from lathe.compress.widths import KeptUnits, keep_layers, shrink
from lathe.data.tokens import TokenDataset
from lathe.evaluate.latency import measure
from lathe.export.export import write
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import CheckpointFolder
from lathe.model.gpt import GPT
from lathe.search.design import Design
from lathe.train.batches import open_data
from lathe_base.artifacts.journal import Journal
from lathe_base.artifacts.kinds import checked, read_as, read_json
from lathe_base.config.settings import ExportSettings, QuantizationSettings, Recipe
from lathe_base.config.settings.types import FORMATS, Format
from lathe_base.errors import Code, UserError
from lathe_base.progress import track
from lathe_base.storage import atomic_file

COSTS_HINT = "delete the file: the costs are then estimated again"

ROUNDS = 9
PROMPT = 128  # tokens
METRIC_KEYS = {"latency": "decode_ms", "prefill": "prefill_ms", "bytes": "bytes", "parameters": ""}
SCALE = 0.05  # of an activation; any, since only times are measured

Parts = Counter[str]
"""Amounts by the name of a part: `layers`, `heads`, `channels`, `weights int8` and so on."""


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

    def linear_cost(self, name: str, fmt: Format) -> float:
        """Cost of a linear's format."""
        return 0.0 if fmt == "float" else self.formats[fmt][name]

    def totals(self) -> dict[str, float]:
        """The total cost of having every linear in a format, by format."""
        return {fmt: sum(costs.values()) for fmt, costs in self.formats.items()}


def write_costs(recipe: Recipe, model: Path | CheckpointFolder, data: Path, output: Path) -> Costs:
    """Estimate all costs and write them to a JSON file; a killed estimate resumes.

    Args:
        recipe: that of quantization; `Compress.Quantization` determines the formats.
    """
    checkpoint = load_checkpoint(model)
    tokens = open_data(data, recipe, checkpoint.model.config, checkpoint.tokenizer)
    findings = output.with_name(f"{output.name}.findings.jsonl")
    journal = Journal(findings, {"model": checkpoint.digest, "data": tokens.digest})
    costs = estimate(recipe, checkpoint, tokens, journal)
    with atomic_file(output) as work:
        work.write_text(json.dumps(asdict(costs)) + "\n", encoding="utf-8")
    # Only now: a result in the file is complete.
    journal.close()
    return costs


def read_costs(path: Path) -> Costs:
    """Read the file of `write_costs`."""
    costs = read_as(path, Costs, COSTS_HINT)
    if "float" not in costs.formats:
        raise UserError(f"{path}: formats lack the cost of float", COSTS_HINT, Code.INCOMPLETE)
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
    sums = slopes.double()[:, order].cumsum(1)  # (N, units): s of the first k + 1 units
    gone = (tokens / 2 * sums.square().mean(0)).cpu().numpy()
    # A larger set costs at least as much; slopes of opposite sign may make its estimate smaller.
    return [*np.maximum.accumulate(gone)[::-1].tolist(), 0.0]


@dataclass(frozen=True)
class Prices:
    """Prices of parts, as shares of the dense float32 model's total.

    Attributes:
        of: price by name of the part.
    """

    of: Mapping[str, float]

    def total(self, parts: Parts) -> float:
        """The price of several parts."""
        return sum(self.of.get(name, 0.0) * amount for name, amount in parts.items())


def design_parts(config: GPTConfig, design: Design, group_size: int) -> Parts:
    """All parts of a design for a model with this dense shape."""
    # The output layer, which is also the token embedding, has a price for each format.
    parts = Counter({"fixed": 1, f"head {design.formats.get(HEAD, 'float')}": 1})
    for i, (heads, channels) in enumerate(zip(design.heads, design.channels, strict=True)):
        if not heads:
            continue
        parts += Counter(layers=1, heads=heads, channels=channels)
        widths = config.layer_widths(i, heads, channels)
        for linear in config.architecture.linears:
            fmt = design.formats.get(f"{config.architecture.block(i)}.{linear.name}", "float")
            shape = linear.shape(config.n_embd, widths)
            parts += linear_parts(shape, fmt, group_size)
    return parts


def linear_parts(shape: tuple[int, int], fmt: Format, group_size: int) -> Parts:
    """The parts of a linear with a weight (in, out)."""
    n_in, n_out = shape
    if fmt == "float":
        return Counter({"weights float": n_in * n_out})
    if FORMATS[fmt].is_grouped:  # the last group is padded
        n_in = ceil(n_in / group_size) * group_size
    return Counter({f"linears {fmt}": 1, f"weights {fmt}": n_in * n_out, f"outputs {fmt}": n_out})


def write_prices(
    base: Recipe,
    quantization: Recipe,
    model: Path | CheckpointFolder,
    costs: Path,
    dense: Path,
    output: Path,
) -> dict[str, Prices]:
    """Measure the prices for each target of a `Goal` and write them to a JSON file.

    Args:
        base: the recipe for exports.
        model, dense: the dense checkpoint and its export.
        costs: output of `write_costs`, which determines the formats.
    """
    checkpoint, forms = load_checkpoint(model), list(read_costs(costs).formats)
    settings = quantization.Compress.Quantization
    measured = measure_prices(checkpoint, dense, forms, settings, base.Export)
    with atomic_file(output) as work:
        prices = {target: asdict(prices) for target, prices in measured.items()}
        work.write_text(json.dumps(prices) + "\n", encoding="utf-8")
    return measured


def read_prices(path: Path) -> dict[str, Prices]:
    """Read the file of `write_prices`."""
    hint = "delete the file: the prices are then measured again"
    prices = checked(read_json(path, hint), dict[str, Prices], str(path), hint)
    if prices.keys() != METRIC_KEYS.keys():
        raise UserError(
            f"{path}: lacks the prices of {', '.join(METRIC_KEYS)}", hint, Code.INCOMPLETE
        )
    return prices


def measure_prices(
    checkpoint: Checkpoint,
    dense: Path,
    forms: Sequence[Format],
    settings: QuantizationSettings,
    export: ExportSettings,
) -> dict[str, Prices]:
    """The prices for each target of a `Goal`; see `write_prices`."""
    config = checkpoint.model.config
    samples = list(_samples(config, forms, settings.quantize_embedding))
    shares = [
        measure_design(checkpoint, dense, sample, settings, export)
        for sample in track(samples, "prices")
    ]

    # Prices of the parts, none negative, by least squares of relative errors.
    parts = [design_parts(config, sample, settings.group_size) for sample in samples]
    names = sorted(set().union(*parts))
    amounts = np.array([[part[name] for name in names] for part in parts], float)
    unit = amounts.max(0)  # parts are counted in ones and in millions
    prices = {}
    for target in METRIC_KEYS:
        measured = np.array([share[target] for share in shares])
        # Every equation is divided by its price, so that a percent off counts the same in each.
        coefficients, _ = scipy.optimize.nnls(
            amounts / unit / measured[:, None], np.ones(len(measured))
        )
        prices[target] = Prices(dict(zip(names, (coefficients / unit).tolist(), strict=True)))
    return prices


def measure_design(
    checkpoint: Checkpoint,
    dense: Path,
    design: Design,
    settings: QuantizationSettings,
    export: ExportSettings,
) -> dict[str, float]:
    """A design's value for each target, as a share of the dense model's.

    It is exported with arbitrary units and without training, neither of which affects size and
    speed.
    """
    model = build_sample(checkpoint.model, design, settings)
    with TemporaryDirectory(prefix="lathe-design-") as scratch:
        folder = Path(scratch) / "onnx"
        write_sample(checkpoint, model, folder, export)
        # Alternately, so that the load of the machine affects both equally.
        both = measure({"dense": dense, "other": folder}, prompt_tokens=PROMPT, rounds=ROUNDS)
    shares = {t: both["other"][key] / both["dense"][key] for t, key in METRIC_KEYS.items() if key}
    return shares | {"parameters": model.config.n_params / checkpoint.model.config.n_params}


def _samples(config: GPTConfig, forms: Sequence[Format], has_head: bool) -> Iterator[Design]:
    """Designs that differ enough to determine the price of every part."""
    heads, channels, linears = config.n_kv_head, config.n_inner, config.linear_names()
    # Two amounts of each part determine its price and what is fixed.
    half_heads, half_channels = (tuple(-(-n // 2) for n in part) for part in (heads, channels))
    for fmt in forms:
        every = dict.fromkeys(linears, fmt)
        yield Design(heads, channels, every)
        yield Design(half_heads, channels, every)
        yield Design(heads, half_channels, every)
        if has_head and fmt != "float":
            yield Design(heads, channels, {**every, HEAD: fmt})
    # Half of the layers, so that a layer has a price apart from its heads and channels.
    some = config.n_layer // 2
    if some:
        kept = {name: fmt for name in linears if int(name.split(".")[1]) < some}
        removed = (0,) * (config.n_layer - some)
        yield Design((*heads[:some], *removed), (*channels[:some], *removed), kept)


def build_sample(model: GPT, design: Design, settings: QuantizationSettings) -> GPT:
    """A model of a design with arbitrary units and scales, for measurements."""
    kept = [i for i, heads in enumerate(design.heads) if heads]
    units = [
        KeptUnits(torch.arange(design.heads[i]), torch.arange(design.channels[i])) for i in kept
    ]
    pruned = shrink(keep_layers(model, kept), units)
    # What a design does not name stays in float.
    in_float: dict[str, Format] = dict.fromkeys((*pruned.config.linear_names(), HEAD), "float")
    plan = make_plan(pruned.config, settings, in_float | design.pruned_formats())
    has_positions = pruned.config.architecture.positions == "learned"
    # As the real quantization decides, so that sizes agree.
    plan = replace(plan, position_embedding=settings.quantize_embedding and has_positions)
    plan = plan.with_scales(dict.fromkeys(plan.activation_scales, SCALE))
    fake_quant.insert(pruned, plan)
    pruned.config = pruned.config.with_quantization(plan)
    return pruned


def write_sample(checkpoint: Checkpoint, model: GPT, folder: Path, export: ExportSettings) -> None:
    """Export a model with the checkpoint's tokenizer, without verification."""
    folder.mkdir()
    write(replace(checkpoint, model=model), folder, export)
