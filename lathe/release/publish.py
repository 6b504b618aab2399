"""Puts a rehearsed repository into production, and rolls back to an earlier one.

A release is published, tested from the bytes in the store, rolled out, and only then does the
pointer name it. If the process is interrupted, the pointer still names a working release, and
running it again resumes.

The acceptance test serves the published bytes on a temporary Triton.
"""

import json
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import grpc  # type: ignore[import-untyped]
from rich.table import Table
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from lathe.release.release import SHORT, Golden, Releases, make_golden, open_releases
from lathe.report.cards.audit import require_audited
from lathe.report.cards.release import write_release_documents
from lathe_base.artifacts.kinds import release_digests, release_name
from lathe_base.config.settings import ProductionSettings, Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance.chain import require
from lathe_base.provenance.keys import trusted_keys
from lathe_base.provenance.step import attest, materials, now
from lathe_base.tracking.models import register_release
from lathe_launch.cluster.rollout import Deployment, has_cluster, roll
from lathe_serving.client import Client
from lathe_serving.client.grpc_transport import CHANNEL_OPTIONS, request
from lathe_serving.client.load import Load, Objective, Summary, run_load, summarize
from lathe_serving.repository import remove_bytecode, require_whole
from lathe_serving.server import ANY_PORTS, start
from lathe_serving.state import LOOPBACK, ServerState

log = logging.getLogger("lathe")

REPOSITORY = "repository"

TIMEOUT_SECONDS = 60.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
ENDLESS = "The turner counts the strokes. " * 20_000  # more tokens than any context has

MALFORMED_BODIES = {
    "truncated JSON": b'{"text_input": "On',
    "JSON that is not an object": b'["text_input"]',
    "text_input missing": b'{"max_tokens": 4}',
    "text_input a number": b'{"text_input": 5, "max_tokens": 4}',
    "max_tokens a text": b'{"text_input": "On", "max_tokens": "four"}',
}


class LiveReleaseChanged(UserError):
    """The live release is not the one that the candidate was compared with."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what, hint, Code.CHANGED)


@dataclass(frozen=True)
class Acceptance:
    """Figures of a release that has passed.

    Attributes:
        identical: number of prompts whose whole continuation equals the golden one.
        refused: number of malformed requests that were refused.
        first_token_ms, between_tokens_ms: 99th percentiles under the burst.
    """

    prompts: int
    identical: int
    refused: int
    requests: int
    tokens_per_second: float
    first_token_ms: float
    between_tokens_ms: float


@dataclass(frozen=True)
class Production:
    """The state of production after a deployment or a rollback.

    Attributes:
        address: the release's, in the object store.
        before: name of the release that was live; None before the first.
        rolled: whether a Deployment was rolled; False if there is none.
        acceptance: None for a rollback.
    """

    release: str
    address: str
    before: str | None
    rolled: bool
    acceptance: Acceptance | None = None

    def to_json(self) -> str:
        """The result as JSON, for a file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def publish_release(
    recipe: Recipe,
    deployed: Path,
    evaluation: Path | None = None,
    verdict: Path | None = None,
    model: Path | None = None,
    replaces: str | None = None,
) -> Production:
    """Publish a rehearsed repository, test the published bytes, make them live, and register them
    if there is a model registry.

    Args:
        recipe: groups Production and Serving (the model's name).
        deployed: output of `lathe deploy`.
        evaluation: evaluation folder of the checkpoint, whose figures are stored with the release.
        verdict: file of `lathe gate`, which the release's attestation refers to.
        model: the checkpoint, for the model card and the bills of materials of the release.
        replaces: name of the live release, which the candidate was compared with; None: none is.

    Raises:
        LiveReleaseChanged: another release is live; it stays live.
        UserError: the store, the cluster or a folder is not usable.
        StageError: the release fails its tests or `Production.require`, or does not become ready;
            the previous one stays live.
    """
    releases, deployment = open_releases(recipe), _deployment(recipe.Production)
    golden = make_golden(deployed, evaluation)
    require_whole(deployed / REPOSITORY)
    remove_bytecode(deployed / REPOSITORY)  # of a server that still runs on it
    # The rehearsed repository has to be signed before the release gets its own signature.
    wanted = [name for name in recipe.Production.require if name == "signature"]
    require(deployed / REPOSITORY, wanted, trusted_keys(recipe.Production.keys))
    with tempfile.TemporaryDirectory(prefix="lathe-release-") as scratch:
        # The files of the repository in a new folder, described, attested and signed as a release.
        folder = Path(scratch) / recipe.Serving.model_name
        started, repository = now(), deployed / REPOSITORY
        for name in release_digests(repository):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, folder / name)
        if model is not None:
            exported = repository / recipe.Serving.model_name / "1"
            write_release_documents(folder, model, exported, evaluation, verdict)
        artifacts = {"deployed": repository, "evaluation": evaluation, "verdict": verdict}
        inputs = [pair for name, path in artifacts.items() for pair in materials(name, path)]
        attest("release", recipe, folder, inputs, {}, started, release_digests(folder))

        # All that can refuse it without a server, before anything is uploaded.
        _require(recipe.Production, folder)
        live = releases.pointer().live_release
        _require_replaceable(releases, release_name(folder), live, replaces)
        release = releases.publish(folder, golden)
    acceptance = accept(releases, release, recipe)
    seconds = recipe.Production.rollout_seconds
    before = _make_live(releases, release, deployment, seconds, replaces)
    address = releases.address(release)
    # Last, because a registry that does not answer must not keep a release from going live.
    register_release(recipe.Serving.model_name, release, address, golden.figures)
    return Production(release, address, before, deployment is not None, acceptance)


def roll_back(recipe: Recipe, to: str | None = None) -> Production:
    """Make the previous release live again, or any other that was live.

    Args:
        to: its digest or a prefix of it.

    Raises:
        UserError: there is no such release, or it was never live.
        StageError: it fails `Production.require` or does not become ready; the live one stays live.
    """
    releases, deployment = open_releases(recipe), _deployment(recipe.Production)
    pointer = releases.pointer()
    previous = pointer.previous
    if to is None:
        if not previous:
            raise UserError(
                f"{releases.root}: no release was live before the current one",
                "choose one from `lathe release list` with --to",
                Code.NOT_FOUND,
            )
        to = previous[0].release
    # A release that was live has passed the tests; others may never have been served.
    release = releases.find(to)
    if not pointer.has_had(release):
        raise UserError(
            f"{releases.address(release)} was never live: it may never have been tested",
            "publish it with `lathe release publish`, which tests it",
            Code.NOT_PROVED,
        )
    if recipe.Production.require:
        with tempfile.TemporaryDirectory(prefix="lathe-release-") as scratch:
            _require(recipe.Production, releases.fetch(release, Path(scratch) / "repository"))
    seconds = recipe.Production.rollout_seconds
    before = _make_live(releases, release, deployment, seconds, pointer.live_release)
    return Production(release, releases.address(release), before, deployment is not None)


def _require(settings: ProductionSettings, folder: Path) -> None:
    if "audit" in settings.require:
        require_audited(folder, [Path(name) for name in settings.vex])
    require(folder, provenance_checks(settings), trusted_keys(settings.keys))


def provenance_checks(settings: ProductionSettings) -> list[str]:
    """The checks in `Production.require` that concern attestations and signatures."""
    return [name for name in settings.require if name != "audit"]


def accept(releases: Releases, release: str, recipe: Recipe) -> Acceptance:
    """Fetch a release and serve it; it must reproduce its golden prompts, stay within the latency
    limits of `recipe.Production` under load, and reject malformed requests. The fetched bytes must
    first meet `Production.require`.

    Raises:
        UserError: the store does not answer, or Triton is not installed.
        StageError: the release fails a test; the message says which.
    """
    golden = releases.golden(release)
    with tempfile.TemporaryDirectory(prefix="lathe-release-") as scratch:
        repository = releases.fetch(release, Path(scratch) / "repository")
        settings = recipe.Production
        require(repository, provenance_checks(settings), trusted_keys(settings.keys))
        serving = recipe.Serving.model_copy(update=ANY_PORTS)
        with (
            start(repository, serving, Path(scratch) / "server") as server,
            Client(server.state.grpc, serving.model_name) as client,
        ):
            identical = golden.replay(client)
            burst = _burst(client, golden, recipe.Production)
            refused = list(refusals(server.state))
            log.info("refused: %s", "; ".join(refused))
            golden.replay(client)  # the server still answers correctly
    return Acceptance(
        prompts=len(golden.prompts),
        identical=identical,
        refused=len(refused),
        requests=burst.requests,
        tokens_per_second=burst.tokens_per_second,
        first_token_ms=1e3 * burst.first_token["p99"],
        between_tokens_ms=1e3 * burst.between_tokens.get("p99", 0.0),
    )


def _burst(client: Client, golden: Golden, settings: ProductionSettings) -> Summary:
    load = Load(
        prompts=[prompt.prompt for prompt in golden.prompts],
        lengths=[golden.max_tokens],
        requests=sys.maxsize,  # the time ends it
        clients=settings.burst_clients,
        seconds=settings.burst_seconds,
    )
    requests = run_load(client, load)
    if failed := [request.error for request in requests if not request.answered]:
        raise StageError(
            f"under load {len(failed)} of {len(requests)} requests failed, the first: {failed[0]}",
            Code.GATE,
        )
    summary = summarize(requests, Objective(math.inf, math.inf))
    for what, seconds, limit in (
        ("the first token", summary.first_token, settings.p99_first_token_ms),
        ("the next token", summary.between_tokens, settings.p99_between_tokens_ms),
    ):
        p99 = 1e3 * seconds.get("p99", 0.0)
        log.info(
            "burst of %d requests: p99 of the time to %s %.1f ms (limit %g ms)",
            *(summary.requests, what, p99, limit),
        )
        if p99 > limit:
            raise StageError(
                f"too slow under load: with {settings.burst_clients} clients, the 99th percentile "
                f"of the time to {what} is {p99:.1f} ms, above the limit of {limit:g} ms",
                Code.GATE,
            )
    return summary


def refusals(state: ServerState) -> Iterator[str]:
    """Send malformed requests, which a server must reject without being affected, one by one;
    yields a description of each after its rejection.

    Raises:
        StageError: one was accepted, or the server did not respond.
    """
    attempts = {
        f"gRPC, {what}": partial(_grpc_error, state, message)
        for what, message in _messages(state.model_name).items()
    } | {
        f"HTTP, {what}": partial(_http_error, state, body)
        for what, body in MALFORMED_BODIES.items()
    }
    for what, attempt in attempts.items():
        if not attempt():
            raise StageError(f"the server answers a malformed request: {what}", Code.GATE)
        yield what


def _messages(model_name: str) -> dict[str, Any]:
    def asking(prompt: str = "On", **parameters: int) -> Any:
        return request(model_name, prompt, {"max_tokens": 4, **parameters})

    wrong_type = service_pb2.ModelInferRequest(
        model_name=model_name,
        inputs=[
            {
                "name": "text_input",
                "datatype": "INT64",
                "shape": [1],
                "contents": {"int64_contents": [5]},
            }
        ],
    )
    return {
        "text_input of type INT64": wrong_type,
        "text_input missing": service_pb2.ModelInferRequest(model_name=model_name),
        "a prompt longer than the context": asking(ENDLESS),
        "max_tokens negative": asking(max_tokens=-1),
        "max_tokens beyond the context": asking(max_tokens=2**40),
        "num_return_sequences huge": asking(num_return_sequences=2**40),
    }


def _grpc_error(state: ServerState, message: Any) -> str | None:
    with grpc.insecure_channel(state.grpc, CHANNEL_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            # A decoupled model answers on a stream; its errors are messages of it, not of the call.
            responses = stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_SECONDS)
            return next((str(r.error_message) for r in responses if r.error_message), None)
        except grpc.RpcError as error:
            if error.code() in NO_ANSWER:
                raise StageError(
                    f"no answer to a malformed request: {error.details()}", Code.GATE
                ) from error
            return str(error.details())


def _http_error(state: ServerState, body: bytes) -> str | None:
    url = f"http://{state.http}/v2/models/{state.model_name}/generate"
    http_request = Request(url, body, {"Content-Type": "application/json"})
    try:
        with LOOPBACK.open(http_request, timeout=TIMEOUT_SECONDS):
            return None
    except HTTPError as error:
        return f"{error.code} {error.read().decode(errors='replace')}"
    except OSError as error:
        raise StageError(f"no answer to a malformed request: {error}", Code.GATE) from error


def releases_table(recipe: Recipe) -> Table:
    """All releases for a terminal, the newest first."""
    releases = open_releases(recipe)
    pointer = releases.pointer()
    table = Table("release", "published", "live", "perplexity", "cloze accuracy", "parameters")
    for name in releases.published():
        golden = releases.golden(name)
        # Newest first: a release that was live twice shows the later time.
        times = [p.since for p in (pointer.live, *pointer.previous) if p and p.release == name]
        is_live = pointer.live is not None and pointer.live.release == name
        metrics = golden.figures
        table.add_row(
            name[:SHORT],
            _minute(golden.published),
            ("now, since " if is_live else "from ") + _minute(times[0]) if times else "",
            f"{metrics['perplexity']:.2f}" if "perplexity" in metrics else "",
            f"{metrics['cloze_accuracy']:.2%}" if "cloze_accuracy" in metrics else "",
            f"{metrics['parameters']:,.0f}" if "parameters" in metrics else "",
        )
    return table


def _deployment(settings: ProductionSettings) -> Deployment | None:
    if settings.deployment is not None and has_cluster():
        return Deployment(settings.namespace, settings.deployment)
    log.warning("no Deployment to roll: only the release pointer will be updated")
    return None


def _require_replaceable(
    releases: Releases, release: str, live: str | None, replaces: str | None
) -> None:
    if live not in (replaces, release):
        raise LiveReleaseChanged(
            f"{releases.address(release)} is to replace {replaces or 'nothing'}, but "
            f"{live or 'nothing'} is live now",
            "compare it with the live release, and publish it with "
            f"--replaces {live[:SHORT] if live else 'left out'}; see `lathe release list`",
        )


def _make_live(
    releases: Releases,
    release: str,
    deployment: Deployment | None,
    seconds: float,
    replaces: str | None,
) -> str | None:
    """Roll the Deployment, then update the pointer; returns the previously live release, which is
    the one to replace."""
    address = releases.address(release)
    # Two publications at a time would roll the Deployment to one release, and point at the other.
    # The live release is read again under the lock: it may have changed during the tests.
    with deployment.locked() if deployment else nullcontext():
        pointer = releases.pointer()
        before = pointer.live_release
        _require_replaceable(releases, release, before, replaces)
        if deployment is not None:
            # If the rollout fails, the Deployment goes back to what the pointer names, even if
            # somebody has rolled it by hand.
            running = deployment.release()
            back_to = releases.address(before) if before else running
            if running != back_to:
                log.warning("%s runs %s, not %s", deployment.name, running, back_to)
            roll(deployment, address, back_to, seconds)
            # Raises if the lock was lost during the rollout: then the pointer is not ours to move.
            deployment.keep_lock()
        releases.point(pointer.moved_to(release, datetime.now(UTC)), seen=pointer)
    log.info("live: %s", address)
    return before


def _minute(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
