"""Messages of a conversation in OpenAI's form, as chat templates read them."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    field_validator,
    model_validator,
)


class Strict(BaseModel):
    """A part of a request: a text is not taken for a number, nor 1 for true."""

    model_config = ConfigDict(strict=True)


class Part(Strict):
    """A text in a message's content; a model's refusal has a field of its own for it."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
        return {**value, "text": value.get("refusal")} if is_refusal else value


class MessagePart(Part):
    """A part of a message of `/v1/chat/completions`."""

    type: Literal["text", "refusal"]


def joined(part: type[Part]) -> BeforeValidator:
    """A validator that joins a content's parts; null becomes an empty text."""
    parts: TypeAdapter[list[Part]] = TypeAdapter(list[part])  # type: ignore[valid-type]

    def join(value: Any) -> Any:
        if isinstance(value, list):
            return "".join(one.text for one in parts.validate_python(value))
        return "" if value is None else value

    return BeforeValidator(join)


class CalledFunction(Strict):
    """A called function. The template gets the arguments as an object, or as they are if they are
    none: a call may have been cut, or come from another model."""

    name: str
    arguments: Any = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if value in (None, ""):
            return {}
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
        return parsed if isinstance(parsed, dict) else value


class ToolCall(BaseModel):
    """A tool call in an earlier message."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a conversation; other fields are for the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, joined(MessagePart)] = ""
    tool_calls: list[ToolCall] = []

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls(cls, value: Any) -> Any:
        return [] if value is None else value

    @field_validator("role", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return "system" if value == "developer" else value  # OpenAI's new name for it

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("content") is None and value.get("refusal"):
            return {**value, "content": value["refusal"]}
        return value

    def of_template(self) -> dict[str, Any]:
        """The message for the template: only fields that are set, because some templates test for
        the presence of a name."""
        message = self.model_dump(exclude=None if self.tool_calls else {"tool_calls"})
        return {name: value for name, value in message.items() if value is not None}
