"""The goal of a search, a target and a budget, and the designs of smaller models that it tries: the
units that each layer keeps, and the format of every linear."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lathe.model.architecture import HEAD, Architecture
from lathe.model.config import GPTConfig, read_config
from lathe_base.artifacts.kinds import checked
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import Format
from lathe_base.errors import Code, UserError
from lathe_base.inputs import parse_json
from lathe_base.storage import digest

Target = Literal["latency", "prefill", "bytes", "parameters"]
Budget = Literal["accuracy", "perplexity"]

EXACT: tuple[Target, ...] = ("bytes", "parameters")
"""Targets whose measurements do not vary."""

MAX_RELATIVE_INCREASE = 1e6  # of a perplexity, relative


@dataclass(frozen=True)
class Goal:
    """A limit on `target`, as a share of the dense float32 model's, and a quality budget.

    Attributes:
        target: `latency` per decoded token, `prefill` of a prompt, `bytes` of the ONNX file.
        budget: allowed loss of cloze accuracy in points, or relative increase of perplexity.
    """

    target: Target
    at_most: float
    budget: Budget
    allowed: float


def parse_goal(target: str, budget: str) -> Goal:
    """Parse `latency=0.4` and `accuracy=-0.5` (points) or `perplexity=0.05` (relative).

    Raises:
        UserError: an unknown target or budget, not a number, or a number out of range.
    """
    measure, share = assignment("--target", target, get_args(Target))
    kind, allowed = assignment("--budget", budget, get_args(Budget))
    if not 0 < share < 1:
        raise UserError(
            f"--target {target}: not a share",
            f"give one below 1, e.g. {measure}=0.4",
            Code.INVALID_VALUE,
        )
    # An accuracy is lost in points, which the gate takes as a share.
    loss = -allowed / 100 if kind == "accuracy" else allowed
    if not 0 <= loss <= (1 if kind == "accuracy" else MAX_RELATIVE_INCREASE):
        raise UserError(
            f"--budget {budget}: {'asks for a gain' if loss < 0 else 'not a loss to bear'}",
            "write accuracy=-0.5 to lose half a point, perplexity=0.05 for 5 % more",
            Code.INVALID_VALUE,
        )
    return Goal(measure, share, kind, loss)  # type: ignore[arg-type]


def assignment(option: str, text: str, names: Sequence[str]) -> tuple[str, float]:
    """Parse `name=number`, with one of `names`, the value `text` of `option`.

    Raises:
        UserError: it is not.
    """
    name, _, value = text.partition("=")
    try:
        if name in names:
            return name, float(value)
    except ValueError:
        pass
    raise UserError(
        f"{option} {text}: not understood",
        f"write one of {', '.join(names)}, as {names[0]}=0.4",
        Code.INVALID_VALUE,
    )


@dataclass(frozen=True)
class Design:
    """A design: the parts of a dense model to keep, and their formats.

    Attributes:
        heads, channels: number that each layer keeps; 0 and 0 remove the layer. A head is a
            key-value head with the query heads that share it.
        formats: those of the linears in the remaining layers, by their paths in the dense model.
    """

    heads: tuple[int, ...]
    channels: tuple[int, ...]
    formats: Mapping[str, Format]

    @property
    def name(self) -> str:
        """A folder name that is unique to the design."""
        return f"design-{digest(repr(sorted(asdict(self).items())))[:10]}"

    def prunes(self, config: GPTConfig) -> bool:
        """Whether it removes any part of a model with this dense shape."""
        return (self.heads, self.channels) != (config.n_kv_head, config.n_inner)

    def to_json(self) -> str:
        """The JSON that `parse_design` reads."""
        return json.dumps(asdict(self))

    def pruned_formats(self) -> dict[str, Format]:
        """`formats` by the paths in the pruned model, whose layers are renumbered."""
        kept = [i for i, heads in enumerate(self.heads) if heads]  # a layer keeps both or neither
        renamed = {HEAD: self.formats[HEAD]} if HEAD in self.formats else dict[str, Format]()
        for name, fmt in self.formats.items():
            if name != HEAD:
                blocks, layer, linear = name.split(".", 2)
                renamed[f"{blocks}.{kept.index(int(layer))}.{linear}"] = fmt
        return renamed

    def pruning(self, recipe: Recipe) -> Recipe:
        """The recipe that prunes to the design."""
        widths = {"heads": list(self.heads), "channels": list(self.channels)}
        # The widths say everything; what would otherwise choose them is set aside.
        others = {"layers": 0, "rounds": 1, "criterion": "taylor", "head_unit": "group"}
        return _with(recipe, "Prune", widths | others)

    def quantization(self, recipe: Recipe, family: Architecture) -> Recipe:
        """The recipe that quantizes the pruned model to the design."""
        blocks: dict[str, dict[str, Format]] = defaultdict(dict)
        for name, fmt in self.pruned_formats().items():
            if linear := family.find_linear(name):
                blocks[f"block_{name.split('.')[1]}"][linear.skip_name] = fmt
        named = {"formats": dict(blocks), "head_format": self.formats.get(HEAD)}
        # Emptied, not left out: over the same recipe's map this would leave it as it is.
        skips = {block: list[str]() for block in recipe.Compress.Quantization.skip_tensor_map}
        return _with(recipe, "Quantization", named | {"skip_tensor_map": skips})


@dataclass(frozen=True)
class Proposal:
    """A design to train.

    Attributes:
        predicted: its predicted share of the target.
        cost: the predicted KL divergence from the dense model before training, nats per token.
    """

    design: Design
    predicted: float
    cost: float


def parse_design(text: str) -> Design:
    """Read a design from the JSON of its fields.

    Raises:
        UserError: it is not one.
    """
    hint = "give one returned by the component `design`"
    return checked(parse_json(text, "design", hint), Design, "design", hint)


def pruning_to(
    design: str, recipe: Recipe, overrides: Sequence[str], model: Path
) -> tuple[Recipe | None, list[str]]:
    """The recipe that prunes to a design, as `parse_design` reads it, and the overrides for it;
    None if the design does not prune the model."""
    parsed = parse_design(design)
    changed = parsed.pruning(recipe)
    result = changed if parsed.prunes(read_config(model)) else None
    # As an override too, since the pipeline's step reads the recipe by name.
    return result, [*overrides, override(changed, "Prune")]


def quantization_to(
    design: str, recipe: Recipe, overrides: Sequence[str], model: Path
) -> tuple[Recipe, list[str]]:
    """The recipe that quantizes the pruned model to a design, and the overrides for it."""
    changed = parse_design(design).quantization(recipe, read_config(model).architecture)
    return changed, [*overrides, override(changed, "Quantization")]


def override(recipe: Recipe, group: str) -> str:
    """The group `Compress.<group>` of a recipe as an override of another recipe."""
    return f"Compress.{group}={getattr(recipe.Compress, group).model_dump_json()}"


def _with(recipe: Recipe, group: str, values: Mapping[str, Any]) -> Recipe:
    compression = recipe.Compress
    # A copy at each level: the recipe that was given stays as it is.
    changed = getattr(compression, group).model_copy(update=values)
    return recipe.model_copy(update={"Compress": compression.model_copy(update={group: changed})})
