"""Starts a run that resumes another one, reusing its finished steps.

    python -m pipelines.cluster.resume RUN

The outputs are always those of that run, regardless of Pipelines' cache.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage import list_objects
from lathe_launch.cluster.nodes import more_memory
from pipelines.cluster.follow import Logs
from pipelines.cluster.pods import CONTAINER, Pods, open_pods
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import HELP, Client, answers, connect, run_state
from pipelines.cluster.submit import Followed, prepare, start
from pipelines.commands.arguments import error_messages
from pipelines.commands.inputs import STORE_SECONDS, within
from pipelines.compiler.compile import FUNCTIONS, built
from pipelines.steps.resources import Outputs
from pipelines.steps.steps import finished_steps

NOT_REUSED = ("gate", "report", "release")
"""Steps that every run repeats."""


def steps_to_take(name: str, location: str, earlier: Sequence[str] = ()) -> dict[str, Outputs]:
    """The finished steps of the run with artifacts below `location` that pipeline `name` can reuse.

    Args:
        earlier: artifact locations of the runs whose steps that run reused.

    Raises:
        UserError: the store does not answer.
    """
    finished: dict[str, Outputs] = {}
    for where in (*earlier, location):  # the run's own results replace earlier ones
        addresses = within(STORE_SECONDS, where, lambda where=where: list(list_objects(where)))
        finished |= finished_steps(where, addresses)
    left = {*NOT_REUSED}
    for component, spec in built(name).pipeline_spec.components.items():
        if component.startswith("comp-for-loop"):  # a name does not identify the iteration
            left |= spec.dag.tasks.keys()
    return {step: outputs for step, outputs in finished.items() if step not in left}


def require_enough_memory(client: Client, run: str) -> None:
    """Check that no step of a run was killed for memory; nothing if its pods cannot be read.

    Raises:
        UserError: one was; the hint proposes more, within the quota and the nodes.
    """
    pods = open_pods(run, client.steps_namespace, None)
    if not isinstance(pods, Pods):
        return
    killed: dict[str, Any] = {}
    with suppress(UserError, StageError):
        killed = pods.out_of_memory()
    if not killed:
        return
    said, proposed = [], []
    room = "FORCE=1 to try with the same"
    for step, pod in killed.items():
        (main,) = (c for c in pod.spec.containers if c.name == CONTAINER)
        limit = ((main.resources and main.resources.limits) or {}).get("memory", "")
        said.append(
            f"{step} was killed because it needed more memory than its limit"
            + (f" of {limit}" if limit else "")
        )
        amount = more_memory(limit) if limit else "..."
        if limit:
            try:
                pods.require_room(pod, amount)
            except StageError as error:
                said.append(f"there is no room for {amount}: {error}")
                room = f"more memory in the quota or on a node, or {room}"
                continue
            except UserError:  # quota or nodes may not be read
                pass
        proposed.append(f"{step.partition('-')[0]}={amount}")  # as in Launch.steps
    if len(proposed) == len(killed):
        hint = f"make resume RUN={run} MEMORY={','.join(proposed)}, or {room}"
    else:
        hint = room
    raise UserError(f"run {run}: {'; '.join(said)}", hint, Code.OUT_OF_MEMORY)


def with_memory(arguments: dict[str, Any], memory: str) -> dict[str, Any]:
    """The arguments of a run with more memory: `6Gi` for every step that computes, or
    `prune=6Gi,export=8Gi` for these steps only."""
    if "=" not in memory:
        return arguments | {"memory": memory}
    given = dict(part.partition("=")[::2] for part in memory.split(","))
    settings = {f"Launch.steps.{step}.memory": amount for step, amount in given.items()}
    kept = [one for one in arguments["overrides"] if one.partition("=")[0] not in settings]
    more = [f"{key}={amount}" for key, amount in settings.items()]
    return arguments | {"overrides": [*kept, *more]}


def _compiled(client: Client, run: Any) -> dict[str, Any]:
    """The compiled pipeline of a run; empty if its version is unknown."""
    version = run.pipeline_version_reference
    if version is None:
        return {}
    with answers():
        spec = client.pipelines.pipeline_service_get_pipeline_version(
            version.pipeline_id, version.pipeline_version_id
        ).pipeline_spec
    return dict(spec or {})


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=HELP)
def main(
    run: Annotated[str, typer.Argument(help="Id of the run to resume.")],
    is_followed: Followed = False,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory instead of the run's: 6Gi for every step that computes, or STEP=6Gi, with "
            "commas between several, for single steps."
        ),
    ] = "",
    is_forced: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also resume a run that has succeeded, or ran out of memory, as it was.",
        ),
    ] = False,
    logs: Logs = True,
) -> None:
    """Resume a run in a new run with the same pipeline and parameters."""
    with error_messages():
        client = connect()
        with answers():
            before: Any = client.runs.run_service_get_run(run)
        compiled = _compiled(client, before)
        # The UI chooses other names for runs; a run without a version is one that `submit` named.
        spec = compiled.get("pipeline_spec", compiled)
        name = spec.get("pipelineInfo", {}).get("name") or before.display_name.partition(" ")[0]
        if name not in FUNCTIONS:
            raise UserError(
                f"run {run} ({before.display_name!r}) is not a run of Lathe's pipelines",
                f"its pipeline is {name}, and none of {', '.join(FUNCTIONS)}",
                Code.WRONG_KIND,
            )
        if run_state(before) == "SUCCEEDED" and not is_forced:
            raise UserError(
                f"run {run} ({before.display_name}) has succeeded",
                "FORCE=1 (--force) starts another that repeats its "
                f"{', '.join(NOT_REUSED[:-1])} and {NOT_REUSED[-1]}",
                Code.EXISTS,
            )
        if not memory and not is_forced:
            require_enough_memory(client, run)
        root = f"{ResultsReader(client).artifact_root(before)}/{name}"
        # A run that was resumed itself imports artifacts of earlier ones: a folder for each.
        pattern = rf'"({re.escape(root)}/[0-9a-f-]{{36}}/)'
        earlier = sorted(set(re.findall(pattern, json.dumps(compiled))))
        taken = steps_to_take(name, f"{root}/{run}/", earlier)
        # A step that Pipelines took from its cache has no outputs below this run's folder.
        nothing = "nothing; cached steps are taken from the cache again"
        print(f"reused from {run}: {', '.join(sorted(taken)) or nothing}")
        settings = before.runtime_config
        arguments: dict[str, Any] = {"overrides": []} | dict(settings.parameters or {})
        arguments = with_memory(arguments, memory) if memory else arguments
        submission = prepare(name, arguments, settings.pipeline_root or "", finished=taken)
        start(submission, f"{name} from {run[:8]}", is_followed, logs)


if __name__ == "__main__":
    app()
