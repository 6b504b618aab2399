"""Every pod complies with the `restricted` Pod Security Standard and requests its resources."""

import copy
from collections.abc import Callable

import pytest

from tests.support.rendered import Object, Pod, find_namespace, of_kind, pods

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
VOLUMES |= {"projected", "secret", "name"}
SECCOMP = ("RuntimeDefault", "Localhost")
LABELS = {"app.kubernetes.io/name": "lathe", "app.kubernetes.io/part-of": "lathe"}


def violations(pod: Pod) -> list[str]:
    """Violations of the `restricted` Pod Security Standard."""
    spec, found = pod.spec, []
    whole = spec.get("securityContext", {})
    found += [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [f"volume {v['name']}" for v in spec.get("volumes", []) if set(v) - VOLUMES]
    found += [
        f"pod {key}" for key in ("sysctls", "windowsOptions", "seLinuxOptions") if key in whole
    ]
    for container in pod.containers:
        own = container.get("securityContext", {})
        capabilities = own.get("capabilities", {})
        checks = {
            "privileged": not own.get("privileged"),
            "escalation": own.get("allowPrivilegeEscalation") is False,
            "drop": "ALL" in capabilities.get("drop", []),
            "add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "root": own.get("runAsNonRoot", whole.get("runAsNonRoot")) is True,
            "user": own.get("runAsUser", whole.get("runAsUser")) != 0,
            "seccomp": own.get("seccompProfile", whole.get("seccompProfile", {})).get("type")
            in SECCOMP,
            "proc": own.get("procMount", "Default") == "Default",
            "port": not any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {name}" for name, holds in checks.items() if not holds]
    return found


def test_restricted(objects: list[Object]) -> None:
    for namespace in of_kind(objects, "Namespace"):
        labels = namespace["metadata"]["labels"]
        for mode in ("enforce", "audit", "warn"):
            assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"
    for pod in pods(objects):
        assert violations(pod) == [], pod.owner


def _container(pod: Pod) -> Object:
    context: Object = pod.spec["containers"][0]["securityContext"]
    return context


@pytest.mark.parametrize(
    "harm",
    [
        lambda pod: pod.spec.update(hostNetwork=True),
        lambda pod: pod.spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        lambda pod: pod.spec["securityContext"].pop("runAsNonRoot"),
        lambda pod: pod.spec["securityContext"].pop("seccompProfile"),
        lambda pod: pod.spec["securityContext"].update(runAsUser=0),
        lambda pod: _container(pod).update(privileged=True),
        lambda pod: _container(pod).pop("allowPrivilegeEscalation"),
        lambda pod: _container(pod).update(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        lambda pod: _container(pod).update(capabilities={}),
        lambda pod: pod.spec["containers"][0].update(ports=[{"hostPort": 80}]),
    ],
)
def test_a_violation_is_found(production: list[Object], harm: Callable[[Pod], object]) -> None:
    pod = pods(copy.deepcopy(of_kind(production, "Deployment")))[0]
    harm(pod)
    assert len(violations(pod)) >= 1


def test_pods_of_all_that_has_some(production: list[Object]) -> None:
    assert {pod.owner for pod in pods(production)} == {
        "Deployment/lathe-serve",
        "CronJob/lathe-janitor",
        "TrainingRuntime/lathe-torch",
        "TrainingRuntime/lathe-paddle",
    }


def test_user_root_file_system_and_writable_places(objects: list[Object]) -> None:
    for pod in pods(objects):
        user = pod.spec["securityContext"].get("runAsUser")
        assert user == (None if of_kind(objects, "Route") else 10001)
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in pod.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
            assert len(mounts) == len(container["volumeMounts"]) and "/tmp" in mounts
            for mount in mounts.values():
                assert mount.get("readOnly") or "emptyDir" in volumes[mount["name"]]
            if "/dev/shm" in mounts:
                assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"


def test_requests_and_images(objects: list[Object]) -> None:
    for pod in pods(objects):
        for container in pod.containers:
            where = f"{pod.owner} {container['name']}"
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
            name, _, tag = container["image"].rpartition(":")
            assert "/" in name and tag not in ("", "latest"), where


def test_labels(objects: list[Object]) -> None:
    for thing in objects:
        if "namespace" in thing["metadata"]:
            # Trainer's own place.
            trainers = thing["metadata"]["name"].startswith("lathe-trainer-status")
            here = "kubeflow-system" if trainers else find_namespace(objects)
            assert thing["metadata"]["namespace"] == here
            assert LABELS.items() <= thing["metadata"]["labels"].items(), thing["metadata"]["name"]
    for pod in pods(objects):
        assert LABELS.items() <= pod.labels.items(), pod.owner
        assert "app.kubernetes.io/component" in pod.labels
