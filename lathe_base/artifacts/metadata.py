"""Pydantic models of the JSON metadata files that Lathe writes, and of a checkpoint's origin: they
reject invalid values early."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from lathe_base.config.settings import ServingSettings
from lathe_base.storage.files import is_digest, is_relative


def _relative(name: str) -> str:
    if not is_relative(name):
        raise ValueError(f"{name!r} is not a relative file name")
    return name


def _digest(value: str) -> str:
    if not is_digest(value):
        raise ValueError("not a SHA-256 in lowercase hex")
    return value


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a plain folder name")
    return name


TEXT = "text.jsonl.zst"
"""The documents of a shard."""

TASK_NAME = r"^\w[\w.-]*$"
"""Pattern of a task's name, which is also the name of the file with its units."""

Sha256 = Annotated[str, AfterValidator(_digest)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
FileName = Annotated[str, AfterValidator(_relative)]
TaskName = Annotated[str, Field(pattern=TASK_NAME)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Metadata(BaseModel):
    """Base class of all metadata files; keys that a later version adds are accepted."""

    # Strict, because JSON has the types already: a number in quotes is a mistake.
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    HAS_NAN: ClassVar[bool] = False
    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def raw(self) -> dict[str, Any]:
        """The JSON object as it was read."""
        return self._raw


class Entry(BaseModel):
    """A file in the list of a metadata file."""

    bytes: Count
    sha256: Sha256


Files = dict[FileName, Entry]


class BlendPart(BaseModel):
    """A data set within a blend; see `lathe.data.blend`."""

    folder: Annotated[str, AfterValidator(_plain)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    metadata_sha256: Sha256 | None = None


class NgramIndex(BaseModel):
    """The n-gram index of the training part; see `lathe.data.training_index`."""

    ngram: Literal[8, 16, 32]
    stride: Annotated[int, Field(ge=1, lt=2**31)]
    finds_tokens: Positive
    false_positive_rate: Annotated[float, Field(ge=0, le=1)]


class DataMetadata(Metadata):
    """`data.json`; data sets of other tools lack it, and earlier versions wrote no `files`."""

    documents: Positive
    tokens: Positive
    vocab_size: Annotated[int, Field(gt=0, lt=2**31)]
    eos_id: Count
    boundaries: Annotated[list[Count], Field(min_length=4, max_length=4)] | None = None
    part_tokens: Annotated[list[Count], Field(min_length=3, max_length=3)] | None = None
    cloze_examples: Count | None = None
    made_from: dict[str, Any] | None = None
    source: str | None = None
    license: str | None = None
    format: Literal["megatron", "paddle"] | None = None
    sequences: Positive | None = None
    blend: list[BlendPart] = []
    left_out: dict[str, Count] = {}
    assistant_tokens: Positive | None = None
    ngrams: NgramIndex | None = None
    prompts: Count | None = None
    files: Files | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "DataMetadata":
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} is outside the vocabulary of {self.vocab_size}")
        # The first documents of training, validation and test, and the end.
        bounds = self.boundaries
        if bounds and (bounds != sorted(bounds) or bounds[0] or bounds[3] != self.documents):
            raise ValueError(f"boundaries {bounds} do not partition {self.documents} documents")
        if self.made_from is not None and (self.files is None or bounds is None):
            raise ValueError("files or boundaries is missing")
        if self.files is not None and "tokenizer.json" not in self.files:
            raise ValueError("files does not list tokenizer.json")
        return self


class TrainedOn(BaseModel):
    """The documents that a tokenizer was trained on: the training part of this split of a text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text_sha256: Sha256
    split: list[Finite]
    vocab_size: Positive


class TokenizerMetadata(Metadata):
    """`origin.json`, next to a tokenizer that `lathe tokenizer` trained or copied.

    Attributes:
        source: the tokenizer's corpus, as it was found.
        trained_on: None if it was given.
    """

    source: str
    trained_on: TrainedOn | None
    files: Files


class ShardMetadata(Metadata):
    """`shard.json`.

    Attributes:
        corpus_sha256: of the names and sizes of the corpus's files.
        tokenizer_sha256: of the tokenizer.
        special_tokens_in_text: whether their names in a document are these tokens.
        sentences: rules by which documents are split into sentences; None if they are whole.
        chat_template_sha256: of the template of conversations; None if the corpus has none.
        text_sha256: of the shard's own documents.
        blocks: file, block and documents of each block, in the order of the corpus.
    """

    shard: Positive
    of: Positive
    source: str
    corpus_sha256: Sha256
    text_key: str
    tokenizer_sha256: Sha256
    special_tokens_in_text: bool = True
    sentences: str | None = None
    chat_template_sha256: Sha256 | None = None
    trained_on: TrainedOn | None
    text_sha256: Sha256
    documents: Count
    left_out: dict[str, Count] = {}
    tokens: Count
    blocks: list[Annotated[tuple[Count, Count, Positive], Field(strict=False)]]
    files: Files

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ShardMetadata":
        if self.shard > self.of:
            raise ValueError(f"shard {self.shard} of {self.of}")
        places = [(file, block) for file, block, _ in self.blocks]
        if places != sorted(set(places)):
            raise ValueError("blocks are not in the order of the corpus")
        if sum(documents for _, _, documents in self.blocks) != self.documents:
            raise ValueError(f"blocks do not add up to {self.documents} documents")
        if missing := {"tokenizer.json", TEXT, "tokens.bin", "tokens.idx"} - self.files.keys():
            raise ValueError(f"files lists no {' and no '.join(sorted(missing))}")
        return self


class CheckpointMetadata(Metadata):
    """`lathe.json`; a loss that could not be measured is NaN."""

    HAS_NAN = True
    lathe: str
    stage: str
    engine: str = "torch"
    parent: str | None = None
    n_params: Positive
    metrics: dict[str, Any] = {}
    files: dict[FileName, Sha256]
    recipe: dict[str, Any] = {}

    @model_validator(mode="after")
    def _lists_what_counts(self) -> "CheckpointMetadata":
        if missing := {"model.safetensors", "config.json", "tokenizer.json"} - self.files.keys():
            raise ValueError(f"files lists no {' and no '.join(sorted(missing))}")
        return self


class RecordedProof(BaseModel):
    """The figures of an export's verification that later stages check."""

    max_error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    mean_limit: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class RecordedEngineProof(BaseModel):
    """The figures of a verification in an engine that later stages show."""

    engine: str
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    argmax_agreement: Share


class ExportedFormat(BaseModel):
    """An additional format of an export: its files, and its verification if its engine was
    installed."""

    files: list[FileName]
    proof: RecordedEngineProof | None = None


class ExportMetadata(Metadata):
    """`export.json`; earlier versions wrote no `files`.

    Attributes:
        formats: additional formats, by their names in `Export.formats`.
        engines: verifications in further engines, such as vLLM, by their names.
    """

    flavour: Literal["fp32", "fp16", "int8", "int4"]
    n_head: Annotated[list[Positive], Field(min_length=1)]
    n_kv_head: list[Positive] | None = None
    head_dim: Positive
    n_positions: Positive
    vocab_size: Positive
    eos_id: Count
    end_ids: list[Count] = []
    prefix_tokens: list[Count] = []
    bytes: Positive
    sha256: Sha256
    source: Sha256
    proof: RecordedProof | None = None
    formats: dict[str, ExportedFormat] = {}
    engines: dict[str, RecordedEngineProof] = {}
    files: Files | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ExportMetadata":
        if (last := max(self.eos_id, *self.end_ids, 0)) >= self.vocab_size:
            raise ValueError(f"eos_id {last} is outside the vocabulary of {self.vocab_size}")
        for name, fmt in self.formats.items():
            if missing := set(fmt.files) - (self.files or {}).keys():
                raise ValueError(f"files lists no {min(missing)}, which is a file of {name}")
        return self

    def format_files(self, format_name: str) -> Files:
        """The files of a further format."""
        return {name: (self.files or {})[name] for name in self.formats[format_name].files}


Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RecordedModel(BaseModel):
    """The model that an evaluation measured."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    n_params: Positive
    bytes: Positive


class Figures(BaseModel):
    """Figures by name: numbers, booleans or None; subclasses declare some of them."""

    model_config = ConfigDict(extra="allow", strict=True)
    # The type of the figures that a subclass does not declare.
    __pydantic_extra__: dict[str, bool | Finite | None] = Field(init=False)


class ClozeFigures(Figures):
    """Figures of a cloze set."""

    examples: Positive
    accuracy: Share
    accuracy_stderr: Error | None = None
    last_token_accuracy: Share | None = None
    last_token_accuracy_stderr: Error | None = None
    target_perplexity: Error | None = None
    target_perplexity_stderr: Error | None = None


class TextFigures(Figures):
    """Figures of a text."""

    blocks: Positive
    perplexity: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    perplexity_stderr: Error | None = None
    adjusted_perplexity: Error | None = None
    character_perplexity: Error | None = None


class TaskEntry(BaseModel):
    """A task of `--task` and its figures."""

    model_config = ConfigDict(extra="allow", strict=True)
    task: str
    source: str
    sha256: Sha256
    figures: Figures


class Contamination(BaseModel):
    """Number of units of a task's file that the training text contains."""

    contaminated: Count
    units: Positive
    too_short: Count
    by_chance: Error


class EvaluationMetadata(Metadata):
    """`metrics.json`; earlier versions wrote no `files`, `tasks` and `vocab_size`."""

    model: RecordedModel
    cloze: ClozeFigures | None
    text: TextFigures | None
    protocol: dict[str, Any]
    sources: dict[str, str | None]
    digests: dict[str, str | None]
    seconds: Error
    tasks: dict[TaskName, TaskEntry] = Field(default_factory=dict)
    contamination: dict[str, Contamination] = {}
    vocab_size: Count | None = None
    files: Files | None = None


class Rehearsed(BaseModel):
    """A prompt of a deployment's rehearsal, and its text."""

    model_config = ConfigDict(extra="allow", strict=True)
    prompt: str
    text: str


class DeploymentMetadata(Metadata):
    """`deploy.json`."""

    prompts: Count
    identical: Count
    near_ties: Count
    start_seconds: Error
    first_token_ms: Error
    tokens_per_second: Error
    tokens_per_second_together: Error
    samples: list[Rehearsed]
    serving: dict[str, Any]

    @field_validator("serving")
    @classmethod
    def _can_serve(cls, values: dict[str, Any]) -> dict[str, Any]:
        ServingSettings.model_validate(values)
        return values


# --- the origin of a checkpoint, within `lathe.json` ---


class _OriginPart(BaseModel):
    model_config = ConfigDict(strict=True)


class Ancestor(_OriginPart):
    """An ancestor of a checkpoint.

    Attributes:
        sha256: its identity, see `lathe.model.folder.checkpoint_digest`.
        stage: the stage that wrote it; None for a Hugging Face model.
        step: training steps of that stage.
        hub, revision: its name and commit on the Hugging Face Hub, if it is from there.
    """

    sha256: Sha256
    stage: str | None = None
    step: Count | None = None
    hub: str | None = None
    revision: str | None = None


class Corpus(_OriginPart):
    """A token data set, or one of those in a blend.

    Attributes:
        sha256: of its metadata, which lists its files with their digests.
        text_sha256: of its documents, one JSON line each.
        source: where the text is from; None if another tool made the data set.
        license: as stated when the data set was prepared.
        weight: its weight in a blend, relative to the others'.
        left_out: number of rows and documents that were dropped, by reason.
    """

    sha256: Sha256
    documents: Positive
    tokens: Positive
    text_sha256: Sha256 | None = None
    source: str | None = None
    license: str | None = None
    weight: float = 1.0
    left_out: dict[str, Count] = {}


class TrainingData(_OriginPart):
    """The data set that a checkpoint was trained on; `sha256` is of its metadata."""

    sha256: Sha256
    corpora: list[Corpus]


class Origin(_OriginPart):
    """The keys of `lathe.json` about a checkpoint's ancestors (nearest first) and training data;
    checkpoints of earlier versions have neither."""

    ancestors: list[Ancestor] = []
    data: TrainingData | None = None

    @property
    def parent(self) -> str | None:
        """The digest of the parent model."""
        return self.ancestors[0].sha256 if self.ancestors else None

    @property
    def base_model(self) -> str | None:
        """The nearest ancestor from the Hugging Face Hub."""
        return next((ancestor.hub for ancestor in self.ancestors if ancestor.hub), None)

    def to_json(self) -> dict[str, Any]:
        """The keys of `lathe.json`."""
        return {
            "parent": self.parent,
            "ancestors": [x.model_dump(exclude_none=True) for x in self.ancestors],
            "data": self.data and self.data.model_dump(exclude_none=True),
        }
