"""Settings of the evaluation, the gate and the model card."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe_base.config.settings.types import EvaluationRuntime, Positive, Precision, Settings


class AnswerSettings(Settings):
    """How the prompts of a generative task are answered, greedily."""

    max_tokens: Positive = 512
    """Maximum number of tokens of an answer; at most half of the model's context."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that end an answer, in addition to the model's end token; they are not part of it."""
    chat: bool = False
    """Whether a row's `prompt` is a user's message, to be rendered by the model's chat template, as
    `messages` always are."""


class OfflineEvalSettings(Settings):
    """What `lathe evaluate` measures. PaddleFleetX's group; `dtype` is Lathe's own."""

    eval_path: str | None = None
    """File to evaluate on: a cloze set if its name ends in .jsonl, otherwise a text; null means the
    files given as options, or those in the data folder."""
    cloze_eval: bool = True
    """Whether to measure cloze accuracy in addition to perplexity."""
    overlapping_eval: Positive | None = None
    """Stride of the evaluation window, in tokens; a smaller stride gives every token a longer
    context and takes longer. Null means half of the maximum sequence length, so that every token
    is read twice; PaddleFleetX and Megatron-LM use 32."""
    windows: Literal["overlapping", "lm_eval"] = "overlapping"
    """Windowing of the text: `overlapping` with a stride of `overlapping_eval`, or `lm_eval` as in
    lm-evaluation-harness, where windows do not overlap and the first token is scored too, after
    the token that begins or ends a text. In both, only the first window begins with the
    tokenizer's `<s>`."""
    batch_size: Positive = 8
    """Batch size, in full-length sequences; on a CPU it may be smaller."""
    max_seq_len: Positive = 1024
    """Maximum sequence length to score, in tokens; the model's own limit if that is lower. Recipes
    set it to the training length. Perplexity falls as it grows, so perplexities of one text compare
    only at the same length."""
    dtype: Precision = "float32"
    """Precision of the blocks' products: `float32`, or the faster `bfloat16` and, on GPUs, `tf32`
    (float32 of which 10 bits of the fraction are multiplied). These are used only if the first
    batch's log-probabilities differ from float32's by at most 0.03 nats on average; otherwise the
    evaluation continues in float32, and says so. Exports, quantized checkpoints and the Paddle
    engine have float32 only."""
    training_data: str | None = None
    """Data set that the model was trained on; examples found in its training text are marked as
    contaminated. null means the data folder."""
    contaminated_overlap: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Minimum share of an example's windows (of six 8-grams) that match the training text for the
    example to count as contaminated; below 0.01, a single match is enough."""
    quantized: Literal["onnxruntime", "simulated"] = "onnxruntime"
    """How a quantized checkpoint is evaluated on a CPU: as its exported graph in onnxruntime, or
    with fake quantization in torch (`simulated`), which is slower. On a GPU and with Paddle it is
    always simulated."""
    tasks: list[Annotated[str, Field(pattern=r"^[^=]+=.+$")]] = Field(default=[])
    """Evaluation tasks and their files, TASK=FILE, as `--task` of `lathe evaluate`, in addition to
    those; in a pipeline, of all evaluations."""
    answers: dict[str, AnswerSettings] = Field(default={})
    """How answers to the files of generative tasks are generated, by the file's name without
    `.jsonl` or by pattern: `{gsm8k: {max_tokens: 256, stop: ["Question:"]}, "*": {chat: True}}`.
    An entry has `max_tokens` (512; at most half of the model's context), `stop` (texts that end
    an answer) and `chat` (False; whether `prompt` is a user's message, which the chat template
    renders). The last matching pattern wins."""
    noise_floor: bool = True
    """Whether answers of generative tasks are generated a second time, in another order and batch
    size and, where there is one, another runtime: on how many examples a model disagrees with
    itself is the noise floor, which the gate reads from the baseline's evaluation. An evaluation
    with a `--reference` is a candidate's, and does without."""
    runtime: EvaluationRuntime = "onnxruntime"
    """Runtime of an export that is evaluated. `onnxruntime` is what it was verified with;
    `openvino` reads text two to three times as fast on CPUs with AMX, and is used only if its
    logits match onnxruntime's within the export's limit."""


class GateSettings(Settings):
    """Margins for a candidate relative to its baseline. The group is Lathe's own."""

    max_accuracy_drop: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Maximum absolute drop in cloze accuracy: 0.02 allows 50 % to become 48 %."""
    cloze_measure: Literal["accuracy", "word_perplexity"] = "accuracy"
    """Measure for the cloze set: accuracy on the last words, or, for models that get hardly any
    right, the perplexity of those words."""
    max_perplexity_increase: Annotated[float, Field(ge=0)] = 0.10
    """Maximum relative increase in perplexity: 0.1 allows 10 %."""
    max_task_accuracy_drop: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Maximum absolute drop in accuracy on a `--task` file; also for accuracies, and other scores
    between 0 and 1, logged by lm-evaluation-harness."""
    margins: dict[str, Annotated[float, Field(ge=0)] | None] = Field(default={})
    """Margins of individual measures, by name in the verdict's table or by pattern, overriding the
    general ones: `{hellaswag acc_norm: 0.01, "mmlu_*": null}`; null excludes the measure from the
    verdict. The last matching pattern wins."""
    cluster_by: str | None = "document"
    """Key of an example that names its document: examples from the same document are not
    independent, so the interval is clustered by document. Examples without the key count as
    independent; null treats all examples as independent."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Confidence level of the interval around each difference."""
    on_inconclusive: Literal["pass", "fail"] = "fail"
    """What a pipeline does if the interval contains the margin, so that the result is
    inconclusive: `fail` stops the candidate, `pass` deploys it, and the report says so."""
    sequential: bool = False
    """Whether to use alpha spending: each comparison with the model in production requires more
    confidence than the one before, so that the probability that any model beyond the margin passes
    stays below (1 - `confidence`) / 2, however often a schedule runs. Excludes `on_inconclusive:
    pass`."""

    @model_validator(mode="after")
    def _needs_proof(self) -> "GateSettings":
        if self.sequential and self.on_inconclusive == "pass":
            raise ValueError(
                "sequential excludes on_inconclusive: pass, because unproven models would pass"
            )
        return self


class CardSettings(Settings):
    """Statements in a model's card and bill of materials that cannot be measured. Empty values
    appear as "not stated". The group is Lathe's own."""

    license: str = ""
    """License of the model: an SPDX identifier such as Apache-2.0, or the license's name."""
    language: Annotated[str, Field(pattern=r"^([a-z]{2,3}|multilingual)?$")] = ""
    """Language of the model's text, as an ISO 639 code such as en, or `multilingual`."""
    intended_use: str = ""
    """What the model is for."""
    out_of_scope: str = ""
    """What the model must not be used for."""
    contact: str = ""
    """Contact for questions about the model: a name, an address or both."""
