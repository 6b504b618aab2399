"""The analyze stage: rank linears by the cost of INT8 or INT4, and choose their formats.

The modes `ptq` and `qat` follow PaddleSlim's sensitivity analysis; `fisher` is an addition.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lathe.compress.activation import int8_candidates, smoothing_factors
from lathe.compress.gptq import gptq, gptq_bytes
from lathe.compress.output_hessians import rounding_costs
from lathe.compress.plan import formats, make_plan, named_formats, quantizable
from lathe.compress.sensitivity.measure import (
    BatchMetric,
    estimate_costs,
    input_distributions,
    linear_weight,
    weight_distributions,
)
from lathe.compress.sensitivity.rank import (
    run_analysis,
    validation_batches,
)
from lathe.compress.sensitivity.result import Distribution, SensitivityResult
from lathe.compress.smoothing import fold
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.fake_quant import without_quantization
from lathe.model.quantization import QuantizationPlan
from lathe.train.batches import calibration_batches
from lathe.train.room import BY_BLOCK, device_with_room, pass_bytes
from lathe.train.workers import choose_device
from lathe_base.artifacts.journal import Journal
from lathe_base.config.settings import QuantizationSettings, Recipe
from lathe_base.config.settings.types import FORMAT_BY_BITS, Format
from lathe_base.provenance.step import attested


@attested("analyze", "model", "data")
def analyze(recipe: Recipe, model: Path, data: Path, output: Path) -> SensitivityResult:
    """Rank the linears of a checkpoint and choose skips.

    Writes `sensitivity.json` and an HTML page, `sensitivity.html`; see `run_analysis`.

    Raises:
        UserError: `Sensitivity.mode` does not apply to this checkpoint, the validation part cannot
            fill one sequence, or there is an unfinished analysis of something else.
    """
    checkpoint = load_checkpoint(model)

    def open_model(tokens: TokenDataset, journal: Journal) -> TorchModel:
        return TorchModel(recipe, checkpoint, tokens, journal)

    return run_analysis(recipe, model, data, output, checkpoint, open_model)


class TorchModel:
    """See `lathe.compress.sensitivity.rank.AnalyzedModel`."""

    engine = "torch"

    def __init__(
        self,
        recipe: Recipe,
        checkpoint: Checkpoint,
        data: TokenDataset,
        journal: Journal,
        named: bool = False,
    ) -> None:
        validation = validation_batches(recipe, data)
        self.model = without_quantization(checkpoint.model)
        self._recipe, self._data = recipe, data
        batches = [*calibration_batches(recipe, data)]
        tokens = max(batches[0].size, validation[0].size)
        needed = pass_bytes(self.model, tokens, gradients=True)
        device, _ = device_with_room(recipe, choose_device(recipe), "analysis", {BY_BLOCK: needed})
        self.calibration = [torch.from_numpy(tokens).to(device) for tokens in batches]
        plan = checkpoint.model.config.quantization
        settings = recipe.Compress.Quantization
        self._uses_gptq = not plan and settings.uses_gptq(recipe.Engine.max_steps)
        if self._uses_gptq and settings.has_int4:  # GPTQ will round smoothed weights
            smoothed = named_formats(self.model.config, settings, None)
            fold(self.model, smoothing_factors(recipe, self.model, self.calibration, smoothed))
        self.group_size: int = settings.group_size
        possible = quantizable(self.model.config, settings)
        self.forms: Sequence[Format]
        # A quantized checkpoint (mode qat) has its formats already; a float model is calibrated in
        # each that its linears may have.
        if plan:
            self.forms = [FORMAT_BY_BITS[plan.weight_bits]]
            self.plans = {self.forms[0]: plan}
        else:
            every: dict[str, Format] = dict.fromkeys(possible, "int8")
            int8 = int8_candidates(recipe, self.model, self.calibration, every)
            self.forms = [x for x in formats(settings, int8, named) if x != "float"]
            self.plans = {fmt: self._calibrated(settings, fmt, journal) for fmt in self.forms}
        self.plan = self.plans[self.forms[0]]
        self.names: Sequence[str] = list(self.plan.linears)
        self.float_already: Sequence[str] = [name for name in possible if name not in self.names]
        measured = [torch.from_numpy(validation[i]).to(device) for i in range(len(validation))]
        self._measure = BatchMetric(recipe.Sensitivity.metric, measured, self.model)

    def measure(self, formats: Mapping[str, Format]) -> list[float]:
        """The metric of every validation batch, with only these linears quantized: to 4 bits as
        `quantize` will round them."""
        linears = {name: self.plans[fmt].linears[name] for name, fmt in formats.items()}
        plan = QuantizationPlan(linears, self.plan.position_embedding)
        rounded = self._by_gptq[1] if "int4" in formats.values() else {}
        in_4_bits = [name for name, fmt in formats.items() if fmt == "int4" and name in rounded]
        weights = {name: linear_weight(self.model, name) for name in in_4_bits}
        with _in_place(weights, rounded), fake_quant.inserted(self.model, plan):
            return self._measure(self.model)

    def estimates(self) -> dict[Format, dict[str, float]]:
        """KL estimated from gradients, nats per token, by format and name; in 4 bits for the
        weights that GPTQ will make."""
        found = estimate_costs(self.model, self.plans, self.names, self.calibration)
        if "int4" in found:
            found["int4"] |= self._by_gptq[0]
        return found

    def weights(self) -> dict[str, Distribution]:
        """Statistics of the weights, by the linear's name."""
        device = self.calibration[0].device
        return weight_distributions(self.model, self.plan, self.names, device)

    def inputs(self) -> dict[str, Distribution]:
        """Statistics of the inputs, by the linear's name."""
        return input_distributions(self.model, self.plan, self.names, self.calibration)

    def n_params(self, name: str) -> int:
        """Number of parameters of a linear."""
        if name == HEAD:
            return self.model.output.weight.numel()
        return sum(parameter.numel() for parameter in self.model.get_submodule(name).parameters())

    def _calibrated(
        self, settings: QuantizationSettings, fmt: Format, journal: Journal
    ) -> QuantizationPlan:
        """A plan with all linears of the float model in one format."""
        names = quantizable(self.model.config, settings)
        plan = make_plan(self.model.config, settings, dict.fromkeys(names, fmt))

        def find() -> dict[str, float]:
            with fake_quant.inserted(self.model, plan):
                return fake_quant.calibrate(self.model, self.calibration)

        # From the journal after a kill, so that costs are measured with the same scales.
        return plan.with_scales(journal.recall(f"scales of {fmt}", find, dict))

    @cached_property
    def _by_gptq(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Costs and weights of linears that GPTQ has rounded to 4 bits, by name; none if the recipe
        does not use it."""
        plan, settings = self.plans.get("int4"), self._recipe.Compress.Quantization
        if plan is None or not self._uses_gptq:
            return {}, {}
        parts = calibration_batches(self._recipe, self._data, settings.gptq_batches)
        texts = [torch.from_numpy(part) for part in parts]
        weights = {name: linear_weight(self.model, name) for name in plan.linears}
        rounded = {name: weight.data.clone() for name, weight in weights.items()}
        with _in_place(weights, rounded), fake_quant.inserted(self.model, plan):
            needed = gptq_bytes(self.model, texts[0].numel())
            wanted = self.calibration[0].device
            device, _ = device_with_room(self._recipe, wanted, "GPTQ", {BY_BLOCK: needed})
            texts = [text.to(device) for text in texts]
            gptq(self.model, texts)
        with fake_quant.inserted(self.model, plan):
            costs = rounding_costs(self.model, rounded, texts)
        return costs, rounded


@contextmanager
def _in_place(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have weights hold other values for the duration of a `with` block, which may change those."""
    before = {name: weight.data for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.data = values[name]
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.data = before[name]
