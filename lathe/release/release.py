"""The releases of a model in the object store, and the pointer to the one in production.

    RELEASES/MODEL/sha256-DIGEST/              a Triton model repository; never changed once live
    RELEASES/MODEL/sha256-DIGEST.golden.json   its golden prompts, and figures of its evaluation
    RELEASES/MODEL/production.json             the live release and earlier ones
    RELEASES/MODEL/looks.json                  comparisons with the live one, if they are counted

In the repository
`find * -type f ! -name provenance.intoto.jsonl ! -name model.sig | LC_ALL=C sort | xargs sha256sum`
lists the files, and the SHA-256 of this list is DIGEST.

Golden prompts are those of the rehearsal, with the answers that the release must reproduce wherever
it is served.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from lathe.evaluate.evaluation_folder import read_metrics
from lathe.release.rehearsal import ask, greedy
from lathe_base.artifacts.kinds import RELEASE_NAME, read_json, release_name
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.inputs import first_mistake
from lathe_base.storage import (
    exists,
    fetch,
    is_store,
    list_uris,
    read_text,
    replace_text,
    upload,
    write_text,
)
from lathe_serving.client import Client

log = logging.getLogger("lathe")

REPORT = "deploy.json"
POINTER = "production.json"
SHORT = len("sha256-") + 12


class GoldenPrompt(BaseModel):
    """A prompt and its greedy tokens, of which the first `clear` must be reproduced: the checkpoint
    prefers them by more than the export's proven tolerance. Later ones may follow a near tie, which
    rounding on another CPU may break differently."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    tokens: tuple[int, ...]
    clear: NonNegativeInt


class Golden(BaseModel):
    """Attributes:
    published: time of the first publication.
    max_tokens: length of every continuation.
    figures: those of the checkpoint's evaluation; empty without one.
    """

    model_config = ConfigDict(extra="forbid")

    published: datetime
    max_tokens: PositiveInt
    prompts: tuple[GoldenPrompt, ...]
    figures: dict[str, float] = {}

    @staticmethod
    def parse(text: str, where: str) -> "Golden":
        """Parse; raises UserError if `publish` did not write this text."""
        try:
            return Golden.model_validate_json(text)
        except ValidationError as error:
            raise UserError(
                f"{where}: broken: {first_mistake(error)}",
                "remove it, and publish the release again",
                Code.MALFORMED,
            ) from error

    def replay(self, client: Client) -> int:
        """Replay every prompt; returns the number of identical continuations.

        Raises:
            StageError: a clear token differs.
        """
        identical = 0
        for golden in self.prompts:
            tokens = tuple(ask(client, golden.prompt, **greedy(self.max_tokens)).tokens)
            # Later tokens may differ after a near tie; only the clear ones must be the same.
            identical += tokens == golden.tokens
            clear = golden.tokens[: golden.clear]
            if tokens[: golden.clear] != clear:
                raise StageError(
                    f"the release's answers differ from its checkpoint's: {golden.prompt!r} gives "
                    f"{list(tokens)}, not {list(clear)} ...",
                    Code.NOT_PROVED,
                )
        log.info("golden prompts: %d of %d identical", identical, len(self.prompts))
        return identical


def make_golden(deployed: Path, evaluation: Path | None) -> Golden:
    """Golden prompts from a rehearsal, with the figures of the checkpoint's evaluation.

    Args:
        deployed: output of `lathe deploy`.
        evaluation: output of `lathe evaluate`, of the checkpoint.

    Raises:
        UserError: a folder is of the wrong kind.
    """
    if not (deployed / REPORT).is_file():
        raise UserError(
            f"{deployed}: no {REPORT}", "give the output folder of `lathe deploy`", Code.WRONG_KIND
        )
    try:
        report = read_json(deployed / REPORT, "deploy the model again")
        golden = [
            GoldenPrompt(**{key: sample[key] for key in GoldenPrompt.model_fields})
            for sample in report["samples"]
        ]
        figures: dict[str, float | None] = {}
        if evaluation:
            metrics = read_metrics(evaluation)
            cloze, text = metrics["cloze"] or {}, metrics["text"] or {}
            figures = {
                "cloze_accuracy": cloze.get("accuracy"),
                "cloze_stderr": cloze.get("accuracy_stderr"),
                "perplexity": text.get("perplexity"),
                "perplexity_stderr": text.get("perplexity_stderr"),
                "parameters": metrics["model"]["n_params"],
                "bytes": metrics["model"]["bytes"],
            }
        return Golden(
            published=datetime.now(UTC),
            max_tokens=report["max_tokens"],
            prompts=tuple(golden),
            figures={name: float(x) for name, x in figures.items() if x is not None},
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{deployed}: no {REPORT} of a rehearsal ({type(error).__name__})",
            "give the output folder of `lathe deploy`, or deploy it again",
            Code.WRONG_KIND,
        ) from error


class Placed(BaseModel):
    """A release and the time it went live."""

    model_config = ConfigDict(extra="forbid")

    release: str
    since: datetime


class Pointer(BaseModel):
    """`production.json`: the live release and earlier ones, newest first."""

    model_config = ConfigDict(extra="forbid")

    live: Placed | None = None
    previous: tuple[Placed, ...] = ()

    @property
    def live_release(self) -> str | None:
        """Name of the live release."""
        return self.live.release if self.live else None

    def has_had(self, release: str) -> bool:
        """Whether a release is or was live."""
        return any(placed.release == release for placed in (self.live, *self.previous) if placed)

    def moved_to(self, release: str, now: datetime) -> "Pointer":
        """The pointer with `release` live; unchanged if it already is."""
        if self.live is None:
            return Pointer(live=Placed(release=release, since=now))
        # Publishing again must not make a release its own predecessor.
        if self.live.release == release:
            return self
        return Pointer(
            live=Placed(release=release, since=now), previous=(self.live, *self.previous)
        )


@dataclass(frozen=True)
class Releases:
    """The releases of one model; `root` is their address without a trailing slash."""

    root: str

    def address(self, release: str) -> str:
        """Address of a release's repository, which the Deployment's pods fetch."""
        return f"{self.root}/{release}/"

    def publish(self, repository: Path, golden: Golden) -> str:
        """Upload a repository under the digest of its contents; returns its name.

        A release that is or was live is never written to, even if its bytes have changed. Another
        one gets the new attestations, such as of a verdict that it lacked.

        Raises:
            UserError: the store cannot be written to.
        """
        # The golden prompts first: a release that is complete can be tested.
        release = release_name(repository)
        if not exists(self._golden(release)):
            write_text(self._golden(release), golden.model_dump_json(indent=1) + "\n")
        if exists(self.address(release)) and self.pointer().has_had(release):
            log.info("%s is already published", self.address(release))
        else:
            upload(repository, self.address(release))
            log.info("published %s", self.address(release))
        return release

    def fetch(self, release: str, folder: Path) -> Path:
        """Fetch the repository of a release into `folder`, and check it against its digest.

        Raises:
            UserError: it does not exist, or the store does not answer.
            StageError: its bytes have changed.
        """
        repository = fetch(self.address(release), folder)
        if (actual := release_name(repository)) != release:
            raise StageError(
                f"{self.address(release)} does not match the digest in its name ({actual[:SHORT]}):"
                " remove it, and publish it again",
                Code.CORRUPT,
            )
        return repository

    def golden(self, release: str) -> Golden:
        """Golden prompts of a release; raises UserError if they are missing or broken."""
        return Golden.parse(read_text(self._golden(release)), self._golden(release))

    def pointer(self) -> Pointer:
        """The release in production; empty before the first deployment.

        Raises:
            UserError: the store does not answer, or the pointer is broken.
        """
        return self._parse(self._pointer_text())

    def point(self, pointer: Pointer, seen: Pointer) -> None:
        """Replace the pointer that was `seen`.

        Raises:
            UserError: another process has changed it since; also as `pointer`.
        """
        # `seen` is what the caller has decided by; `text`, what the store must still have when the
        # new pointer is put.
        text = self._pointer_text()
        if self._parse(text) != seen:
            raise UserError(
                f"{self.root}/{POINTER}: changed by another process",
                "see `lathe release list`, and run it again",
                Code.CHANGED,
            )
        replace_text(f"{self.root}/{POINTER}", pointer.model_dump_json(indent=1) + "\n", text)

    def _pointer_text(self) -> str | None:
        uri = f"{self.root}/{POINTER}"
        return read_text(uri) if exists(uri) else None

    def _parse(self, text: str | None) -> Pointer:
        try:
            return Pointer.model_validate_json(text) if text is not None else Pointer()
        except ValidationError as error:
            raise UserError(
                f"{self.root}/{POINTER}: broken: {first_mistake(error)}",
                "create it again with `lathe deploy`",
                Code.MALFORMED,
            ) from error

    def published(self) -> list[str]:
        """Names of the complete releases, newest first."""
        names = [uri.rstrip("/").rpartition("/")[2] for uri in list_uris(f"{self.root}/")]
        return [name for name in reversed(names) if RELEASE_NAME.fullmatch(name)]

    def find(self, digest: str) -> str:
        """The name of the published release with this digest or prefix of one.

        Raises:
            UserError: none or several match.
        """
        wanted = "sha256-" + digest.removeprefix("sha256-")
        matches = [name for name in self.published() if name.startswith(wanted)]
        if len(matches) == 1:
            return matches[0]
        what, code = "does not match any release", Code.NOT_FOUND
        if matches:
            what, code = f"means {len(matches)} releases", Code.AMBIGUOUS
        hint = "choose one from `lathe release list`"
        raise UserError(f"{digest}: {what} in {self.root}", hint, code)

    def _golden(self, release: str) -> str:
        return f"{self.root}/{release}.golden.json"


def open_releases(recipe: Recipe) -> Releases:
    """The releases of `Serving.model_name` in `Production.releases`.

    Raises:
        UserError: the recipe has no address in an object store.
    """
    root = recipe.Production.releases
    if not root or not is_store(root):
        wrong = f"{root}: not an address in an object store" if root else "not set"
        raise UserError(
            f"Production.releases is {wrong}",
            "set -o Production.releases=s3://bucket/prefix, or file:///folder",
            Code.INVALID_VALUE if root else Code.MISSING_OPTION,
        )
    return Releases(f"{root.rstrip('/')}/{recipe.Serving.model_name}")
