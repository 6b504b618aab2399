"""What a body of KServe's interface has to be before Triton gets it.

Triton 2.51 trusts its JSON: it parses it recursively, and multiplies the sizes of a tensor without
looking for an overflow. Either can end the server.
"""

import math
from typing import Any

from pydantic_core import from_json

from lathe.gateway.errors import ApiError

JSON_LENGTH = "inference-header-content-length"
"""The header that says how many bytes of the body are JSON; the rest are binary tensors."""

MOST_FIELDS, MOST_TENSORS, MOST_SIZES = 256, 64, 16
MOST = {"parameters": MOST_FIELDS, "inputs": MOST_TENSORS, "outputs": MOST_TENSORS}


def require_request(body: bytes, json_length: str | None) -> dict[str, Any]:
    """Check a request; returns its JSON.

    Args:
        json_length: value of the header JSON_LENGTH.

    Raises:
        ApiError: it is not a JSON object of few fields that is nested at most 200 deep (the limit
            of pydantic's parser), or a tensor has more elements than the request has bytes.
    """
    text = body
    if json_length is not None:
        if not json_length.isdecimal() or len(json_length) > 9 or int(json_length) > len(body):
            raise ApiError(400, f"{JSON_LENGTH} is not a length within the body: {json_length:.99}")
        text = body[: int(json_length)]
    try:
        given = from_json(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is not a JSON object")
    _require_at_most(MOST_FIELDS, "fields", given)
    for name, most in MOST.items():
        _require_at_most(most, name, given.get(name))
    tensors = given.get("inputs")
    if isinstance(tensors, list):
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, dict):
                _require_shape(f"inputs[{i}].shape", tensor.get("shape"), len(body))
    return given


def _require_at_most(most: int, name: str, given: Any) -> None:
    if isinstance(given, dict | list) and len(given) > most:
        raise ApiError(400, f"more than {most} {name}", param=name)


def _require_shape(name: str, shape: Any, most: int) -> None:
    """Raise ApiError unless each size, and all of them multiplied, are at most so many."""
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ApiError(400, f"{name} is not a list of sizes", param=name)
    _require_at_most(MOST_SIZES, name, shape)
    if max(math.prod(shape), *shape, 0) > most:
        raise ApiError(400, f"{name} has more elements than the request has bytes", param=name)
