"""Turns an export into a Triton model repository, and rehearses it on a real server.

The stage passes only if the server generates the same as the checkpoint: greedy tokens for held-out
prompts are compared with the checkpoint's in torch, over gRPC and HTTP, streamed and not, one by
one and concurrently.
"""

import json
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lathe.data.tokens import read_data_metadata
from lathe.export.formats.compressed_tensors import with_float_inputs
from lathe.export.prompts import shares
from lathe.export.prove import TIE
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.config import read_config
from lathe.model.generate import generate
from lathe.release.rehearsal import RehearsedAnswer, ask, ask_http, ask_together, greedy
from lathe_base.artifacts.kinds import DEPLOYMENT, EXPORT, checked, open_export, read_json
from lathe_base.artifacts.kinds import REPOSITORY as REPOSITORY_KIND
from lathe_base.config.settings import GenerationSettings, Recipe, ServingSettings
from lathe_base.errors import Code, StageError, UserError
from lathe_base.inputs import read_text
from lathe_base.progress import track
from lathe_base.provenance.step import attested
from lathe_base.storage import (
    atomic_file,
    claim_output_file,
    claim_output_folder,
    locked,
    require_apart,
)
from lathe_base.storage.ownership import Source, foreign_files_error, scratch_prefix
from lathe_serving import state as serve_state
from lathe_serving.client import Client
from lathe_serving.client.load import OPENINGS
from lathe_serving.environment import find_environment
from lathe_serving.repository import remove_bytecode, require_whole, write_repository
from lathe_serving.runtime.open_model import REFERENCE_RUNTIME
from lathe_serving.runtime.text import bos_ids, encode_prompts
from lathe_serving.server import ANY_PORTS, TritonServer, free_ports, start
from lathe_serving.state import STATE_FILES, ServerState

GREEDY = GenerationSettings(decode_strategy="greedy_search", min_dec_len=0)

log = logging.getLogger("lathe")

REPORT = "deploy.json"
REPOSITORY = "repository"
SERVER = "server"
N_PROMPTS = 8
N_CLIENTS = 4
TOGETHER = f"{N_CLIENTS} concurrent clients"
PROMPT_CHARACTERS = 80


@dataclass(frozen=True)
class DeployResult:
    """Figures of a rehearsal; `deploy.json` also has them, with every prompt's answer."""

    folder: Path
    repository: Path
    prompts: int
    identical: int  # prompts whose greedy tokens all equal the checkpoint's
    near_ties: int  # prompts that diverge only at a tie
    max_tie_gap: float  # the largest difference of the tied tokens' logits
    start_seconds: float
    first_token_ms: float  # median
    tokens_per_second: float  # of one client
    tokens_per_second_together: float  # of N_CLIENTS clients

    @property
    def same_text(self) -> str:
        """How many greedy texts equal the checkpoint's, and why the others do not."""
        same = f"{self.identical} of {self.prompts} prompts"
        if not self.near_ties:
            return same
        gap = f"the two tokens' logits differ by at most {self.max_tie_gap:.2g}"
        return f"{same}; the other {self.near_ties} diverge at a near tie, where {gap}"


@attested("deploy", "exported", "model", "data", below="repository")
def deploy(
    recipe: Recipe,
    exported: Path,
    model: Path,
    output: Path,
    data: Path | None = None,
    keep_running: bool = False,
) -> DeployResult:
    """Write `output/repository`, serve it, and compare its answers with the checkpoint's.

    Args:
        recipe: groups Serving, Generation (defaults of requests) and Export (new_tokens).
        exported: folder of the export stage.
        model: the checkpoint it was exported from.
        data: token data set whose held-out text gives the prompts; default a few fixed ones.
        keep_running: serve on the recipe's ports, replacing the server of the default state
            folder, and leave it running. Otherwise the server uses free ports and ends with the
            stage.

    Raises:
        UserError: a port is in use, or a folder is of the wrong kind.
        StageError: the server does not start, or its answers differ from the checkpoint's.
    """
    _claim(output, exported, model, data)
    checkpoint = load_checkpoint(model)
    tolerance = _verified_tolerance(exported, model, checkpoint, recipe.Serving.runtime)

    # Prompts are cut so that `new_tokens` more fit into the context.
    new_tokens, room = shares(recipe.Export, checkpoint.model.config.n_positions)
    room -= len(bos_ids(checkpoint.tokenizer))
    prompts = []
    for prompt in _prompts(data):
        offsets = checkpoint.tokenizer.encode(prompt, add_special_tokens=False).offsets
        prompts.append(prompt if len(offsets) <= room else prompt[: offsets[room][0]])

    if recipe.Serving.runtime == "vllm":
        checkpoint = replace(checkpoint, model=with_float_inputs(checkpoint.model))
        # An engine of other kernels, and on a GPU of narrower floats, may prefer either of two
        # tokens whose logits are this close; see `lathe.export.prove.TIE`.
        with torch.inference_mode():
            last = [checkpoint.model(torch.tensor([_ids(checkpoint, p)]))[0, -1] for p in prompts]
        tie = TIE * statistics.mean(float(logits.std()) for logits in last)
        tolerance = max(tolerance, tie)

    # What is missing on this machine is said before a repository is written.
    find_environment()
    if keep_running and serve_state.find() is None:
        free_ports(recipe.Serving, with_gateway=True)
    with locked(output):
        repository = output / REPOSITORY
        write_repository(exported, repository, recipe.Serving, recipe.Generation)
        return _rehearsed(recipe, checkpoint, prompts, new_tokens, tolerance, output, keep_running)


def _rehearsed(
    recipe: Recipe,
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    new_tokens: int,
    tolerance: float,
    output: Path,
    keep_running: bool,
) -> DeployResult:
    repository = output / REPOSITORY
    started = time.perf_counter()
    with _start(repository, recipe.Serving, output, keep_running) as server:
        start_seconds = time.perf_counter() - started
        answers, ways, together_seconds = _rehearse(server.state, prompts, new_tokens)
        # onnxruntime computes each row as it does alone; other runtimes may add in another order.
        max_gap = -math.inf if recipe.Serving.runtime == REFERENCE_RUNTIME else tolerance
        _check_ways(checkpoint, prompts, answers, ways, max_gap)

        # Over gRPC, against the checkpoint in torch.
        expected = [greedy_tokens(checkpoint, prompt, new_tokens) for prompt in prompts]
        divergences = [
            find_divergence(checkpoint, prompt, mine, answer.tokens)
            for prompt, mine, answer in zip(prompts, expected, answers, strict=True)
        ]
        result = DeployResult(
            folder=output,
            repository=repository,
            prompts=len(prompts),
            identical=divergences.count(None),
            near_ties=len(prompts) - divergences.count(None),
            max_tie_gap=max((abs(d.gap) for d in divergences if d is not None), default=0.0),
            start_seconds=start_seconds,
            first_token_ms=1e3 * statistics.median(a.first_token_seconds for a in answers),
            tokens_per_second=sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers),
            tokens_per_second_together=sum(map(len, ways[TOGETHER])) / together_seconds,
        )
        _check(prompts, divergences, tolerance)

        # The report is written only now: a folder without one has not passed. Its samples become
        # the golden prompts of a release.
        samples = [
            {
                "prompt": prompt,
                "text": answer.text,
                "tokens": answer.tokens,
                "clear": clear_choices(checkpoint, prompt, answer.tokens, tolerance),
                "divergence": divergence and asdict(divergence),
            }
            for prompt, answer, divergence in zip(prompts, answers, divergences, strict=True)
        ]
        report = {
            **{k: v for k, v in asdict(result).items() if not isinstance(v, Path)},
            "serving": recipe.Serving.model_dump(),
            "max_tokens": new_tokens,
            "samples": samples,
        }
        with atomic_file(output / REPORT) as work:
            work.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if keep_running:
            server.detach()
            log.info('try it: lathe client "%s"; stop it: make stop', prompts[0])
    if not keep_running:
        remove_bytecode(repository)  # which the server's Python has written
    return result


def serve(deployed: Path) -> ServerState:
    """Start the server of a deployed folder again, on its own ports, and leave it running.

    Args:
        deployed: output of `deploy`.

    Raises:
        UserError: no such folder, a server is already running, or a port is in use.
    """
    if not (deployed / REPORT).is_file():
        raise UserError(
            f"{deployed}: no {REPORT}", "give the folder written by `lathe deploy`", Code.WRONG_KIND
        )
    report = read_json(deployed / REPORT, "deploy the model again")
    where = f"{deployed / REPORT}: serving"
    serving = checked(report.get("serving"), ServingSettings, where, "deploy the model again")
    require_whole(deployed / REPOSITORY)
    return start(deployed / REPOSITORY, serving, with_gateway=True).detach()


@dataclass(frozen=True)
class Divergence:
    """The position where a served continuation diverges from the checkpoint's.

    `gap`: the checkpoint's logit of its own choice minus that of the served token. A gap within the
    export's tolerance is a tie, which the two may break differently.
    """

    position: int
    expected: int
    served: int
    gap: float


def greedy_tokens(checkpoint: Checkpoint, prompt: str, max_tokens: int) -> list[int]:
    """The checkpoint's own greedy continuation, in torch."""
    settings = GREEDY.model_copy(update={"max_dec_len": max_tokens})
    return generate(checkpoint.model, [_ids(checkpoint, prompt)], settings, checkpoint.end_ids)[0]


@torch.inference_mode()
def find_divergence(
    checkpoint: Checkpoint, prompt: str, expected: Sequence[int], served: Sequence[int]
) -> Divergence | None:
    """The first position where two continuations differ, or None; an early end counts as EOS."""
    if list(expected) == list(served):
        return None
    eos = -1 if checkpoint.eos_id is None else checkpoint.eos_id
    pairs = zip([*expected, eos], [*served, eos], strict=False)
    # They differ, so a pair does, at the latest where one has ended.
    position, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    ids = [*_ids(checkpoint, prompt), *expected[:position]]
    logits = checkpoint.model(torch.tensor([ids]))[0, -1]  # (V,)
    return Divergence(position, mine, theirs, float(logits[mine] - logits[theirs]))


@torch.inference_mode()
def clear_choices(
    checkpoint: Checkpoint, prompt: str, tokens: Sequence[int], tolerance: float
) -> int:
    """Number of leading `tokens` that the checkpoint prefers to every other token by a logit margin
    above `tolerance`, so that rounding cannot change them."""
    prefix = _ids(checkpoint, prompt)
    logits = checkpoint.model(torch.tensor([[*prefix, *tokens]]))[0, len(prefix) - 1 : -1]  # (n, V)
    # The margin to the second-best token is how much rounding it would take.
    best = logits.topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    is_clear = (best.indices[:, 0] == torch.tensor(tokens)) & (gaps > tolerance)
    return int(is_clear.int().cumprod(0).sum())


def _ids(checkpoint: Checkpoint, prompt: str) -> list[int]:
    return encode_prompts(checkpoint.tokenizer, [prompt])[0]


def _claim(output: Path, *inputs: Source) -> None:
    """See `claim_output_folder`; the folder of a rehearsal has no metadata file of its own."""
    require_apart(output, *inputs)
    claim_output_folder(output / REPOSITORY, REPOSITORY_KIND)
    claim_output_file(output / REPORT, DEPLOYMENT)
    # What an earlier rehearsal may have left; anything else is not ours to mix with.
    owned = {output: {REPOSITORY, REPORT, SERVER}, output / SERVER: STATE_FILES}
    scratch = scratch_prefix(output / REPOSITORY, inside=False)
    for folder, names in owned.items():
        if folder.is_dir():
            others = sorted({path.name for path in folder.iterdir()} - names)
            others = [name for name in others if not name.startswith(scratch)]
            if others:
                raise foreign_files_error(folder, others)


def _start(
    repository: Path, serving: ServingSettings, output: Path, keep_running: bool
) -> TritonServer:
    if not keep_running:
        return start(repository, serving.model_copy(update=ANY_PORTS), output / SERVER)
    # The recipe's ports are those of the server that it replaces.
    if serve_state.stop():
        log.info("stopped the server that was running")
    return start(repository, serving, with_gateway=True)


def _rehearse(
    state: ServerState, prompts: Sequence[str], new_tokens: int
) -> tuple[list[RehearsedAnswer], dict[str, list[list[int]]], float]:
    """The sequential answers, the tokens from every other transport, and the duration of the
    concurrent requests."""
    parameters = greedy(new_tokens)
    with Client(state.grpc, state.model_name) as client:
        ask(client, prompts[0], **parameters)  # the first request includes the runtime's startup
        answers = [
            ask(client, prompt, **parameters) for prompt in track(prompts, "query the server")
        ]
        started = time.perf_counter()
        together = ask_together(client, prompts, N_CLIENTS, **parameters)
        seconds = time.perf_counter() - started
        ways = {
            TOGETHER: [answer.tokens for answer in together],
            "gRPC, not streamed": [client.generate(p, **parameters).tokens for p in prompts],
            "HTTP generate": [ask_http(state, p, False, **parameters) for p in prompts],
            "HTTP generate_stream": [ask_http(state, p, True, **parameters) for p in prompts],
        }
    return answers, ways, seconds


def _check_ways(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    answers: Sequence[RehearsedAnswer],
    ways: Mapping[str, list[list[int]]],
    max_gap: float,
) -> None:
    """Raise StageError unless all transports give the same tokens, or diverge at tokens whose
    logits differ by at most `max_gap`."""
    for way, tokens in ways.items():
        for prompt, answer, got in zip(prompts, answers, tokens, strict=True):
            divergence = find_divergence(checkpoint, prompt, answer.tokens, got)
            if divergence is not None and not abs(divergence.gap) <= max_gap:
                raise StageError(
                    f"{way}: {prompt!r} gives {got}, over a gRPC stream {answer.tokens}",
                    Code.NOT_PROVED,
                )


def _check(
    prompts: Sequence[str], divergences: Sequence[Divergence | None], tolerance: float
) -> None:
    for prompt, divergence in zip(prompts, divergences, strict=True):
        if divergence is not None and not divergence.gap <= tolerance:
            raise StageError(
                f"the server differs from the checkpoint: after {prompt!r} and "
                f"{divergence.position} equal tokens it generates {divergence.served}, but the "
                f"checkpoint {divergence.expected}, whose logit is {divergence.gap:.4g} higher "
                f"(tolerance {tolerance:g})",
                Code.NOT_PROVED,
            )


def _verified_tolerance(exported: Path, model: Path, checkpoint: Checkpoint, runtime: str) -> float:
    """The verified tolerance of the export's logits; for a runtime other than the verified one, the
    limit of its own check on the serving machine."""
    metadata = open_export(exported)
    if metadata.proof is None:
        raise UserError(
            f"{exported / EXPORT.metadata_file}: the export was not verified",
            "export the model again",
            Code.NOT_PROVED,
        )
    if metadata.source != checkpoint.digest or read_config(exported) != checkpoint.model.config:
        raise UserError(
            f"{exported} was exported from another checkpoint than {model}",
            "export the model again, or give the checkpoint it came from",
            Code.MISMATCH,
        )
    proven = max(metadata.proof.max_error, metadata.proof.tolerance)
    return proven if runtime == REFERENCE_RUNTIME else max(proven, metadata.proof.mean_limit)


def _prompts(data: Path | None) -> list[str]:
    """Beginnings of held-out lines, evenly spread, cut at word boundaries."""
    if data is None:
        return list(OPENINGS)
    read_data_metadata(data)
    path, hint = data / "heldout.txt", "give the output folder of `lathe prepare`"
    if not path.exists():
        raise UserError(f"{path}: no such file", hint, Code.NOT_FOUND)
    lines = [line.strip() for line in read_text(path, hint).splitlines()]
    # Headings and other short lines are poor prompts.
    lines = [line for line in lines if len(line) >= PROMPT_CHARACTERS // 2]
    chosen = lines[:: max(1, len(lines) // N_PROMPTS)][:N_PROMPTS]
    cut = [line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] for line in chosen]
    return cut or list(OPENINGS)
