"""Strict validation of custom resources against the operators' own CRDs."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # takes more than a second
    from jsonschema import Draft202012Validator

CRDS = Path(__file__).resolve().parents[3] / "shared" / "crds"


@functools.cache
def validator(group: str, plural: str, version: str) -> "Draft202012Validator | None":
    """Validator that rejects unknown fields; None if the CRD is not in `shared/crds`."""
    path = CRDS / f"{group}_{plural}.yaml"
    if not path.is_file():
        return None
    from jsonschema import Draft202012Validator

    definition = yaml.load(path.read_text(), yaml.CSafeLoader)
    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == version)
    schema = _closed(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


def _closed(schema: Any) -> Any:
    """Convert a CRD's OpenAPI schema to a JSON schema that rejects unknown fields."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {name: _closed(part) for name, part in schema.items() if name != "properties"}
    if "properties" in schema:
        closed["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
        if "x-kubernetes-preserve-unknown-fields" not in schema:
            closed.setdefault("additionalProperties", False)
    if schema.get("nullable"):
        closed["type"] = [schema["type"], "null"]
    return closed
