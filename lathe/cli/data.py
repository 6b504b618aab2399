"""Verbs that make training data."""

from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Output, OutputBeside, Overrides, RecipeName, load
from lathe.console import show
from lathe.storage.artifacts.remote import input_path

if TYPE_CHECKING:
    from lathe.data.prepare import PreparedData

Source = Annotated[
    str | None,
    typer.Option(
        help="Text, JSONL (.gz, .xz, .zst), a folder of them, an http(s):// or s3:// address, "
        "a Hugging Face data set, or newest:PLACE, the newest one in a folder or below a "
        "prefix; the recipe's Prepare.source unless given."
    ),
]
GivenTokenizer = Annotated[
    str | None, typer.Option(help="tokenizer.json, a folder with GPT-2's BPE, or `train`.")
]


@app.command(
    epilog="Example: lathe prepare --source novels.jsonl.xz --tokenizer gpt2/ --output run/novels"
)
def prepare(
    source: Source = None,
    tokenizer: GivenTokenizer = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "data",
) -> None:
    """Turn a corpus into a token data set, a tokenizer and held-out sets.

    Without --source it is the English prose that ships with Python: nothing is downloaded.
    `lathe tokenize` and `lathe join` do the same on several machines.
    """
    settings = load(recipe, override)
    from lathe.data.prepare import prepare

    made = prepare(settings, output, source, tokenizer)
    _show_data_set(made)


@app.command(epilog="Example: lathe tokenizer --source novels.jsonl.xz --output run/tokenizer")
def tokenizer(
    source: Source = None,
    tokenizer: GivenTokenizer = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "tokenizer",
) -> None:
    """Train the tokenizer of a corpus, as prepare does, on the training documents alone."""
    settings = load(recipe, override)
    from lathe.data.corpus_tokenizer import make_tokenizer

    made = make_tokenizer(settings, output, source, tokenizer)
    show(tokenizer=made.folder, vocabulary=made.vocab_size)


@app.command(
    epilog="Example: lathe tokenize --shard 2/8 --source novels.jsonl.xz --tokenizer run/tokenizer"
)
def tokenize(
    shard: Annotated[
        str, typer.Option(metavar="NUMBER/OF", help="Which shard of how many, from 1: 2/8.")
    ],
    source: Source = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="As prepare's, or the folder of `lathe tokenizer`; `train` is none."),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Tokenize one shard of a corpus; `lathe join` makes the data set of all of them.

    Shards may be tokenized anywhere and in any order. One that is complete is kept when the
    command is repeated.
    """
    settings = load(recipe, override)
    from lathe.data.shard import Shard
    from lathe.data.tokenize import tokenize

    wanted = Shard.parse(shard)
    place = output or RUN / f"shard-{wanted.number}-of-{wanted.of}"
    made = tokenize(settings, place, wanted, source, tokenizer)
    show(shard=made.folder, documents=made.documents, tokens=made.tokens)


@app.command(epilog="Example: lathe join run/shard-*-of-8 --output run/data")
def join(
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARD...", help="Every shard's folder or address.")
    ],
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "data",
) -> None:
    """Make a data set of the tokenized shards of a corpus, byte for byte that of prepare."""
    settings = load(recipe, override)
    from lathe.data.join import join

    made = join(settings, [input_path(shard) for shard in shards], output)
    _show_data_set(made)


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


def _show_data_set(made: "PreparedData") -> None:
    show(
        data=made.folder,
        documents=made.documents,
        tokens=made.tokens,
        vocabulary=made.vocab_size,
        cloze_examples=made.cloze_examples,
    )
