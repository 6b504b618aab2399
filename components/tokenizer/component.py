"""Text -> tokenizer, before the text is tokenized in shards."""

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("text", hours=4, reads="text")
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def tokenizer(
    recipe: str,
    vocabulary: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    corpus: str = "",
    tokenizer: str = "",
    model: dsl.Input[dsl.Model] = None,
    contents: dict = {},  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
):
    """Train a tokenizer on a corpus, or use the given one.

    Args:
        recipe: Name or path of the recipe (groups Prepare and Data).
        overrides: Settings that replace the recipe's, as `Group.key=value`.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty, else the recipe's.
        model: A model whose tokenizer is used.
        vocabulary: Folder with the tokenizer and its origin.
        metrics: Vocabulary size.
        contents: Content identifiers of the text, the tokenizer and the model, by address; the step
            fails if the contents differ.
    """
    from pathlib import Path

    from components.artifacts import local, record
    from components.stage import stage
    from lathe.data.corpus_tokenizer import make_tokenizer
    from lathe.data.run_inputs import require_unchanged
    from lathe_base.artifacts.remote import input_path

    with stage(recipe, overrides, contents) as settings:
        (of_model,) = local(model)
        tokenizer_path = input_path(tokenizer) if tokenizer else of_model
        result = make_tokenizer(
            settings, Path(vocabulary.path), corpus or None, tokenizer_path and str(tokenizer_path)
        )
        require_unchanged(contents)
        record(result, metrics, vocabulary)
