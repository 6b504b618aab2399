"""How good a model is, how much worse another one may be, and what its card says of its use."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.types import Positive


class OfflineEvalSettings(Settings):
    """What `lathe evaluate` measures. PaddleFleetX's group; `dtype` is Lathe's own."""

    eval_path: str | None = None
    """File to measure on: a cloze set where its name ends in .jsonl, else a text; null takes those
    of the options or of the data folder."""
    cloze_eval: bool = True
    """Whether to measure the cloze accuracy as well as the perplexity."""
    overlapping_eval: Positive | None = None
    """Tokens by which the window over a text advances; fewer give every token a longer context and
    take longer. Null is half of the longest sequence, so that every token is read twice;
    PaddleFleetX and Megatron-LM advance by 32."""
    windows: Literal["overlapping", "lm_eval"] = "overlapping"
    """How the window moves over a text: by `overlapping_eval`, or as in lm-evaluation-harness: the
    first token is scored too, after the token that begins or ends a text, and windows do not
    overlap. By either rule only the first window begins with the tokenizer's `<s>`."""
    batch_size: Positive = 8
    """Full-length sequences that are scored at a time; on a CPU it may be fewer."""
    max_seq_len: Positive = 1024
    """Longest sequence to score, in tokens; the model's own limit where that is lower."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the forward pass; the Paddle engine has float32 only."""
    training_data: str | None = None
    """Data set that the model was trained on: examples that its training text contains are marked
    as contaminated; null takes the data folder."""
    contaminated_overlap: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of an example's 8-grams in the training text from which on it is contaminated; smaller
    than 1 in a hundred marks examples that share a single run of tokens."""
    quantized: Literal["onnxruntime", "simulated"] = "onnxruntime"
    """What computes a quantized checkpoint on a CPU: the graph that it is exported as, or torch,
    which simulates the rounding in float (fake quantization) and is slower; on a GPU and with
    Paddle it is always simulated."""


class GateSettings(Settings):
    """How much worse a candidate may be than its baseline. The group is Lathe's own."""

    max_accuracy_drop: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Largest drop of the cloze accuracy, absolute: 0.02 allows 50 % to become 48 %."""
    cloze_measure: Literal["accuracy", "word_perplexity"] = "accuracy"
    """How models are compared on the cloze set: by the last words that they get right, or, for a
    model that gets hardly any right, by the perplexity of those words."""
    max_perplexity_increase: Annotated[float, Field(ge=0)] = 0.10
    """Largest increase of a perplexity, relative to the baseline's: 0.1 allows 10 %."""
    max_task_accuracy_drop: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Largest drop of an accuracy on a file given with `--task`, absolute; also of the accuracies,
    and of other scores from 0 to 1, that lm-evaluation-harness has logged."""
    margins: dict[str, Annotated[float, Field(ge=0)] | None] = Field(default={})
    """Margins of single measures, by the names in the verdict's table or patterns of them, in place
    of the general ones: `{hellaswag acc_norm: 0.01, "mmlu_*": null}`; null leaves the measure
    unjudged. The last pattern that matches counts."""
    cluster_by: str | None = "document"
    """Key of an example that says which document it is from: examples of one document are not
    independent, and the interval then takes the documents as its units. Examples without the key
    are taken as independent; null takes all as such."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Confidence level of the interval around each difference."""
    on_inconclusive: Literal["pass", "fail"] = "fail"
    """What a pipeline does where the interval lies on both sides of the limit, so that nothing is
    proven: `fail` stops the candidate, `pass` lets it through, and the report says so."""
    sequential: bool = False
    """Whether the comparisons with the model in production are counted, each at a higher confidence
    than the one before, so that the chance that any model beyond the margin passes stays below
    (1 - `confidence`) / 2 however often a schedule runs; excludes `on_inconclusive: pass`."""

    @model_validator(mode="after")
    def _needs_proof(self) -> "GateSettings":
        if self.sequential and self.on_inconclusive == "pass":
            raise ValueError(
                "sequential excludes on_inconclusive: pass, since what is not proven would pass"
            )
        return self


class CardSettings(Settings):
    """What a model's card and bill of materials say that cannot be measured. An empty text is not
    stated. The group is Lathe's own."""

    license: str = ""
    """Licence of the model: an SPDX identifier such as Apache-2.0, or the licence's name."""
    language: Annotated[str, Field(pattern=r"^([a-z]{2,3}|multilingual)?$")] = ""
    """Language of the model's text, as an ISO 639 code such as en, or `multilingual`."""
    intended_use: str = ""
    """What the model is for."""
    out_of_scope: str = ""
    """What the model must not be used for."""
    contact: str = ""
    """Whom to ask about the model: a name, an address or both."""
