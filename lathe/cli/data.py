"""Commands that prepare training data."""

from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, Output, OutputBeside, Overrides, RecipeName, load
from lathe_base.artifacts.remote import input_path
from lathe_base.console import show

if TYPE_CHECKING:
    from lathe.data.prepare import PreparedData

Source = Annotated[
    str | None,
    typer.Option(
        help="Corpus: text or JSONL (.gz, .bz2, .xz, .zst), a folder of such files, an http(s):// "
        "or s3:// address, a Hugging Face dataset (FOLDER::SPLIT for another split than train), or "
        "newest:PLACE for the newest in a folder or below a prefix. Default: the recipe's "
        "Prepare.source."
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="tokenizer.json, folder with GPT-2's BPE files, or `train` to train one."),
]


@app.command(
    epilog="Example: lathe prepare --source novels.jsonl.xz --tokenizer gpt2/ --output run/novels"
)
def prepare(
    source: Source = None,
    tokenizer: TokenizerOption = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "data",
) -> None:
    """Tokenize a corpus into a token data set, with a tokenizer and held-out sets.

    Without --source it uses the English prose that ships with Python, and downloads nothing. To
    distribute the work over several machines, use `lathe tokenize` and `lathe join`.
    """
    settings = load(recipe, override)
    from lathe.data.prepare import prepare

    made = prepare(settings, output, source, tokenizer)
    _show_data_set(made)


@app.command(epilog="Example: lathe tokenizer --source novels.jsonl.xz --output run/tokenizer")
def tokenizer(
    source: Source = None,
    tokenizer: TokenizerOption = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "tokenizer",
) -> None:
    """Train a corpus's tokenizer on its training documents, as `lathe prepare` does."""
    settings = load(recipe, override)
    from lathe.data.corpus_tokenizer import make_tokenizer

    made = make_tokenizer(settings, output, source, tokenizer)
    show(tokenizer=made.folder, vocabulary=made.vocab_size)


@app.command(
    epilog="Example: lathe tokenize --shard 2/8 --source novels.jsonl.xz --tokenizer run/tokenizer"
)
def tokenize(
    shard: Annotated[
        str,
        typer.Option(metavar="NUMBER/OF", help="Shard number (from 1) and number of shards: 2/8."),
    ],
    source: Source = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, folder with GPT-2's BPE files, or output folder of "
            "`lathe tokenizer`."
        ),
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Tokenize one shard of a corpus; `lathe join` combines the shards into a data set.

    Shards can be tokenized on any machine and in any order. If you repeat the command, a complete
    shard is kept.
    """
    settings = load(recipe, override)
    from lathe.data.sources import Shard
    from lathe.data.tokenize import tokenize

    wanted = Shard.parse(shard)
    path = output or RUN / f"shard-{wanted.number}-of-{wanted.of}"
    made = tokenize(settings, path, wanted, source, tokenizer)
    show(shard=made.folder, documents=made.documents, tokens=made.tokens)


@app.command(epilog="Example: lathe join run/shard-*-of-8 --output run/data")
def join(
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARD...", help="Folders or addresses of all shards.")
    ],
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "data",
) -> None:
    """Combine the tokenized shards of a corpus into the same data set that `lathe prepare` writes,
    byte for byte."""
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
            help="Data sets with the same tokenizer, and their weights.",
        ),
    ],
    output: Output = RUN / "blend",
) -> None:
    """Blend several data sets into one; training samples from each by weight.

    Pass the folder to any stage as --data. Weights are proportions: 7 and 3 are 0.7 and 0.3.
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
