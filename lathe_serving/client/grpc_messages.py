"""Generation requests to Triton as gRPC messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from lathe_base.errors import UserError
from lathe_serving.client.transport import Parameter

CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]
PARAMETER_FIELD = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


def request(
    model_name: str, prompt: str | Sequence[int], parameters: Mapping[str, Parameter]
) -> Any:
    """Build the gRPC message of a generation request.

    Args:
        prompt: a text, or token ids.

    Raises:
        UserError: the prompt is not UTF-8 text, or a number is too large for the message.
    """
    given: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    if isinstance(prompt, str):
        given["contents"] = {"bytes_contents": [utf8(prompt)]}
    else:
        given = {"name": "input_ids", "datatype": "INT64", "shape": [len(prompt)]}
        given["contents"] = {"int64_contents": prompt}
    message = service_pb2.ModelInferRequest(model_name=model_name, inputs=[given])
    for name, value in parameters.items():
        if value is None:
            continue
        try:
            setattr(message.parameters[name], PARAMETER_FIELD[type(value)], value)
        except ValueError:
            raise UserError(f"{name} {value}: out of range", "give a smaller number") from None
    return message


def utf8(text: str, what: str = "prompt") -> bytes:
    """The text's bytes.

    Args:
        what: its name in the error.

    Raises:
        UserError: it has an unpaired surrogate.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what}: not UTF-8 at character {error.start}",
            "convert it, for instance with iconv -t utf-8",
        ) from None
