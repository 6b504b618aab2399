"""Chat templates: Jinja as Hugging Face's tokenizers have it, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lathe.gateway.errors import ApiError

END_OF_TEXT = "<|endoftext|>"


class ChatTemplate:
    """A template.

    Raises:
        ApiError: it is not Jinja.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = _compiled(source)
        except TemplateError as error:
            raise ApiError(500, f"the model's chat template is broken: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next message.

        Raises:
            ApiError: the template refuses the messages.
        """
        try:
            prompt = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=END_OF_TEXT,
                eos_token=END_OF_TEXT,
            )
        except Exception as error:  # a template is a program of somebody else's
            what = f"the model's chat template refuses the messages: {error}"
            raise ApiError(400, what, param="messages") from None
        if not prompt:
            raise ApiError(400, "the messages make an empty prompt", param="messages")
        return prompt


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **more: json.dumps(
        value, ensure_ascii=False, **more
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _refuse(message: str) -> None:
    raise TemplateError(message)
