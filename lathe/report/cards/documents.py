"""Common parts of Lathe's CycloneDX documents: the tool, the serial number, the text."""

import json
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6

from lathe_base import __version__
from lathe_base.storage.ownership import FileKind

_SERIAL, _TIME = "serialNumber", "timestamp"


def new_bom(component: Component, timestamp: datetime | None = None) -> Bom:
    """An empty bill of materials of `component`, written by Lathe."""
    tool = Component(name="lathe", version=__version__, type=ComponentType.APPLICATION)
    metadata = BomMetaData(component=component, tools=ToolRepository(components=[tool]))
    if timestamp is not None:
        metadata.timestamp = timestamp
    return Bom(metadata=metadata)


def to_values(bom: Bom, timestamp: datetime | None = None) -> dict[str, Any]:
    """The JSON of a bill of materials in CycloneDX 1.6, without a serial number, and with a time
    only if given."""
    values: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del values[_SERIAL]
    if timestamp is None:
        del values["metadata"][_TIME]
    return values


def to_text(values: dict[str, Any]) -> str:
    """The text of a document, whose serial number is derived from its content, so that the same
    evidence gives the same bytes."""
    return json.dumps({**values, _SERIAL: _serial_number(values)}, indent=2, sort_keys=True) + "\n"


def sha256_hash(digest: str) -> HashType:
    """The hash entry of a component for a SHA-256."""
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def licenses(stated: str | None) -> list[License]:
    """A license by its SPDX identifier or expression, or else by name; empty if not stated."""
    return [LicenseFactory().make_from_string(stated)] if stated else []


def properties(values: dict[str, Any]) -> list[Property]:
    """Properties in Lathe's namespace, without those that are None."""
    return [
        Property(name=f"lathe:{name}", value=str(value))
        for name, value in values.items()
        if value is not None
    ]


def _serial_number(values: dict[str, Any]) -> str:
    content = {key: value for key, value in values.items() if key != _SERIAL}
    # As a name in RFC 9562's name space of addresses.
    name = json.dumps(content, sort_keys=True)
    return uuid.uuid5(uuid.NAMESPACE_URL, name).urn


def _is_ours(path: Path) -> bool:
    try:
        values = json.loads(path.read_bytes())
        return bool(values[_SERIAL] == _serial_number(values))
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


BOM = FileKind("a bill of materials", _is_ours)
