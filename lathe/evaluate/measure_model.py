"""Measure a model of any framework with the evaluation tasks."""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from tokenizers import Tokenizer

from lathe.data.chat_template import model_template
from lathe.data.tokenizer import require_same_vocabulary
from lathe.data.tokens import read_data_metadata
from lathe.evaluate.contamination import Marks, statement, training_text
from lathe.evaluate.evaluation_folder import METRICS, UNITS, measured, units_file
from lathe.evaluate.scoring import (
    GENERATE_HINT,
    Answerers,
    ResumableScorer,
    ScoreLimits,
    Scorer,
)
from lathe.evaluate.tasks import CLOZE, SLOTS, TASKS, TEXT, task_named
from lathe.evaluate.tasks.task import Reader, Task
from lathe.evaluate.tasks.text import compare_text
from lathe.model.config import GPTConfig
from lathe_base.artifacts.journal import Journal
from lathe_base.artifacts.kinds import EVALUATION
from lathe_base.artifacts.metadata import TASK_NAME
from lathe_base.artifacts.remote import input_path
from lathe_base.config.settings import GenerationSettings, OfflineEvalSettings, Recipe
from lathe_base.config.settings.quality import AnswerSettings
from lathe_base.config.settings.types import EvaluationRuntime, Precision
from lathe_base.errors import Code, UserError
from lathe_base.storage import atomic_folder, digest, sha256
from lathe_base.storage.ownership import real_path
from lathe_serving.runtime.text import encode_prompts

log = logging.getLogger("lathe")

# Activations of more tokens do not fit a CPU's caches: with 2,048, INT8 of 135 million parameters
# takes 8 % more processor time, and with 512 hardly less.
CPU_BATCH_TOKENS = 1024

N_SAMPLES = 4
SAMPLE_TOKENS = 48
PROMPT_CHARACTERS = 80

Generate = Callable[[list[list[int]], GenerationSettings], list[list[int]]]
"""Continues prompts, each a list of token ids, by a decoding strategy."""

TaskOption = tuple[str, Path]
"""A task's name and its file."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate, with its scorer.

    Attributes:
        stage: the stage that wrote it.
        n_bytes: size of its weights.
        on_cpu: whether it computes on the CPU.
        generate: continues prompts; None if the evaluation writes no samples.
        answerers: opens what answers the prompts of generative tasks; None if nothing does.
        engine: the framework that computes.
        precision: that of its products, as measured.
    """

    folder: Path
    scorer: Scorer
    config: GPTConfig
    tokenizer: Tokenizer
    stage: str | None
    n_bytes: int
    digest: str
    on_cpu: bool = True
    generate: Generate | None = None
    answerers: Answerers | None = None
    engine: str = "torch"
    precision: Callable[[], Precision] = lambda: "float32"

    @property
    def simulates(self) -> bool:
        """Whether the rounding of a quantized model is simulated in float."""
        is_graph = self.engine in get_args(EvaluationRuntime)
        return self.config.quantization is not None and not is_graph

    def token_budget(self, wanted: int) -> int:
        """Tokens per batch, `wanted` at most."""
        return min(wanted, CPU_BATCH_TOKENS) if self.on_cpu else wanted

    def metadata(self) -> dict[str, Any]:
        """The entry of the model in `metrics.json`."""
        return {
            "stage": self.stage,
            "engine": f"{self.engine}, fake quantization" if self.simulates else self.engine,
            "n_params": self.config.n_params,
            "bytes": self.n_bytes,
            "quantized": self.config.quantization is not None,
        }


@dataclass(frozen=True)
class EvalResult:
    """The figures in `metrics.json`.

    Attributes:
        engine: the framework that computed, and whether it simulated quantization.
        figures: those of all tasks, by their metric names (see `TaskResult.metrics`); also
            available as attributes, as in `result.perplexity`.
        not_held_out: a sentence for each set that is partly in the training text.
    """

    folder: Path
    engine: str
    n_params: int
    n_bytes: int
    figures: Mapping[str, float]
    not_held_out: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> float:
        figures: Mapping[str, float] = self.__dict__.get("figures", {})  # absent while it is copied
        if name not in figures:
            raise AttributeError(f"no figure {name!r} among {', '.join(figures)}")
        return figures[name]

    def metrics(self) -> dict[str, float]:
        """The metrics of a run."""
        return {"n_params": self.n_params, "n_bytes": self.n_bytes, **self.figures}


@dataclass(frozen=True)
class TaskFile:
    """A file to evaluate on; `name` is the name of the result."""

    name: str
    task: Task[Any, Any]
    path: Path


@dataclass(frozen=True)
class Sample:
    """A held-out prompt and its continuation, for a reader to judge."""

    prompt: str
    text: str


def measure(
    recipe: Recipe,
    subject: EvaluatedModel,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
    tasks: Sequence[TaskOption] = (),
    reference: EvaluatedModel | None = None,
) -> EvalResult:
    """Measure `subject` and write the evaluation folder `output`.

    A killed evaluation resumes from the batch it had reached, from a file next to `output`.

    See `lathe.evaluate.evaluate.evaluate` for parameters and errors.
    """
    settings = recipe.Offline_Eval
    if data is not None:
        read_data_metadata(data)
        require_same_vocabulary(data, subject.tokenizer)
    stated = [*tasks, *map(parse_task, settings.tasks)]
    files = _find_inputs(settings, data, cloze, text, task_files(stated))

    # Before anything is scored, which may take hours.
    generative = [file for file in files if file.task.generates]
    if generative and subject.answerers is None:
        raise UserError(
            f"{generative[0].path}: this engine does not generate", GENERATE_HINT, Code.UNSUPPORTED
        )
    if reference is not None:
        _require_comparable(subject, reference, files)

    limits, protocol, answers = _protocol(settings, subject, reference, generative)
    if subject.simulates:
        log.info(
            "%s is quantized: %s simulates its rounding in float (fake quantization)",
            *(subject.folder, subject.engine),
        )
    started = time.perf_counter()
    texts = subject.tokenizer, subject.folder, subject.config.n_positions
    read = [
        file.task.read(file.path, Reader(*texts, answers.get(file.name, AnswerSettings())))
        for file in files
    ]

    # All that the results depend on: another evaluation must not resume from this one's journal.
    models = {"tokenizer": digest(subject.tokenizer.to_str()), "model": subject.digest}
    if reference is not None:
        models["reference"] = reference.digest
    how = [protocol, limits.answers_twice] if answers else protocol
    identity = {
        "model": digest(json.dumps([models, subject.metadata()])),
        "data": digest(json.dumps([(file.name, sha256(file.path)) for file in files])),
        "settings": digest(json.dumps(how)),
    }
    with _journal(output, identity) as journal:
        try:
            units, figures = _score(subject, files, read, limits, journal, reference)
        except UserError:  # which scoring again would raise again
            journal.close()
            raise
        protocol["dtype"] = subject.precision()  # as a test on the first batch has decided
        samples = _samples(recipe, subject, files)
        marks = _marks(settings, data, files, read, units)
        metrics = _metadata(subject, files, figures, protocol, marks, models)
        metrics["seconds"] = round(time.perf_counter() - started, 3)
        _write(output, metrics, units, marks, samples)

    parts = []
    for one in measured(metrics, output):
        for metric, value, stderr in one.scores():
            error = f" ± {metric.show(stderr)}" if stderr else ""
            parts.append(f"{one.label(metric)} {metric.show(value)}{error}")
        parts[-1] += f" ({one.figures[one.task.unit]:,} {one.task.unit})"
    log.info("%s", ", ".join(parts))
    # Read as from the file: what is shown is what others will read.
    result = read_result(output, metrics)
    for sentence in result.not_held_out:
        log.warning("%s", sentence)
    return result


def _find_inputs(
    settings: OfflineEvalSettings,
    data: Path | None,
    cloze: Path | None,
    text: Path | None,
    tasks: Sequence[TaskFile],
) -> list[TaskFile]:
    """All files to evaluate on, in the order of tables."""
    paths = {file.name: file.path for file in tasks}
    cloze, text = cloze or paths.get(CLOZE.name), text or paths.get(TEXT.name)
    others = [file for file in tasks if file.task not in SLOTS]
    # Options come before the recipe, and the recipe before the data set.
    if settings.eval_path:
        named = Path(settings.eval_path)
        if named.suffix == ".jsonl":
            cloze = cloze or named
        else:
            text = text or named
    if data is not None:
        if not any((data / name).exists() for name in ("cloze.jsonl", "heldout.txt")):
            raise UserError(
                f"{data}: no cloze.jsonl and no heldout.txt",
                "give the folder written by `lathe prepare`, or omit --data",
                Code.WRONG_KIND,
            )
        cloze = cloze or _held_out(data / "cloze.jsonl")
        text = text or _held_out(data / "heldout.txt")
    if not settings.cloze_eval:
        cloze = None
    slots = [
        TaskFile(task.name, task, path)
        for task, path in ((TEXT, text), (CLOZE, cloze))
        if path is not None
    ]
    if not slots and not others:
        raise UserError(
            "nothing to evaluate on",
            "give a data folder with held-out documents, a cloze JSONL file, a text or a task",
            Code.MISSING_OPTION,
        )
    return [*slots, *others]


def _held_out(path: Path) -> Path | None:
    if path.is_file() and path.stat().st_size:
        return path
    log.warning("%s is missing or empty (no test documents): skipped", path)
    return None


def _require_comparable(
    subject: EvaluatedModel, reference: EvaluatedModel, files: Sequence[TaskFile]
) -> None:
    """Raise UserError unless the reference has the same vocabulary and length, and there is a
    text."""
    names = f"{subject.folder} and its reference {reference.folder}"
    sizes = [(model.config.vocab_size, model.config.n_positions) for model in (subject, reference)]
    if subject.tokenizer.get_vocab() != reference.tokenizer.get_vocab() or sizes[0] != sizes[1]:
        raise UserError(
            f"{names} have different vocabularies or lengths",
            "give the model that this one was derived from",
            Code.MISMATCH,
        )
    if not any(file.task is TEXT for file in files):
        raise UserError(
            f"{names} are compared on a text, but none is given",
            "give --text or --data",
            Code.MISSING_OPTION,
        )


def _protocol(
    settings: OfflineEvalSettings,
    subject: EvaluatedModel,
    reference: EvaluatedModel | None,
    generative: Sequence[TaskFile],
) -> tuple[ScoreLimits, dict[str, Any], dict[str, AnswerSettings]]:
    """The limits of the model's input; how it is measured, for `metrics.json`, which the gate wants
    to be the same for both models; and how the answers to each generative file are generated."""
    n_positions = subject.config.n_positions
    seq_len = min(settings.max_seq_len, n_positions)
    rolling = settings.windows == "lm_eval"
    overlap = (
        seq_len if rolling else min(settings.overlapping_eval or max(1, seq_len // 2), seq_len)
    )
    budget = subject.token_budget(settings.batch_size * seq_len)
    # The gate reads the noise floor from the baseline, and what has a reference is a candidate.
    answers_twice = settings.noise_floor and reference is None
    limits = ScoreLimits(seq_len, overlap, budget, rolling, answers_twice)
    protocol: dict[str, Any] = {
        "max_seq_len": seq_len,
        "overlapping_eval": overlap,
        "dtype": settings.dtype,
        **({"windows": settings.windows} if rolling else {}),
    }

    answers = {}
    for file in generative:
        matching = [s for pattern, s in settings.answers.items() if fnmatchcase(file.name, pattern)]
        chosen = matching[-1] if matching else AnswerSettings()
        max_tokens = min(chosen.max_tokens, n_positions // 2)  # the other half is the prompt's
        answers[file.name] = chosen.model_copy(update={"max_tokens": max_tokens})
    if answers:
        template = model_template(subject.folder)
        protocol["answers"] = {name: one.model_dump() for name, one in answers.items()}
        protocol["chat_template"] = template and digest(template)
    return limits, protocol, answers


@contextmanager
def _journal(output: Path, identity: dict[str, str]) -> Iterator[Journal]:
    """A journal next to `output`, deleted if the block succeeds; if the parent folder is not
    writable, a temporary one that cannot be resumed."""
    with TemporaryDirectory() as scratch:
        # `output` is renamed into place when it is complete, so the journal cannot be inside it.
        target = real_path(output)
        # The parent of an output need not exist yet.
        exists = next(folder for folder in target.parents if folder.exists())
        journal_folder = target.parent if os.access(exists, os.W_OK) else Path(scratch)
        journal = Journal(journal_folder / f"{target.name}.unfinished.jsonl", identity)
        yield journal
        journal.close()


def _score(
    subject: EvaluatedModel,
    files: Sequence[TaskFile],
    read: Sequence[Any],
    limits: ScoreLimits,
    journal: Journal,
    reference: EvaluatedModel | None,
) -> tuple[dict[str, Sequence[Any]], dict[str, dict[str, Any]]]:
    """Score the examples `read`; returns units and figures by the files' names."""
    units: dict[str, Sequence[Any]] = {}
    metrics: dict[str, dict[str, Any]] = {}
    scorer = ResumableScorer(subject.scorer, journal, answerers=subject.answerers)
    for file, examples in zip(files, read, strict=True):
        units[file.name] = file.task.score(scorer, examples, limits)
        metrics[file.name] = _plain(file.task.summarize(units[file.name], examples))
        # Checked before the next task is scored, which would take as long for nothing.
        loss = metrics[file.name][file.task.loss] if file.task.loss else 0.0
        if not math.isfinite(loss):
            raise UserError(
                f"{subject.folder}: its loss is {loss}",
                "training diverged: use an earlier checkpoint",
                Code.NOT_FINITE,
            )
        if reference is not None and file.task is TEXT:
            units[file.name], beside = compare_text(
                subject.scorer, reference.scorer, examples, units[file.name], limits, journal
            )
            metrics[file.name] |= beside
    return units, metrics


def _plain(values: Any) -> dict[str, Any]:
    """A dataclass, or a dictionary, as one."""
    return asdict(values) if is_dataclass(values) and not isinstance(values, type) else dict(values)


def _marks(
    settings: OfflineEvalSettings,
    data: Path | None,
    files: Sequence[TaskFile],
    read: Sequence[Any],
    units: Mapping[str, Sequence[Any]],
) -> dict[str, Marks]:
    """The overlap of the units with the training text, by file name, if it has an index."""
    trained_on = Path(settings.training_data) if settings.training_data else data
    known = training_text(trained_on)
    if known is None:
        return {}
    by_name = {}
    for file, examples in zip(files, read, strict=True):
        tokens = file.task.tokens(units[file.name], examples)
        marks = known.marks(tokens, settings.contaminated_overlap, file.task.generates)
        if marks is not None:
            by_name[file.name] = marks
    return by_name


def _samples(recipe: Recipe, subject: EvaluatedModel, files: Sequence[TaskFile]) -> list[Sample]:
    """Continuations of prompts from the text by the recipe's decoding strategy, if the model can
    generate, and its answers to a task are not there to be read."""
    texts = [file.path for file in files if file.task is TEXT]
    if any(file.task.generates for file in files) or subject.generate is None or not texts:
        return []

    # Openings of long lines, evenly spread over the file, cut at word boundaries.
    lines = [line.strip() for line in texts[0].read_text(encoding="utf-8").splitlines()]
    long = [line for line in lines if len(line) > PROMPT_CHARACTERS // 2]
    chosen = long[:: max(1, len(long) // N_SAMPLES)][:N_SAMPLES]
    prompts = [line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] for line in chosen]
    if not prompts:
        return []

    tokenizer, n_positions = subject.tokenizer, subject.config.n_positions
    limit = min(SAMPLE_TOKENS, recipe.Generation.max_dec_len, n_positions // 2)
    update = {"max_dec_len": limit, "num_return_sequences": 1}
    settings = recipe.Generation.model_copy(update=update)
    encoded = [ids[limit - n_positions :] for ids in encode_prompts(tokenizer, prompts)]
    return [
        Sample(tokenizer.decode(ids), tokenizer.decode(new))
        for ids, new in zip(encoded, subject.generate(encoded, settings), strict=True)
    ]


def _metadata(
    subject: EvaluatedModel,
    files: Sequence[TaskFile],
    figures: Mapping[str, Mapping[str, Any]],
    protocol: Mapping[str, Any],
    marks: Mapping[str, Marks],
    models: Mapping[str, str],
) -> dict[str, Any]:
    """The contents of `metrics.json`; cloze and text have their own keys.

    Args:
        models: digests of the tokenizer, the model and its reference.
    """
    by_name = {file.name: file for file in files}
    slots = {task.name: by_name.pop(task.name, None) for task in (CLOZE, TEXT)}
    digests = {name: file and sha256(file.path) for name, file in slots.items()}
    metadata: dict[str, Any] = {
        "model": subject.metadata(),
        **{name: file and _json_ready(figures[name]) for name, file in slots.items()},
        "tasks": {
            name: {
                "task": file.task.name,
                "source": file.path.name,
                "sha256": sha256(file.path),
                "figures": _json_ready(figures[name]),
            }
            for name, file in by_name.items()
        },
        "sources": {name: file and file.path.name for name, file in slots.items()},
        "digests": {**digests, **models},
        "protocol": protocol,
        "vocab_size": subject.tokenizer.get_vocab_size(),
    }
    if marks:
        metadata["contamination"] = {name: mark.summary() for name, mark in marks.items()}
    return metadata


def _json_ready(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN, which JSON lacks, by null: the standard error of a single unit."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def _write(
    output: Path,
    metrics: Mapping[str, Any],
    units: Mapping[str, Sequence[Any]],
    marks: Mapping[str, Marks],
    samples: Sequence[Sample],
) -> None:
    # A unit's line says whether the training text contains it, so that the gate can leave it out.
    rows = {name: [_plain(unit) for unit in values] for name, values in units.items()}
    for name, mark in marks.items():
        rows[name] = [a | b for a, b in zip(rows[name], mark.rows(), strict=True)]
    with atomic_folder(output, EVALUATION) as work:
        # The files of cloze and text are always there, and empty if nothing was measured.
        for name in dict.fromkeys((*UNITS, *rows)):
            path = work / units_file(name)
            path.parent.mkdir(exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in rows.get(name, ()))
            path.write_text(lines, encoding="utf-8")
        for name, values in (
            ("samples.json", [asdict(sample) for sample in samples]),
            (METRICS, metrics),
        ):
            text = json.dumps(values, indent=2, allow_nan=False)
            (work / name).write_text(text + "\n", encoding="utf-8")


def read_result(folder: Path, metrics: Mapping[str, Any]) -> EvalResult:
    """The figures of an evaluation folder's `metrics.json`."""
    results = measured(metrics, folder)
    return EvalResult(
        folder=folder,
        engine=metrics["model"].get("engine", "torch"),
        n_params=metrics["model"]["n_params"],
        n_bytes=metrics["model"]["bytes"],
        figures={name: value for result in results for name, value in result.metrics().items()},
        not_held_out=tuple(
            sentence
            for name, summary in metrics.get("contamination", {}).items()
            if (sentence := statement(name, summary))
        ),
    )


def parse_task(option: str, source: str = "--task") -> TaskOption:
    """The task and the file of `TASK=FILE`, which is fetched if it is an address.

    Raises:
        UserError: another form, or no such file.
    """
    task, _, file = option.partition("=")
    if not task or not file:
        what = f"{source} {option}: not TASK=FILE"
        raise UserError(what, "write multiple_choice=hellaswag.jsonl", Code.INVALID_VALUE)
    return task, input_path(file)


def task_files(requested: Sequence[TaskOption]) -> list[TaskFile]:
    """The files given with `--task`.

    Raises:
        UserError: an unknown task, or a file name that does not give a valid, unique result name.
    """
    files_by_task: dict[str, TaskFile] = {}
    for name, path in requested:
        task = task_named(name, "choose one, as in multiple_choice=hellaswag.jsonl")
        task_name = task.name if task in SLOTS else path.stem
        if task_name in files_by_task or (task not in SLOTS and task_name in TASKS):
            raise UserError(
                f"{path}: duplicate result name {task_name}",
                "rename the file",
                Code.DUPLICATE,
            )
        if not re.fullmatch(TASK_NAME, task_name):
            raise UserError(
                f"{path}: {task_name!r} is not a valid result name",
                "rename the file: use only letters, digits, _, - and .",
                Code.INVALID_VALUE,
            )
        files_by_task[task_name] = TaskFile(task_name, task, path)
    return list(files_by_task.values())


def require_float32(settings: OfflineEvalSettings, what: str) -> None:
    """Raise UserError unless `Offline_Eval.dtype` is float32; `what` is the reason, a clause."""
    if settings.dtype != "float32":
        raise UserError(
            f"Offline_Eval.dtype is {settings.dtype}, but {what}",
            "set Offline_Eval.dtype=float32",
            Code.UNSUPPORTED,
        )
