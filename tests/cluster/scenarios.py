"""Scenarios that must work on any cluster: functions that return a summary of the result."""

import json
import re
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from kubernetes import client

from components.images import TRAIN
from lathe_base.checks import Check, Finding, run_checks
from lathe_base.errors import StageError
from lathe_base.storage import fetch, list_objects, remove, upload
from lathe_launch.cluster.rollout import Deployment, roll
from pipelines.cluster.doctor import run_pod, step_pod
from pipelines.cluster.pods import RUN, STAGE
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.schedule import end_runs, schedules, unfinished
from pipelines.cluster.schedule import remove as remove_schedules
from pipelines.cluster.server import connect
from tests.cluster.form import start_clone, start_new, start_recurring
from tests.cluster.site import Site, skip_without

SHORT = (
    "-o",
    "Engine.max_steps=120",
    "-o",
    "Engine.eval_freq=1000",
    "-o",
    "Engine.logging_freq=10",
)
"""A training run of about a minute on one core that logs progress every few seconds."""
LONG = (*SHORT, "-o", "Engine.save_load.save_steps=20")
KINDS = ("pretrain", "prune", "quantize", "evaluate-int8", "report")
"""Steps that train, compress, quantize, evaluate and report, in this order."""
TRAINED = "step 20/120"
"""Appears in the log when a state is saved."""
YEARLY, EVERY_MINUTE = "0 0 3 1 1 *", "0 * * * * *"
# Process 1 of a step's pod, or a child of it, supervises the step's own process.
KILL_THE_STEP = """
import os, signal, time

def step():
    lines = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = open(f"/proc/{name}/cmdline").read().split(chr(0))
            parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        lines[name] = (command, parent)
    for number, (_, parent) in lines.items():
        if "components.supervise" in lines.get(parent, ([], ""))[0]:
            return number
    return None

end = time.monotonic() + 20
while not (number := step()) and time.monotonic() < end:
    time.sleep(0.1)
if number:
    os.kill(int(number), signal.SIGKILL)
    print("killed")
"""
PROBE = """
import json, socket, time
for name, host, port, wanted in json.loads({targets!r}):
    end = time.monotonic() + {patience}
    while True:  # network plugins apply the policies some seconds after a pod has started
        try:
            socket.create_connection((host, port), 5).close()
            found = True
        except OSError:
            found = False
        if found == wanted or time.monotonic() > end:
            break
        time.sleep(1)
    state = "ok" if found == wanted else "broken"
    print(json.dumps(dict(check=name, state=state, said="open" if found else "closed", hint="")))
"""
LOAD = """
import json, os, signal, threading, time, urllib.request

failed, sent, is_over = [], 0, threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: is_over.set())
body = json.dumps(dict(text_input="Once upon a time", max_tokens=32)).encode()
url = "http://lathe-serve:8000/v2/models/gpt/generate"
keys = [line for line in os.environ["KEYS"].splitlines() if line and not line.startswith("#")]

def ask():
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {keys[0]}"}
    urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).read()

def client():
    global sent
    while not is_over.is_set():
        try:
            ask()
        except OSError as error:
            failed.append(repr(error))
        sent += 1

for _ in range(30):  # until the network policies of this pod are applied
    try:
        ask()
        break
    except OSError:
        time.sleep(1)
print("under load", flush=True)
clients = [threading.Thread(target=client) for _ in range(4)]
[thread.start() for thread in clients]
[thread.join() for thread in clients]
state = "broken" if failed or sent < 10 else "ok"
said = f"{sent} requests, {len(failed)} failed {sorted(set(failed))[:3]}"
print(json.dumps(dict(check="load", state=state, said=said, hint="")))
"""
END_LOAD = "import os, signal; os.kill(1, signal.SIGUSR1)"
PIPELINES, OUTSIDE = ("ml-pipeline.kubeflow.svc", 8888), ("1.1.1.1", 443)
NEIGHBOUR = ("ml-pipeline-ui.kubeflow.svc", 80)


def doctor(site: Site) -> str:
    """The doctor reports nothing broken."""
    out = site.command(
        "pipelines.cluster.doctor", ["full", "--gpus", str(site.gpus), "--nodes", "2"]
    )
    return f"{out.count('│ ok')} checks ok, {out.count('│ warning')} warnings"


def full(site: Site) -> str:
    """The full pipeline with three shards and a recipe file ends with a model that passed the gate
    and its report, and with a release and a notification if these are configured."""
    arguments = ["--shards", "3", "-o", _unique_seed(), *_production(site)]
    secrets = site.core.list_namespaced_secret(site.cluster.namespace).items
    is_told = any(secret.metadata.name == "lathe-webhook" for secret in secrets)
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "mine.yaml"
        recipe.write_text("_base_: tiny\n", encoding="utf-8")
        arguments += ["--recipe", str(recipe), *(["--notify"] if is_told else [])]
        run = site.submit("full", *arguments)
    out = site.follow(run)
    assert "gate    passed" in out, out
    assert not is_told or "notify: told" in out, out
    notified = list_objects(f"{ResultsReader(connect()).default_root}/full/{run}/notify/")
    assert any(found.endswith("/page") for found in notified), "no page on the graph's first level"
    site.trained = run
    return f"{time.monotonic() - began:.0f} s, gate passed"


def given_model(site: Site) -> str:
    """A pipeline quantizes and releases the model that `full` trained, imported by its address with
    the equivalent scheme (`s3://` for `minio://` or the reverse)."""
    skip_without(site.trained, "the scenario `full` has not succeeded")
    root = f"{ResultsReader(connect()).default_root}/full/{site.trained}/pretrain/"
    (model,) = {found.partition("/model/")[0] for found in list_objects(root) if "/model/" in found}
    scheme, _, place = model.partition("://")
    other = {"s3": "minio", "minio": "s3"}[scheme]
    run = site.submit("qat", "--model", f"{other}://{place}/model", *SHORT, *_production(site))
    site.follow(run)
    return f"{other}:// for {scheme}://, and the run succeeded"


def _unique_seed() -> str:
    """An override with which no model comes from Pipelines' cache."""
    return f"Global.seed={time.time_ns() % 10**9}"


def _production(site: Site) -> list[str]:
    return ["--production", site.production] if site.production else []


def two_nodes(site: Site) -> str:
    """Training runs on two nodes, and its TrainJob is deleted afterwards."""
    run = site.submit("pretrain", nodes=2)
    began = time.monotonic()
    site.follow(run)
    assert not site.left_behind()
    site.on_two_nodes = run
    return f"{time.monotonic() - began:.0f} s"


def form(site: Site) -> str:
    """A run that is started as Pipelines' UI does, from the uploaded version, the form's defaults
    and two nodes."""
    overrides = [*SHORT[1::2], _unique_seed()]
    run = start_new(site, "pretrain", gpus=site.gpus, nodes=2, overrides=overrides)
    began = time.monotonic()
    site.follow(run)
    return f"{time.monotonic() - began:.0f} s"


def reused(site: Site) -> str:
    """A run of the form with the values of the run of `two_nodes` repeats no training."""
    skip_without(site.on_two_nodes, "the scenario `two_nodes` has not succeeded")
    run = start_new(site, "pretrain", gpus=site.gpus, nodes=2)
    site.follow(run)
    steps = _steps(site, run)
    assert steps <= {"inputs", "report", "notify"}, steps
    return f"ran {', '.join(sorted(steps))}"


def _steps(site: Site, run: str) -> set[str]:
    """The steps of a run that did not come from the cache."""
    return {pod.metadata.labels.get(STAGE) for pod in site.cluster.pods(f"{RUN}={run}")} - {None}


def cloned(site: Site) -> str:
    """A clone of the run of `full` with one setting of the gate changed repeats the gate and what
    follows it, and nothing else."""
    skip_without(site.trained, "the scenario `full` has not succeeded")
    old = connect().runs.run_service_get_run(site.trained).runtime_config.parameters
    changed = [*old["overrides"], "Gate.max_accuracy_drop=0.5"]
    run = start_clone(site, site.trained, overrides=changed)
    site.follow(run)
    steps = _steps(site, run)
    assert {"inputs", "gate"} <= steps <= {"inputs", "gate", "release", "report", "notify"}, steps
    return f"ran {', '.join(sorted(steps))}"


def recurring(site: Site) -> str:
    """A recurring run that is made as Pipelines' UI does starts a run when due."""
    api = connect()
    recurring = start_recurring(site, "pretrain", gpus=site.gpus, overrides=[_unique_seed()])
    made = api.recurring_runs.recurring_run_service_get_recurring_run(recurring)
    try:
        site.until("a run has started", lambda: unfinished(api, [made]), 200)
        run = unfinished(api, [made])[0].run_id
        site.step(run, "pretrain")
    finally:
        api.recurring_runs.recurring_run_service_disable_recurring_run(recurring)
        left = unfinished(api, [made])
        site.runs += [run.run_id for run in left]
        end_runs(api, [made], wait=False)
        remove_schedules(api, [made])
    site.until("nothing is left", lambda: not site.left_behind(), 300)
    return f"started {len(left)} at its time, which trained"


def preemption(site: Site) -> str:
    """A worker's pod is deleted, and training resumes from its saved state."""
    run = site.submit("pretrain", *LONG, nodes=2)
    labels = f"lathe/run-id={run},app.kubernetes.io/component=train"
    workers = site.until("two workers run", lambda: _two(site, labels), run=run)
    first = {pod.metadata.uid for pod in workers}
    step = site.step(run, "pretrain").metadata.name
    site.until("a state is saved", lambda: site.has_said(step, TRAINED), run=run)
    site.core.delete_namespaced_pod(workers[1].metadata.name, site.cluster.namespace)
    again = site.until("other workers run", lambda: _two(site, labels, without=first), run=run)
    site.follow(run)
    return f"{len(again)} new workers, and the run succeeded"


def _two(site: Site, labels: str, without: Collection[str] = ()) -> list[Any]:
    found = [pod for pod in site.pods(labels) if pod.metadata.uid not in without]
    return found if len(found) == 2 else []


def cancel(site: Site) -> str:
    """Terminating a run leaves nothing running."""
    # A new seed: with that of the preempted run, training would come from the cache.
    run = site.submit("pretrain", *LONG, "-o", "Global.seed=2", nodes=2)
    site.step(run, "pretrain")
    began = time.monotonic()
    site.terminate(run)
    site.wait_for_end(run)
    site.until("nothing is left", lambda: not site.left_behind(), 900)
    return f"nothing left after {time.monotonic() - began:.0f} s"


def killed_step(site: Site) -> str:
    """A step's process is killed, and restarts in its pod."""
    run = site.submit("pretrain", *LONG)
    pod = site.step(run, "pretrain").metadata.name
    site.until("a state is saved", lambda: site.has_said(pod, TRAINED), run=run)
    assert "killed" in site.execute(pod, KILL_THE_STEP)
    site.follow(run)  # which may begin after the step has ended, and then does not show its log
    assert site.has_said(pod, "restarting")
    return "restarted in its pod, and the run succeeded"


def resume(site: Site) -> str:
    """A step of each kind fails in turn, and the resumed run repeats no finished step."""
    run = site.submit("full", *SHORT, "-o", "Launch.restarts=0", "-o", _unique_seed())
    for kind in KINDS:
        _fail(site, run, kind)
        assert site.wait_for_end(run) == "FAILED"
        done = site.command("pipelines.cluster.resume", [run])
        taken = re.findall(r"^reused from \S+: (.*)", done, re.M)[0].split(", ")
        assert set(KINDS[: KINDS.index(kind)]) - {"report"} <= set(taken), (kind, taken)
        run = site.started(done)
    site.follow(run)
    return f"failed in {', '.join(KINDS)}, and succeeded"


def _fail(site: Site, run: str, step: str) -> None:
    """Kill the process of a step, which is not restarted, as soon as it exists."""

    def killed() -> bool:
        with suppress(client.ApiException):  # the container has not started yet, or has exited
            found = site.pods(f"{RUN}={run},{STAGE}={step}")
            return any("killed" in site.execute(pod.metadata.name, KILL_THE_STEP) for pod in found)
        return False

    site.until(f"{step} is killed", killed, run=run)


def janitor(site: Site) -> str:
    """The job that deletes leftover TrainJobs succeeds."""
    batch, namespace = client.BatchV1Api(site.cluster.api), site.cluster.namespace
    template = batch.read_namespaced_cron_job("lathe-janitor", namespace).spec.job_template
    meta = client.V1ObjectMeta(generate_name="lathe-janitor-", labels=template.metadata.labels)
    job = batch.create_namespaced_job(namespace, client.V1Job(metadata=meta, spec=template.spec))
    name = job.metadata.name
    try:
        site.until("it has ended", lambda: _has_ended(batch.read_namespaced_job(name, namespace)))
        assert batch.read_namespaced_job(name, namespace).status.succeeded
    finally:
        batch.delete_namespaced_job(name, namespace, propagation_policy="Background")
    return "succeeded"


def _has_ended(job: Any) -> bool:
    return any(c.type in ("Complete", "Failed") for c in job.status.conditions or [])


def schedule(site: Site) -> str:
    """A schedule is created, updated and removed."""
    name = "lathe-pretrain"
    skip_without(not schedules(connect(), name), f"there is a schedule {name}, which stays")
    machines = ["--gpus", str(site.gpus), "--cron", YEARLY]
    for said in ("created", "updated"):
        out = site.command("pipelines.cluster.schedule", ["set", "pretrain", *machines])
        assert f"schedule {name}: {said}" in out, out
        assert len(schedules(connect(), name)) == 1
    site.command("pipelines.cluster.schedule", ["remove", "pretrain"])
    assert not schedules(connect(), name)
    return "created, updated, removed"


def scheduled_run(site: Site) -> str:
    """A schedule starts a run when due, and removing the schedule terminates the run."""
    name = "lathe-pretrain"
    skip_without(not schedules(connect(), name), f"there is a schedule {name}, which stays")
    machines = ["--gpus", str(site.gpus), "--cron", EVERY_MINUTE]
    site.command("pipelines.cluster.schedule", ["set", "pretrain", *machines, *LONG])
    try:
        site.until(
            "a run has started", lambda: unfinished(connect(), schedules(connect(), name)), 200
        )
        site.runs += [r.run_id for r in unfinished(connect(), schedules(connect(), name))]
    finally:
        site.command("pipelines.cluster.schedule", ["remove", "pretrain"])
    site.until("nothing is left", lambda: not site.left_behind(), 300)
    return "started at its time, ended with its schedule"


def release_and_rollback(site: Site) -> str:
    """Rolling back to the previous release and forward again loses no request under load."""
    skip_without(site.production, "no PRODUCTION= that may be replaced")
    place = ["-o", f"Production.releases={site.production}"]
    place += ["-o", f"Production.namespace={site.cluster.namespace}"]
    digests = re.findall(r"sha256-\w+|[0-9a-f]{12,64}", _releases(site, place))
    skip_without(len(set(digests)) > 1, "fewer than two releases: run the scenarios once more")
    before = _live(site)
    digest = before.rstrip("/").rpartition("/")[2]

    def there_and_back() -> None:
        (found,) = site.until("the load's pod runs", lambda: site.pods(f"{STAGE}=doctor"), 300)
        pod = found.metadata.name
        site.until("there is load", lambda: site.has_said(pod, "under load"), 300)
        try:
            site.command("lathe", ["release", "rollback", *place])
            assert _live(site) != before
            site.command("lathe", ["release", "rollback", "--to", digest, *place])
            assert _live(site) == before
        finally:
            site.execute(pod, END_LOAD)

    with ThreadPoolExecutor() as pool:
        rolling = pool.submit(there_and_back)
        load = _put_load(site)
        rolling.result()
    assert load.state == "ok", load.said
    return f"{digest[:20]} is live again; {load.said.partition(' [')[0]}"


def _put_load(site: Site) -> Finding:
    """Run four clients in a separate pod that send requests to the Service until SIGUSR1."""
    body = step_pod([TRAIN], ["python", "-c", LOAD], None)
    labels = body["metadata"]["labels"] | {"lathe/client": "true"}
    del labels["app.kubernetes.io/part-of"]  # so that Lathe's own network policies do not apply
    body["metadata"]["labels"] = labels
    keys = {"secretKeyRef": {"name": "lathe-api", "key": "keys"}}
    body["spec"]["containers"][0]["env"].append({"name": "KEYS", "valueFrom": keys})
    (found,) = (f for f in run_pod(site.cluster, body) if f.check == "load")
    return found


def unsigned_release(site: Site) -> str:
    """If signatures are required, a copy of the live release without signatures is rejected."""
    skip_without(site.production, "no PRODUCTION= that may be replaced")
    live, deployment = _live(site), Deployment(site.cluster.namespace, "lathe-serve")
    skip_without("signature" in _environment(site, "LATHE_REQUIRE"), "signatures are not required")
    unsigned = f"{site.production}/unsigned/{live.rstrip('/').rpartition('/')[2]}/"
    with TemporaryDirectory() as folder:
        copy = fetch(live, Path(folder) / "release")
        (copy / "model.sig").unlink()
        upload(copy, unsigned)
    with deployment.locked(), pytest.raises(StageError) as refused:
        roll(deployment, unsigned, live, 180)
    remove(unsigned)
    assert _live(site) == live
    assert "signature" in str(refused.value), refused.value
    return "refused, and the signed release stayed live"


def _releases(site: Site, place: list[str]) -> str:
    return site.command("lathe", ["release", "list", *place])


def _live(site: Site) -> str:
    """Release that the Deployment is configured to serve."""
    return _environment(site, "LATHE_RELEASE")


def _environment(site: Site, name: str) -> str:
    """Value of a variable in the first container of the Deployment that has it; else empty."""
    apps = client.AppsV1Api(site.cluster.api)
    found = apps.read_namespaced_deployment("lathe-serve", site.cluster.namespace)
    pod = found.spec.template.spec
    containers = [*(pod.init_containers or []), *pod.containers]
    return str(next((v.value for c in containers for v in c.env or [] if v.name == name), ""))


def network(site: Site) -> str:
    """Steps can reach Pipelines but not the internet; workers can reach neither."""
    step = [("Pipelines", *PIPELINES, True), ("the internet", *OUTSIDE, False)]
    step.append(("Pipelines' pages", *NEIGHBOUR, False))
    worker = [("Pipelines, of a worker", *PIPELINES, False)]
    found = _probe(site, step, {}) + _probe(site, worker, {"app.kubernetes.io/component": "train"})
    wrong = [f"{finding.check} is {finding.said}" for finding in found if finding.state == "broken"]
    assert not wrong, ", ".join(wrong)
    return f"{len(found)} connections as docs/reference/cluster.md says"


def _probe(site: Site, targets: list[Any], labels: dict[str, str]) -> list[Finding]:
    command = ["python", "-c", PROBE.format(targets=json.dumps(targets), patience=15 * site.poll)]
    body = step_pod([TRAIN], command, None)
    if labels:
        del body["metadata"]["labels"]["workflows.argoproj.io/workflow"]
    body["metadata"]["labels"] |= labels
    found = run_checks([Check("the doctor's pod", lambda: run_pod(site.cluster, body))])
    return [finding for finding in found if not finding.check.startswith("image ")]


SCENARIOS = (
    doctor,
    network,
    janitor,
    schedule,
    scheduled_run,
    full,
    given_model,
    two_nodes,
    reused,
    form,
    cloned,
    recurring,
    cancel,
    killed_step,
    preemption,
    resume,
    release_and_rollback,
    unsigned_release,
)
"""Scenarios in the order in which they run, quick ones first."""
