"""Finds the designs worth training by integer programming, and measures them.

There is a 0/1 variable for every number of units that a layer may keep, and for every format of
every linear at that number. The quality cost and the price of a design are sums over these; the
cost is minimized while the price stays within the limit.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import scipy  # type: ignore[import-untyped]

from lathe.compress.plan import INT8_FORMATS, named_formats, quantizable
from lathe.model.architecture import HEAD, Units
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.folder import CheckpointFolder
from lathe.search.design import EXACT, Design, Goal, Proposal
from lathe.search.prices import (
    Costs,
    Parts,
    Prices,
    design_parts,
    linear_parts,
    measure_design,
    read_costs,
    read_prices,
)
from lathe_base.artifacts.journal import Journal
from lathe_base.artifacts.kinds import checked, open_export, read_json
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage import atomic_file

log = logging.getLogger("lathe")

CLOSE = 0.97  # of a limit: a design this near to it is not corrected
MEASUREMENTS = 6  # of designs, for one limit

Measure = Callable[[Design], float]
"""Returns a design's value for the target, as a share of the dense model's."""

WIDTHS = 16  # numbers of heads, or of channels, from which a layer's is chosen
SECONDS = 60.0
GAP = 1e-3  # of the cost: a design this near to the best is good enough


def write_designs(
    goal: Goal,
    recipes: Sequence[Recipe],
    model: Path | CheckpointFolder,
    dense: Path,
    costs: Path,
    prices: Path,
    trials: int,
    output: Path,
) -> list[Proposal]:
    """Run `propose` on the outputs of `write_costs` and `write_prices`, and write a JSON file.

    Args:
        recipes: for evaluation and export, for pruning, and for quantization.
        model, dense: the dense checkpoint and its export.
        output: the file; next to it is a journal of all measurements, which later calls reuse.
    """
    base, pruning, quantization = recipes
    checkpoint, settings = load_checkpoint(model), quantization.Compress.Quantization
    known = read_costs(costs), read_prices(prices)[goal.target]
    problem = Problem.of(checkpoint.model.config, *known, pruning, quantization)
    open_export(dense)  # before the journal is written
    findings = output.with_name(f"{output.name}.findings.jsonl")
    journal = Journal(findings, {"model": checkpoint.digest})

    def measure(design: Design) -> float:
        def find() -> dict[str, float]:
            return measure_design(checkpoint, dense, design, settings, base.Export)

        return journal.recall(design.name, find, dict)[goal.target]

    proposals = propose(problem, goal, trials, measure)
    with atomic_file(output) as work:
        text = json.dumps([asdict(proposal) for proposal in proposals], indent=2)
        work.write_text(text + "\n", encoding="utf-8")
    return proposals


def read_proposals(path: Path) -> list[Proposal]:
    """Read the file of `write_designs`."""
    hint = "run the pipeline again"
    return checked(read_json(path, hint, list), list[Proposal], str(path), hint)


def propose(problem: "Problem", goal: Goal, trials: int, measure: Measure) -> list[Proposal]:
    """At most `trials` designs whose measurement reaches the target, the largest first.

    Prices are off by a few percent, so every design is measured before it is trained; if it misses
    the limit, or leaves much of it unused, the prices are rescaled by the measurement, and the next
    design is tried. Measured times vary, so each further trial aims `CLOSE` below the last; one
    design is enough for a target in `EXACT`.

    Raises:
        UserError: `trials` is not positive.
        StageError: no design reaches the target.
    """
    if trials < 1:
        raise UserError(
            f"trials: {trials}, so no design would be trained",
            "give at least 1",
            Code.INVALID_VALUE,
        )
    proposals: list[Proposal] = []
    scale = 1.0
    for trial in range(1 if goal.target in EXACT else trials):
        # Times vary by a few percent: each further trial aims lower, in case the first is too slow.
        limit = goal.at_most * CLOSE**trial
        proposal, scale = _within(problem, limit, scale, measure)
        if proposal is None and not proposals:
            smallest = problem.price(problem.cheapest()) * scale
            raise StageError(
                f"no design reaches {goal.target} {goal.at_most:g}: the smallest has a predicted "
                f"{smallest:.3f}. Raise the target, or allow more formats "
                "(Compress.Quantization.weight_bits=4, quantize_embedding=True)",
                Code.GATE,
            )
        if proposal is None:
            break
        if proposal.design not in [other.design for other in proposals]:
            proposals.append(proposal)
    return proposals


def _within(
    problem: "Problem", limit: float, scale: float, measure: Measure
) -> tuple[Proposal | None, float]:
    """The design with the lowest cost whose measurement is within a limit; None if there is none.

    Args:
        scale: scale of the prices from earlier measurements; the corrected one is also returned.
    """
    tried: list[Design] = []
    fitting: list[Proposal] = []
    while len(tried) < MEASUREMENTS:
        design = problem.solve(limit / scale)
        if design is None or design in tried:
            break
        tried.append(design)
        price, share = problem.price(design), measure(design)
        words = "%s: predicted %.3f of the target, measured %.3f before training"
        log.info(words, design.name, price * scale, share)
        # Close to the limit is good enough. Otherwise all prices are scaled by how far off this one
        # was, and the program is solved again; a design that comes again is the end.
        if share <= limit:
            fitting.append(Proposal(design, price * scale, problem.cost(design)))
        if CLOSE * limit <= share <= limit:
            break
        scale = share / price
    return min(fitting, key=lambda proposal: proposal.cost, default=None), scale


@dataclass(frozen=True)
class Problem:
    """The search space of designs.

    Attributes:
        config: the dense shape.
        formats: those that each quantizable linear may have; other linears are float.
        multiple: numbers of FFN channels are multiples of it.
        prunes: whether units and layers may be removed; otherwise only formats are chosen.
    """

    config: GPTConfig
    costs: Costs
    prices: Prices
    formats: Mapping[str, Sequence[Format]]
    group_size: int
    multiple: int = 1
    prunes: bool = True

    @classmethod
    def of(
        cls, config: GPTConfig, costs: Costs, prices: Prices, pruning: Recipe, quantization: Recipe
    ) -> "Problem":
        """The designs that the recipes allow for a model with this dense shape."""
        settings = quantization.Compress.Quantization
        forced, possible = named_formats(config, settings, None), list(costs.formats)
        int8 = INT8_FORMATS[settings.activation_quantize_type]

        def options(fmt: Format | None) -> list[Format]:
            if fmt == "int8":
                return [known for known in possible if known in int8]
            return [fmt] if fmt else possible

        return cls(
            config,
            costs,
            prices,
            {name: options(forced.get(name)) for name in quantizable(config, settings)},
            settings.group_size,
            pruning.Compress.Prune.channel_multiple,
            prunes=pruning.Compress.Prune.enable is not False,
        )

    def price(self, design: Design) -> float:
        """The predicted price of a design."""
        return self.prices.total(design_parts(self.config, design, self.group_size))

    def cost(self, design: Design) -> float:
        """The predicted quality cost of a design: a KL divergence, nats per token."""
        kept = {"heads": design.heads, "channels": design.channels}
        full = {"heads": self.config.n_kv_head, "channels": self.config.n_inner}
        cost = 0.0
        for i in range(self.config.n_layer):
            cost += self.costs.heads[i][design.heads[i]]
            cost += self.costs.channels[i][design.channels[i]]
        for name, fmt in design.formats.items():
            linear, share = self.config.architecture.find_linear(name), 1.0
            if linear is not None:
                i = int(name.split(".")[1])
                share = kept[linear.units][i] / full[linear.units][i]
            # A linear of half the units has half the weights to round.
            cost += self.costs.linear_cost(name, fmt) * share
        return cost

    def cheapest(self) -> Design:
        """The design with the lowest price."""
        solution = self.solve(np.inf, by_price=True)
        assert solution is not None
        return solution

    def solve(self, limit: float, by_price: bool = False) -> Design | None:
        """The design with the lowest cost, or price, and a price of at most `limit`; None if there
        is none."""
        # A layer stays, with one width for each kind of unit, or it is gone; one stays at least.
        program = _Program()
        layers = []
        for i in range(self.config.n_layer):
            layers.append(program.add(0.0, self.prices.total(Parts(layers=1))))
            removed = program.add(self.costs.heads[i][0] + self.costs.channels[i][0], 0.0)
            program.require({layers[i]: 1.0, removed: 1.0}, 1, 1)
        min_layers = 1 if self.prunes else len(layers)
        program.require(dict.fromkeys(layers, 1.0), min_layers, len(layers))

        # The numbers of units that each layer may keep, by their variables; and the formats that
        # each linear may have, by variables for every width of its layer.
        widths: dict[tuple[int, Units], dict[int, int]] = {}
        chosen: dict[str, dict[int, Format]] = {}
        for i, layer in enumerate(layers):
            for units in ("heads", "channels"):
                costs = getattr(self.costs, units)[i]
                step = self.multiple if units == "channels" else 1
                step *= -(
                    -(len(costs) - 1) // (WIDTHS * step)
                )  # rounded up: at most WIDTHS choices
                counts = range(len(costs) - 1, 0, -step) if self.prunes else [len(costs) - 1]
                widths[i, units] = {
                    program.add(costs[count], self.prices.total(Parts({units: count}))): count
                    for count in counts
                }
                # Exactly one width if the layer stays, and none if it is gone.
                program.require({**dict.fromkeys(widths[i, units], 1.0), layer: -1.0}, 0, 0)
                for linear in self.config.architecture.linears:
                    if linear.units == units:
                        name = f"{self.config.architecture.block(i)}.{linear.name}"
                        chosen[name] = self._add_linear(program, name, widths[i, units])
        chosen[HEAD] = {
            program.add(
                self.costs.linear_cost(HEAD, fmt), self.prices.total(Parts({f"head {fmt}": 1}))
            ): fmt
            for fmt in self.formats.get(HEAD, ["float"])
        }
        program.require(dict.fromkeys(chosen[HEAD], 1.0), 1, 1)

        # What every design has is paid before the choice.
        taken = program.solve(limit - self.prices.total(Parts(fixed=1)), by_price)
        if taken is None:
            return None

        def width(i: int, units: Units) -> int:
            return sum(count for variable, count in widths[i, units].items() if variable in taken)

        formats = {
            name: fmt
            for name, options in chosen.items()
            for variable, fmt in options.items()
            if variable in taken and name in self.formats
        }
        every = range(self.config.n_layer)
        return Design(
            tuple(width(i, "heads") for i in every),
            tuple(width(i, "channels") for i in every),
            formats,
        )

    def _add_linear(
        self, program: "_Program", name: str, widths: Mapping[int, int]
    ) -> dict[int, Format]:
        """The formats that a linear may have at each width of its layer, by their variables."""
        linear, layer = self.config.architecture.find_linear(name), int(name.split(".")[1])
        assert linear is not None
        full = max(widths.values())
        formats: dict[int, Format] = {}
        for width, count in widths.items():
            kept = self.config.layer_widths(layer, groups=count, channels=count)
            shape = linear.shape(self.config.n_embd, kept)
            options = {
                program.add(
                    self.costs.linear_cost(name, fmt) * count / full,
                    self.prices.total(linear_parts(shape, fmt, self.group_size)),
                ): fmt
                for fmt in self.formats.get(name, ["float"])
            }
            # Exactly one format at the width that is chosen, and none at the others: a product of
            # two choices has a variable of its own, so that the program stays linear.
            program.require({**dict.fromkeys(options, 1.0), width: -1.0}, 0, 0)
            formats |= options
        return formats


class _Program:
    """0/1 variables, their costs and prices, and bounds on sums of them."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.prices: list[float] = []
        self.sums: list[tuple[Mapping[int, float], float, float]] = []

    def add(self, cost: float, price: float) -> int:
        """Add a variable; returns its index."""
        self.costs.append(cost)
        self.prices.append(price)
        return len(self.costs) - 1

    def require(self, factors: Mapping[int, float], low: float, high: float) -> None:
        """Add a bounded sum of variables."""
        self.sums.append((factors, low, high))

    def solve(self, limit: float, by_price: bool) -> set[int] | None:
        """The variables that are 1 in the solution with the lowest cost and a price of at most
        `limit`, or with the lowest price."""
        rows, columns, factors = zip(
            *((r, c, f) for r, (sum_, *_) in enumerate(self.sums) for c, f in sum_.items()),
            strict=True,
        )
        shape = len(self.sums), len(self.costs)
        matrix = scipy.sparse.csr_array((factors, (rows, columns)), shape=shape)
        _, low, high = zip(*self.sums, strict=True)
        goal = np.array(self.prices if by_price else self.costs)
        # Exact up to the gap, with HiGHS: a greedy choice would not see that a layer removed pays
        # for wider ones.
        solution = scipy.optimize.milp(
            goal / np.median(np.abs(goal[goal != 0])),  # the solver's tolerances are absolute
            integrality=np.ones(len(goal)),
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=[
                scipy.optimize.LinearConstraint(matrix, low, high),
                scipy.optimize.LinearConstraint(np.array(self.prices)[None], -np.inf, limit),
            ],
            options={"mip_rel_gap": GAP, "time_limit": SECONDS},
        )
        return None if solution.x is None else set(np.flatnonzero(solution.x > 0.5).tolist())
