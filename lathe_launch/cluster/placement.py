"""Apply the group Launch to pods: turns `Placement` into a pod's specification.

    kubectl kustomize manifests/overlays/production |
      python -m lathe_launch.cluster.placement recipe.yaml > manifests.yaml

places the server, the janitor and the training runtimes, as `make manifests RECIPE=` does. Lists
keep their entries: tolerations are appended, and variables, volumes and pull secrets are merged by
name.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
import yaml

from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Placement, Placements
from lathe_base.config.settings.placement import NODE_POOL
from lathe_base.errors import Code, UserError, coded

Object = dict[str, Any]
IDENTITY = ("runAsUser", "runAsGroup", "fsGroup")
STEPS = {"Deployment": "serve", "InferenceService": "serve", "CronJob": "janitor"}
"""Kind of object -> the name of its pods in `Launch.steps`."""


def place(
    template: Object, settings: Placement, node_pool: str | None = None, has_gpus: bool = False
) -> None:
    """Apply the settings to a pod's metadata and specification.

    Args:
        node_pool: required of the node unless the settings choose nodes themselves.
    """
    metadata, spec = template.setdefault("metadata", {}), template["spec"]
    for key, entries in (("labels", settings.labels), ("annotations", settings.annotations)):
        _update(metadata, key, dict(entries) | metadata.get(key, {}))  # ours select, and stay
    # A recipe that chooses nodes replaces the pool; its other labels are added.
    selector = dict(spec.get("nodeSelector", {}))
    if settings.chooses_nodes:
        selector.pop(NODE_POOL, None)
    _update(spec, "nodeSelector", selector | settings.selector(node_pool))
    before = spec.get("tolerations", [])
    added = [one for one in settings.tolerated(node_pool, has_gpus) if one not in before]
    _update(spec, "tolerations", [*before, *added])
    _update(spec, "affinity", spec.get("affinity", {}) | settings.affinity)
    context = spec.setdefault("securityContext", {})
    for name in IDENTITY:
        if settings.run_as_user is None:
            context.pop(name, None)
        elif name in context:
            context[name] = settings.run_as_user
    secrets = [{"name": name} for name in settings.image_pull_secrets]
    _update(spec, "imagePullSecrets", _merged(spec.get("imagePullSecrets", []), secrets, "name"))
    # Volumes have no names in recipes, and need some in pods.
    volumes = {f"lathe-volume-{n}": volume for n, volume in enumerate(settings.volumes)}
    sources = [{"name": name, **volume.source} for name, volume in volumes.items()]
    _update(spec, "volumes", _merged(spec.get("volumes", []), sources, "name"))
    mounts = [{"name": name, "mountPath": one.mount_path} for name, one in volumes.items()]
    env = [{"name": name, "value": value} for name, value in settings.env.items()]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        _update(
            container,
            "volumeMounts",
            _merged(container.get("volumeMounts", []), mounts, "mountPath"),
        )
        _update(container, "env", _merged(container.get("env", []), env, "name"))


def place_manifests(objects: Sequence[Object], settings: Placements) -> None:
    """Place every pod that these objects describe."""
    for thing in objects:
        step_placement = settings.of_step(STEPS.get(thing["kind"], ""))
        for template in _templates(thing):
            place(template, step_placement)
            if settings.priority_class:
                template["spec"]["priorityClassName"] = settings.priority_class


def _templates(value: Any) -> Iterator[Object]:
    """The pod templates within an object; KServe's predictor is metadata and specification."""
    if isinstance(value, list):
        for item in value:
            yield from _templates(item)
    elif isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        elif "containers" in value:
            yield {"metadata": value, "spec": value}
        else:
            for item in value.values():
                yield from _templates(item)


def _update(target: Object, key: str, value: Any) -> None:
    """Set a value unless it is empty."""
    if value:
        target[key] = value


def _merged(before: list[Object], added: list[Object], key: str) -> list[Object]:
    """Merge two lists; added entries replace those with the same key."""
    replaced = {item[key] for item in added}
    return [*(item for item in before if item[key] not in replaced), *added]


def main(
    recipe: Annotated[str, typer.Argument(help="Recipe whose Launch group is applied.")],
    override: Annotated[
        list[str] | None, typer.Option("-o", help="Replace a setting: Group.key=value.")
    ] = None,
) -> None:
    """Apply a recipe's Launch group to the Kubernetes objects on standard input."""
    try:
        settings = load_recipe(recipe, override or []).Launch
        objects = [thing for thing in yaml.safe_load_all(sys.stdin) if thing]
    except (UserError, yaml.YAMLError) as error:
        if isinstance(error, yaml.YAMLError):
            hint = "give Kubernetes objects in YAML"
            error = UserError(f"standard input: not YAML: {error}", hint, Code.MALFORMED)
        print(coded(error), file=sys.stderr)
        raise SystemExit(UserError.status) from None
    place_manifests(objects, settings)
    yaml.safe_dump_all(objects, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    typer.run(main)
