"""Commands that evaluate and compare models."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    DATA,
    EVALUATED_MODEL,
    RUN,
    OutputBeside,
    Overrides,
    RecipeName,
    Tasks,
    beside,
    input_argument,
    input_option,
    load,
    located,
    model_argument,
    named_models,
    output_option,
    parse_tasks,
)
from lathe_base.console import show, with_error


@app.command(epilog="Example: lathe evaluate run/int8 --cloze lambada_test.jsonl")
def evaluate(
    ctx: typer.Context,
    model: Annotated[
        Path, model_argument("Folder with a checkpoint, Hugging Face model or export.")
    ] = RUN / "int8",
    data: Annotated[
        Path | None, input_option("Folder written by `lathe prepare`, with held-out sets.")
    ] = None,
    cloze: Annotated[Path | None, input_option("Cloze set: JSONL in LAMBADA's format.")] = None,
    text: Annotated[Path | None, input_option("Text file for the perplexity.")] = None,
    task: Tasks = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Evaluate the server at this gRPC address; MODEL is its export.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        input_option(
            "Reference checkpoint or export, such as the dense model: also record top-1 agreement "
            "and KL divergence on the text, for `lathe gate`."
        ),
    ] = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Measure cloze accuracy (strict LAMBADA), perplexity (as on WikiText), multiple choice and
    generated answers.

    The default output is MODEL-eval. Without --data, --cloze, --text and --task it evaluates on
    run/data. MODEL can also be an export, evaluated with the runtime Offline_Eval.runtime;
    --endpoint localhost:8001 evaluates the server that `make serve` started. A quantized checkpoint
    is evaluated as its exported graph, unless Offline_Eval.quantized is `simulated`. Answers are
    generated as Offline_Eval.answers says, and twice, unless Offline_Eval.noise_floor is False: on
    how many a model disagrees with itself is the gate's noise floor. A killed evaluation resumes.
    """
    settings = load(recipe, override)
    from lathe import backends
    from lathe.evaluate.evaluation_folder import STDERR

    model = located(ctx, settings, "model", model, EVALUATED_MODEL)
    # The default data set is only for who names nothing to evaluate on.
    named = settings.Offline_Eval.eval_path or settings.Offline_Eval.tasks
    if data is None and not (cloze or text or task or named):
        data = located(ctx, settings, "data", RUN / "data", DATA)
    output = output or beside(model, "eval")
    tasks = parse_tasks(task)
    result = backends.of(settings).evaluate(
        settings, model, output, data, cloze, text, endpoint, tasks, reference
    )
    show(
        evaluation=result.folder,
        computed_by=result.engine,
        parameters=result.n_params,
        not_held_out="; ".join(result.not_held_out) or None,
        **{
            name: with_error(value, stderr) if stderr is not None else value
            for name, value in result.figures.items()
            if not name.endswith(STDERR)
            for stderr in [result.figures.get(f"{name}{STDERR}")]
        },
    )


@app.command(
    epilog="Example: lathe gate run/dense-eval run/int8-eval -o Gate.max_accuracy_drop=0.01"
)
def gate(
    baseline: Annotated[
        Path,
        input_argument("Baseline: folder written by `lathe evaluate`, or lm_eval samples."),
    ] = RUN / "dense-eval",
    candidate: Annotated[
        Path,
        input_argument("Candidate: folder written by `lathe evaluate`, or lm_eval samples."),
    ] = RUN / "int8-eval",
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: Annotated[Path, output_option("Output JSON file.")] = RUN / "gate.json",
    history: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON file, or address in an object store, that counts comparisons with this "
            "baseline (alpha spending): each requires more confidence than the one before, so "
            "that verdicts stay valid for any number of candidates. Created if it does not "
            "exist.",
        ),
    ] = None,
) -> None:
    """Test whether a model is non-inferior to a baseline, example by example.

    A paired non-inferiority test with the margins in the recipe's Gate group. The verdict is pass,
    fail, or inconclusive ("not proven") if there is too little data. The exit status is 0 for a
    pass and 1 for any other verdict, regardless of Gate.on_inconclusive, which applies to
    pipelines.

    It also compares models evaluated by lm-evaluation-harness, on any tasks: give the folder, or a
    samples_*.jsonl, that `lm_eval --log_samples` wrote for each. Other figures in the output, such
    as flipped answers, are for information only.
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
            help="Checkpoint folders; the first is the baseline of the comparison.",
        ),
    ],
    sensitivity: Annotated[Path | None, input_option("Folder written by `lathe analyze`.")] = None,
    deployed: Annotated[Path | None, input_option("Folder written by `lathe deploy`.")] = None,
    certificate: Annotated[
        Path | None, input_option("JSON file written by `lathe certify-resume`.")
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Annotated[Path, output_option("Output HTML file.")] = RUN / "report.html",
) -> None:
    """Compare models in one self-contained HTML page: quality, size, latency, curves, samples.

    NAME is a model's name on the page; the default is its folder's name.

    Evaluations and exports are read from MODEL-eval and MODEL-onnx, the default outputs of `lathe
    evaluate` and `lathe export`. The last model is compared with the first by the recipe's Gate.
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
