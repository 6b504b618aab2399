"""`newest:s3://bucket/corpora/` -> the corpus that this means now."""

from kfp import dsl

from components.images import TRAIN


@dsl.component(base_image=TRAIN, install_kfp_package=False)
def resolve(
    recipe: str,
    overrides: list[str],
    metrics: dsl.Output[dsl.Metrics],
    corpus: str = "",
) -> str:
    """Choose the corpus, in every run anew; what reads it is cached by its address.

    Args:
        recipe: Name or path of the recipe (group Prepare).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        corpus: File, folder, address, data set name, or newest:PLACE; the recipe's when empty.
        metrics: Whether there was a choice; its metadata have the corpus.

    Returns:
        The corpus itself, or the newest one below the place.
    """
    from components.artifacts import record
    from components.stage import stage
    from lathe.data.newest import resolve

    with stage(recipe, overrides) as settings:
        source = corpus or settings.Prepare.source
        found = resolve(source)
        metrics.metadata["corpus"] = found
        record({"chosen": found != source}, metrics)
        return found
