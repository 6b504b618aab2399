"""Text and tokenizer -> one tokenized shard."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("text", hours=4, reads="text")
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def tokenize(
    recipe: str,
    shard: int,
    of: int,
    tokenizer: dsl.Input[dsl.Artifact],
    tokens: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    corpus: str = "",
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Tokenize one shard of a corpus.

    Args:
        recipe: Name or path of the recipe (group Prepare).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        shard: Number of the shard, from 1.
        of: Number of shards.
        tokenizer: Folder of the step `tokenizer`.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokens: The shard's tokens and documents.
        metrics: The shard's number, documents and tokens.
        contents: Content identifiers of the text, the tokenizer and the model, by address; the step
            fails if the contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.data.run_inputs import require_unchanged
    from lathe.data.sources import Shard
    from lathe.data.tokenize import tokenize

    with stage(recipe, overrides, contents) as settings:
        (folder,) = local(tokenizer)
        part = Shard(shard, of)
        result = tokenize(settings, Path(tokens.path), part, corpus or None, str(folder))
        require_unchanged(contents)
        record(result, metrics, tokens)
