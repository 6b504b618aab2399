"""Batch sizes of a step: global = local * data-parallel ranks, local = micro * accumulate steps."""

from dataclasses import dataclass

from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError


@dataclass(frozen=True)
class Batch:
    """Numbers of sequences: per optimizer step (`total`), per rank, and per forward pass."""

    total: int
    local: int
    micro: int
    accumulate_steps: int

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        return self.total // self.local


def resolve_batch(recipe: Recipe, data_parallel: int) -> Batch:
    """Derive the sizes that the recipe omits, for `data_parallel` = dp_degree * sharding_degree.

    `Global.local_batch_size` follows from `global_batch_size`, or else is one micro-batch for each
    of `Engine.accumulate_steps` (default 1).

    Raises:
        UserError: the sizes do not divide, or two of them disagree.
    """
    sizes, steps = recipe.Global, recipe.Engine.accumulate_steps
    total, local, micro = sizes.global_batch_size, sizes.local_batch_size, sizes.micro_batch_size
    if total is not None and total % data_parallel:
        raise UserError(
            f"Global.global_batch_size {total} is not a multiple of {data_parallel}, the number of "
            "data-parallel ranks (dp_degree * sharding_degree)",
            f"set it to {(total // data_parallel + 1) * data_parallel}, or change the degrees",
            Code.LAYOUT,
        )
    if local is None:
        local = micro * (steps or 1) if total is None else total // data_parallel
    if total is not None and total != local * data_parallel:
        raise UserError(
            f"Global.global_batch_size {total} is not local_batch_size {local} "
            f"* {data_parallel} data-parallel ranks",
            "fix one of the two, or leave it empty",
            Code.CONFLICTING_OPTIONS,
        )
    if local % micro:
        raise UserError(
            f"Global.local_batch_size {local} is not a multiple of micro_batch_size {micro}",
            "choose a micro_batch_size that divides it",
            Code.CONFLICTING_OPTIONS,
        )
    if steps not in (None, local // micro):
        raise UserError(
            f"Engine.accumulate_steps {steps} is not local_batch_size {local} / "
            f"micro_batch_size {micro} = {local // micro}",
            "leave accumulate_steps empty to compute it from the two",
            Code.CONFLICTING_OPTIONS,
        )
    return Batch(local * data_parallel, local, micro, local // micro)
