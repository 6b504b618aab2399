"""Verbs that measure, judge and compare models."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    RUN,
    OutputBeside,
    Overrides,
    RecipeName,
    Tasks,
    beside,
    given_tasks,
    input_argument,
    input_option,
    load,
    model_argument,
    named_models,
    output_option,
)
from lathe.console import show, with_error


@app.command(epilog="Example: lathe evaluate run/int8 --cloze lambada_test.jsonl")
def evaluate(
    model: Annotated[
        Path, model_argument("Folder of a checkpoint, HF GPT-2 or `lathe export`.")
    ] = RUN / "int8",
    data: Annotated[
        Path | None, input_option("Folder of `lathe prepare`, for its held-out sets.")
    ] = None,
    cloze: Annotated[Path | None, input_option("LAMBADA-format JSONL.")] = None,
    text: Annotated[Path | None, input_option("Text file, for the perplexity.")] = None,
    task: Tasks = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Measure the server of this gRPC address; MODEL is its export.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        input_option(
            "Checkpoint or export, such as the dense one: record over the text how often both "
            "models rate the same token highest, and the KL divergence, for `lathe gate`."
        ),
    ] = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Measure cloze accuracy (strict LAMBADA), perplexity (as on WikiText) and multiple choice.

    Writes MODEL-eval unless --output says otherwise. Without --data, --cloze, --text and --task it
    measures on run/data. The ONNX file of an export is measured just as its checkpoint is, by
    onnxruntime, and so is the server that `make serve` started: --endpoint localhost:8001. A
    quantized checkpoint is computed as its export would be, unless Offline_Eval.quantized is
    `simulated`. An evaluation that was killed resumes where it stopped.
    """
    settings = load(recipe, override)
    from lathe import backends

    if data is None and cloze is None and text is None and not task:
        data = RUN / "data"
    output = output or beside(model, "eval")
    tasks = given_tasks(task)
    result = backends.of(settings).evaluate(
        settings, model, output, data, cloze, text, endpoint, tasks, reference
    )
    show(
        evaluation=result.folder,
        computed_by=result.engine,
        parameters=result.n_params,
        cloze_accuracy=with_error(result.cloze_accuracy, result.cloze_stderr),
        last_token_accuracy=with_error(result.last_token_accuracy, result.last_token_stderr),
        cloze_word_perplexity=with_error(result.word_perplexity, result.word_perplexity_stderr),
        cloze_examples=result.n_examples or None,
        perplexity=with_error(result.perplexity, result.perplexity_stderr),
        adjusted_perplexity=result.adjusted_perplexity,
        not_held_out="; ".join(result.not_held_out) or None,
        **{
            found.label(measure): with_error(value, stderr)
            for found in result.tasks.values()
            for measure, value, stderr in found.scores()
        },
    )


@app.command(
    epilog="Example: lathe gate run/dense-eval run/int8-eval -o Gate.max_accuracy_drop=0.01"
)
def gate(
    baseline: Annotated[
        Path,
        input_argument("Folder of `lathe evaluate`, or samples of lm_eval: what to be as good as."),
    ] = RUN / "dense-eval",
    candidate: Annotated[
        Path,
        input_argument("Folder of `lathe evaluate`, or samples of lm_eval: what to let through."),
    ] = RUN / "int8-eval",
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: Annotated[Path, output_option("JSON file to write.")] = RUN / "gate.json",
    history: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON file, or address in an object store, that counts the comparisons with this "
            "baseline: each needs more confidence than the one before, so that the verdicts stay "
            "valid however many candidates are compared. It is made if it is absent.",
        ),
    ] = None,
) -> None:
    """Say whether a model has lost too much beside another, example by example.

    A paired test of non-inferiority with the margins of the recipe's Gate: pass, fail, or
    inconclusive ("not proven") where the data are too few to tell. Exit status 0 is a pass, 1 any
    other verdict, whatever Gate.on_inconclusive, which is for pipelines, says.

    Models that lm-evaluation-harness has evaluated are compared too: give the folder, or a
    samples_*.jsonl, that `lm_eval --log_samples` wrote for each, with any tasks. What is shown
    beside the verdict, such as the answers that flipped, is not judged.
    """
    settings = load(recipe, override)
    from rich.console import Console

    from lathe.evaluate.gate import gate, shown_table, verdict_table

    result = gate(settings, baseline, candidate, output, history)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(verdict_table(result))
    if result.shown:
        console.print(shown_table(result))
    for note in result.notes:
        console.print(note, markup=False, highlight=False)
    if result.verdict == "inconclusive":
        console.print(result.reasons[0], style="bold", markup=False, highlight=False)
    show(verdict=result.verdict, look=result.look, written=output)
    if result.verdict != "pass":
        raise typer.Exit(1)


@app.command(epilog="Example: lathe report run/dense run/pruned run/int8 --output report.html")
def report(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]FOLDER...",
            help="Checkpoint folders; the others are compared with the first.",
        ),
    ],
    sensitivity: Annotated[Path | None, input_option("Folder of `lathe analyze`.")] = None,
    deployed: Annotated[Path | None, input_option("Folder of `lathe deploy`.")] = None,
    certificate: Annotated[
        Path | None, input_option("JSON file of `lathe certify-resume`.")
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Annotated[Path, output_option("HTML file to write.")] = RUN / "report.html",
) -> None:
    """Compare models in one self-contained HTML page: quality, size, latency, curves, samples.

    NAME is what the page calls a model; the default is its folder's name.

    Beside a MODEL it finds MODEL-eval and MODEL-onnx, where `lathe evaluate` and `lathe export`
    put them. The last one is judged against the first by the recipe's Gate.
    """
    settings = load(recipe, override)
    from rich.console import Console

    from lathe.report.report import report_run
    from lathe.report.summary import Candidate, summary_table

    candidates = [
        Candidate(name, m, _if_folder(beside(m, "eval")), _if_folder(beside(m, "onnx")))
        for name, m in named_models(models)
    ]
    rows = report_run(settings, candidates, output, sensitivity, deployed, certificate)
    Console().print(summary_table(rows))
    show(report=output)


def _if_folder(path: Path) -> Path | None:
    return path if path.is_dir() else None
