"""Runs a pipeline on the cluster: check, compile, upload, start, and optionally follow it.

    python -m pipelines.cluster.submit qat --model s3://models/gpt --nodes 2 --gpus 8 --follow

The environment configures the server: see --help.
"""

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from kfp import compiler
from kfp.dsl.graph_component import GraphComponent

from components.machines import Pool
from lathe_base.checks import require
from lathe_base.config.recipe import load_recipe, recipe_text
from lathe_base.config.settings import Placements
from lathe_base.errors import UserError
from lathe_base.storage import digest, sha256, uri_scheme
from lathe_base.storage.s3 import SCHEMES
from pipelines.cluster.follow import Logs, follow_to_end
from pipelines.cluster.preflight import Preflight, image_checks
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import HELP, LOCAL_UI, TO_UI, Client, answers, find
from pipelines.commands.arguments import (
    error_messages,
    recipe_names,
    takes_arguments,
    takes_machines,
)
from pipelines.compiler.compile import (
    FUNCTIONS,
    REPOSITORY,
    build,
    code_digest,
    with_own_digest,
)
from pipelines.steps.resources import SERVICE_ACCOUNT, Outputs, Variant

SHORT = 8  # characters of a digest in a name
LAUNCH = {
    **{"gpus": "gpus_per_node", "nodes": "nodes", "cpus": "cpus_per_node"},
    **{"memory": "memory_per_node", "node_pool": "node_pool", "queue": "queue"},
    "notify": "notify",
}
"""Parameter of a run -> key of the recipe's group Launch with its value."""
EXPERIMENT = "lathe"

Root = Annotated[
    str,
    typer.Option(
        envvar="LATHE_PIPELINE_ROOT",
        help="Artifact location: s3://..., or for models and data sets file:///... on a volume in "
        "Launch.volumes. Default: the server's.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail if the node pool does not have enough GPUs, even if "
                                        "it may be autoscaled.")
]  # fmt: skip
Tried = Annotated[
    bool,
    typer.Option(
        "--try/--no-try", help="Refuse a layout that cannot fit the GPUs of the node pool."
    ),
]

Followed = Annotated[
    bool, typer.Option("--follow", help="Wait for the run, and exit with its status.")
]


def with_store(arguments: dict[str, Any], root: str) -> tuple[dict[str, Any], str]:
    """Turn a pipeline root on a volume into the setting Launch.store; returns the arguments and
    Pipelines' root.

    Pipelines' launcher and driver (2.17) support only S3 and Google Cloud Storage.
    """
    if uri_scheme(root) != "file":
        return arguments, root
    return arguments | {"overrides": [*arguments["overrides"], f"Launch.store={root}"]}, ""


def with_machines(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run with its machines among them: those that were given, else those of
    the group Launch of the pipeline's first recipe, else the pipeline's defaults.

    Overrides of these settings become arguments, so that a clone of the run can change them.

    Raises:
        UserError: that recipe is invalid.
    """
    first = next(iter(recipe_names(name, arguments).values()))
    launch = load_recipe(first, arguments["overrides"]).Launch
    settings = {
        key: value
        for key, field in LAUNCH.items()
        if field in launch.model_fields_set and (value := getattr(launch, field)) is not None
    }
    # Overrides would replace the arguments: they are in `settings` now.
    known = tuple(f"Launch.{field}=" for field in LAUNCH.values())
    overrides = [o for o in arguments["overrides"] if not o.startswith(known)]
    return settings | arguments | {"overrides": overrides}


def choose_variant(name: str, arguments: dict[str, Any]) -> Variant:
    """What the pipeline of a run is compiled with, by its recipes.

    Raises:
        UserError: the first of them is invalid.
    """
    names = list(recipe_names(name, arguments).values())
    launch = load_recipe(names[0], arguments["overrides"]).Launch
    # Only the settings that were given: the others are those of the cluster.
    settings = launch.model_dump(include=set(Placements.model_fields), exclude_unset=True)
    engines = set()
    for recipe in names:
        with suppress(UserError):  # reported by the check of the recipes
            engines.add(load_recipe(recipe, arguments["overrides"]).Compress.engine)
    return Variant(
        placement=Placements.model_validate(settings),
        engine="paddle" if "paddle" in engines else Variant.engine,
        shared_memory=launch.shared_memory,
        shards=launch.shards,
        has_chats=bool(arguments.get("chat")),
    )


@dataclass(frozen=True)
class Submission:
    """An uploaded pipeline, ready to run with these parameters."""

    client: Client
    pipeline: GraphComponent
    pipeline_id: str
    version_id: str
    experiment_id: str
    parameters: dict[str, Any]
    root: str
    service_account: str

    def request(self) -> dict[str, Any]:
        """Fields shared by runs and recurring runs."""
        models = self.client.api_models
        return {
            "experiment_id": self.experiment_id,
            "pipeline_version_reference": models.V2beta1PipelineVersionReference(
                pipeline_id=self.pipeline_id, pipeline_version_id=self.version_id
            ),
            "runtime_config": models.V2beta1RuntimeConfig(
                parameters=self.parameters, pipeline_root=self.root or None
            ),
            "service_account": self.service_account,
        }


def prepare(
    name: str,
    arguments: dict[str, Any],
    root: str,
    strict: bool = False,
    is_tried: bool = True,
    finished: Mapping[str, Outputs] | None = None,
) -> Submission:
    """Run all checks, then upload the pipeline.

    Args:
        strict: whether missing machines are an error rather than a warning.
        is_tried: see `Preflight`.
        finished: outputs of steps to reuse.

    Raises:
        ExceptionGroup: all problems, as UserErrors; nothing is then uploaded.
        UserError, StageError: the server rejects it.
    """
    arguments, root = with_store(arguments, root)
    variant = Variant()  # if the checks will reject the pipeline or its recipes
    if name in FUNCTIONS:
        with suppress(UserError):
            arguments = with_machines(name, arguments)
            variant = choose_variant(name, arguments)
    variant = replace(variant, finished=finished or {}, code=code_digest())
    preflight = Preflight(name, arguments, root, variant.placement, strict, is_tried)
    checks = preflight.checks()
    if name in FUNCTIONS:
        pipeline = build(name, variant)
        checks = chain(checks, image_checks(pipeline, Pool.from_arguments(arguments)))
    doctor = "`make doctor` checks from within the cluster what cannot be checked from here"
    require(checks, elsewhere=doctor)
    # Nothing is uploaded before all checks have passed.
    client = preflight.client
    with TemporaryDirectory() as folder:
        compiled = Path(folder) / f"{name}.yaml"
        compiler.Compiler().compile(with_own_digest(name, pipeline), str(compiled))
        version = version_name(variant)
        with answers():
            what = str(pipeline.description or "")
            ids = upload(client, f"lathe-{name}", version, compiled, what)
            experiment = experiment_id(client, EXPERIMENT)
    pipeline_id, version_id, is_new = ids
    state = "uploaded" if is_new else "there already"
    print(f"pipeline lathe-{name}, version {version}: {state}")
    # With the defaults: the UI's form of a clone shows only what a run was given.
    inputs = pipeline.component_spec.inputs
    parameters = {key: spec.default for key, spec in inputs.items() if spec.optional} | arguments
    for key, recipe in recipe_names(name, arguments).items():
        # The steps' image contains only the built-in recipes: a file is passed as its text.
        is_file = "\n" not in recipe and Path(recipe).is_file()
        parameters[key] = recipe_text(Path(recipe)) if is_file else recipe
    # Pipelines imports the model itself, by its address.
    if model := arguments.get("model"):
        parameters["model"] = _importable(client, model, root)
    account = variant.placement.service_account or SERVICE_ACCOUNT
    return Submission(
        client, pipeline, pipeline_id, version_id, experiment, parameters, root, account
    )


def _importable(client: Client, model: str, root: str) -> str:
    """The model's address, with the scheme of the pipeline root if it is in the same bucket.

    Pipelines 2.17 records no store for imports: its launcher reads them like the root if scheme and
    bucket are the same, and otherwise as if from Amazon, at http://BUCKET.ENDPOINT.
    """
    with suppress(UserError):  # the root is not known here: the address stays
        ours = urlsplit(root or ResultsReader(client).default_root)
        theirs = urlsplit(model)
        if {ours.scheme, theirs.scheme} <= set(SCHEMES) and ours.netloc == theirs.netloc:
            return theirs._replace(scheme=ours.scheme).geturl()
    return model


def version_name(variant: Variant) -> str:
    """The commit, a digest of uncommitted changes, and the variant; `unversioned` without a
    repository, as in an image.
    """
    # Of one commit, there are as many versions as variants that were submitted.
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
    # First under the plain name, then, if other content has taken that, with the digest.
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
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository: as in an image
        return "unversioned"
    # `git diff` does not show new files: their contents are part of the digest too.
    files = [REPOSITORY / name for name in new if (REPOSITORY / name).is_file()]
    changes += "".join(sha256(file) for file in files)
    return f"{commit}-dirty-{digest(changes)[:SHORT]}" if changes else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout


def start(submission: Submission, name: str, is_followed: bool, logs: bool) -> None:
    """Start a run with this name and print its page's address; optionally follow it.

    Raises:
        UserError, StageError: the server rejects it.
    """
    client = submission.client
    with answers():
        body = client.api_models.V2beta1Run(display_name=name, **submission.request())
        run_id = client.runs.run_service_create_run(body).run_id
    page = client.page(f"runs/details/{run_id}")
    print(f"run {run_id}: {page}", flush=True)
    if page.startswith(LOCAL_UI):
        print(f"for that page: {TO_UI}; or set LATHE_KFP_UI to the UI's address")
    if is_followed:
        follow_to_end(client, run_id, logs)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=HELP)
@takes_arguments
@takes_machines
def main(
    pipeline: str,
    arguments: dict[str, Any],
    root: Root = "",
    strict: Strict = False,
    is_tried: Tried = True,
    is_followed: Followed = False,
    logs: Logs = True,
) -> None:
    """Run a pipeline on the cluster."""
    with error_messages():
        submission = prepare(pipeline, arguments, root, strict, is_tried)
        name = f"{pipeline} {datetime.now():%Y-%m-%d %H:%M:%S}"
        start(submission, name, is_followed, logs)


if __name__ == "__main__":
    app()
