"""The bill of materials of a model: CycloneDX 1.6 with a model card (ML-BOM)."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.model.contact import OrganizationalContact

from lathe.model.card import TASK, card_settings, describe_formats, measured_losses, source_name
from lathe.report.cards.documents import (
    licenses,
    new_bom,
    properties,
    sha256_hash,
    to_text,
    to_values,
)
from lathe.report.cards.evidence import Evidence
from lathe.report.cards.figures import Figure
from lathe_base.artifacts.metadata import Ancestor, Corpus
from lathe_base.config.settings import CardSettings

MODEL = "model"


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
    if evidence.figures:
        metrics = [_metric(figure) for figure in evidence.figures]
        model_card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    model_card["considerations"] = _considerations(evidence, card)
    return model_card


def _metric(figure: Figure) -> dict[str, Any]:
    values: dict[str, Any] = {
        "type": figure.label,
        "value": str(figure.value),
        "slice": f"{figure.source}, SHA-256 {figure.sha256}",
    }
    if figure.interval is not None:
        low, high = map(str, figure.interval)
        values["confidenceInterval"] = {"lowerBound": low, "upperBound": high}
    return values


def _considerations(evidence: Evidence, card: CardSettings) -> dict[str, Any]:
    limits = [f"A prompt and its continuation have at most {evidence.config.n_positions:,} tokens."]
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
    return considerations
