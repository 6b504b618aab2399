"""A run that is started in Pipelines' UI, by its form of a new run or of a clone: in a browser, if
the site has the UI's address, or with the request that the UI sends."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lathe_base.errors import UserError
from lathe_launch.cluster.doctor import require_account
from pipelines.cluster.server import KUBEFLOW, connect
from pipelines.cluster.submit import EXPERIMENT, experiment_id, find
from pipelines.steps.resources import SERVICE_ACCOUNT
from tests.cluster.site import Site, skip_without

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path("build/screenshots")


def start_new(site: Site, pipeline: str, **typed: Any) -> str:
    """Start a run of the latest version of a pipeline; returns its id."""
    body = new_run(site, pipeline, **typed)
    if not site.ui:
        return site.start(body)
    return _submit(site, f"new {pipeline}", _version(body), body, typed)


def start_clone(site: Site, run: str, **typed: Any) -> str:
    """Start a clone of a run; returns the clone's id."""
    body = clone(site, run, **typed)
    if not site.ui:
        return site.start(body)
    return _submit(site, f"clone {run}", {"cloneFromRun": run}, body, typed)


def start_recurring(site: Site, pipeline: str, **typed: Any) -> str:
    """Start a recurring run, every minute, of the latest version of a pipeline; returns its id."""
    body = new_run(site, pipeline, **typed)
    trigger = {"periodic_schedule": {"interval_second": "60"}}
    body |= {"trigger": trigger, "max_concurrency": "10", "no_catchup": False, "mode": "ENABLE"}
    if not site.ui:
        made = connect().recurring_runs.recurring_run_service_create_recurring_run(body)
        return str(made.recurring_run_id)
    query = _version(body) | {"recurring": "1"}
    return _submit(site, f"recurring {pipeline}", query, body, typed)


def _version(body: Mapping[str, Any]) -> dict[str, str]:
    """What opens the form with a run's version of the pipeline."""
    version = body["pipeline_version_reference"]
    return {
        "pipelineId": version["pipeline_id"],
        "pipelineVersionId": version["pipeline_version_id"],
    }


def _submit(
    site: Site, name: str, query: dict[str, str], body: dict[str, Any], typed: Mapping[str, Any]
) -> str:
    """Fill in the UI's form in a browser, and click on Start. The request that the form then sends
    must be `body`, of a run or of a recurring one. Returns its id.

    Args:
        name: of the form's screenshot.
        query: what the form is opened with.
        typed: parameter -> value to type; the form has the others already.
    """
    from playwright.sync_api import sync_playwright  # a quarter of a second, only needed here

    query |= {"experimentId": body["experiment_id"]}
    site_query = f"?ns={namespace}" if (namespace := connect().namespace) else ""
    program = next(filter(None, map(shutil.which, BROWSERS)), "")
    skip_without(program, f"no browser: none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1800})
        page.goto(f"{site.ui}/{site_query}#/runs/new?{urlencode(query)}")
        for key, value in typed.items():
            page.locator(f"#{key}").fill(value if isinstance(value, str) else json.dumps(value))
        if body["service_account"]:
            page.get_by_label("Service Account").fill(body["service_account"])
        recurs = "trigger" in body
        if recurs:  # "Run every 1 Hours", before
            page.get_by_text("Run every").get_by_role("combobox").click()
            page.get_by_role("option", name="Minutes").click()
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
        path = "/recurringruns" if recurs else "/runs"
        with page.expect_response(lambda answer: answer.url.endswith(path)) as answered:
            page.click("#startNewRunBtn")
        sent, got = answered.value.request.post_data_json or {}, answered.value.json()
        browser.close()
    keys = ("experiment_id", "pipeline_version_reference", "runtime_config")
    for key in (*keys, *(["trigger", "max_concurrency", "no_catchup"] if recurs else [])):
        assert sent[key] == body[key], (sent[key], body[key])
    if recurs:
        return str(got["recurring_run_id"])
    site.runs.append(got["run_id"])
    return str(got["run_id"])


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
    name, before = f"Clone of {old.display_name}", old.runtime_config
    return _run(site, name, ids, before.parameters | typed, before.pipeline_root or "")


def _run(
    site: Site, name: str, version: dict[str, Any], parameters: dict[str, Any], root: str = ""
) -> dict[str, Any]:
    return {
        "display_name": name,
        "description": "",
        "experiment_id": experiment_id(connect(), EXPERIMENT),
        "pipeline_version_reference": version,
        "runtime_config": {"parameters": parameters, "pipeline_root": root},
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
