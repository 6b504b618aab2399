"""One self-contained HTML page about a run: no scripts, nothing loaded from elsewhere.

All text is escaped by the template engine; pictures are SVG data URIs, one for light and one for
dark screens.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import lathe
from lathe.evaluate.gate import GateResult
from lathe.model.checkpoint import checkpoint_digest
from lathe.report.figures import Measure, comparison, loss_curve, sensitivity_chart
from lathe.report.style import DARK, LIGHT, Theme
from lathe.report.summary import (
    COLUMNS,
    Candidate,
    Row,
    cells,
    columns,
    read_json,
    summarize,
)
from lathe.storage import atomic_file

STAGES = {"pretrain": "pretraining", "prune": "finetuning", "quantize": "QAT"}


@dataclass(frozen=True)
class Picture:
    """Data URIs of one figure, and what it shows in words."""

    title: str
    alt: str
    light: str
    dark: str


def report(
    output: Path,
    candidates: Sequence[Candidate],
    sensitivity: Path | None = None,
    deployed: Path | None = None,
    latency: Mapping[str, Mapping[str, float]] | None = None,
    gate: GateResult | None = None,
    title: str = "Lathe run",
) -> list[Row]:
    """Write the page to the file `output` and return the rows of its table.

    Args:
        candidates: models of the run, the reference first; one is enough.
        sensitivity: folder of `lathe analyze`.
        deployed: folder of `lathe deploy`.
        latency: by candidate name, what `lathe.evaluate.latency.measure` returned.
        gate: the verdict on the last candidate, shown at the top.

    Raises:
        UserError: a folder without what its stage writes.
    """
    rows = summarize(candidates, latency)
    analysis = read_json(sensitivity / "sensitivity.json") if sensitivity else None
    environment = Environment(
        loader=PackageLoader("lathe.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        title=title,
        version=lathe.__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        gate=gate,
        columns=[column.title for column in columns(rows)],
        rows=list(zip(rows, cells(rows), strict=True)),
        comparisons=_comparisons(rows) if len(rows) > 1 else [],
        curves=_curves(candidates),
        sensitivity=analysis,
        sensitivity_chart=_sensitivity_picture(analysis) if analysis else None,
        samples=_samples(candidates),
        deployment=read_json(deployed / "deploy.json") if deployed else None,
        proofs=_proofs(candidates),
        recipes=_recipes(candidates),
        digests=_digests(candidates),
    )
    with atomic_file(output) as work:
        work.write_text(page, encoding="utf-8")
    return rows


def _picture(title: str, alt: str, paint: Callable[[Theme], str]) -> Picture:
    light, dark = (
        "data:image/svg+xml;base64," + base64.b64encode(paint(theme).encode()).decode()
        for theme in (LIGHT, DARK)
    )
    return Picture(title, alt, light, dark)


def _comparisons(rows: Sequence[Row]) -> list[Picture]:
    units = {
        "File": ("File size", "megabytes", 1e-6),
        "Perplexity": ("Perplexity, lower is better", "perplexity, with 95 % interval", 1.0),
        "Cloze accuracy": (
            "Cloze accuracy, higher is better",
            "% of last words right, with 95 % interval",
            100.0,
        ),
        "Prefill": ("Latency: prefill", "ms for the prompt, batch of 1", 1.0),
        "Decode, a token": ("Latency: decode", "ms per generated token, batch of 1", 1.0),
    }
    pictures = []
    for column in COLUMNS:
        values = [column.of(row) for row in rows]
        if column.title not in units or not any(value is not None for value in values):
            continue
        title, unit, factor = units[column.title]
        stderr = column.stderr
        measure = Measure(
            title=title,
            unit=unit,
            names=[row.name for row in rows],
            values=[None if value is None else factor * value for value in values],
            labels=[
                f"{cell.value} ({cell.ratio})" if cell.ratio else cell.value
                for cell in (column.cell(row, rows[0]) for row in rows)
            ],
            stderrs=[factor * (stderr(row) or 0.0) for row in rows] if stderr else None,
            from_zero=stderr is None,
        )
        alt = f"{title}: " + ", ".join(f"{row.name} {column.cell(row, rows[0])}" for row in rows)
        pictures.append(_picture(title, alt, partial(comparison, measure)))
    return pictures


def _curves(candidates: Sequence[Candidate]) -> list[Picture]:
    pictures = []
    for index, candidate in enumerate(candidates):
        path = candidate.model / "train.jsonl"
        records = _read_lines(path) if path.is_file() else []
        if not records:
            continue
        stage = _meta(candidate).get("stage", "training")
        title = f"{candidate.name}: {STAGES.get(stage, stage)}"
        alt = f"Loss of {title}, step {records[0]['step']} to {records[-1]['step']}"
        pictures.append(_picture(title, alt, partial(loss_curve, records, index)))
    return pictures


def _sensitivity_picture(analysis: Mapping[str, Any]) -> Picture:
    linears, skip = analysis["linears"], analysis["skip"]
    worst = ", ".join(f"{linear['name']} {linear['score']:.4f}" for linear in linears[:3])
    return _picture(
        "Loss added by INT8 in one linear",
        f"Loss added by INT8, worst first: {worst}",
        partial(sensitivity_chart, linears, skip),
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSONL file that may still be growing."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _meta(candidate: Candidate) -> dict[str, Any]:
    """`lathe.json`; empty for a plain HF folder."""
    path = candidate.model / "lathe.json"
    return read_json(path) if path.is_file() else {}


def _samples(candidates: Sequence[Candidate]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(prompt, [(model, its continuation)]) of the prompts that every evaluation has."""
    by_model = {
        c.name: {sample["prompt"]: sample["text"] for sample in json.loads(path.read_text())}
        for c in candidates
        if c.evaluation and (path := c.evaluation / "samples.json").is_file()
    }
    prompts = dict.fromkeys(prompt for texts in by_model.values() for prompt in texts)
    return [
        (prompt, [(name, texts[prompt]) for name, texts in by_model.items() if prompt in texts])
        for prompt in prompts
    ]


def _proofs(candidates: Sequence[Candidate]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Names of the exported candidates, and (figure of `export.json`, its value in each)."""
    cards = {c.name: read_json(c.exported / "export.json") for c in candidates if c.exported}
    figures = [_proof(card) for card in cards.values()]
    keys = dict.fromkeys(key for proof in figures for key in proof)
    return list(cards), [(key, [proof.get(key, "-") for proof in figures]) for key in keys]


def _proof(card: Mapping[str, Any]) -> dict[str, str]:
    """Numbers and names of a card, in words; lists by their length."""
    shown = {k: card[k] for k in ("flavour", "opset") if k in card} | card.get("proof", {})
    return {
        key.replace("_", " "): f"{value:.3g}"
        if isinstance(value, float)
        else str(len(value) if isinstance(value, list) else value)
        for key, value in shown.items()
    }


def _recipes(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    """(name, YAML) of the recipe that each checkpoint records."""
    return [
        (c.name, yaml.safe_dump(recipe, sort_keys=False))
        for c in candidates
        if (recipe := _meta(c).get("recipe"))
    ]


def _digests(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    found = [(f"{c.name} checkpoint", checkpoint_digest(c.model)) for c in candidates]
    for candidate in candidates:
        if candidate.evaluation:
            digests = read_json(candidate.evaluation / "metrics.json")["digests"]
            found += [
                (f"{name} evaluated on" if name != "tokenizer" else name, digest)
                for name, digest in digests.items()
                if digest and name != "model"
            ]
    return list(dict.fromkeys(found))
