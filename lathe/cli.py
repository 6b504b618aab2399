"""The command line: a verb a stage, the same functions as the pipeline components call."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.console import end_cleanly_on_sigterm, log_to_stderr, print_any_text, show, with_error
from lathe.errors import StageError, UserError, explain_os_error, printable
from lathe.inputs import argument_text
from lathe.remote import input_path, output_path, upload_outputs

# The stages bring torch: the verb that runs imports its own, after its recipe has been read, so
# that help and a mistake in the settings come at once.
if TYPE_CHECKING:
    from lathe.serve.production import Production
    from lathe.settings import Recipe
    from lathe.train.result import TrainResult

app = typer.Typer(
    help="Train, prune, quantize, prove and serve GPT-2/3-family language models.\n\n"
    "The verbs in their order: prepare, pretrain, prune, analyze, quantize, evaluate, gate, "
    "export, deploy, client. Their defaults follow on each other under run/, so that each can be "
    "tried without an option. Folders and files may be addresses, as s3://bucket/run/data. "
    "Settings come from a recipe: `lathe recipe` lists them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=lambda *_: upload_outputs(),
)

RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="A YAML file, or the name of a recipe that ships.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override", "-o", metavar="KEY=VALUE", help="Replace a setting; may be repeated."
    ),
]


def _input(help: str) -> Any:
    return typer.Option(help=help, parser=input_path, metavar="PATH")


def _input_argument(help: str) -> Any:
    return typer.Argument(help=help, parser=input_path)


def _output(help: str) -> Any:
    return typer.Option(help=help, parser=output_path, metavar="PATH")


Data = Annotated[Path, _input("Folder that `lathe prepare` wrote.")]
Model = Annotated[Path, _input_argument("Checkpoint, or HF GPT-2, folder.")]
Output = Annotated[Path, _output("Folder to write.")]
OutputBeside = Annotated[Path | None, _output("Folder to write.")]

RUN = Path("run")


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
    settings = _load(recipe, override)
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
    show(data=made.folder, documents=made.card["documents"], tokens=made.card["tokens"])


@app.command(epilog="Example: lathe pretrain -r gpt-345m -o Engine.max_steps=1000 --data run/data")
def pretrain(
    data: Data = RUN / "data",
    init: Annotated[Path | None, _input("Checkpoint, or HF GPT-2, folder to start from.")] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "dense",
) -> None:
    """Train a GPT on a token data set; a run that was stopped goes on where it was saved.

    With -o Distributed.dp_degree=2 it starts two worker processes; under torchrun it is one.
    """
    settings = _load(recipe, override)
    from lathe.train.pretrain import pretrain

    _train(settings, lambda: pretrain(settings, data, output, init))


@app.command(epilog="Example: lathe plan --recipe gpt-6.7b --gpus 16 --memory 80GB")
def plan(
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there are.")],
    memory: Annotated[str, typer.Option(help="Of one GPU: 80GB, 24g or 40GiB.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs that NVLink joins.")] = 8,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Show the ways to divide a training over GPUs that fit their memory, and pick the fastest.

    The recipe's global batch stays as it is: a layout changes speed and memory, not what is
    learned. Where it cannot be divided over all GPUs, some stay idle. Speeds are of one layout
    against another, from a model of a DGX A100.
    """
    settings = _load(recipe, override)
    from rich.console import Console

    from lathe.train.layout import options
    from lathe.train.plan import make_plan, parse_memory, plan_table

    found = make_plan(settings, gpus, parse_memory(memory), gpus_per_node)
    Console(width=None if sys.stdout.isatty() else 120).print(plan_table(found))
    chosen = " ".join(f"-o {option}" for option in options(settings, found.best.layout))
    show(
        GPUs=found.idle(),
        pick=str(found.best.layout),
        options=chosen or "none: it is the recipe's own",
        recipe=found.verdict(),
    )


@app.command(epilog="Example: lathe prune run/dense -o Compress.Prune.ratio=0.25")
def prune(
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny-prune",
    override: Overrides = None,
    output: Output = RUN / "pruned",
) -> None:
    """Remove whole attention heads and FFN channels, then finetune what is left."""
    settings = _load(recipe, override)
    from lathe.compress.prune import prune

    _train(settings, lambda: prune(settings, model, data, output))


@app.command(epilog="Example: lathe analyze run/pruned -o Sensitivity.metric=kl")
def analyze(
    model: Model = RUN / "pruned",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
    output: Output = RUN / "sensitivity",
) -> None:
    """Rank the linear layers by what INT8 costs in each, and choose those to leave in float.

    Sensitivity.mode ptq (the default) quantizes one at a time, qat takes one at a time of a
    quantized MODEL back to float, fisher estimates all at once from gradients. The cost is in
    Sensitivity.metric loss, kl or accuracy; the fewest layers stay float that bring what is
    predicted for the others within Sensitivity.budget. Pictures are in sensitivity.html.
    """
    settings = _load(recipe, override)
    from lathe.compress.sensitivity.stage import analyze

    result = analyze(settings, model, data, output)
    worst = result.linears[0]
    show(
        analysis=output,
        metric=result.metric,
        baseline=result.baseline,
        most_sensitive=f"{worst.name} ({worst.score:+.2g})",
        leave_in_float=", ".join(result.skip) or "none",
        predicted_cost=result.predicted,
        estimate_rank_correlation=result.rank_correlation,
    )


@app.command(epilog="Example: lathe quantize run/pruned --sensitivity run/sensitivity")
def quantize(
    model: Model = RUN / "pruned",
    data: Data = RUN / "data",
    sensitivity: Annotated[
        Path | None, _input("Folder of `lathe analyze`: its choice stays in float.")
    ] = None,
    recipe: RecipeName = "tiny-qat",
    override: Overrides = None,
    output: Output = RUN / "int8",
) -> None:
    """Train a model to bear INT8 weights and activations (quantization-aware training)."""
    settings = _load(recipe, override)
    from lathe.compress.quantize import quantize

    _train(settings, lambda: quantize(settings, model, data, output, sensitivity))


@app.command(epilog="Example: lathe evaluate run/int8 --cloze lambada_test.jsonl")
def evaluate(
    model: Annotated[
        Path, _input_argument("Checkpoint, HF GPT-2, or `lathe export`, folder.")
    ] = RUN / "int8",
    data: Annotated[
        Path | None, _input("Folder of `lathe prepare`, for its held-out sets.")
    ] = None,
    cloze: Annotated[Path | None, _input("LAMBADA-format JSONL.")] = None,
    text: Annotated[Path | None, _input("Text file, for the perplexity.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Measure the server of this gRPC address; MODEL is its export.",
        ),
    ] = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Measure cloze accuracy (strict LAMBADA) and perplexity (as on WikiText).

    Writes MODEL-eval unless --output says otherwise. Without --data, --cloze and --text it
    measures on run/data. The ONNX file of an export is measured just as its checkpoint is, and so
    is the server that `make serve` started: --endpoint localhost:8001.
    """
    settings = _load(recipe, override)
    from lathe.evaluate.stage import evaluate

    if data is None and cloze is None and text is None:
        data = RUN / "data"
    output = output or _beside(model, "eval")
    result = evaluate(settings, model, output, data, cloze, text, endpoint)
    show(
        evaluation=result.folder,
        parameters=result.n_params,
        cloze_accuracy=with_error(result.cloze_accuracy, result.cloze_stderr),
        last_token_accuracy=with_error(result.last_token_accuracy, result.last_token_stderr),
        cloze_word_perplexity=with_error(result.word_perplexity, result.word_perplexity_stderr),
        cloze_examples=result.n_examples or None,
        perplexity=with_error(result.perplexity, result.perplexity_stderr),
        adjusted_perplexity=result.adjusted_perplexity,
    )


@app.command(
    epilog="Example: lathe gate run/dense-eval run/int8-eval -o Gate.max_accuracy_drop=0.01"
)
def gate(
    baseline: Annotated[
        Path, _input_argument("Folder of `lathe evaluate`: what to be as good as.")
    ] = RUN / "dense-eval",
    candidate: Annotated[
        Path, _input_argument("Folder of `lathe evaluate`: what to let through.")
    ] = RUN / "int8-eval",
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: Annotated[Path, _output("JSON file to write.")] = RUN / "gate.json",
) -> None:
    """Say whether a model has lost too much beside another, example by example.

    A paired test of non-inferiority with the margins of the recipe's Gate: pass, fail, or
    inconclusive where the data are too few to tell. Exit status 0 is a pass, 1 any other verdict;
    Gate.on_inconclusive is for pipelines.
    """
    settings = _load(recipe, override)
    from rich.console import Console

    from lathe.evaluate.gate import gate, verdict_table

    result = gate(settings, baseline, candidate, output)
    Console(width=None if sys.stdout.isatty() else 120).print(verdict_table(result))
    show(verdict=result.verdict, written=output)
    if result.verdict != "pass":
        raise typer.Exit(1)


@app.command(
    epilog="Example: lathe compress run/dense --target latency=0.5 --budget perplexity=0.05"
)
def compress(
    target: Annotated[
        str,
        typer.Option(
            help="latency (of a decoded token), prefill, bytes or parameters=SHARE of dense."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(help="accuracy=-POINTS of the cloze set, or perplexity=RELATIVE INCREASE."),
    ],
    model: Model = RUN / "dense",
    data: Data = RUN / "data",
    cloze: Annotated[
        Path | None, _input("LAMBADA-format JSONL; held-out examples unless given.")
    ] = None,
    recipe: RecipeName = "tiny",
    prune_recipe: Annotated[str, typer.Option(help="Of pruning and its finetuning.")] = (
        "tiny-prune"
    ),
    qat_recipe: Annotated[str, typer.Option(help="Of analysis and quantization.")] = "tiny-qat",
    override: Overrides = None,
    trials: Annotated[int, typer.Option(min=1, help="Most models to try.")] = 4,
    output: Output = RUN / "compressed",
) -> None:
    """Find the least pruned INT8 model that meets a target of speed or size and is still good.

    Every trial prunes, finetunes, ranks, quantizes, exports and evaluates. A killed search goes
    on where it was; another target reuses what was tried. Status 1 if nothing meets both.
    """
    names = (recipe, prune_recipe, qat_recipe)
    settings = tuple(_load(name, override) for name in names)
    from lathe.compress.search import PAGE, compress, parse_goal, require_met
    from lathe.launch.start import start_workers

    def run(verb: str, stage: Callable[[], object], arguments: Sequence[object]) -> None:
        of_verb = 1 if verb == "prune" else 2
        options = ["--recipe", names[of_verb], *_as_options(override)]
        start_workers([verb, *options, *map(str, arguments)], settings[of_verb])
        stage()

    goal = parse_goal(target, budget)
    found = compress(goal, settings, model, data, output, trials, cloze, run)  # type: ignore[arg-type]
    for trial in found.trials:
        show(trial=str(trial))
    show(picture=output / PAGE)
    best = require_met(found)
    show(best=best.name, model=output / best.name / "int8", onnx=output / best.name / "onnx")


@app.command(epilog="Example: lathe export run/int8 --output run/int8-onnx")
def export(
    model: Model = RUN / "int8",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: OutputBeside = None,
) -> None:
    """Write a static ONNX graph with KV cache, and prove that it is the checkpoint.

    Writes MODEL-onnx unless --output says otherwise. A quantized checkpoint gives an INT8 graph.
    """
    settings = _load(recipe, override)
    from lathe.export.stage import export

    output = output or _beside(model, "onnx")
    result = export(settings, model, data, output)
    show(exported=result.folder, flavour=result.flavour, bytes=result.n_bytes)


@app.command(
    "import-paddle",
    epilog="Example: lathe import-paddle epoch_0_step_1000 --tokenizer gpt2/ -r gpt-345m",
)
def import_paddle(
    source: Annotated[
        Path,
        typer.Argument(
            help="model.pdparams of PaddleFleetX, or a folder above it.", parser=input_path
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a folder with GPT-2's BPE.")],
    recipe: RecipeName = "gpt-345m",
    override: Overrides = None,
    output: Output = RUN / "dense",
) -> None:
    """Make a checkpoint folder of PaddleFleetX's GPT. Nothing in the file is run.

    The number of heads is the recipe's Model.num_attention_heads; all else is in the file.
    """
    settings = _load(recipe, override)
    from lathe.paddle.convert import import_checkpoint

    config = import_checkpoint(settings, source, tokenizer, output)
    show(model=output, layers=config.n_layer, parameters=config.n_params())


@app.command("export-paddle", epilog="Example: lathe export-paddle run/dense --dtype float16")
def export_paddle(
    model: Model = RUN / "dense",
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    output: Output = RUN / "paddle",
) -> None:
    """Write a checkpoint as PaddleFleetX's mp_00_sharding_00_pp_00/model.pdparams."""
    from lathe.paddle.convert import export_checkpoint

    if dtype not in ("float32", "float16"):
        raise UserError(f"--dtype {dtype}: not known", "take float32 or float16")
    show(file=export_checkpoint(model, output, dtype))


@app.command(epilog="Example: lathe deploy run/int8-onnx --model run/int8 -o Serving.http_port=0")
def deploy(
    exported: Annotated[Path, _input_argument("Folder of `lathe export`.")] = RUN / "int8-onnx",
    model: Annotated[Path, _input("The checkpoint it was exported from.")] = RUN / "int8",
    data: Annotated[Path | None, _input("Folder of `lathe prepare`, for held-out prompts.")] = None,
    keep_running: Annotated[bool, typer.Option(help="Leave the server up.")] = True,
    production: Annotated[
        bool, typer.Option("--production", help="Then publish it, and make it live.")
    ] = False,
    evaluation: Annotated[
        Path | None, _input("Folder of `lathe evaluate`, whose figures the release keeps.")
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Make the release before the live one live again.")
    ] = False,
    to: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Which release to roll back to.")
    ] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "deploy",
) -> None:
    """Build a Triton model repository, serve it, and compare its text with the checkpoint's.

    The server stays up on loopback: `lathe client` talks to it, `lathe stop` ends it.

    With --production it ends instead, and the repository is published below Production.releases
    under its digest, fetched back, served again, held to its golden prompts, a load within
    Production.p99_* and malformed requests, and the Deployment of the current cluster is rolled
    to it, if there is one. Where that fails, what was live is live. --rollback does the last step
    alone.
    """
    settings = _load(recipe, override)
    if to is not None and not rollback:
        raise UserError(f"--to {to} without --rollback", "give both")
    if rollback:
        from lathe.serve.production import roll_back

        _show_live(roll_back(settings, to))
        return
    from lathe.serve.deploy import deploy

    if production:
        from lathe.serve.release import releases_of

        releases_of(settings)
    result = deploy(settings, exported, model, output, data, keep_running and not production)
    show(
        repository=result.repository,
        same_text=f"{result.identical} of {result.prompts} prompts",
        ready_in_seconds=result.start_seconds,
        first_token_ms=result.first_token_ms,
        tokens_per_second=result.tokens_per_second,
    )
    if production:
        from lathe.serve.production import deploy_to_production

        _show_live(deploy_to_production(settings, output, evaluation))


@app.command(epilog="Example: lathe releases -o Production.releases=s3://models/releases")
def releases(recipe: RecipeName = "tiny", override: Overrides = None) -> None:
    """List what has been published: digest, when, what is and was live, and how good it is."""
    settings = _load(recipe, override)
    from rich.console import Console

    from lathe.serve.production import releases_table

    Console(width=None if sys.stdout.isatty() else 120).print(releases_table(settings))


@app.command(epilog="Example: lathe serve run/deploy")
def serve(
    deployed: Annotated[Path, typer.Argument(help="Folder of `lathe deploy`.")] = RUN / "deployed",
) -> None:
    """Start the server of a deployed folder again; the default is the last pipeline run's."""
    from lathe.serve.deploy import serve

    state = serve(deployed)
    show(model=state.model_name, http=state.http, grpc=state.grpc)


@app.command()
def stop() -> None:
    """Stop the server that `lathe deploy` or `lathe serve` left running."""
    from lathe.serve.state import stop

    stopped = stop()
    print(f"stopped {stopped.http}" if stopped else "no server is running")


@app.command(epilog='Example: lathe client "Once upon a time" --max-tokens 40 --greedy')
def client(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to go on from; default: line by line from the input.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same sample again.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token always.")] = False,
    score: Annotated[
        str | None, typer.Option(help="Say how likely this continuation is, and generate nothing.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="gRPC HOST:PORT; default: the server of this folder.")
    ] = None,
    model_name: Annotated[str, typer.Option(help="Its name on that server.")] = "gpt",
) -> None:
    """Ask the running server to continue a prompt, and print its text as it comes.

    Without a PROMPT it asks for one after another: Ctrl-C ends an answer, Ctrl-D the conversation.
    What is not given is the server's default, from the recipe it was deployed with.
    """
    from lathe.serve.client import Client, connect
    from lathe.serve.conversation import ask, lines

    parameters = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "decode_strategy": "greedy_search" if greedy else None,
    }
    prompt = None if prompt is None else argument_text(prompt, "prompt")
    score = None if score is None else argument_text(score, "--score")
    with Client(url, model_name) if url is not None else connect() as server:
        if score is not None:
            likelihoods, is_greedy = server.score_text(prompt or "", score)
            show(
                log_likelihood=float(likelihoods.sum()),
                tokens=likelihoods.size,
                greedy=str(bool(is_greedy.all())).lower(),
            )
        elif prompt is not None:
            ask(server, prompt, parameters)
        else:
            for line in lines():
                with suppress(KeyboardInterrupt):  # wherever in an answer it comes
                    ask(server, line, parameters, goes_on=True)


@app.command(epilog="Example: lathe playground, then open the address that it prints")
def playground(
    port: Annotated[int, typer.Option(min=0, help="Of the page; 0: any free one.")] = 8080,
) -> None:
    """A web page to try the running server with, until Ctrl-C; ?prompt=... in its address asks."""
    from lathe.serve import state
    from lathe.serve.playground import playground

    server = state.find()
    if server is None:
        raise UserError("no server is running", "start one with `make serve`")
    with playground(server.http, server.model_name, port) as address:
        show(playground=address, model=server.model_name)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()


@app.command(
    "bench-serve", epilog="Example: lathe bench-serve --clients 16 --requests 200 --output run/load"
)
def bench_serve(
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, at random times, whoever has been answered."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="In all.")] = 100,
    tokens: Annotated[
        str, typer.Option(metavar="MIN:MAX", help="New tokens of a request, drawn evenly.")
    ] = "16:64",
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a prompt a line; default: a few openings.")
    ] = None,
    first_token: Annotated[
        float, typer.Option(help="Objective: seconds to the first token.")
    ] = 1.0,
    between_tokens: Annotated[
        float, typer.Option(help="Objective: mean seconds from a token to the next.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and samples.")] = 0,
    url: Annotated[
        str | None, typer.Option(help="gRPC HOST:PORT; default: the server of this folder.")
    ] = None,
    model_name: Annotated[str, typer.Option(help="Its name on that server.")] = "gpt",
    output: Annotated[Path, typer.Option(help="Folder to write.")] = RUN / "load",
) -> None:
    """Put load on a running server: how long do its users wait?

    A closed loop of --clients, each asking again when it is answered; with --rate an open loop, in
    which requests come whether or not the server keeps up. Writes load.json and load.html.
    """
    from lathe.serve.bench import bench

    low, high = _span("--tokens", tokens)
    shape = {"clients": clients, "rate": rate, "requests": requests, "seed": seed}
    objective = first_token, between_tokens
    summary = bench((low, high), shape, objective, prompts, url, model_name, output)
    show(
        page=output / "load.html",
        tokens_per_second=f"{summary.tokens_per_second:.1f}",
        requests_per_second=f"{summary.requests_per_second:.2f}",
        goodput=f"{summary.goodput:.2f}",
        first_token=_milliseconds(summary.first_token),
        between_tokens=_milliseconds(summary.between_tokens),
        failed=f"{summary.failed} of {summary.requests}",
    )


@app.command(
    epilog='Example: lathe generate run/dense "The day" -o Generation.decode_strategy=beam_search'
)
def generate(
    model: Annotated[Path, _input_argument("Checkpoint, or HF GPT-2, folder.")],
    prompts: Annotated[list[str], typer.Argument(help="Texts to go on from.")],
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Continue prompts with a checkpoint itself, without a server.

    How is the recipe's group Generation, which -o Generation.KEY=VALUE changes. decode_strategy:

    * sampling draws from the top_k likeliest tokens, and of these from the fewest that together
      have probability top_p, at a temperature; the same Global.seed draws the same

    * greedy_search takes the likeliest token

    * beam_search keeps the num_beams likeliest texts; a larger length_penalty favours longer ones

    For all: at least min_dec_len and at most max_dec_len tokens; a repetition_penalty above 1
    discourages words that were there; num_return_sequences texts a prompt. Prompts from a file, one
    a line: xargs -d '\\n' lathe generate run/dense < prompts.txt
    """
    settings = _load(recipe, override)
    prompts = [argument_text(prompt, "prompt") for prompt in prompts]
    from lathe.model.checkpoint import load_checkpoint
    from lathe.model.generate import generate
    from lathe.progress import bar

    checkpoint = load_checkpoint(model)
    tokens = [checkpoint.tokenizer.encode(t, add_special_tokens=False).ids for t in prompts]
    with bar("generate", total=settings.Generation.max_dec_len) as progress:
        seed, eos = settings.Global.seed, checkpoint.eos_id
        new = generate(checkpoint.model, tokens, settings.Generation, eos, seed, progress)
    copies = settings.Generation.num_return_sequences
    for i, ids in enumerate(new):
        print(prompts[i // copies] + checkpoint.tokenizer.decode(ids))


@app.command(epilog="Example: lathe report run/dense run/pruned run/int8 --output report.html")
def report(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Checkpoint folders; the others are compared with the first.", parser=input_path
        ),
    ],
    sensitivity: Annotated[Path | None, _input("Folder of `lathe analyze`.")] = None,
    deployed: Annotated[Path | None, _input("Folder of `lathe deploy`.")] = None,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Annotated[Path, _output("HTML file to write.")] = RUN / "report.html",
) -> None:
    """Compare models in one self-contained HTML page: quality, size, latency, curves, samples.

    Beside a MODEL it finds MODEL-eval and MODEL-onnx, where `lathe evaluate` and `lathe export`
    put them. The last one is judged against the first by the recipe's Gate.
    """
    settings = _load(recipe, override)
    from rich.console import Console

    from lathe.report.stage import report_run
    from lathe.report.summary import Candidate, summary_table

    candidates = [
        Candidate(
            printable(m.name), m, _if_folder(_beside(m, "eval")), _if_folder(_beside(m, "onnx"))
        )
        for m in models
    ]
    rows = report_run(settings, candidates, output, sensitivity, deployed)
    Console().print(summary_table(rows))
    show(report=output)


@app.command(epilog="Example: lathe recipe gpt-345m -o Model.num_layers=12 > mine.yaml")
def recipe(
    name: Annotated[str | None, typer.Argument(help="Recipe to print; none: list them.")] = None,
    override: Overrides = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Say what a setting, or a whole group of them, means."),
    ] = None,
) -> None:
    """Print a recipe with its bases merged and every default filled in, as YAML.

    With --explain it prints what KEY means, its range and default, and its value in the recipe.
    """
    import yaml

    from lathe.recipe import shipped_recipes

    if name is None and override:
        raise UserError(f"-o {override[0]}: of no recipe", "name it: lathe recipe tiny -o ...")
    if explain is not None:
        from lathe.explain import explain as text_of

        print(text_of(explain, _load(name, override) if name is not None else None, name or ""))
        return
    if name is None:
        print("\n".join(shipped_recipes()))
        return
    settings = _load(name, override).model_dump(mode="json")
    print(yaml.safe_dump(settings, sort_keys=False), end="")


def main() -> None:
    """Run the command line; a user's mistake is one message and status 2, no traceback."""
    print_any_text()
    log_to_stderr()
    end_cleanly_on_sigterm()
    try:
        app(prog_name="lathe")
    except BrokenPipeError:  # of `lathe recipe tiny | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except UnicodeEncodeError as error:  # of a library in Rust
        print(f"error: {printable(error.object)}: not UTF-8", file=sys.stderr)
        print("  cure: rename the file or folder", file=sys.stderr)
        sys.exit(UserError.status)
    except (UserError, StageError, OSError) as error:
        told = explain_os_error(error) if isinstance(error, OSError) else error
        print(f"{told.kind}: {told}", file=sys.stderr)
        sys.exit(told.status)


def _load(name: str, overrides: list[str] | None) -> "Recipe":
    from lathe.recipe import load_recipe

    return load_recipe(name, overrides or [])


def _as_options(overrides: list[str] | None) -> list[str]:
    return [part for value in overrides or [] for part in ("-o", value)]


def _span(option: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = 0, 0
    if not 0 < span[0] <= span[1]:
        raise UserError(f"{option} {text}: not understood", "write MIN:MAX, as 16:64")
    return span


def _show_live(made: "Production") -> None:
    test = made.acceptance
    show(
        live=made.address,
        before=made.before,
        golden_prompts=test and f"{test.identical} of {test.prompts} the same to the end",
        p99_first_token_ms=test and test.first_token_ms,
        p99_between_tokens_ms=test and test.between_tokens_ms,
        rolled="the Deployment" if made.rolled else "no Deployment: the pointer alone has moved",
    )


def _milliseconds(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in percentiles.items())


def _beside(model: Path, suffix: str) -> Path:
    if not model.name:
        raise UserError(f"{model}: has no name to put {suffix} behind", "give --output")
    return model.with_name(f"{model.name}-{suffix}")


def _if_folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _train(settings: "Recipe", stage: Callable[[], "TrainResult"]) -> None:
    """Run a training stage here, or the whole command again in the workers that it asks for."""
    from lathe.launch.start import start_workers

    if start_workers(sys.argv[1:], settings):
        return
    result = stage()
    if os.environ.get("RANK", "0") != "0":
        return
    show(
        model=result.folder,
        steps=result.step,
        parameters=result.n_params,
        loss=result.loss,
        first_perplexity=result.first_eval_perplexity,
        perplexity=result.eval_perplexity,
        tokens_per_second=result.tokens_per_second,
    )
