"""Run a pipeline on the cluster: check, compile, upload, start, and follow it if asked to.

    python -m pipelines.submit qat --model s3://models/gpt --nodes 2 --gpus 8 --follow

What a run needs to know of the server is in the environment: see --help.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from kfp import compiler
from kfp.dsl.graph_component import GraphComponent

from lathe.config.recipe import load_recipe
from lathe.errors import UserError
from pipelines.arguments import recipe_names, takes_arguments
from pipelines.compile import FUNCTIONS, build
from pipelines.follow import Logs, follow_to_end
from pipelines.preflight import Preflight
from pipelines.resources import SERVICE_ACCOUNT, Pool
from pipelines.server import HELP, LOCAL_UI, TO_UI, Client, answers
from pipelines.told import told
from pipelines.upload import experiment_id, upload, version_name

EXPERIMENT = "lathe"

Nodes = Annotated[int | None, typer.Option(help="Machines of a training; default 1.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs of a machine; 0 for none, default 1.")]
NodePool = Annotated[str, typer.Option(help="Value of the node label lathe/node-pool.")]
Queue = Annotated[str, typer.Option(help="Kueue LocalQueue through which GPUs are given out.")]
Root = Annotated[
    str,
    typer.Option(
        envvar="LATHE_PIPELINE_ROOT", help="Where artifacts go, s3://...; default: the server's."
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a node pool without enough GPUs, as an autoscaled "
    "one may be.")
]  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """A pipeline that is on the server, ready to be run with these parameters."""

    client: Client
    pipeline: GraphComponent
    pipeline_id: str
    version_id: str
    experiment_id: str
    parameters: dict[str, Any]
    root: str

    def request(self) -> dict[str, Any]:
        """What a run and a recurring run have in common."""
        models = self.client.api_models
        return {
            "experiment_id": self.experiment_id,
            "pipeline_version_reference": models.V2beta1PipelineVersionReference(
                pipeline_id=self.pipeline_id, pipeline_version_id=self.version_id
            ),
            "runtime_config": models.V2beta1RuntimeConfig(
                parameters=self.parameters, pipeline_root=self.root or None
            ),
            "service_account": SERVICE_ACCOUNT,
        }


def choose_pool(name: str, arguments: dict[str, Any]) -> Pool:
    """The machines that the first recipe's group Launch asks for; `Pool`'s own where it is silent.

    Raises:
        UserError: that recipe is wrong.
    """
    names = list(recipe_names(name, arguments).values())
    launch = load_recipe(names[0], arguments["overrides"]).Launch
    gpus = launch.gpus_per_node if "gpus_per_node" in launch.model_fields_set else Pool.gpus
    engine = _engine_of(names, arguments["overrides"])
    return Pool(launch.nodes, gpus, launch.node_pool or Pool.node_pool, launch.queue, engine)


def _engine_of(recipes: list[str], overrides: list[str]) -> str:
    """`paddle` if one of the recipes says so."""
    for recipe in recipes:
        with suppress(UserError):  # which the check of the recipes tells
            if load_recipe(recipe, overrides).Compress.engine == "paddle":
                return "paddle"
    return Pool.engine


def prepare(
    name: str, arguments: dict[str, Any], root: str, fresh: bool = False, strict: bool = False
) -> Submission:
    """Check all that can be checked, then put the pipeline on the server.

    Args:
        strict: whether machines that are not there now are an error; else a warning.

    Raises:
        ExceptionGroup: of UserErrors, everything that is wrong; nothing is on the server then.
        UserError, StageError: the server does not take it.
    """
    preflight = Preflight()
    client = preflight.server()
    preflight.arguments(name, arguments)
    preflight.store(root)
    if name not in FUNCTIONS:
        preflight.finish()
    try:
        pool = choose_pool(name, arguments)
    except UserError:  # which the check of the recipes tells
        pool = Pool()
    preflight.recipes(name, arguments, pool)
    preflight.nodes(pool, strict)
    pipeline = build(name, pool, fresh)
    preflight.images(pipeline, pool)
    for line in preflight.unchecked:
        print(line)
    preflight.finish()
    assert client
    with TemporaryDirectory() as folder:
        compiled = Path(folder) / f"{name}.yaml"
        compiler.Compiler().compile(pipeline, str(compiled))
        version = version_name(pool, fresh)
        with answers():
            ids = upload(client, f"lathe-{name}", version, compiled)
            experiment = experiment_id(client, EXPERIMENT)
    pipeline_id, version_id, is_new = ids
    state = "uploaded" if is_new else "there already"
    print(f"pipeline lathe-{name}, version {version}: {state}")
    overrides = list(dict.fromkeys([*arguments["overrides"], *pool.overrides]))
    parameters = recipe_names(name, arguments) | arguments | {"overrides": overrides}
    return Submission(client, pipeline, pipeline_id, version_id, experiment, parameters, root)


def machines(nodes: int | None, gpus: int | None, node_pool: str, queue: str) -> list[str]:
    """The options about machines in a recipe's words."""
    given = {"nodes": nodes, "gpus_per_node": gpus, "node_pool": node_pool, "queue": queue}
    return [f"Launch.{key}={value}" for key, value in given.items() if value not in (None, "")]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=HELP)
@takes_arguments
def main(
    pipeline: str,
    arguments: dict[str, Any],
    nodes: Nodes = None,
    gpus: Gpus = None,
    node_pool: NodePool = "",
    queue: Queue = "",
    root: Root = "",
    strict: Strict = False,
    is_followed: Annotated[
        bool, typer.Option("--follow", help="Wait for the run, and end with its status.")
    ] = False,
    logs: Logs = True,
) -> None:
    """Run a pipeline on the cluster."""
    arguments["overrides"] = [*arguments["overrides"], *machines(nodes, gpus, node_pool, queue)]
    with told():
        submission = prepare(pipeline, arguments, root, strict=strict)
        client = submission.client
        with answers():
            body = client.api_models.V2beta1Run(
                display_name=f"{pipeline} {datetime.now():%Y-%m-%d %H:%M:%S}",
                **submission.request(),
            )
            run_id = client.runs.run_service_create_run(body).run_id
        page = client.page(f"runs/details/{run_id}")
        print(f"run {run_id}: {page}", flush=True)
        if page.startswith(LOCAL_UI):
            print(f"for that page: {TO_UI}; or set LATHE_KFP_UI to the UI's address")
        if is_followed:
            follow_to_end(client, run_id, logs)


if __name__ == "__main__":
    app()
