"""The acceptance test of a release: the published bytes, served by a temporary Triton."""

import logging
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lathe.release.golden import Golden
from lathe.release.malformed import refusals
from lathe.release.release import Releases
from lathe_base.config.settings import ProductionSettings, Recipe
from lathe_base.errors import StageError
from lathe_base.provenance.keys import trusted_keys
from lathe_base.provenance.policy import require
from lathe_serving.client import Client
from lathe_serving.client.load import Load, Objective, Summary, run_load, summarize
from lathe_serving.server import ANY_PORTS, start

log = logging.getLogger("lathe")


def provenance_of(settings: ProductionSettings) -> list[str]:
    """The checks in `Production.require` that concern attestations and signatures."""
    return [name for name in settings.require if name != "audit"]


@dataclass(frozen=True)
class Acceptance:
    """Attributes:
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
        require(repository, provenance_of(settings), trusted_keys(settings.keys))
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
        requests=sys.maxsize,
        clients=settings.burst_clients,
        seconds=settings.burst_seconds,
    )
    requests = run_load(client, load)
    if failed := [request.error for request in requests if not request.answered]:
        raise StageError(
            f"under load {len(failed)} of {len(requests)} requests failed, the first: {failed[0]}"
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
                f"of the time to {what} is {p99:.1f} ms, above the limit of {limit:g} ms"
            )
    return summary
