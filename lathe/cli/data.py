"""Verbs that make training data."""

from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Output, Overrides, RecipeName, load
from lathe.console import show


@app.command(
    epilog="Example: lathe prepare --source novels.jsonl.xz --tokenizer gpt2/ --output run/novels"
)
def prepare(
    source: Annotated[
        str | None,
        typer.Option(
            help="Text, JSONL (.gz, .xz, .zst), a folder of them, an http(s):// or s3:// address, "
            "a Hugging Face data set, or newest:PLACE, the newest one in a folder or below a "
            "prefix; the recipe's Prepare.source unless given."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="tokenizer.json, a folder with GPT-2's BPE, or `train`."),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "data",
) -> None:
    """Turn a corpus into a token data set, a tokenizer and held-out sets.

    Without --source it is the English prose that ships with Python: nothing is downloaded.
    """
    settings = load(recipe, override)
    from lathe.data.prepare import prepare

    made = prepare(settings, output, source, tokenizer)
    show(
        data=made.folder,
        documents=made.documents,
        tokens=made.tokens,
        vocabulary=made.vocab_size,
        cloze_examples=made.cloze_examples,
    )


@app.command(epilog="Example: lathe blend run/novels=0.7 run/python=0.3 --output run/blend")
def blend(
    parts: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER=WEIGHT...",
            help="Data sets of one tokenizer, and how often to draw from each.",
        ),
    ],
    output: Output = RUN / "blend",
) -> None:
    """Make one data set of several; training draws from each by its weight.

    Every stage takes the folder as its --data. Weights are proportions: 7 and 3 are 0.7 and 0.3.
    """
    from lathe.data.blend import blend, parse_part

    made = blend([parse_part(part) for part in parts], output)
    show(data=made.folder, documents=made.metadata["documents"], tokens=made.metadata["tokens"])
