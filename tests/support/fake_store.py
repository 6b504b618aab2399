"""An in-memory store of Kubernetes objects, with the semantics that clients of the API can observe.

Implements resource versions and events, 409 for objects that exist or were modified meanwhile,
merge patches, finalizers, background and foreground garbage collection of owned objects, and label
and field selectors. Custom objects are validated against their CRDs if `shared/crds` exists next to
the checkout.
"""

import copy
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from tests.support.crds import CRDS, validator

FOREGROUND = "foregroundDeletion"
SYSTEM = {"uid", "creationTimestamp", "deletionTimestamp", "generation", "resourceVersion"}

Object = dict[str, Any]


class Key(NamedTuple):
    resource: str  # plural and group, such as pods or deployments.apps
    namespace: str
    name: str


class Event(NamedTuple):
    version: int
    type: str  # ADDED, MODIFIED or DELETED
    key: Key
    object: Object


class Refused(Exception):
    """An error response, with the Status object that the real API returns."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        kind: Object = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.status = kind | {"reason": reason, "message": message, "code": code}


class Store:
    """Objects by resource, namespace and name; all methods are thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.stopped = False
        self.version = self.oldest = 1
        self._objects: dict[Key, Object] = {}
        self._events: list[Event] = []

    def create(self, resource: str, body: Object, namespace: str = "lathe") -> Object:
        body = copy.deepcopy(body)
        metadata = body.setdefault("metadata", {})
        if "name" not in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        key = Key(resource, namespace, metadata["name"])
        with self.changed:
            if key in self._objects:
                raise Refused(409, "AlreadyExists", f'{resource} "{key.name}" already exists')
            validate(key, body)
            if resource == "pods":  # set by the API server, before any kubelet sees the pod
                body["status"] = {"phase": "Pending"} | body.get("status", {})
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            metadata |= {"namespace": namespace} if namespace else {}
            self._objects[key] = body
            self._record("ADDED", key)
            made = copy.deepcopy(body)
            self._collect_garbage()
            return made

    def get(self, resource: str, name: str, namespace: str = "lathe") -> Object:
        with self.changed:
            found = self._objects.get(Key(resource, namespace, name))
            if found is None:
                raise Refused(404, "NotFound", f'{resource} "{name}" not found')
            return copy.deepcopy(found)

    def list(
        self, resource: str, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """List objects, in all namespaces by default.

        Args:
            labels, fields: selectors, such as `a=b,c!=d,e`.
        """
        with self.changed:
            return [
                copy.deepcopy(found)
                for key, found in sorted(self._objects.items())
                if key.resource == resource and namespace in (None, key.namespace)
                if selected(found, labels, fields)
            ]

    def patch(self, resource: str, name: str, changes: Object, namespace: str = "lathe") -> Object:
        """Apply a JSON merge patch: null removes a field, a list replaces the old one."""
        return self.replace(resource, name, lambda found: _merge(found, changes), namespace)

    def replace(
        self, resource: str, name: str, change: Callable[[Object], Object], namespace: str = "lathe"
    ) -> Object:
        with self.changed:
            before = self.get(resource, name, namespace)
            key = Key(resource, namespace, name)
            after = change(copy.deepcopy(before))
            if after["metadata"].get("resourceVersion", _version(before)) != _version(before):
                raise Refused(409, "Conflict", f"{resource} {name}: it has been modified")
            after["metadata"] |= {k: v for k, v in before["metadata"].items() if k in SYSTEM}
            validate(key, after)
            if after.get("spec") != before.get("spec"):
                after["metadata"]["generation"] += 1
            self._objects[key] = after
            if after != before:
                self._record("MODIFIED", key)
            changed = copy.deepcopy(after)
            self._finalize(key)
            self._collect_garbage()
            return changed

    def delete(
        self, resource: str, name: str, namespace: str = "lathe", foreground: bool = False
    ) -> Object:
        with self.changed:
            found = self.get(resource, name, namespace)
            self._begin_delete(Key(resource, namespace, name), foreground)
            self._collect_garbage()
            return found

    def compact(self) -> None:
        """Drop all events so far: a watch from one of their versions fails with 410 (Gone)."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.changed.notify_all()

    def follow(self, since: int = 0, timeout: float = 1e9) -> Iterator[Event]:
        """Yield events after version `since` as they occur, until the timeout in seconds."""
        end, position = time.monotonic() + timeout, 0
        while True:
            with self.changed:
                while not self.stopped:
                    if 0 < since < self.oldest:
                        raise Refused(410, "Expired", f"too old resource version: {since}")
                    if position < len(self._events):
                        break
                    if (left := end - time.monotonic()) <= 0:
                        return
                    self.changed.wait(min(left, 3600))
                if self.stopped:
                    return
                event = self._events[position]
            position += 1
            if event.version > since:
                yield event
                since = since and event.version

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _record(self, kind: str, key: Key) -> None:
        self.version += 1
        found = self._objects[key]
        found["metadata"]["resourceVersion"] = str(self.version)
        self._events.append(Event(self.version, kind, key, copy.deepcopy(found)))
        self.changed.notify_all()

    def _begin_delete(self, key: Key, foreground: bool) -> None:
        metadata = self._objects[key]["metadata"]
        if foreground and FOREGROUND not in metadata.setdefault("finalizers", []):
            metadata["finalizers"].append(FOREGROUND)
        if "deletionTimestamp" not in metadata:
            grace = 0
            if key.resource == "pods":
                spec = self._objects[key].get("spec", {})
                grace = spec.get("terminationGracePeriodSeconds", 30)
                metadata["deletionGracePeriodSeconds"] = grace
            metadata["deletionTimestamp"] = now(
                grace
            )  # end of the grace period, as in the real API
            self._record("MODIFIED", key)
        self._finalize(key)

    def _finalize(self, key: Key) -> None:
        metadata = self._objects[key]["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            self._record("DELETED", key)
            del self._objects[key]

    def _collect_garbage(self) -> None:
        while self._collect_one():
            pass

    def _collect_one(self) -> bool:
        """Delete one object without a living owner, or finish one foreground deletion.

        Returns:
            Whether there was one.
        """
        living = {found["metadata"]["uid"]: key for key, found in self._objects.items()}
        waiting = {
            uid
            for uid, key in living.items()
            if FOREGROUND in self._objects[key]["metadata"].get("finalizers", [])
        }
        owned = set()
        for key, found in self._objects.items():
            owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences", [])}
            owned |= owners
            orphan = bool(owners) and not owners & (living.keys() - waiting)
            if orphan and "deletionTimestamp" not in found["metadata"]:
                self._begin_delete(key, foreground=bool(owners & waiting))
                return True
        for uid in waiting - owned:
            self._objects[living[uid]]["metadata"]["finalizers"].remove(FOREGROUND)
            self._finalize(living[uid])
            return True
        return False


def now(seconds: int = 0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def selected(found: Object, labels: str, fields: str) -> bool:
    have = found["metadata"].get("labels", {})
    for name, operator, value in _terms(labels):
        matches = have.get(name) == value if operator else name in have
        if matches == (operator == "!="):
            return False
    for path, operator, value in _terms(fields):
        at: Any = found
        for part in path.split("."):
            at = (at or {}).get(part)
        if (at == value) == (operator == "!="):
            return False
    return True


def _terms(selector: str) -> list[tuple[str, str, str]]:
    return re.findall(r"([^!=,]+)(?:(!=|==?)([^,]*))?(?:,|$)", selector)


def _version(found: Object) -> str:
    return str(found["metadata"]["resourceVersion"])


def _merge(found: Any, changes: Any) -> Any:
    if not isinstance(changes, dict):
        return changes
    merged = dict(found) if isinstance(found, dict) else {}
    for name, change in changes.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), change)
    return merged


def validate(key: Key, body: Object) -> None:
    plural, _, group = key.resource.partition(".")
    if "kubeflow" not in group:
        return
    schema = validator(group, plural, body["apiVersion"].rpartition("/")[2])
    if schema is None:
        warnings.warn(f"{key.resource} is not validated: no {CRDS}", stacklevel=1)
        return
    errors = list(schema.iter_errors(body))
    if errors:
        said = "; ".join(f"{'.'.join(map(str, e.path))}: {e.message[:300]}" for e in errors)
        raise Refused(422, "Invalid", f'{key.resource} "{key.name}" is invalid: {said}')
