"""The report stage: latency side by side, the gate's verdict, and one self-contained HTML page
without scripts or external resources."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from matplotlib.axes import Axes

from lathe.compress.plan import Expectation, expected
from lathe.compress.sensitivity.page import Achieved, section
from lathe.compress.sensitivity.result import analysis_digest, read_analysis
from lathe.evaluate.comparison import AGAIN, Accuracy
from lathe.evaluate.evaluation_folder import measured, read_evaluation, read_metrics
from lathe.evaluate.gate import GateResult, gate
from lathe.evaluate.latency import measure
from lathe.evaluate.measure_model import Sample
from lathe.model.folder import checkpoint_digest
from lathe.report.results import usage_columns
from lathe.report.summary import (
    Candidate,
    Row,
    cells,
    columns,
    summarize,
)
from lathe.report.training import HINT, curve, read_certificate
from lathe.train.result import read_answers
from lathe_base.artifacts.kinds import (
    EVALUATION,
    EXPORT,
    PAGE,
    SENSITIVITY,
    checked,
    open_export,
    read_json,
    read_metadata,
)
from lathe_base.artifacts.metadata import DeploymentMetadata
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError
from lathe_base.pages.html import Picture, picture, render
from lathe_base.pages.style import Theme, draw
from lathe_base.provenance import bundle
from lathe_base.provenance.chain import SHORT, Step, recorded_chain, verify_chain
from lathe_base.provenance.keys import public_path, signing_key, trusted_keys
from lathe_base.storage import atomic_file, claim_output_file
from lathe_launch.usage import Usage

N_ANSWERS = 6
"""Examples of each generative task."""

FIDELITY = {
    "kl": "KL from float, nats per token",
    "torch_kl": "KL of fake quantization",
    "argmax_agreement": "argmax agreement with float",
    "greedy_agreement": "greedy agreement with float",
    "flips": "greedy texts that diverge from float's",
}
"""Labels of the export's metrics relative to the float model."""


def report_run(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    output: Path,
    sensitivity: Path | None = None,
    deployed: Path | None = None,
    certificate: Path | None = None,
    usage: Mapping[str, Usage] | None = None,
) -> list[Row]:
    """Write the page of a run to the file `output` and return the rows of its table.

    The gate compares the last candidate with the first by `recipe.Gate` if both are evaluated. The
    latency of exported candidates is measured in turn, so that noise affects all of them equally.

    Raises:
        UserError: a folder that lacks the files of its stage.
    """
    folders = [f for c in candidates for f in (c.model, c.evaluation, c.exported)]
    claim_output_file(output, PAGE, *folders, sensitivity, deployed, certificate)
    for candidate in candidates:
        # It raises if a file has changed since its stage wrote it.
        assert candidate.checkpoint.verified
        if candidate.exported:
            open_export(candidate.exported)
    exported = {c.name: c.exported for c in candidates if c.exported}
    latency = measure(exported) if exported else None
    first, last = candidates[0].evaluation, candidates[-1].evaluation
    # The verdict is on the last model, beside the first: those between are steps on the way.
    verdict = gate(recipe, first, last) if first and last and len(candidates) > 1 else None
    return report(
        output, candidates, sensitivity, deployed, latency, verdict, certificate, usage=usage
    )


def report(
    output: Path,
    candidates: Sequence[Candidate],
    sensitivity: Path | None = None,
    deployed: Path | None = None,
    latency: Mapping[str, Mapping[str, float]] | None = None,
    gate: GateResult | None = None,
    certificate: Path | None = None,
    title: str = "Lathe run",
    usage: Mapping[str, Usage] | None = None,
) -> list[Row]:
    """Write the page to the file `output` and return the rows of its table.

    Args:
        candidates: models of the run, the reference first; at least one.
        sensitivity: folder of `lathe analyze`.
        deployed: folder of `lathe deploy`.
        latency: by candidate name, what `lathe.evaluate.latency.measure` returned.
        gate: the verdict on the last candidate, shown at the top.
        certificate: JSON file of `lathe certify-resume`.
        usage: what the steps of the run have used so far.

    Raises:
        UserError: a folder that lacks the files of its stage.
    """
    rows = summarize(candidates, latency)
    ranked = None
    if sensitivity is not None:
        read_analysis(sensitivity)
        analysis = read_json(sensitivity / SENSITIVITY.metadata_file, HINT)
        ranked = section(analysis, find_achieved(sensitivity, candidates, rows))
    page = render(
        "lathe/report/page.html.j2",
        title,
        gate=gate,
        columns=[column.title for column in columns(rows)],
        rows=list(zip(rows, cells(rows), strict=True)),
        comparisons=_comparisons(rows) if len(rows) > 1 else [],
        curves=[c for i, x in enumerate(candidates) if (c := curve(x.name, x.model, i))],
        finetuned=[(c.name, texts) for c in candidates if (texts := read_answers(c.model))],
        sensitivity=ranked,
        expectations=_expectations(candidates, rows),
        samples=_samples(candidates),
        answers=_answers(candidates),
        deployment=deployed
        and read_metadata(deployed / "deploy.json", DeploymentMetadata, HINT).raw,
        proofs=_proofs(candidates),
        engines=_engines(candidates, sensitivity),
        recipes=[
            (c.name, yaml.safe_dump(recipe, sort_keys=False))
            for c in candidates
            if (recipe := c.checkpoint.meta.get("recipe"))
        ],
        digests=_digests(candidates),
        # Of the folder with the longest history: the deployment, or the last candidate.
        chain=verified_chain(
            deployed / "repository" if deployed else candidates[-1].exported or candidates[-1].model
        ),
        certificate=read_certificate(certificate) if certificate else None,
        steps=[*(usage or {}), "all"],
        usage=dict(usage_columns(usage)) if usage else {},
    )
    with atomic_file(output) as work:
        work.write_text(page, encoding="utf-8")
    return rows


@dataclass(frozen=True)
class ComparedFigure:
    """One quantity for every candidate.

    Attributes:
        values: one per candidate; None if it was not measured.
        intervals: (low, high) of each value.
        labels: text next to each value.
        from_zero: bars from zero (a size) instead of points on a zoomed axis (a score).
    """

    title: str
    unit: str
    names: Sequence[str]
    values: Sequence[float | None]
    labels: Sequence[str]
    intervals: Sequence[tuple[float, float] | None] | None = None
    from_zero: bool = True


def _comparisons(rows: Sequence[Row]) -> list[Picture]:
    pictures = []
    for column in columns(rows):
        if column.panel is None:
            continue
        title, unit, factor = column.panel.title, column.panel.axis, column.panel.factor
        # Scores have intervals, and are points on a zoomed axis; sizes and times are bars from
        # zero.
        values = [column.of(row) for row in rows]
        interval = column.interval
        measure = ComparedFigure(
            title=title,
            unit=unit,
            names=[row.name for row in rows],
            values=[None if value is None else factor * value for value in values],
            labels=[
                f"{cell.value} ({cell.ratio})" if cell.ratio else cell.value
                for cell in (column.cell(row, rows[0]) for row in rows)
            ],
            intervals=[
                ends and (factor * ends[0], factor * ends[1]) for ends in map(interval, rows)
            ]
            if interval
            else None,
            from_zero=interval is None,
        )
        alt = f"{title}: " + ", ".join(f"{row.name} {column.cell(row, rows[0])}" for row in rows)
        pictures.append(picture(title, alt, partial(comparison_chart, measure)))
    return pictures


def comparison_chart(measure: ComparedFigure, theme: Theme) -> str:
    """One quantity with one row per candidate: bars, or points with a 95 % interval."""
    rows = [i for i, value in enumerate(measure.values) if value is not None]
    values = np.array([measure.values[i] for i in rows], dtype=float)
    known = measure.intervals or [None] * len(measure.values)
    ends = np.array([known[i] or (measure.values[i], measure.values[i]) for i in rows], dtype=float)

    def paint(axes: Axes, theme: Theme) -> None:
        for row, i in enumerate(rows):
            color = theme.color(i)
            if measure.from_zero:
                axes.barh(row, values[row], 0.56, color=color)
            else:
                axes.errorbar(
                    values[row], row, fmt="o", color=color,
                    xerr=np.abs(ends[row] - values[row])[:, None] if known[i] else None,
                    markersize=8, elinewidth=2.2, capsize=4, capthick=2.2,
                )  # fmt: skip
        for row, i in enumerate(rows):
            axes.annotate(
                measure.labels[i], (ends[row, 1], row), xytext=(7, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [measure.names[i] for i in rows])
        axes.tick_params(axis="y", labelcolor=theme.ink)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(measure.unit)
        low, high = ends.min(), ends.max()
        # Room on the right for the labels; points may lie close together, so their axis is at least
        # as wide as 2 % of the value.
        span = high if measure.from_zero else max(high - low, 0.02 * abs(high), 0.5)
        start = 0.0 if measure.from_zero else low - 0.15 * span
        axes.set_xlim(start, high + (0.5 if measure.from_zero else 0.6) * span)
        axes.locator_params(axis="x", nbins=6)
        if measure.unit.startswith("%"):
            axes.set_xticks([tick for tick in axes.get_xticks() if start <= tick <= 100])

    return draw(0.75 + 0.42 * len(rows), theme, paint)


def _expectations(
    candidates: Sequence[Candidate], rows: Sequence[Row]
) -> list[tuple[str, Expectation, float]]:
    """(model, what was to be expected of it, relative increase of its perplexity) for every model
    that was quantized without training in a measured format."""
    reference, expectations = rows[0].perplexity, []
    for candidate, row in zip(candidates, rows, strict=True):
        known = expected(candidate.checkpoint.config)
        # Expectations are of formats without training, which has a step of its own to report.
        untrained = not candidate.checkpoint.meta.get("metrics", {}).get("step")
        if known and untrained and reference and row.perplexity:
            expectations.append((row.name, known, row.perplexity / reference - 1))
    return expectations


def _samples(candidates: Sequence[Candidate]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(prompt, [(model, continuation)]) for every prompt in the evaluations."""
    by_model = {
        c.name: {
            sample.prompt: sample.text
            for sample in checked(read_json(path, HINT, list), list[Sample], str(path), HINT)
        }
        for c in candidates
        if c.evaluation and (path := c.evaluation / "samples.json").is_file()
    }
    prompts = dict.fromkeys(prompt for texts in by_model.values() for prompt in texts)
    return [
        (prompt, [(name, texts[prompt]) for name, texts in by_model.items() if prompt in texts])
        for prompt in prompts
    ]


@dataclass(frozen=True)
class ShownTask:
    """Examples of a generative task.

    Attributes:
        noise: the noise floor, in words; empty if it was not measured.
        examples: (prompt, expected, [(model, answer, what is right about it)]).
    """

    name: str
    noise: str
    examples: list[tuple[str, str, list[tuple[str, str, str]]]]


def _answers(candidates: Sequence[Candidate]) -> list[ShownTask]:
    """Examples of every generative task: first those that the last model gets wrong and the first
    one right, then other differences, then the rest."""
    folders = {c.name: c.evaluation for c in candidates if c.evaluation}
    evaluations = {
        name: read_evaluation(folder)
        for name, folder in folders.items()
        if any(result.task.generates for result in measured(read_metrics(folder), folder))
    }
    shown = []
    for name, result in next(iter(evaluations.values())).measured.items() if evaluations else ():
        if not result.task.generates:
            continue
        units = {
            model: evaluation.units[name]
            for model, evaluation in evaluations.items()
            if name in evaluation.units and evaluation.measured[name].digest == result.digest
        }
        # The first and the last model, which are the same if there is one only, side by side: lost
        # answers sort first (False < True), then those gained, then those that both share.
        titles = {m.column: m.title for m in result.task.measures if isinstance(m, Accuracy)}
        first, *_, last = [*units.values(), *units.values()]
        before, after = ([[row[c] for c in titles] for row in x.rows] for x in (first, last))
        order = sorted(
            range(len(before)), key=lambda i: (before[i] <= after[i], before[i] == after[i])
        )
        examples = []
        for i in order[:N_ANSWERS]:
            # Every model's answer to the same prompt, below each other.
            answers = []
            for model, model_units in units.items():
                row = model_units.rows[i]
                right = [title for column, title in titles.items() if row[column]]
                answers.append((model, row["answer"], ", ".join(right) or "wrong"))
            examples.append((first.rows[i]["prompt"], first.rows[i]["expected"], answers))
        floors = [
            f"{title}: {floor:,} of {len(before):,}"
            for column, title in titles.items()
            if (floor := first.noise_floor(column)) is not None
        ]
        noise = ""
        if floors:
            noise = f"run again ({first.rows[0].get(f'how{AGAIN}')}), the first model disagrees "
            noise += f"with itself on so many answers: {', '.join(floors)}"
        shown.append(ShownTask(name, noise, examples))
    return shown


def _proofs(candidates: Sequence[Candidate]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Names of the exported candidates, and (figure of `export.json`, its value in each)."""
    names, proofs = [], list[dict[str, str]]()
    for candidate in candidates:
        if not candidate.exported:
            continue
        metadata = read_json(candidate.exported / EXPORT.metadata_file, HINT)
        proof = dict(metadata.get("proof", {}))
        fidelity = proof.pop("fidelity", None) or {}
        shown = {k: metadata[k] for k in ("flavour", "opset") if k in metadata} | proof
        named = {key.replace("_", " "): value for key, value in shown.items()}
        named |= {label: fidelity[key] for key, label in FIDELITY.items() if key in fidelity}
        names.append(candidate.name)
        proofs.append(
            {
                key: f"{value:.3g}"
                if isinstance(value, float)
                else str(len(value) if isinstance(value, list) else value)
                for key, value in named.items()
            }
        )
    keys = dict.fromkeys(key for proof in proofs for key in proof)
    return names, [(key, [proof.get(key, "-") for proof in proofs]) for key in keys]


def _engines(candidates: Sequence[Candidate], sensitivity: Path | None) -> list[tuple[str, str]]:
    """(step, engine that computed it) of every step that records one."""
    rows = []
    for candidate in candidates:
        name, meta = candidate.name, candidate.checkpoint.meta
        if "engine" in meta:
            rows.append((f"{name}: {meta['stage']}", meta["engine"]))
        if candidate.evaluation:
            measured = read_json(candidate.evaluation / EVALUATION.metadata_file, HINT)["model"]
            rows.append((f"{name}: evaluate", measured.get("engine", "torch")))
        if candidate.exported:
            metadata = read_json(candidate.exported / EXPORT.metadata_file, HINT)
            engine = "torch, plus Paddle's files" if "paddle" in metadata else "torch"
            rows.append((f"{name}: export", engine))
    if sensitivity is not None:
        analysis = read_json(sensitivity / SENSITIVITY.metadata_file, HINT)
        rows.append(("analyze", analysis.get("engine", "torch")))
    return rows


def _digests(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    rows = [(f"{c.name} checkpoint", c.checkpoint.digest) for c in candidates]
    for candidate in candidates:
        if candidate.evaluation:
            metrics = read_metrics(candidate.evaluation)
            digests = metrics["digests"] | {n: t["sha256"] for n, t in metrics["tasks"].items()}
            rows += [
                (f"{name} evaluated on" if name != "tokenizer" else name, digest)
                for name, digest in digests.items()
                if digest and name not in ("model", "reference")
            ]
    # Candidates are mostly evaluated on the same files, which are listed once.
    return list(dict.fromkeys(rows))


def find_achieved(
    sensitivity: Path, candidates: Sequence[Candidate], rows: Sequence[Row]
) -> Achieved | None:
    """The measured cost of the choice in the folder `sensitivity`; None if the model quantized with
    it, or its parent, is not among the candidates or was not evaluated on a text."""
    digest = analysis_digest(sensitivity)
    by_digest = {checkpoint_digest(c.model): row for c, row in zip(candidates, rows, strict=True)}
    for candidate, row in zip(candidates, rows, strict=True):
        # A training records the digests of its inputs: the model that it started from, and the
        # analysis.
        run = candidate.model / "run.json"
        inputs = read_json(run, "train the model again") if run.is_file() else {}
        parent = by_digest.get(inputs.get("model", ""))
        if inputs.get("sensitivity") == digest and parent and parent.perplexity and row.perplexity:
            return Achieved(row.name, parent.name, parent.perplexity, row.perplexity)
    return None


@dataclass(frozen=True)
class ChainLine:
    """A step, or an external material, in the lineage.

    Attributes:
        depth: distance from the root, in steps.
        seconds: duration of the step; None for materials, and for steps shown before.
    """

    depth: int
    name: str
    digest: str
    finished: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Chain:
    """The lineage of a folder.

    Attributes:
        problem: why it is not verified; None if it is.
        command: verifies it again.
    """

    lines: list[ChainLine]
    problem: str | None
    command: str


def verified_chain(folder: Path) -> Chain | None:
    """The chain behind a folder, verified with the public key of the run's signing key, or else
    with the trusted keys; None without attestations."""
    # First what the attestations say, then whether a key confirms it: a chain that is not verified
    # is shown too, with the reason.
    step, problem = recorded_chain(folder, allows_gaps=True), None
    if step is None:
        return None
    key = signing_key()
    public_key = public_path(key) if key else None
    public = [public_key] if public_key and public_key.is_file() else trusted_keys()
    if not bundle.read(folder)[0].is_signed:
        problem = "the steps are not signed"
    elif not public:
        problem = "no public key is available to verify them"
    else:
        try:
            step = verify_chain(folder, public)
        except UserError as error:
            problem = error.what
    command = f"lathe verify {folder} --key {public[0] if public else 'PUBLIC.pub'} --chain"
    return Chain(list(_lines(step, "", 0, set())), problem, command)


def _lines(step: Step, role: str, depth: int, shown: set[int]) -> Iterator[ChainLine]:
    # A step whose outputs several others use is shown with its own inputs once.
    statement = step.statement
    digest = list(statement.products.values())[-1][:SHORT]
    name = f"{role}: {statement.step}" if role else statement.step
    if id(step) in shown:
        yield ChainLine(depth, f"{name} (see above)", digest)
        return
    shown.add(id(step))
    times = statement.predicate.run_details.metadata
    started, finished = map(datetime.fromisoformat, (times.started_on, times.finished_on))
    seconds = (finished - started).total_seconds()
    yield ChainLine(depth, name, digest, f"{finished:%Y-%m-%d %H:%M:%S} UTC", seconds)
    # A material was made by a step of Lathe, or comes from outside, such as a corpus.
    for material, before in step.made_by:
        if before:
            yield from _lines(before, material.name, depth + 1, shown)
        else:
            file = (material.uri or "").rpartition("/")[2] or material.uri or ""
            label = f"{material.name}: {file}"
            yield ChainLine(depth + 1, label, (material.sha256 or "")[:SHORT])
