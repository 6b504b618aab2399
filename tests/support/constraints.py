"""Constraints under which a model with random weights finishes its output."""

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["naïve", "🙂", 5, None]},
        "tags": {
            "type": "array",
            "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/code"}]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "$defs": {"code": {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$", "maxLength": 6}},
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3,6}@[0-9]+\.(com|org)"
GRAMMAR = 'start: "(" inner ")"\ninner: "x" | start | "[" start "]"'
