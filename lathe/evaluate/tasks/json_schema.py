"""Valid JSON: whether the whole answer is JSON of a schema, with the expected fields.

The answer counts as it is, except for white space around it: a code fence or a sentence before the
JSON would break a program that parses it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lathe.evaluate.comparison import Accuracy
from lathe.evaluate.tasks.generative import Generative
from lathe_base.errors import Code, UserError


@dataclass(frozen=True)
class ExpectedJson:
    """A validator of the schema, and the fields that the answer must have with these values."""

    validator: Any
    fields: Mapping[str, Any] = field(default_factory=dict)


class JsonSchema(Generative[ExpectedJson]):
    """A JSONL file with the JSON `schema` of every answer, and perhaps `expected` fields."""

    name = "json_schema"
    example = (
        '{"messages": [{"role": "user", "content": "..."}], "schema": {"type": "object", ...}, '
        '"expected": {"city": "Paris"}}'
    )
    measures = (
        Accuracy(
            key="valid",
            title="valid JSON",
            axis="% of answers valid",
            column="valid",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
        Accuracy(
            key="correct",
            title="correct JSON",
            axis="% of answers right",
            column="correct",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
    )

    def parse(self, row: Mapping[str, Any], where: str) -> ExpectedJson:
        # Only this task needs these.
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012, specification_with

        schema, fields = row.get("schema"), row.get("expected", {})
        hint = f"a line is {self.example}"
        if not isinstance(schema, dict):
            raise UserError(f"{where}: schema is not an object", hint, Code.MALFORMED)
        if not isinstance(fields, dict):
            raise UserError(f"{where}: expected is not an object of fields", hint, Code.MALFORMED)
        kind = validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise UserError(
                f"{where}: invalid schema: {error.message}", "correct it", Code.MALFORMED
            ) from None
        except RecursionError:
            raise UserError(
                f"{where}: the schema is nested too deeply", "simplify it", Code.TOO_LARGE
            ) from None
        # An empty registry: a schema is never fetched from an address.
        dialect = specification_with(kind.META_SCHEMA["$schema"], default=DRAFT202012)
        resolver = Registry().resolver_with_root(dialect.create_resource(schema))
        for reference in _references(schema):
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise UserError(
                    f"{where}: the schema has no {reference!r}",
                    "put what a $ref names into the schema itself, under $defs",
                    Code.UNKNOWN_NAME,
                ) from None
        validator = kind(schema, registry=Registry())
        return ExpectedJson(validator, fields)

    def judge(self, answer: str, expected: ExpectedJson) -> dict[str, bool]:
        try:
            value = json.loads(answer, parse_constant=_refuse)
            is_valid = expected.validator.is_valid(value)
        except (ValueError, RecursionError):  # of JSON, or of a schema that refers to itself
            return {"valid": False, "correct": False}
        return {"valid": is_valid, "correct": is_valid and _has(value, expected.fields)}

    def show(self, expected: ExpectedJson) -> str:
        shown = {"schema": expected.validator.schema}
        return json.dumps(expected.fields or shown, ensure_ascii=False)


def _references(schema: Any) -> Iterator[str]:
    """The targets of a schema's references."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            elif key not in ("const", "enum", "default", "examples"):
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _has(value: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one; an object may have more fields."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(
            key in value and _has(value[key], one) for key, one in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(value, list) and len(value) == len(wanted) and all(map(_has, value, wanted))
        )
    # In Python, True == 1.
    return bool(isinstance(value, bool) == isinstance(wanted, bool) and value == wanted)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
