"""Uploads a compiled pipeline as a version named after its sources."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lathe_base.storage import digest, sha256
from pipelines.cluster.server import Client, pages
from pipelines.steps.resources import Variant

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = 8
EQUALS = 1


def version_name(variant: Variant) -> str:
    """The commit, a digest of uncommitted changes, and the variant; `unversioned` without a
    repository, as in an image.
    """
    parts = [_commit()]
    variant = replace(variant, code="")  # which the commit stands for
    if variant != Variant():
        parts.append(digest(repr(variant))[:SHORT])
    return "-".join(parts)


def upload(
    client: Client, pipeline: str, version: str, compiled: Path, description: str = ""
) -> tuple[str, str, bool]:
    """Find the version with this content, or create it.

    A version with that name but other content (such as other images) is unchanged, and the new one
    has its digest in its name. The digest is stored at the end of the description.

    Returns:
        the pipeline's id, the version's id, and whether the version is new.
    """
    models = client.api_models
    pipelines = find(client.pipelines.pipeline_service_list_pipelines, "pipelines", pipeline,
                 namespace=client.namespace)  # fmt: skip
    if not pipelines:
        body = models.V2beta1Pipeline(
            name=pipeline,
            display_name=pipeline,
            namespace=client.namespace,
            description=description,
        )
        pipelines = [client.pipelines.pipeline_service_create_pipeline(body)]
    pipeline_id = pipelines[0].pipeline_id
    content = sha256(compiled)
    described = f"{description} sha256:{content}".strip()
    for name in (version, f"{version}-{content[:SHORT]}"):
        versions = find(client.pipelines.pipeline_service_list_pipeline_versions,
                        "pipeline_versions", name, pipeline_id=pipeline_id)  # fmt: skip
        if not versions:
            made = client.pipeline_uploads.upload_pipeline_version(
                str(compiled),
                # Versions that are Kubernetes objects share one namespace with all pipelines'.
                name=f"{pipeline}-{name}",
                display_name=name,
                pipelineid=pipeline_id,
                description=described,
            )
            return pipeline_id, made.pipeline_version_id, True
        if (versions[0].description or "").endswith(f"sha256:{content}"):
            break
    return pipeline_id, versions[0].pipeline_version_id, False


def find(listing: Callable[..., Any], field: str, name: str, **options: Any) -> list[Any]:
    """All objects with a display name from a listing request of the API."""
    predicate = {"operation": EQUALS, "key": "display_name", "stringValue": name}
    return list(pages(listing, field, filter=json.dumps({"predicates": [predicate]}), **options))


def experiment_id(client: Client, name: str) -> str:
    """The experiment with this name, created if it does not exist."""
    listing = client.experiments.experiment_service_list_experiments
    experiments = find(listing, "experiments", name, namespace=client.namespace)
    if not experiments:
        body = client.api_models.V2beta1Experiment(display_name=name, namespace=client.namespace)
        experiments = [client.experiments.experiment_service_create_experiment(body)]
    return str(experiments[0].experiment_id)


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short=12", "HEAD").strip()
        changes = _git("diff", "HEAD")
        new = _git("ls-files", "--others", "--exclude-standard").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unversioned"
    files = [REPOSITORY / name for name in new if (REPOSITORY / name).is_file()]
    changes += "".join(sha256(file) for file in files)
    return f"{commit}-dirty-{digest(changes)[:SHORT]}" if changes else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout
