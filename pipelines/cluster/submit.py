"""Runs a pipeline on the cluster: check, compile, upload, start, and optionally follow it.

    python -m pipelines.cluster.submit qat --model s3://models/gpt --nodes 2 --gpus 8 --follow

The environment configures the server: see --help.
"""

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

from lathe_base.checks import require
from lathe_base.config.recipe import recipe_text
from lathe_base.errors import UserError
from lathe_base.storage.s3 import SCHEMES
from pipelines.cluster.follow import Logs, follow_to_end
from pipelines.cluster.preflight import Preflight, image_checks
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import HELP, LOCAL_UI, TO_UI, Client, answers
from pipelines.cluster.upload import experiment_id, upload, version_name
from pipelines.commands.arguments import recipe_names, takes_arguments
from pipelines.commands.errors import error_messages
from pipelines.commands.variants import (
    choose_variant,
    run_pool,
    takes_machines,
    with_machines,
    with_store,
)
from pipelines.compiler.code import code_digest
from pipelines.compiler.compile import FUNCTIONS, build, with_own_digest
from pipelines.steps.finished import Outputs
from pipelines.steps.resources import SERVICE_ACCOUNT, Variant

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
        checks = chain(checks, image_checks(pipeline, run_pool(arguments)))
    doctor = "`make doctor` checks from within the cluster what cannot be checked from here"
    require(checks, elsewhere=doctor)
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
