"""The documents of a release: the model card, README.md for people and for the Hugging Face Hub,
with the chart of the gate's measurements; and its bills of materials."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index
from matplotlib.axes import Axes

from lathe.evaluate.comparison import Check
from lathe.model.card import CARD, README, TASK, card_values, front_matter
from lathe.report.cards.bom import BOM, ENVIRONMENT_SBOM, environment_sbom, model_bom
from lathe.report.cards.evidence import CONFIDENCE, Evidence, read_evidence
from lathe_base.config.text import write
from lathe_base.pages import is_sealed, render_markdown, seal
from lathe_base.pages.style import LIGHT, Theme, draw
from lathe_base.storage import atomic_file, claim_output_file
from lathe_base.storage.ownership import FileKind, Source

TEMPLATE = "lathe/report/cards/card.md.j2"

PICTURE = "quality.svg"
KIND = FileKind("a model card picture", is_sealed)

MODEL_BOM = "bom.cdx.json"

SERVE_LOCK = Path(__file__).parents[3] / "images" / "serve" / "requirements.lock"
"""The lock file, which exists in a checkout and in the image `train`, but not in an installed
package."""


def picture(checks: Sequence[Check]) -> str:
    """An SVG chart with a row per check: its change and interval relative to the margin, so that 1
    is the limit; empty if all margins are zero."""
    rows = [check for check in checks if check.limit]

    def paint(axes: Axes, theme: Theme) -> None:
        for row, check in enumerate(rows):
            # Divided by the limit, which has the sign of a loss, every loss is positive.
            at, *ends = (x / check.limit for x in (check.change, check.low, check.high))
            axes.plot(ends, [row, row], color=theme.color(0), linewidth=2.2)
            axes.plot(at, row, "o", color=theme.color(0), markersize=7)
            axes.annotate(
                check.formatted()["change"], (at, row), xytext=(0, 8),
                textcoords="offset points", ha="center",
            )  # fmt: skip
        axes.axvline(0, color=theme.muted, linewidth=1)
        axes.axvline(1, color=theme.accent, linewidth=1.5, linestyle=(0, (4, 2)))
        axes.set_yticks(range(len(rows)), [check.measure for check in rows])
        axes.tick_params(axis="y", labelcolor=theme.ink)
        axes.set_ylim(len(rows) - 0.45, -0.75)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("quality loss as a share of the margin; 1 is the limit")
        axes.margins(x=0.1)
        axes.locator_params(axis="x", nbins=6)

    return seal(draw(0.75 + 0.5 * len(rows), LIGHT, paint, background="white")) if rows else ""


def write_document(output: Path, kind: FileKind, text: str, *inputs: Source) -> None:
    """Write a card or a bill of materials.

    Raises:
        UserError: `output` is something else, or is inside one of the `inputs`.
    """
    claim_output_file(output, kind, *inputs)
    with atomic_file(output) as work:
        work.write_text(text, encoding="utf-8")


def write_release_documents(
    folder: Path,
    checkpoint: Path,
    exported: Path,
    evaluation: Path | None = None,
    verdict: Path | None = None,
    data: Path | None = None,
    stated: Mapping[str, str] | None = None,
    lock: Path = SERVE_LOCK,
) -> list[str]:
    """Write `README.md`, `bom.cdx.json`, `quality.svg` (if there is a verdict) and `sbom.cdx.json`
    of the serving environment (if `lock` exists) into `folder`; returns their names. The same
    inputs give the same bytes.

    Args:
        checkpoint: the checkpoint of `exported`.
        evaluation: of `lathe evaluate`, of the checkpoint or of the export.
        verdict: JSON file of `lathe gate`, in which the model is the candidate.
        data: the data set that it was trained on, for checkpoints that do not say it.
        stated: settings of the group Card that replace those of the checkpoint's recipe.
        lock: lock file of the environment that serves the release.

    Raises:
        UserError: an input is of the wrong kind, or belongs to another model; or `folder` has a
            file of one of these names that Lathe did not write.
    """
    evidence = read_evidence(checkpoint, evaluation, verdict, exported, data, stated)
    drawn = picture(evidence.verdict.checks) if evidence.verdict else ""
    documents = [
        (README, CARD, model_card(evidence, PICTURE if drawn else None)),
        (MODEL_BOM, BOM, model_bom(evidence)),
    ]
    if drawn:
        documents.append((PICTURE, KIND, drawn))
    if lock.is_file():
        documents.append((ENVIRONMENT_SBOM, BOM, environment_sbom(lock, "lathe-serve")))
    # All are claimed before the first is written: a file of the user's stops the whole release.
    for name, kind, _ in documents:
        claim_output_file(folder / name, kind)
    for name, kind, text in documents:
        write_document(folder / name, kind, text)
    return [name for name, _, _ in documents]


def model_card(evidence: Evidence, picture: str | None = None) -> str:
    """The text of the card; the same evidence gives the same text.

    Args:
        picture: file name of the chart next to the card.
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
        results = []
        for figure in evidence.figures:
            details = {
                "stderr": figure.stderr,
                "confidence_level": CONFIDENCE if figure.interval else None,
                "confidence_interval": list(figure.interval) if figure.interval else None,
                figure.unit: figure.n,
            }
            results.append(
                EvalResult(
                    task_type=TASK,
                    dataset_type=figure.source,
                    dataset_name=figure.source,
                    dataset_args={"sha256": figure.sha256},
                    metric_type=figure.kind,
                    metric_name=figure.label,
                    metric_value=figure.value,
                    metric_args={key: x for key, x in details.items() if x is not None},
                )
            )
        front["model-index"] = eval_results_to_model_index(evidence.name, results)
    return front
