"""The types, ranges and values of a JSON schema in words, as a reader of a table wants them."""

import json
from typing import Any

NAMES = {"string": "text", "array": "list", "object": "mapping"}


def type_of(kind: dict[str, Any]) -> str:
    return NAMES.get(kind["type"], str(kind["type"]))


def values_of(kind: dict[str, Any]) -> str:
    """`1 to 65536`, `float32, bfloat16`, or else the type."""
    choices = kind.get("enum") or ([kind["const"]] if "const" in kind else None)
    if choices:
        return ", ".join(map(shown, choices))
    if kind["type"] == "boolean":
        return "True, False"
    if kind["type"] == "array" and "prefixItems" in kind:
        return f"{len(kind['prefixItems'])} numbers"
    if kind["type"] in ("integer", "number"):
        return _interval(kind)
    if kind.get("minLength"):
        return "text, not empty"
    return str(kind.get("format") or type_of(kind))


def _interval(kind: dict[str, Any]) -> str:
    low, high = kind.get("minimum"), kind.get("maximum")
    above, below = kind.get("exclusiveMinimum"), kind.get("exclusiveMaximum")
    if kind["type"] == "integer" and above is not None:
        low, above = above + 1, None
    if kind["type"] == "integer" and below is not None:
        high, below = below - 1, None
    end = _number(high) if high is not None else f"below {_number(below)}" if below else ""
    if above is not None:
        return f"above {_number(above)}" + (f", up to {end}" if end else "")
    if low is not None:
        return f"{_number(low)} to {end}" if end else f"at least {_number(low)}"
    return f"up to {end}" if end else type_of(kind)


def _number(value: float) -> str:
    """Large powers of two are written as powers: nobody knows their digits."""
    for offset, tail in ((0, ""), (1, " - 1")):
        whole = int(value) + offset
        if whole > 10**5 and whole == value + offset and whole & (whole - 1) == 0:
            return f"2^{whole.bit_length() - 1}{tail}"
    return f"{value:.10g}" if value < 1e12 else f"{value:g}"


def shown(value: Any) -> str:
    """As YAML, in one line, booleans as the recipes write them."""
    if isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else json.dumps(value)
