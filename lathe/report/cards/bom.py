"""Bills of materials in CycloneDX 1.6: of a model, with a model card (ML-BOM); of an environment or
a container image, from its lock file.

A lock file has the form of pip's requirements, as uv compiles it: `name==version`, the SHA-256 of
every distribution file that may be installed, and comments that name the packages that depend on
it.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.model.contact import OrganizationalContact
from cyclonedx.model.license import License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from lathe.model.card import TASK, card_settings, describe_formats, measured_losses, source_name
from lathe.report.cards.evidence import Evidence
from lathe_base import __version__
from lathe_base.artifacts.metadata import Ancestor, Corpus
from lathe_base.config.settings import CardSettings
from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text
from lathe_base.storage import sha256
from lathe_base.storage.ownership import FileKind

HINT = "give a lock file with hashes, such as images/train/requirements.lock"
ENVIRONMENT_SBOM = "sbom.cdx.json"
ROOT = "environment"

_PINNED = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,.-]*\])?===?([^\s;\\]+)(?:\s*;[^\\]*)?\s*\\?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\s*\\?")
_WANTED = re.compile(r"#(?: via)? +(\S.*)")
_IMAGE = re.compile(r"(?P<name>[^@\s]+?)(?P<tag>:[\w.-]+)?@sha256:(?P<digest>[0-9a-f]{64})")
MODEL = "model"

_SERIAL, _TIME = "serialNumber", "timestamp"


def model_bom(evidence: Evidence, timestamp: datetime | None = None) -> str:
    """The JSON text of the bill of materials; the same evidence gives the same text.

    The model is the component that the document describes; its files are nested components, and
    each corpus of its training data is another component.

    Args:
        timestamp: time of the document; None omits it.
    """
    card = card_settings(evidence.meta)
    model = _model(evidence, card)
    bom = new_bom(model, timestamp)
    corpora = evidence.origin.data.corpora if evidence.origin.data else []
    data = [_corpus(corpus, f"data:{i}") for i, corpus in enumerate(corpora, 1)]
    for component in data:
        bom.components.add(component)
    bom.register_dependency(model, data)
    values = to_values(bom, timestamp)
    # The library has no class for a model card.
    values["metadata"]["component"]["modelCard"] = _model_card(evidence, card, data)
    return to_text(values)


def _model(evidence: Evidence, card: CardSettings) -> Component:
    # The files of the export too, if it is not itself the model.
    digests = dict(evidence.files)
    if evidence.exported is not None and not evidence.is_export_alone:
        digests |= {"model.onnx": evidence.exported.sha256}
        for format_name in evidence.exported.formats:
            entries = evidence.exported.format_files(format_name).items()
            digests |= {name: entry.sha256 for name, entry in entries}
    files = [
        Component(
            name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=[sha256_hash(digest)]
        )
        for name, digest in digests.items()
    ]
    return Component(
        name=evidence.name,
        version=evidence.digest[:12],
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=MODEL,
        hashes=[sha256_hash(evidence.digest)],
        licenses=licenses(card.license),
        authors=[OrganizationalContact(name=card.contact)] if card.contact else None,
        components=files,
        pedigree=_pedigree(evidence.origin.ancestors),
        properties=properties(_facts(evidence)),
    )


def _facts(evidence: Evidence) -> dict[str, Any]:
    config, meta, exported = evidence.config, evidence.meta, evidence.exported
    facts = {
        "version": meta.get("lathe"),
        "stage": meta.get("stage"),
        "engine": meta.get("engine"),
        "parameters": config.n_params,
        "context-tokens": config.n_positions,
        "layers": config.n_layer,
        "hidden-size": config.n_embd,
        "head-size": config.head_dim,
        "attention-heads": " ".join(map(str, config.n_head)),
        "key-value-heads": " ".join(map(str, config.kv_heads)) or None,
        "ffn-channels": " ".join(map(str, config.n_inner)),
        "vocabulary": config.vocab_size,
        "training-steps": meta.get("metrics", {}).get("step"),
    }
    facts |= {f"loss:{said.replace(' ', '-')}": x for said, x in measured_losses(meta).items()}
    if config.quantization is not None:
        facts |= {
            f"quantization:{fmt.replace(', ', ':').replace(' ', '-')}": linears
            for fmt, linears in describe_formats(config).items()
        }
    if exported is not None:
        facts |= {
            "export:flavour": exported.flavour,
            "export:bytes": exported.bytes,
            "export:checkpoint-sha256": exported.source,
            "export:largest-logit-error": exported.proof and exported.proof.max_error,
        }
    return facts


def _pedigree(ancestors: Sequence[Ancestor]) -> Pedigree | None:
    """The parent model, whose own pedigree contains the earlier ancestors."""
    if not ancestors:
        return None
    ancestor, *others = ancestors
    # Ancestors are a chain: each component contains the one before it.
    component = Component(
        name=ancestor.hub or ancestor.stage or "not stated",
        version=ancestor.revision or ancestor.sha256[:12],
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"ancestor:{ancestor.sha256[:12]}",
        hashes=[sha256_hash(ancestor.sha256)],
        properties=properties({"stage": ancestor.stage, "training-steps": ancestor.step}),
        pedigree=_pedigree(others),
    )
    return Pedigree(ancestors=[component])


def _corpus(corpus: Corpus, ref: str) -> Component:
    return Component(
        name=source_name(corpus),
        type=ComponentType.DATA,
        bom_ref=ref,
        hashes=[sha256_hash(corpus.sha256)],
        licenses=licenses(corpus.license),
        properties=properties(
            {
                "documents": corpus.documents,
                "tokens": corpus.tokens,
                "weight": corpus.weight,
                "text-sha256": corpus.text_sha256,
            }
        ),
    )


def _model_card(evidence: Evidence, card: CardSettings, data: list[Component]) -> dict[str, Any]:
    config = evidence.config
    text = [{"format": "text"}]
    parameters: dict[str, Any] = {
        "approach": {"type": "self-supervised"},
        "task": TASK,
        "architectureFamily": "transformer",
        "modelArchitecture": config.to_json()["architectures"][0],
        "datasets": [{"ref": str(component.bom_ref.value)} for component in data],
        "inputs": text,
        "outputs": text,
    }
    model_card: dict[str, Any] = {
        "modelParameters": {key: value for key, value in parameters.items() if value}
    }

    metrics = []
    for figure in evidence.figures:
        metric: dict[str, Any] = {
            "type": figure.label,
            "value": str(figure.value),
            "slice": f"{figure.source}, SHA-256 {figure.sha256}",
        }
        if figure.interval is not None:
            low, high = map(str, figure.interval)
            metric["confidenceInterval"] = {"lowerBound": low, "upperBound": high}
        metrics.append(metric)
    if metrics:
        model_card["quantitativeAnalysis"] = {"performanceMetrics": metrics}

    limits = [f"A prompt and its continuation have at most {config.n_positions:,} tokens."]
    if card.out_of_scope:
        limits.append(f"Out of scope: {card.out_of_scope}")
    if not evidence.figures:
        limits.append("It has not been evaluated.")
    considerations: dict[str, Any] = {"technicalLimitations": limits}
    if evidence.verdict is not None:
        undecided = evidence.verdict.undecided
        limits += [f"The comparison with its baseline could not decide {m}." for m in undecided]
        considerations["performanceTradeoffs"] = evidence.verdict.reasons
    if card.intended_use:
        considerations["useCases"] = [card.intended_use]
    model_card["considerations"] = considerations
    return model_card


@dataclass
class Pinned:
    """A package of a lock file.

    Attributes:
        hashes: SHA-256 of each of its distribution files.
        wanted_by: packages that depend on it, according to the comments.
    """

    name: str
    version: str
    hashes: list[str] = field(default_factory=list)
    wanted_by: list[str] = field(default_factory=list)

    @property
    def component(self) -> Component:
        """The package by its URL; its hashes are those of all its distribution files."""
        purl = PackageURL("pypi", None, self.name, self.version)
        return Component(
            name=self.name,
            version=self.version,
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=purl.to_string(),
            hashes=[sha256_hash(value) for value in self.hashes],
        )


def read_lock(path: Path) -> list[Pinned]:
    """The packages of a lock file.

    Raises:
        UserError: no such file, a line that pins nothing, or a package without a hash.
    """
    pins: list[Pinned] = []
    # Hashes and comments are on lines of their own, after the package that they belong to.
    for number, text in enumerate(read_text(path, HINT).splitlines(), 1):
        line = text.strip()
        if line in ("", "# via"):
            continue
        if match := _PINNED.fullmatch(line):
            pins.append(Pinned(match[1], match[2]))
        elif (match := _HASH.fullmatch(line)) and pins:
            pins[-1].hashes.append(match[1])
        elif match := _WANTED.fullmatch(line):
            if pins:
                pins[-1].wanted_by.append(match[1])
        elif not line.startswith("#"):
            raise UserError(
                f"{path}:{number}: does not pin a package: {line[:80]}", HINT, Code.MALFORMED
            )
    if not pins:
        raise UserError(f"{path}: does not pin any package", HINT, Code.MALFORMED)
    for package in pins:
        if not package.hashes:
            raise UserError(f"{path}: {package.name} has no --hash=sha256", HINT, Code.INCOMPLETE)
    return pins


def environment_sbom(
    lock: Path,
    name: str,
    image: str | None = None,
    timestamp: datetime | None = None,
    base: str | None = None,
) -> str:
    """The JSON text of the bill of materials; the same lock file gives the same text.

    Args:
        name: that of the environment.
        image: reference of the container image by digest, if it is one.
        base: reference of its base image by tag, a separate component.
        timestamp: time of the document; None omits it.

    Raises:
        UserError: as `read_lock`, an image without a digest, or a base without a tag.
    """
    packages = read_lock(lock)
    # The document describes the image, or else the environment as an application.
    root = _image(image) if image else Component(name=name, version=__version__)
    root.type = ComponentType.CONTAINER if image else ComponentType.APPLICATION
    root.bom_ref.value = ROOT
    for entry in properties({"lock:sha256": sha256(lock)}):
        root.properties.add(entry)
    bom = new_bom(root, timestamp)
    components = {package.name: package.component for package in packages}
    for component in components.values():
        bom.components.add(component)
    if base:
        bom.components.add(_base(base))
    wants: dict[str | None, list[Component]] = {}
    for package in packages:
        # What is not in the file itself is a project or another list: the environment wants it.
        for by in package.wanted_by or [ROOT]:
            wants.setdefault(by if by in components else None, []).append(components[package.name])
    bom.register_dependency(root, wants.get(None, []))
    for by, component in components.items():
        bom.register_dependency(component, wants.get(by, []))
    return to_text(to_values(bom, timestamp))


def _image(reference: str) -> Component:
    match = _IMAGE.fullmatch(reference)
    if match is None:
        raise UserError(
            f"{reference}: not an image reference with a digest",
            "give NAME@sha256:DIGEST, as images/refs.json lists it after `make push`",
            Code.INVALID_VALUE,
        )
    # Package URLs have no registry: the name is the last part, and the rest a qualifier.
    image, tag = match["name"], match["tag"]
    short = image.rpartition("/")[2]
    qualifiers = {"repository_url": image} | ({"tag": tag[1:]} if tag else {})
    return Component(
        name=image,
        version=f"sha256:{match['digest']}",
        purl=PackageURL("oci", None, short, f"sha256:{match['digest']}", qualifiers),
        hashes=[sha256_hash(match["digest"])],
    )


def _base(reference: str) -> Component:
    image, _, tag = reference.rpartition(":")
    host, _, path = image.partition("/")
    namespace, _, short = path.rpartition("/")
    if not short or "/" in tag:
        what = f"{reference}: not an image reference with a tag"
        raise UserError(
            what,
            "give HOST/NAME:TAG, such as nvcr.io/nvidia/tritonserver:26.07-py3",
            Code.INVALID_VALUE,
        )
    purl = PackageURL("docker", namespace or None, short, tag, {"repository_url": host})
    return Component(
        name=image,
        version=tag,
        type=ComponentType.CONTAINER,
        purl=purl,
        bom_ref=purl.to_string(),
    )


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
    # The library always writes a random serial number and the time.
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
