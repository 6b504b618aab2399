"""Whether a recipe's compression is possible: checked before an hour of training, reported after
it."""

from lathe.model.config import GPTConfig
from lathe_base.config.settings import PruneSettings
from lathe_base.errors import Code, UserError


def require_enabled(group: str, enable: bool | None) -> None:
    """Raise UserError if `Compress.<group>.enable` is False; it defaults to True."""
    if enable is False:
        raise UserError(
            f"Compress.{group}.enable is False in this recipe",
            f"-o Compress.{group}.enable=True, or name another recipe",
            Code.CONFLICTING_OPTIONS,
        )


def kept_units(n: int, ratio: float, multiple: int = 1) -> int:
    """Number of units that stay of the `n` of a layer if `ratio` of them are removed: at least one,
    rounded up to a multiple."""
    keep = max(1, n - round(n * ratio))
    return min(n, -(-keep // multiple) * multiple)


def require_possible(
    settings: PruneSettings, config: GPTConfig, is_pooled: bool = False
) -> list[str]:
    """Check that `Compress.Prune` removes something of a model of this shape.

    Args:
        is_pooled: heads and channels are ranked together, so that one may replace the other.

    Returns:
        A sentence for each part of the request that cannot be met.

    Raises:
        UserError: more layers than can be removed, or a ratio that removes nothing.
    """
    if settings.heads:
        return []
    if settings.layers >= config.n_layer:
        raise UserError(
            f"Compress.Prune.layers is {settings.layers}, but the model has {config.n_layer} "
            "layers, of which at least one must stay",
            f"set -o Compress.Prune.layers={config.n_layer - 1} or less",
            Code.INVALID_VALUE,
        )
    if not settings.ratio:
        return []
    heads = config.per_group if settings.head_unit == "query" else config.n_kv_head
    # Kind of unit -> units of each layer, and the multiple that has to stay.
    kinds = {"heads": (heads, 1), "channels": (config.n_inner, settings.channel_multiple)}
    unmet, gone = [], 0
    for name, (units, multiple) in kinds.items():
        wanted = sum(units) * settings.ratio
        if settings.scope == "global":  # rounded once
            most = sum(n - min(n, multiple) for n in units)
            removed, step = min(multiple * round(wanted / multiple), most), multiple
        else:  # in every layer, and may be much less than wanted
            removed = sum(n - kept_units(n, settings.ratio, multiple) for n in units)
            step = multiple * len(units)
        gone += removed
        if not removed or wanted - removed >= step:
            unmet.append(
                f"{name}: Compress.Prune.ratio={settings.ratio} removes {removed} of "
                f"{sum(units)}, because each layer has {shown(units)}, keeps at least one, and "
                f"keeps {'a multiple of ' + str(multiple) if multiple > 1 else 'whole ones'}"
            )
    if not gone and not settings.layers:
        raise UserError(
            f"Compress.Prune.ratio is {settings.ratio}, which removes nothing of this model: "
            f"{shown(heads)} heads and {shown(config.n_inner)} channels per layer, channels in "
            f"multiples of {settings.channel_multiple}, and one of each stays",
            "raise the ratio, lower Compress.Prune.channel_multiple, or remove layers",
            Code.INVALID_VALUE,
        )
    return [] if is_pooled else unmet


def removed_figures(dense: GPTConfig, pruned: GPTConfig) -> dict[str, float]:
    """What a pruned model lacks of the dense one: number of layers, shares of query heads and FFN
    channels."""
    return {
        "removed_layers": dense.n_layer - pruned.n_layer,
        "removed_heads": 1 - sum(pruned.n_head) / sum(dense.n_head),
        "removed_channels": 1 - sum(pruned.n_inner) / sum(dense.n_inner),
    }


def shown(units: tuple[int, ...]) -> str:
    """Numbers of units per layer as text: `4`, or `2 to 4`."""
    low, high = min(units), max(units)
    return f"{low}" if low == high else f"{low} to {high}"
