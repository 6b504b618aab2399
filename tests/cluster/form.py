"""What Pipelines' UI sends when somebody fills in its form of a new run, or clones a run."""

from typing import Any

from lathe_base.errors import UserError
from lathe_launch.cluster.access import require_account
from pipelines.cluster.server import KUBEFLOW, connect
from pipelines.cluster.submit import EXPERIMENT
from pipelines.cluster.upload import experiment_id, find
from pipelines.steps.resources import SERVICE_ACCOUNT
from tests.cluster.site import Site


def new_run(site: Site, pipeline: str, **typed: Any) -> dict[str, Any]:
    """A run of the latest version of a pipeline, with the defaults of all parameters that are not
    `typed`."""
    api = connect()
    name = f"lathe-{pipeline}"
    listing = api.pipelines.pipeline_service_list_pipelines
    (found,) = find(listing, "pipelines", name, namespace=api.namespace)
    latest = api.pipelines.pipeline_service_list_pipeline_versions(
        found.pipeline_id, page_size=1, sort_by="created_at desc"
    ).pipeline_versions[0]
    ids = {"pipeline_id": found.pipeline_id, "pipeline_version_id": latest.pipeline_version_id}
    version = api.pipelines.pipeline_service_get_pipeline_version(**ids)
    fields = version.pipeline_spec["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert typed.keys() <= fields.keys(), fields.keys()
    defaults = {
        # YAML has 1.0 where JavaScript, whose numbers are all of one type, sends 1.
        key: int(field["defaultValue"]) if "INTEGER" in field["parameterType"]
        else field["defaultValue"]
        for key, field in fields.items()
        if "defaultValue" in field
    }  # fmt: skip
    return _run(site, f"Run of {latest.display_name}", ids, defaults | typed)


def clone(site: Site, run: str, **typed: Any) -> dict[str, Any]:
    """A clone of a run: its version and its parameters, but neither its account nor its
    experiment."""
    old = connect().runs.run_service_get_run(run)
    ids = old.pipeline_version_reference.to_dict()
    name, parameters = f"Clone of {old.display_name}", old.runtime_config.parameters
    return _run(site, name, ids, parameters | typed)


def _run(
    site: Site, name: str, version: dict[str, Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    return {
        "display_name": name,
        "description": "",
        "experiment_id": experiment_id(connect(), EXPERIMENT),
        "pipeline_version_reference": version,
        "runtime_config": {"parameters": parameters},
        "service_account": _account(site),
    }


def _account(site: Site) -> str:
    """What has to be typed as the service account: nothing with the component `default-account`."""
    usual = "pipeline-runner" if site.cluster.namespace == KUBEFLOW else "default-editor"
    try:
        require_account(site.cluster, usual, "")
    except UserError:
        return SERVICE_ACCOUNT
    return ""
