"""Choose between static and dynamic activation scales by the quality cost of static ones.

In a pretrained model a few tokens, above all the first of a text, have activations a thousand times
as large as the others' ("massive activations", Sun et al. 2024, arXiv:2402.17762). One static scale
for all tokens rounds the others to zero; a small model that was trained for minutes has no such
tokens, and reads prompts faster with static scales.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from statistics import fmean

import torch
from torch import Tensor

from lathe.compress.plan import INT8_FORMATS, choose_formats, make_plan
from lathe.compress.sensitivity.measure import BatchMetric, estimate_costs, linear_weight
from lathe.compress.smoothing import Factors, find_factors
from lathe.model import fake_quant
from lathe.model.by_block import hidden_states
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan
from lathe_base.config.settings import QuantizationSettings, Recipe
from lathe_base.config.settings.types import FORMAT_BY_BITS, FORMATS, Format
from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

TOKENS = 2048  # on which costs are measured: a pass over them takes a second
SHARE = 0.1
"""Maximum cost of static scales, as a share of the increase in log perplexity that the gate allows;
the rest is for weight rounding, pruning, and the gate's own uncertainty."""
ATTEMPTS = 4  # to meet that limit with some of the scales static
PREFIX_TOKENS = 512  # on which prefixes are compared
MAX_PREFIX_TOKENS = 3
CANDIDATES = 4  # for every token of a prefix
GAIN = 0.9
"""Maximum cost of static scales with one more prefix token, relative to the cost without it."""

MASSIVE = 100.0
"""Ratio of a token's largest input to the median token's above which its activations count as
massive."""

Formats = Mapping[str, Format]


def int8_candidates(
    recipe: Recipe, model: GPT, batches: Sequence[Tensor], formats: Formats
) -> Sequence[Format]:
    """The INT8 formats to choose from, with the reason logged: for `activation_quantize_type: auto`
    only static ones if they cost little enough. Warns if static scales are requested and cost too
    much.

    The cost is KL(float || quantized without training) in nats per token, on calibration text.

    Args:
        model: in float, in evaluation mode.
        batches: tokens (B, T) each.
        formats: those of individual linears, for `make_plan`.
    """
    return _Trial(recipe, model, batches, formats).candidates()


def with_int8_formats(
    recipe: Recipe, model: GPT, batches: Sequence[Tensor], formats: Formats
) -> dict[str, Format]:
    """`formats`, with `activation_quantize_type: auto` resolved for every `int8` linear: as many
    weights as the limit allows have static scales. See `int8_candidates`."""
    trial = _Trial(recipe, model, batches, formats)
    candidates = trial.candidates()
    chosen = trial.choose(candidates) if len(candidates) > 1 else trial.all_in(candidates[0])
    return {**formats, **chosen}


def find_prefix(
    recipe: Recipe, model: GPT, batches: Sequence[Tensor], formats: Formats, end: int
) -> tuple[int, ...]:
    """The prefix: a few tokens before every text, whose keys and values are float constants; to be
    found before `smoothing_factors`.

    Massive activations occur at the first token of a text, whichever it is, and at a few tokens
    with little meaning, which serve as attention sinks. If a prefix contains such tokens, those of
    the text have no massive activations, and static scales round them well. The tokens are chosen
    one by one to minimize the cost of static scales. There are none unless all scales must be
    static, because a prefix changes the predictions by more than dynamic scales do.

    Source: Chen et al. 2024, "PrefixQuant: Static Quantization Beats Dynamic through Prefixed
    Outliers in LLMs" (arXiv:2410.05265), without its training.

    Args:
        recipe, model, batches, formats: those of `int8_candidates`.
        end: the end-of-document token, which is always tried.

    Raises:
        UserError: a prefix is requested, with tensor parallelism.
    """
    settings: QuantizationSettings = recipe.Compress.Quantization
    mp, is_auto = recipe.Distributed.mp_degree, settings.prefix == "auto"
    if mp > 1 and isinstance(settings.prefix, int):
        raise UserError(
            f"Compress.Quantization.prefix is {settings.prefix}: not supported with "
            f"Distributed.mp_degree {mp}",
            "set Compress.Quantization.prefix=none, or use sharding",
            Code.CONFLICTING_OPTIONS,
        )
    is_static = settings.activation_quantize_type == "moving_average_abs_max"
    if settings.prefix == "none" or mp > 1 or not is_static:
        return ()
    trial = _Trial(recipe, model, batches, formats)
    if not trial.names or (is_auto and trial.total_cost("static_int8") <= trial.limit):
        return ()
    # The prefix takes positions, which training and evaluation do not need.
    longest = max(part.dataset.max_seq_len for part in (recipe.Data.Train, recipe.Data.Eval))
    room = model.config.n_positions - longest
    max_tokens = (
        min(MAX_PREFIX_TOKENS, room) if isinstance(settings.prefix, str) else settings.prefix
    )
    # Candidates: the end of a document, and the text's tokens with massive activations. They are
    # compared on less text than the limit is measured on, because every token needs several passes.
    massive = (token for token in massive_tokens(model, [trial.sample]) if token != end)
    candidates = [end, *islice(massive, CANDIDATES - 1)]
    quick = _Trial(recipe, model, batches, formats, PREFIX_TOKENS)
    prefix_tokens: tuple[int, ...] = ()
    every = quick.all_in("static_int8")
    cost = without = quick.cost(every)
    # Greedy: the best token after those that were chosen, while it lowers the cost enough.
    while len(prefix_tokens) < max_tokens:
        costs = {}
        for token in candidates:
            with prefixed(model, (*prefix_tokens, token)):
                costs[token] = quick.cost(every)
        best = min(candidates, key=costs.__getitem__)
        if is_auto and costs[best] > GAIN * cost:
            break
        prefix_tokens, cost = (*prefix_tokens, best), costs[best]
    words = "prefix of %d tokens %s: static INT8 costs %.2g nats per token, %.2g without"
    log.info(words, len(prefix_tokens), list(prefix_tokens), cost, without)
    return prefix_tokens


def smoothing_factors(
    recipe: Recipe, model: GPT, batches: Sequence[Tensor], formats: Formats
) -> Factors:
    """Smoothing factors of the linears' inputs (see `lathe.compress.smoothing`), for use before
    `with_int8_formats`; none if static scales already cost little enough and no input has dynamic
    ones.

    Arguments: those of `int8_candidates`.
    """
    settings = recipe.Compress.Quantization
    trial = _Trial(recipe, model, batches, formats)
    int8 = INT8_FORMATS[settings.activation_quantize_type]
    dynamic = {fmt for fmt, facts in FORMATS.items() if facts.activation == "dynamic_int8"}
    is_due = settings.has_int4 or bool(dynamic & {*formats.values(), int8[0]})
    if settings.smoothing and not is_due and trial.names and int8[0] == "static_int8":
        is_due = trial.total_cost("static_int8") > trial.limit
    if not (settings.smoothing and is_due):
        return {}
    fmt = int8[0] if _static_scales_reason(recipe) else int8[-1]
    plan = make_plan(model.config, settings, {**formats, **trial.all_in(fmt)})
    for_gptq = settings.uses_gptq(recipe.Engine.max_steps)
    # The largest values, which decide static scales, are those of all text.
    read = batches if fmt == "static_int8" else [trial.sample]
    factors = find_factors(model, read, plan.linears, for_gptq)
    log.info("smoothed the inputs of %d linears", len(factors))
    return factors


class _Trial:
    """Quantizes a model in different ways, and measures each on calibration text.

    Attributes:
        names: the linears whose kind of INT8 is to be chosen.
        limit: maximum cost in nats per token.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: GPT,
        batches: Sequence[Tensor],
        formats: Formats,
        tokens: int = TOKENS,
    ) -> None:
        self.recipe, self.model, self.formats = recipe, model, formats
        self.settings: QuantizationSettings = recipe.Compress.Quantization
        usual = FORMAT_BY_BITS[self.settings.weight_bits]
        undecided: set[Format] = {"int8"}
        if self.settings.activation_quantize_type == "moving_average_abs_max":
            undecided.add("static_int8")  # an analysis may have chosen it: the warning is due too
        plan = make_plan(model.config, self.settings, formats)
        self.names = [name for name in plan.linears if formats.get(name, usual) in undecided]
        self.limit = SHARE * math.log1p(recipe.Gate.max_perplexity_increase)
        rows = max(1, tokens // batches[0].shape[1])
        self.sample = torch.cat(list(batches))[:rows]
        self._costs: dict[Format, float] = {}

    def all_in(self, fmt: Format) -> dict[str, Format]:
        return dict.fromkeys(self.names, fmt)

    def candidates(self) -> Sequence[Format]:
        kind = self.settings.activation_quantize_type
        both = INT8_FORMATS[kind]
        if both[0] != "static_int8" or not self.names:
            return both[:1]
        static = self.total_cost("static_int8")
        cost = f"costs {static:.2g} nats per token before training"
        description = f"INT8 with static activation scales {cost}"
        allowed = f"{self.limit:.2g}, {SHARE:.0%} of what Gate.max_perplexity_increase allows"
        if static <= self.limit:
            log.info("%s (limit %s): static", description, allowed)
            return both[:1]
        reason = _static_scales_reason(self.recipe)
        if kind == "auto" and reason is None:
            log.info(
                "%s (limit %s): using dynamic scales for the most expensive linears",
                description,
                allowed,
            )
            return both
        advice = "set activation_quantize_type=auto"
        hint = f"{reason} excludes others" if kind == "auto" else advice
        log.warning("%s, more than %s: %s", description, allowed, hint)
        return both[:1]

    def choose(self, forms: Sequence[Format]) -> dict[str, Format]:
        """The formats with the fewest bytes of which a measurement shows that they cost at most the
        limit; the last of `forms` for all if none do.

        Costs are estimated from gradients, and scaled to the measured cost of having all linears in
        one format. The budget of each attempt corrects for the error of the estimate before it.
        """
        plans = {fmt: self.plan(self.all_in(fmt)) for fmt in forms}
        rows = torch.split(self.sample, 1)  # as gradients need all activations of a pass
        estimates = estimate_costs(self.model, plans, self.names, rows)
        totals = {fmt: self.total_cost(fmt) for fmt in forms}
        scales = {fmt: totals[fmt] / sum(estimates[fmt].values()) for fmt in forms}
        costs = {n: [estimates[f][n] * scales[f] for f in forms] for n in self.names}
        sizes = {name: linear_weight(self.model, name).numel() for name in self.names}
        best, least, budget = self.all_in(forms[-1]), totals[forms[-1]], self.limit
        tried: list[dict[str, Format]] = []
        for _ in range(ATTEMPTS):
            chosen, _ = choose_formats(costs, forms, sizes, self.settings.group_size, budget, 0)
            if chosen in tried:
                break
            tried.append(chosen)
            cost = self.cost(chosen)
            if cost <= self.limit and _count_static(chosen) > _count_static(best):
                best, least = chosen, cost
            budget *= self.limit / cost  # the choice cost that much more, or less, than estimated
        words = "%d of %d INT8 linears have static scales: %.2g nats per token, %.2g with none"
        log.info(words, _count_static(best), len(best), least, totals[forms[-1]])
        return best

    def plan(self, formats: Formats) -> QuantizationPlan:
        """The calibrated plan for only these linears."""
        every = make_plan(self.model.config, self.settings, {**self.formats, **formats})
        plan = every.part(formats)
        with fake_quant.inserted(self.model, plan):
            return plan.with_scales(fake_quant.calibrate(self.model, [self.sample]))

    @cached_property
    def measure(self) -> BatchMetric:
        """The KL divergence from the model without its prefix."""
        # The reference is the model as it was trained, whatever prefix is tried meanwhile.
        with prefixed(self.model, ()):
            return BatchMetric("kl", [self.sample], self.model)

    def total_cost(self, fmt: Format) -> float:
        """The cost of having all linears in one format, measured once."""
        if fmt not in self._costs:
            self._costs[fmt] = self.cost(self.all_in(fmt))
        return self._costs[fmt]

    def cost(self, formats: Formats) -> float:
        """KL(float || these linears quantized), nats per token."""
        measure, plan = self.measure, self.plan(formats)
        with fake_quant.inserted(self.model, plan):
            return fmean(measure(self.model))


def _count_static(formats: Formats) -> int:
    return sum(fmt == "static_int8" for fmt in formats.values())


def _static_scales_reason(recipe: Recipe) -> str | None:
    """The setting that requires static scales, if any."""
    settings: QuantizationSettings = recipe.Compress.Quantization
    if settings.activation_preprocess_type:
        return f"activation_preprocess_type {settings.activation_preprocess_type}"
    if recipe.Distributed.mp_degree > 1:
        return f"Distributed.mp_degree {recipe.Distributed.mp_degree}"
    return None


@torch.no_grad()
def massive_tokens(model: GPT, batches: Sequence[Tensor]) -> list[int]:
    """Tokens with massive activations in a float model, the most frequent first.

    Args:
        batches: tokens (B, T) each.
    """
    counts: Counter[int] = Counter()
    for tokens in batches:
        is_massive = torch.zeros_like(tokens, dtype=torch.bool)

        # Bound as a default: the loop rebinds `is_massive` for the next batch.
        def observe(_module: object, inputs: tuple[Tensor, ...], seen: Tensor = is_massive) -> None:
            peaks = inputs[0].abs().amax(-1)  # (B, T)
            seen |= peaks > MASSIVE * peaks.median()

        linears = (model.get_submodule(name) for name in model.config.linear_names())
        hooks = [linear.register_forward_pre_hook(observe) for linear in linears]
        try:
            hidden_states(model.eval(), [tokens])
        finally:
            for hook in hooks:
                hook.remove()
        counts.update(tokens[is_massive].tolist())
    return [token for token, _ in counts.most_common()]


@contextmanager
def prefixed(model: GPT, tokens: Sequence[int]) -> Iterator[None]:
    """`set_prefix` for the duration of a `with` block; afterwards the model is as before."""
    before = model.config.prefix_tokens
    model.set_prefix(tokens)
    try:
        yield
    finally:
        model.set_prefix(before)
