"""RBAC: every permission has a user, and no account has more than those listed here."""

import pytest

from tests.support.rendered import Object, find_namespace, of_kind, pods, variant

TRAINER, KFP = "trainer.kubeflow.org", "pipelines.kubeflow.org"
OF_PIPELINES = ("default-editor", "pipeline-runner")
"""Accounts of runs that name none, which the component `default-account` binds."""
DEPLOY = {
    *(("apps", "deployments:lathe-serve", verb) for verb in ("get", "patch")),
    ("", "pods", "list"),
    ("", "pods/log", "get"),
    ("", "events", "list"),
}
TRAINJOBS = ("create", "get", "list", "patch", "delete")
KINDS = ("pipelines", "pipelines/versions", "experiments")
RUNS = ("create", "get", "list", "terminate")
JOBS = ("create", "get", "list", "delete", "enable", "disable")
QUEUED = ("kueue.x-k8s.io", "workloads", "list")
SUBMIT = {
    *((KFP, kind, v) for kind in KINDS for v in ("create", "get", "list")),
    *((KFP, "runs", verb) for verb in RUNS),
    *((KFP, "jobs", verb) for verb in JOBS),
    *(("", "pods", verb) for verb in ("get", "list")),
    ("", "pods/log", "get"),
    QUEUED,
    *(("", kind, "list") for kind in ("events", "resourcequotas")),
    ("argoproj.io", "workflows", "list"),
    ("", "configmaps:kfp-launcher", "get"),
    ("", "nodes", "list"),
}
"""No creation of pods, which would read every Secret."""
EXPECTED = {
    "lathe-pipeline": {
        *((TRAINER, "trainjobs", verb) for verb in TRAINJOBS),
        (TRAINER, "trainingruntimes", "get"),
        *(("", kind, "list") for kind in ("resourcequotas", "nodes")),
        ("jobset.x-k8s.io", "jobsets", "get"),
        *(("argoproj.io", "workflowtaskresults", verb) for verb in ("create", "patch")),
        ("argoproj.io", "workflows", "get"),
        ("", "configmaps:kfp-launcher", "get"),
        *(("", f"secrets:{key}", "get") for key in ("mlpipeline-minio-artifact", "lathe-s3")),
        *(("", "pods", verb) for verb in ("get", "list", "watch")),
        ("", "pods/log", "get"),
        QUEUED,
        *DEPLOY,
    },
    "lathe-submit": SUBMIT,
    "lathe-doctor": {
        *SUBMIT,
        *(("", "pods", verb) for verb in ("create", "delete")),
        *(("", f"serviceaccounts:{name}", "get") for name in OF_PIPELINES),
        ("authorization.k8s.io", "localsubjectaccessreviews", "create"),
        ("kubeflow.org", "scheduledworkflows", "list"),
        ("", "configmaps:metadata-grpc-configmap", "get"),
    },
    "lathe-deploy": DEPLOY,
    "lathe-janitor": {
        *((TRAINER, "trainjobs", verb) for verb in ("list", "delete")),
        ("", "pods", "list"),
    },
    "lathe-serve": set(),
}


def name(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def rights(objects: list[Object], account: str) -> set[tuple[str, str, str]]:
    """All (group, resource or resource:name, verb) bound to a service account."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": find_namespace(objects)}
    roles = {(o["kind"], name(o)): o["rules"] for o in of_kind(objects, "Role", "ClusterRole")}
    bound = [
        rule
        for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding")
        if subject in binding["subjects"]
        for rule in roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
    ]
    return {
        (group, f"{resource}:{only}" if only else resource, verb)
        for rule in bound
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for only in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("account", EXPECTED)
def test_no_more_and_no_less(objects: list[Object], account: str) -> None:
    assert rights(objects, account) == EXPECTED[account]


def test_every_role_has_a_user_and_every_user_exists(objects: list[Object]) -> None:
    accounts = {name(o) for o in of_kind(objects, "ServiceAccount")}
    # Of components: without permissions, and with those of another.
    assert accounts - {"lathe-train", "default-editor"} == set(EXPECTED)
    bindings = of_kind(objects, "RoleBinding", "ClusterRoleBinding")
    used = {(b["roleRef"]["kind"], b["roleRef"]["name"]) for b in bindings}
    assert used == {(o["kind"], name(o)) for o in of_kind(objects, "Role", "ClusterRole")}
    subjects = [subject for binding in bindings for subject in binding["subjects"]]
    assert {subject["name"] for subject in subjects} <= accounts | {*OF_PIPELINES}
    assert {pod.spec.get("serviceAccountName") for pod in pods(objects)} <= accounts | {None}


def test_only_who_asks_the_cluster_gets_a_token(objects: list[Object]) -> None:
    accounts = {name(o): o for o in of_kind(objects, "ServiceAccount")}
    for pod in pods(objects):
        account = accounts.get(pod.spec.get("serviceAccountName", ""), {})
        automount = account.get("automountServiceAccountToken", True)
        has_token = pod.spec.get("automountServiceAccountToken", automount)
        assert has_token == (pod.owner == "CronJob/lathe-janitor"), pod.owner


@pytest.mark.parametrize("overlay", ["kind", "production", "standalone"])
def test_the_default_account_may_do_what_steps_do(
    overlay: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objects = variant(f"{overlay}+default-account", tmp_path_factory)
    for account in OF_PIPELINES:
        assert rights(objects, account) == EXPECTED["lathe-pipeline"]
    # A namespace that is no profile has no default-editor; pipeline-runner is Pipelines' own.
    accounts = {name(o) for o in of_kind(objects, "ServiceAccount")}
    assert accounts & {*OF_PIPELINES} == ({"default-editor"} if overlay != "standalone" else set())
