"""Commands that deploy, query, benchmark and stop a server."""

import logging
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    EVALUATED_MODEL,
    RUN,
    Output,
    Overrides,
    RecipeName,
    input_argument,
    input_option,
    load,
    located,
    model_path,
    named_models,
)
from lathe_base.console import show
from lathe_base.errors import Code, UserError, printable
from lathe_base.inputs import argument_text

if TYPE_CHECKING:
    from lathe_base.config.settings import Recipe

log = logging.getLogger("lathe")

Url = Annotated[
    str | None,
    typer.Option(
        help="Server: Triton's gRPC HOST:PORT, or the base URL of an OpenAI-compatible API, "
        "http://HOST:PORT/v1. Default: the server started from this folder."
    ),
]


@app.command(epilog="Example: lathe deploy run/int8-onnx --model run/int8 -o Serving.http_port=0")
def deploy(
    ctx: typer.Context,
    exported: Annotated[Path, input_argument("Folder written by `lathe export`.")] = RUN
    / "int8-onnx",
    model: Annotated[Path, input_option("Checkpoint that was exported.")] = RUN / "int8",
    data: Annotated[
        Path | None, input_option("Folder written by `lathe prepare`, with held-out prompts.")
    ] = None,
    keep_running: Annotated[bool, typer.Option(help="Keep the server running.")] = True,
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    output: Output = RUN / "deploy",
) -> None:
    """Build a Triton model repository, serve it, and compare its text with the checkpoint's.

    The server keeps running on loopback: query it with `lathe client`, stop it with `lathe stop`.
    `lathe release publish` puts the repository into production.
    """
    settings = load(recipe, override)
    from lathe.release.deploy import deploy

    exported = located(ctx, settings, "exported", exported, ("Inference.model_dir",))
    model = located(ctx, settings, "model", model, EVALUATED_MODEL)
    result = deploy(settings, exported, model, output, data, keep_running)
    show(
        repository=result.repository,
        same_text=result.same_text,
        ready_in_seconds=result.start_seconds,
        first_token_ms=result.first_token_ms,
        tokens_per_second=result.tokens_per_second,
    )


@app.command(epilog="Example: lathe serve run/deploy")
def serve(
    deployed: Annotated[Path, typer.Argument(help="Folder written by `lathe deploy`.")] = RUN
    / "deployed",
) -> None:
    """Start a server from a deployed folder; the default is that of the last pipeline run.

    LATHE_API_KEYS names a file with the keys that clients must send, and limits.yaml beside it
    limits them by their names. OTEL_EXPORTER_OTLP_ENDPOINT is where traces are sent.
    """
    from lathe.release.deploy import serve

    state = serve(deployed)
    show(model=state.model_name, http=state.http, grpc=state.grpc, openai=state.openai)


@app.command()
def stop() -> None:
    """Stop the server started by `lathe deploy` or `lathe serve`."""
    from lathe_serving.state import stop

    stopped = stop()
    print(f"stopped {stopped.http}" if stopped else "no server is running")


@app.command(epilog='Example: lathe client "Once upon a time" --max-tokens 40 --greedy')
def client(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Prompt. Default: read one prompt per line from standard input."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling threshold (top-p).")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy decoding.")] = False,
    score: Annotated[
        str | None,
        typer.Option(help="Print the log-likelihood of this continuation instead of generating."),
    ] = None,
    url: Url = None,
    model_name: Annotated[str, typer.Option(help="Name of the model on the server.")] = "gpt",
) -> None:
    """Send a prompt to the running server, and stream the answer.

    Without a PROMPT it is interactive: Ctrl-C ends an answer, Ctrl-D the session. Parameters that
    are not given have the server's defaults: Triton's come from the recipe it was deployed with,
    OpenAI's from its API. LATHE_API_KEY is sent to an OpenAI-compatible API.
    """
    from lathe_serving.client import Client, connect
    from lathe_serving.client.conversation import ask, lines

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


@app.command(
    epilog="Example: lathe playground dense=run/dense-onnx int8=run/int8-onnx, then open the URL "
    "that it prints"
)
def playground(
    exports: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]EXPORT...",
            help="Exported folders to serve while the page is open. Default: the running server.",
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Base URL of another OpenAI-compatible API, http://HOST:PORT/v1; may be repeated.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, help="Port of the web page; 0 picks a free one.")
    ] = 8080,
) -> None:
    """Serve a web page to try a model, or compare two, until Ctrl-C.

    It streams tokens, and shows the probability of each and the alternatives. EXPORTs are served
    by their own server while the page is open. ?prompt=... in the page's URL sends a prompt.
    """
    from lathe_serving.client.playground import playground, running_endpoint, serve_exports

    urls = list(url or [])
    with ExitStack() as stack:
        if exports:
            server = stack.enter_context(serve_exports(dict(named_models(exports))))
            urls = [str(server.state.openai), *urls]
        address = stack.enter_context(playground(urls or [running_endpoint()], port))
        with suppress(KeyboardInterrupt):
            show(playground=address)
            # Until Ctrl-C; the page is served by threads.
            signal.pause()
        print()


@app.command(
    "bench-serve", epilog="Example: lathe bench-serve --clients 16 --requests 200 --output run/load"
)
def bench_serve(
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent clients.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, with random arrival times (open loop)."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Total number of requests.")] = 100,
    tokens: Annotated[
        str,
        typer.Option(metavar="MIN:MAX", help="Range of new tokens per request, sampled uniformly."),
    ] = "16:64",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt per line. Default: a few built-in openings."),
    ] = None,
    first_token: Annotated[
        float, typer.Option(help="Latency objective: time to first token, in seconds.")
    ] = 1.0,
    between_tokens: Annotated[
        float,
        typer.Option(help="Latency objective: time per output token after the first, in seconds."),
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed for lengths, arrivals and sampling.")] = 0,
    url: Url = None,
    model_name: Annotated[str, typer.Option(help="Name of the model on the server.")] = "gpt",
    output: Annotated[Path, typer.Option(help="Output folder.")] = RUN / "load",
) -> None:
    """Measure a running server's latency under load.

    A closed loop of --clients, each of which sends its next request when the last one is answered;
    with --rate an open loop, in which requests arrive regardless of the server's speed. Latencies
    are those of vLLM's benchmark: time to first token (TTFT), time per output token after the first
    (TPOT), inter-token latency (ITL, between two chunks of a stream) and end-to-end latency (E2E).
    Writes load.json and load.html.
    """
    from lathe_serving.client.bench import bench

    first, _, last = tokens.partition(":")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low, high = 0, 0
    if not 0 < low <= high:
        raise UserError(
            f"--tokens {tokens}: not understood",
            "write MIN:MAX, such as 16:64",
            Code.INVALID_VALUE,
        )
    shape = {"clients": clients, "rate": rate, "requests": requests, "seed": seed}
    objective = first_token, between_tokens
    summary = bench((low, high), shape, objective, prompts, url, model_name, output)
    show(
        page=output / "load.html",
        tokens_per_second=f"{summary.tokens_per_second:.1f}",
        requests_per_second=f"{summary.requests_per_second:.2f}",
        goodput=f"{summary.goodput:.2f}",
        ttft=_milliseconds(summary.first_token),
        tpot=_milliseconds(summary.per_output_token),
        itl=_milliseconds(summary.between_tokens),
        e2e=_milliseconds(summary.end_to_end),
        failed=f"{summary.failed} of {summary.requests}",
    )


@app.command(
    epilog='Example: lathe generate run/dense "The day" -o Generation.decode_strategy=beam_search'
)
def generate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL PROMPT...",
            help="Folder with a checkpoint or Hugging Face model, which may be an address or "
            "hf://NAME, and prompts. Without a MODEL, the recipe's Engine.save_load.ckpt_dir.",
        ),
    ],
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Generate text with a checkpoint, without a server.

    The recipe's group Generation has the parameters; change them with -o Generation.KEY=VALUE.
    Those that you do not set are the model's own, of its generation_config.json, if it has them.
    decode_strategy is one of:

    * sampling samples at a temperature from the top_k most likely tokens whose probabilities add up
      to top_p; the same Global.seed gives the same text

    * greedy_search always takes the most likely token

    * beam_search keeps the num_beams most likely texts; a larger length_penalty favors longer ones

    Every text has between min_dec_len and max_dec_len tokens; a repetition_penalty above 1
    penalizes repeated tokens; num_return_sequences is the number of texts per prompt. To read
    prompts from a file, one per line: xargs -d '\\n' lathe generate run/dense < prompts.txt
    """
    settings = load(recipe, override)
    model, prompts = _model_and_prompts(settings, arguments)
    from lathe.data.tokenizer import continuation
    from lathe.model.checkpoint import load_checkpoint
    from lathe.model.generate import generate
    from lathe_base.progress import bar
    from lathe_serving.runtime.text import encode_prompts

    checkpoint = load_checkpoint(model)
    tokens = encode_prompts(checkpoint.tokenizer, prompts)
    parameters = checkpoint.model.config.sampling.complete(settings.Generation)
    with bar("generate", total=parameters.max_dec_len) as progress:
        seed, ends = settings.Global.seed, checkpoint.end_ids
        new = generate(checkpoint.model, tokens, parameters, ends, seed, progress)
    copies = parameters.num_return_sequences
    # Texts of a prompt come one after the other.
    for i, ids in enumerate(new):
        prompt = i // copies
        print(prompts[prompt] + continuation(checkpoint.tokenizer, tokens[prompt], ids))


def _model_and_prompts(settings: "Recipe", arguments: list[str]) -> tuple[Path, list[str]]:
    """The model, and the prompts after it; if the recipe names a model, one before them is only
    taken for a model if it is a folder or an address."""
    first, *prompts = [argument_text(argument, "prompt") for argument in arguments]
    stated = settings.Engine.save_load.ckpt_dir
    if stated and not (Path(first).is_dir() or "://" in first):
        return model_path(stated), [first, *prompts]
    if stated and Path(first) != Path(stated):
        log.warning("%s is used as model, not the recipe's Engine.save_load.ckpt_dir", first)
    if not prompts:
        raise UserError(
            "no prompt",
            f'lathe generate {printable(first)} "Once upon a time"',
            Code.MISSING_OPTION,
        )
    return model_path(first), prompts


def _milliseconds(statistics: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in statistics.items())
