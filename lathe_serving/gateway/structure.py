"""Constraints on the output, by their names in OpenAI, vLLM and earlier versions of vLLM."""

import json
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class Constraint(NamedTuple):
    """A constraint on the output.

    Attributes: field: the field of the request that sets it. value: in the format of the backend's
    `structured_outputs`.
    """

    field: str
    value: str


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
        if len(found := self._constraints()) > 1:
            raise ValueError(f"{' and '.join(found)} exclude each other")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The given constraint, if any."""
        for name, value in self._constraints().items():
            return Constraint(name, json.dumps(value))
        return None

    def _constraints(self) -> dict[str, dict[str, Any]]:
        told = self.response_format.value if self.response_format else None
        found = {"response_format": told, "structured_outputs": self.structured_outputs}
        for name, kind in GUIDED.items():
            value = getattr(self, name)
            found[name] = None if value is None else {kind: value}
        return {name: value for name, value in found.items() if value is not None}
