"""The parameters of text generation, once for all that have them.

`Params` states each one's name, type, default, range and meaning. Derived from it are what Triton's
backend accepts (`lathe_serving.runtime.protocol`) and the inputs in `config.pbtxt`, what gateway
and client have in common with the OpenAI API, the defaults of the recipe's `Generation` group, what
is read of a model's `generation_config.json`, and `docs/reference/generation.md`.

The names are those common to language model servers; PaddleFleetX's `min_dec_len` and
`max_dec_len`, which recipes have, are accepted as aliases of `min_tokens` and `max_tokens`.

It imports nothing but `lathe_base.errors`, because it is also loaded in Triton's process.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from lathe_base.errors import Code, UserError

STRATEGIES = ("sampling", "greedy_search", "beam_search")
MAX_INT = 2**63 - 1  # Triton's parameters are 64-bit integers
MAX_TOP = 20  # alternatives of a token, as in the OpenAI API
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000  # every new token is compared with all of them
MAX_TOKEN_IDS = 1024  # of `stop_token_ids` and `logit_bias`
MAX_LOGIT_BIAS = 100.0  # as in the OpenAI API
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")  # of `structured_outputs`
MAX_CONSTRAINT_CHARACTERS = 500_000

STOP_LIMIT = (
    f"a string, or a JSON list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_CHARACTERS} "
    "characters"
)


@dataclass(frozen=True)
class Range:
    """The numbers that a parameter may be: finite, and an integer at most MAX_INT."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (isinstance(value, float) or value <= MAX_INT)
        )

    def __str__(self) -> str:
        if self.le is not None:
            start = f"from {self.ge:g} to" if self.gt is None else f"above {self.gt:g} and at most"
            return f"{start} {self.le:g}"
        if self.ge is not None:
            return f"at least {self.ge:g}"
        return "finite" if self.gt is None else f"above {self.gt:g} and finite"


@dataclass(frozen=True)
class About:
    """What is known of one parameter.

    Attributes:
        kind: its type in a request to Triton, whose parameters are only numbers and strings.
        allowed: whether a value of this type is within the limit.
        limit: for errors and the documentation.
        meaning: for the documentation.
        range: the limit of a number.
        read: parses a structured parameter; raises ValueError if it is invalid.
        allows_beams: whether beam search supports it.
        openai: whether the OpenAI API, with vLLM's additions, has it under the same name and in the
            same form, has it in another form, or does not have it.
        recipe: its name in the recipe's `Generation` group, if it has one.
    """

    kind: type
    allowed: Callable[[Any], bool]
    limit: str
    meaning: str
    range: Range | None = None
    read: Callable[[Any], Any] | None = None
    allows_beams: bool = True
    openai: Literal["same", "other", "none"] = "same"
    recipe: str | None = None


def _number(kind: type, default: float | None, range: Range, meaning: str, **more: Any) -> Any:
    limit = more.pop("limit", str(range))
    about = About(kind, range.__contains__, limit, meaning, range, **more)
    return field(default=default, metadata={"about": about})


_integer, _real = partial(_number, int), partial(_number, float)


def _flag(meaning: str, **more: Any) -> Any:
    about = About(bool, lambda _: True, "true or false", meaning, **more)
    return field(default=False, metadata={"about": about})


def _text(
    default: Any, allowed: Callable[[str], bool], limit: str, meaning: str, **more: Any
) -> Any:
    about = {"about": About(str, allowed, limit, meaning, **more)}
    if isinstance(default, dict):  # dataclasses refuse a mutable default
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def _stop_strings(value: str) -> tuple[str, ...]:
    if not value.startswith("["):
        strings = [value]
    else:
        try:
            strings = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            strings = [value]  # a stop string may begin with a bracket
    if not all(isinstance(string, str) and string for string in strings):
        raise UserError(f"stop {value:.100}: not a list of strings", STOP_LIMIT, Code.INVALID_VALUE)
    if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_CHARACTERS:
        raise UserError(
            f"stop {value:.100}: too many or too long stop strings", STOP_LIMIT, Code.TOO_LARGE
        )
    return tuple(strings)


def _token_ids(value: str) -> tuple[int, ...]:
    ids = json.loads(value)
    is_short = isinstance(ids, list) and len(ids) <= MAX_TOKEN_IDS
    if not is_short or not all(type(i) is int and 0 <= i <= MAX_INT for i in ids):
        raise ValueError
    return tuple(ids)


def _logit_bias(value: str) -> dict[int, float]:
    biases = json.loads(value)
    if not isinstance(biases, dict) or len(biases) > MAX_TOKEN_IDS:
        raise ValueError
    for token, bias in biases.items():
        is_number = type(bias) in (int, float) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
        if not (token.isdecimal() and len(token) < 20 and is_number):
            raise ValueError
    return {int(token): float(bias) for token, bias in biases.items()}


@dataclass(frozen=True)
class Params:
    """The parameters of one request."""

    max_tokens: int | None = _integer(
        default=None,
        range=Range(ge=0),
        meaning="Maximum number of new tokens; 0 only reads the prompt. More than the context has "
        "room for is rejected.",
        recipe="max_dec_len",
    )
    min_tokens: int = _integer(
        default=1,
        range=Range(ge=0),
        meaning="Minimum number of new tokens; end-of-text is not allowed before.",
        recipe="min_dec_len",
    )
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = _text(
        default="sampling",
        allowed=STRATEGIES.__contains__,
        limit=", ".join(STRATEGIES),
        meaning="Decoding method: random sampling, greedy, or beam search.",
        openai="other",
        recipe="decode_strategy",
    )
    temperature: float = _real(
        default=1.0,
        range=Range(gt=0),
        meaning="Sampling temperature; below 1 favors likely tokens.",
        recipe="temperature",
    )
    top_k: int = _integer(
        default=50,
        range=Range(ge=0),
        meaning="Number of most likely tokens to sample from (top-k); 0 disables the limit.",
        limit="at least 0 (0: no limit)",
        recipe="top_k",
    )
    top_p: float = _real(
        default=0.75,
        range=Range(gt=0, le=1),
        meaning="Nucleus sampling threshold (top-p): sample from the smallest set of most likely "
        "tokens whose probabilities add up to this; 1 keeps all.",
        recipe="top_p",
    )
    min_p: float = _real(
        default=0.0,
        range=Range(ge=0, le=1),
        meaning="Keep tokens whose probability is at least this fraction of the most likely "
        "token's.",
        allows_beams=False,
    )
    repetition_penalty: float = _real(
        default=1.0,
        range=Range(gt=0),
        meaning="Factor that lowers the scores of tokens seen before; 1 disables it.",
        recipe="repetition_penalty",
    )
    # These two count the generated tokens, as OpenAI's do.
    presence_penalty: float = _real(
        default=0.0,
        range=Range(ge=-2, le=2),
        meaning="Subtracted from the logits of tokens that were generated.",
        allows_beams=False,
    )
    frequency_penalty: float = _real(
        default=0.0,
        range=Range(ge=-2, le=2),
        meaning="Subtracted from the logits of tokens each time that they were generated.",
        allows_beams=False,
    )
    num_return_sequences: int = _integer(
        default=1,
        range=Range(ge=1),
        meaning="Number of sequences per prompt; `greedy_search` supports only one, `beam_search` "
        "at most `num_beams`.",
        openai="other",
        recipe="num_return_sequences",
    )
    num_beams: int = _integer(
        default=4,
        range=Range(ge=2),
        meaning="Number of beams of `beam_search`.",
        openai="none",
        recipe="num_beams",
    )
    length_penalty: float = _real(
        default=1.0,
        range=Range(),
        meaning="Exponent of the length that `beam_search` divides log-probabilities by; above 0 "
        "favors longer texts.",
        openai="none",
        recipe="length_penalty",
    )
    stop: tuple[str, ...] = _text(
        default=(),
        allowed=bool,
        limit=STOP_LIMIT,
        meaning="Strings that end the text, which does not include them.",
        read=_stop_strings,
        openai="other",
    )
    stop_token_ids: tuple[int, ...] = _text(
        default=(),
        allowed=bool,
        limit=f"a JSON list of at most {MAX_TOKEN_IDS} token ids",
        meaning="Tokens that end the text, also if `ignore_eos` is true.",
        read=_token_ids,
        allows_beams=False,
    )
    ignore_eos: bool = _flag("Exclude the model's own end-of-text tokens.", allows_beams=False)
    logit_bias: Mapping[int, float] = _text(
        default={},
        allowed=bool,
        limit=f"a JSON object of at most {MAX_TOKEN_IDS} token ids with numbers from "
        f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
        meaning="Added to the logits of its tokens before anything else.",
        read=_logit_bias,
        allows_beams=False,
    )
    structured_outputs: str = _text(
        default="",
        allowed=lambda value: len(value) <= MAX_CONSTRAINT_CHARACTERS,
        limit=f"a JSON object with one of {', '.join(CONSTRAINTS)}, of at most "
        f"{MAX_CONSTRAINT_CHARACTERS:,} characters",
        meaning="Constrains the text, see "
        "[Structured output](../concepts/serving.md#structured-output).",
        allows_beams=False,
        openai="other",
    )
    logprobs: bool = _flag(
        "Return the tokens' log-probabilities.", allows_beams=False, openai="other"
    )
    top_logprobs: int = _integer(
        default=0,
        range=Range(ge=0, le=MAX_TOP),
        meaning="Number of most likely tokens at each position whose log-probabilities are "
        "returned too.",
        openai="other",
    )
    echo: bool = _flag("Begin the text with the prompt.", allows_beams=False)
    seed: int | None = _integer(
        default=None,
        range=Range(ge=0),
        meaning="Random seed; without one, each request has its own.",
    )
    timeout_seconds: float | None = _real(
        default=None,
        range=Range(gt=0),
        meaning="Seconds after its arrival at which the request ends with the tokens generated so "
        "far.",
        openai="none",
    )
    stream: bool = _flag("Stream the text as it is generated.")

    @property
    def branches(self) -> int:
        """Number of slots that the request needs."""
        is_beams = self.decode_strategy == "beam_search"
        return self.num_beams if is_beams else self.num_return_sequences


FIELDS: dict[str, About] = {param.name: param.metadata["about"] for param in fields(Params)}

ALIASES = {about.recipe: name for name, about in FIELDS.items() if about.recipe not in (None, name)}
"""PaddleFleetX's names of parameters."""
