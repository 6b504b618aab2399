"""Request schemas: OpenAI's parameters, and the vLLM parameters that Lathe supports.

Unknown fields, and those that do not affect the answer (`user`, `store`, `metadata`), are ignored.
Unsupported fields that would change the answer are rejected. `reasoning_effort` is ignored, because
the models do not reason.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from lathe_serving.client.transport import Parameter
from lathe_serving.gateway.messages import Message
from lathe_serving.runtime.params import (
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_IDS,
    MAX_TOP,
)

DEFAULT_TOKENS = 16
MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 128

CHANGING: dict[str, Any] = {
    # OpenAI's.
    "audio": None,
    "function_call": "none",
    "functions": [],
    "modalities": ["text"],
    "tool_choice": "none",
    "tools": [],
    "web_search_options": None,
    # vLLM's, and of others.
    "allowed_token_ids": [],
    "bad_words": [],
    "grammar": None,
    "include_stop_str_in_output": False,
    "json_schema": None,
    "length_penalty": 1.0,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Unsupported fields that would change the answer, each with the value that changes nothing."""

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's earlier names of constraints."""

Prompt = str | list[int]
Parameters = dict[str, Parameter | Sequence[str]]
Tokens = Annotated[int, Field(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Id = Annotated[int, Field(ge=0, le=MAX_INT)]
Ids = Annotated[list[Id], Field(min_length=1)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


def by_type(*models: type[BaseModel], words: Sequence[str] = ()) -> BeforeValidator:
    """A validator of a JSON object that is one of several models by its `type`, or of a word.

    Unlike pydantic's unions it adds no names of its own to the path of an error.
    """
    known = {
        kind: model for model in models for kind in get_args(model.model_fields["type"].annotation)
    }

    def validate(value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in known:
            told = "".join(f"{word!r}, " for word in words) + "or " * bool(words)
            raise ValueError(f"should be {told}an object of type {', '.join(known)}")
        return known[kind].model_validate(value)

    return BeforeValidator(validate)


class Unsupported(Exception):
    """A request has a field of CHANGING.

    Args:
        field: its name.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported")
        self.field = field


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class RequestBody(BaseModel):
    """The body of a request; null means the default of a field."""

    model_config = ConfigDict(strict=True)

    model: str

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("the body is not a JSON object")
        for name, harmless in CHANGING.items():
            if name not in cls.model_fields and given.get(name) not in (None, harmless):
                raise Unsupported(name)
        return {name: value for name, value in given.items() if value is not None}


class Constraint(NamedTuple):
    """A constraint on the output.

    Attributes:
        field: the field of the request that sets it.
        value: in the format of the backend's `structured_outputs`.
    """

    field: str
    value: str

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the text; None if something else constrains it."""
        value = json.loads(self.value)
        if value.get("json_object"):
            return {"type": "object"}
        schema = value.get("json")
        return schema if isinstance(schema, dict) else None


class JsonSchema(BaseModel):
    """A schema with its name, which has no effect."""

    model_config = ConfigDict(strict=True)

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, which needs it")
        return self

    @property
    def value(self) -> dict[str, Any] | None:
        """The value for `structured_outputs`; None for unconstrained text."""
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class Structured(BaseModel):
    """The fields of a request that constrain the output; at most one may be given."""

    response_format: ResponseFormat | None = None
    # As in vLLM.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(constraints := self._constraints()) > 1:
            raise ValueError(f"{' and '.join(constraints)} exclude each other")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The given constraint, if any."""
        for name, value in self._constraints().items():
            return Constraint(name, json.dumps(value))
        return None

    def _constraints(self) -> dict[str, dict[str, Any]]:
        told = self.response_format.value if self.response_format else None
        constraints = {"response_format": told, "structured_outputs": self.structured_outputs}
        for name, kind in GUIDED.items():
            value = getattr(self, name)
            constraints[name] = None if value is None else {kind: value}
        return {name: value for name, value in constraints.items() if value is not None}


class Sampling(Structured, RequestBody):
    """Generation parameters that completions and chats share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[IdText, Bias], Field(max_length=MAX_TOKEN_IDS)] = {}
    # As in vLLM.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Tokens = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_TOKEN_IDS)] = []

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def with_defaults(self, recommended: Mapping[str, float]) -> Self:
        """The request with the parameters that the model's authors recommend where it has none."""
        omitted = recommended.keys() - self.model_fields_set
        return self.model_copy(update={name: recommended[name] for name in omitted})

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def parameters(
        self, sequences: int, max_tokens: int | None, constraint: Constraint | None
    ) -> Parameters:
        """The backend's parameters for `sequences` sequences; without `max_tokens` its own
        default."""
        is_greedy = self.temperature == 0 or self.top_p == 0
        values: Parameters = {
            "num_return_sequences": sequences,
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            # Greedy search finds one sequence; the likeliest token is drawn for each of several.
            "decode_strategy": "greedy_search" if is_greedy and sequences == 1 else "sampling",
            "temperature": 1.0 if is_greedy else self.temperature,
            "top_k": 1 if is_greedy else max(self.top_k, 0),
            "top_p": 1.0 if is_greedy else self.top_p,
            "min_p": 0.0 if is_greedy else self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed is None else self.seed % MAX_INT,
            "stream": self.stream,
        }
        if self.stop:
            values["stop"] = self.stop
        if constraint is not None:
            values["structured_outputs"] = constraint.value
        for name in ("stop_token_ids", "logit_bias"):
            if value := getattr(self, name):
                values[name] = json.dumps(value)
        return values


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may use."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function


TOOLS = TypeAdapter(list[Tool])


class ChosenFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(strict=True)

    name: str


class ChosenTool(BaseModel):
    """The tool that the model has to call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(BaseModel):
    """The tools that the model may, or has to, call."""

    model_config = ConfigDict(strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(BaseModel):
    """OpenAI's `tool_choice` of several tools."""

    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text] | list[Ids], Field(min_length=1)]
    max_tokens: Tokens = DEFAULT_TOKENS
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
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
            raise ValueError(
                "must be a string, a list of strings, token ids, or a list of token id lists"
            ) from None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> None:
        if value:
            raise ValueError("not supported: the model cannot fill in text")

    @model_validator(mode="after")
    def _best_fits(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        if self.stream and self.sequences > self.n:
            raise ValueError("best_of above n cannot be streamed")
        return self

    @property
    def sequences(self) -> int:
        """Number of sequences to generate for each prompt; the best `n` are returned."""
        return max(self.n, self.best_of or 0)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    def of_backend(self) -> Parameters:
        """The backend's parameters."""
        scored = self.logprobs is not None or self.sequences > self.n
        return self.parameters(self.sequences, self.max_tokens, self.constraint) | {
            "echo": self.echo,
            "logprobs": scored,
            "top_logprobs": self.logprobs or 0,
        }


class Conversation(RequestBody):
    """The input of the chat template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = []
    # As in vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("tools")
    @classmethod
    def _are_tools(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names = [tool.function.name for tool in TOOLS.validate_python(value)]
        if len(set(names)) < len(names):
            raise ValueError("two functions have the same name")
        return value  # the template is given what the request says, in its order

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools offered to the model."""
        return self.tools

    @model_validator(mode="after")
    def _one_continuation_mode(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class ChatRequest(Conversation, Sampling):
    """The body of /v1/chat/completions."""

    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ChosenTool | AllowedChoice | None,
        by_type(ChosenTool, AllowedChoice, words=("auto", "none", "required")),
    ] = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        if self.tool_choice not in (None, "auto", "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        known = {tool["function"]["name"] for tool in self.tools}
        for name in self.chosen_names or ():
            if name not in known:
                raise ValueError(f"tool_choice: no tool is called {name!r:.100}")
        constraint = self.constraint
        if self.usable_tools and constraint is not None and constraint.json_schema is None:
            raise ValueError(f"{constraint.field} and tools exclude each other")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The names in `tool_choice`; None allows all tools."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return [choice.function.name] if isinstance(choice, ChosenTool) else None

    @property
    def may_reply(self) -> bool:
        """Whether the model may answer without a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "auto"
        return choice in (None, "auto")

    @property
    def may_call_more(self) -> bool:
        """Whether several calls are allowed."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, ChosenTool)

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools offered to the model: none if it must not call any."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def callable_names(self) -> list[str]:
        """The names of the tools that it may call: those in `tool_choice`, or all."""
        names = self.chosen_names
        return [tool["function"]["name"] for tool in self.tools] if names is None else names

    @model_validator(mode="after")
    def _top_has_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens in the answer; None means the rest of the context."""
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    def of_backend(self, room: int, constraint: Constraint | None) -> Parameters:
        """The backend's parameters.

        Args:
            room: positions that the prompt leaves.
            constraint: of the answer.
        """
        max_tokens = room if self.limit is None else self.limit
        scored = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return self.parameters(self.n, max_tokens, constraint) | scored
