"""What a request may say: OpenAI's parameters, and some of vLLM's that Lathe's backend has.

Fields that are unknown, or that do not bear on the answer (`user`, `store`, `metadata`), are
ignored. Those that would change the answer and are not supported are refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from lathe.runtime.params import LONGEST_STOP, MAX_INT, MAX_TOP, MOST_STOPS
from lathe.serve.transport import Parameter

DEFAULT_TOKENS = 16
MOST_CHOICES = 128
MOST_MESSAGES = 4096

CHANGING: dict[str, Any] = {
    # OpenAI's.
    "audio": None,
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "tools": [],
    "web_search_options": None,
    # vLLM's, and of others.
    "allowed_token_ids": [],
    "bad_words": [],
    "grammar": None,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "include_stop_str_in_output": False,
    "json_schema": None,
    "length_penalty": 1.0,
    "min_p": 0.0,
    "prompt_logprobs": None,
    "stop_token_ids": [],
    "structured_outputs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Fields that would change the answer and are not supported; and the value that changes nothing."""

Prompt = str | list[int]
Parameters = dict[str, Parameter | Sequence[str]]
Tokens = Annotated[int, Field(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1)]


class Unsupported(Exception):
    """A request has a field of CHANGING.

    Args:
        field: its name.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported")
        self.field = field


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Sampling(BaseModel):
    """What requests of both kinds may say."""

    model_config = ConfigDict(strict=True)

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    # As in vLLM.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] = 0
    min_tokens: Tokens = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("the body is not a JSON object")
        for name, harmless in CHANGING.items():
            if given.get(name) not in (None, harmless):
                raise Unsupported(name)
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def parameters(self, sequences: int, max_tokens: int | None) -> Parameters:
        """The backend's parameters for as many sequences; without `max_tokens` its own default."""
        is_greedy = self.temperature == 0 or self.top_p == 0
        found: Parameters = {
            "num_return_sequences": sequences,
            "max_tokens": max_tokens,
            "min_tokens": max_tokens if self.ignore_eos else self.min_tokens,
            # Greedy search finds one sequence; the likeliest token is drawn for each of several.
            "decode_strategy": "greedy_search" if is_greedy and sequences == 1 else "sampling",
            "temperature": 1.0 if is_greedy else self.temperature,
            "top_k": 1 if is_greedy else max(self.top_k, 0),
            "top_p": 1.0 if is_greedy else self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed is None else self.seed % MAX_INT,
            "stream": self.stream,
        }
        if self.stop:
            found["stop"] = self.stop
        return found


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


PARTS = TypeAdapter(list[Part])


class Message(BaseModel):
    """A message of a conversation; what else it has is the template's to read."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""

    @field_validator("role", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return "system" if value == "developer" else value  # OpenAI's new name for it

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        if isinstance(value, list):
            return "".join(part.text for part in PARTS.validate_python(value))
        return "" if value is None else value


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text] | list[Ids], Field(min_length=1)]
    max_tokens: Tokens = DEFAULT_TOKENS
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    suffix: str | None = None
    return_token_ids: bool = False  # as in vLLM

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _is_prompt(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError("not a text, a list of texts, token ids, or a list of these") from None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> None:
        if value:
            raise ValueError("not supported: the model continues texts, it does not fill gaps")

    @model_validator(mode="after")
    def _best_fits(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        if self.stream and self.sequences > self.n:
            raise ValueError("best_of above n cannot be streamed")
        return self

    @property
    def sequences(self) -> int:
        """Sequences that are generated for each prompt; the best `n` are returned."""
        return max(self.n, self.best_of or 0)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or token ids."""
        given: Any = self.prompt
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_one else list(given)

    def of_backend(self) -> Parameters:
        """The backend's parameters."""
        scored = self.logprobs is not None or self.sequences > self.n
        return self.parameters(self.sequences, self.max_tokens) | {
            "echo": self.echo,
            "logprobs": scored,
            "top_logprobs": self.logprobs or 0,
        }


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    # As in vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _top_has_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _one_way_on(self) -> "ChatRequest":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most; None is the rest of the context."""
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    def of_backend(self, room: int) -> Parameters:
        """The backend's parameters.

        Args:
            room: positions that the prompt leaves.
        """
        most = room if self.limit is None else self.limit
        scored = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return self.parameters(self.n, most) | scored
