"""The full model card: README.md for people and for the Hugging Face Hub."""

from typing import Any

from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

from lathe.model.card import TASK, card_values, front_matter
from lathe.report.cards.evidence import Evidence
from lathe.report.cards.figures import CONFIDENCE, Figure
from lathe_base.config.text import write
from lathe_base.pages import render_markdown

TEMPLATE = "lathe/report/cards/card.md.j2"


def model_card(evidence: Evidence, picture: str | None = None) -> str:
    """The text of the card; the same evidence gives the same text.

    Args:
        picture: file name of the chart next to the card (`lathe.report.cards.release`).
    """
    values = card_values(evidence.config, evidence.meta, evidence.origin, evidence.name)
    values["front"] = write(metadata(evidence))
    proof = evidence.exported.raw.get("proof") if evidence.exported else None
    values |= {"evidence": evidence, "confidence": CONFIDENCE, "proof": proof or {}}
    return render_markdown(TEMPLATE, **values, picture=picture)


def metadata(evidence: Evidence) -> dict[str, Any]:
    """The card's metadata, with the results as Hugging Face's `model-index`."""
    front = front_matter(evidence.config, evidence.meta, evidence.origin)
    if evidence.exported is not None:
        if evidence.is_export_alone:
            front["library_name"] = "onnx"
        flavour = evidence.exported.flavour
        front["tags"] = list(dict.fromkeys([*front["tags"], "onnx", flavour]))
    if evidence.figures:
        front["metrics"] = list(dict.fromkeys(figure.kind for figure in evidence.figures))
        results = [_result(figure) for figure in evidence.figures]
        front["model-index"] = eval_results_to_model_index(evidence.name, results)
    return front


def _result(figure: Figure) -> EvalResult:
    known = {
        "stderr": figure.stderr,
        "confidence_level": CONFIDENCE if figure.interval else None,
        "confidence_interval": list(figure.interval) if figure.interval else None,
        figure.unit: figure.n,
    }
    return EvalResult(
        task_type=TASK,
        dataset_type=figure.source,
        dataset_name=figure.source,
        dataset_args={"sha256": figure.sha256},
        metric_type=figure.kind,
        metric_name=figure.label,
        metric_value=figure.value,
        metric_args={key: value for key, value in known.items() if value is not None},
    )
