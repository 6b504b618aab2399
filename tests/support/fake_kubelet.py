"""A fake kubelet for pods without an owner, and Kubeflow Trainer's admission webhook."""

import threading
from contextlib import suppress

from tests.support.fake_kubernetes import Controller, Event, FakeKubernetes, Object, Refused
from tests.support.fake_trainer import TRAINJOBS, Pod, Script

RUNTIMES = "trainingruntimes.trainer.kubeflow.org"


class Kubelet(Controller):
    """Runs `script` in every pod that is created without an owner.

    Attributes:
        pods: all such pods so far, by uid.
    """

    def __init__(self, server: FakeKubernetes, script: Script) -> None:
        super().__init__(server)
        self.script = script
        self.pods: dict[str, Pod] = {}

    def handle(self, event: Event) -> None:
        metadata = event.object["metadata"]
        if event.key.resource != "pods" or metadata.get("ownerReferences"):
            return
        if event.type == "ADDED":
            pod = self.pods[metadata["uid"]] = Pod(self.server, event.object, 0, 1)
            threading.Thread(target=self._play, args=(pod,), daemon=True).start()
        elif event.type == "DELETED":
            self.pods[metadata["uid"]].terminated.set()

    def _play(self, pod: Pod) -> None:
        with suppress(Refused):  # the pod was deleted
            self.script(pod)


def trainer_webhook(server: FakeKubernetes) -> None:
    """Reject TrainJobs whose runtime does not exist, as Trainer 2.3 does."""

    def admit(resource: str, body: Object) -> None:
        if resource != TRAINJOBS:
            return
        reference = body["spec"]["runtimeRef"]
        name, is_known = reference["name"], reference["kind"] == "TrainingRuntime"
        if not (is_known and server.list(RUNTIMES, "lathe", fields=f"metadata.name={name}")):
            said = (
                'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
                f'spec.RuntimeRef: Invalid value: {{"name":"{name}"}}: '
                f'TrainingRuntime.trainer.kubeflow.org "{name}" not found: specified '
                "trainingRuntime must be created before the TrainJob is created"
            )
            raise Refused(403, "Forbidden", said)

    server.admissions.append(admit)
