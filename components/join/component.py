"""Tokenized shards -> token data set."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("text", hours=4, name="prepare")
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def join(
    recipe: str,
    data: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    shards: dsl.Input[list[dsl.Dataset]] = None,
    finished: list[str] = [],  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Combine the shards of a corpus into one data set.

    Args:
        recipe: Name or path of the recipe (groups Prepare and Data).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        shards: Tokenized shards.
        finished: Addresses of shards that an earlier run has tokenized.
        data: Token data set, tokenizer, held-out text and cloze examples.
        metrics: Documents, tokens and vocabulary size.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.data.join import join
    from lathe_base.artifacts.remote import input_path

    with stage(recipe, overrides) as settings:
        folders = [*map(input_path, finished), *local(*(shards or []))]
        record(join(settings, folders, Path(data.path)), metrics, data)
