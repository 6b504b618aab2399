"""The chat template of a model's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lathe_base.artifacts.kinds import read_json
from lathe_base.errors import UserError
from lathe_base.inputs import read_text

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
CHAT_FILES = (TEMPLATE, TOKENIZER_CONFIG)
TOKENS = ("bos_token", "eos_token")
HINT = "copy the checkpoint again"


def read_chat_template(folder: Path) -> str | None:
    """The template of `chat_template.jinja`, or else of `tokenizer_config.json`; the one named
    `default` if there are several; None without one. A template that uses `bos_token` or
    `eos_token` gets a preamble that defines them as in `tokenizer_config.json`.

    Raises:
        UserError: a file is broken.
    """
    path = folder / TOKENIZER_CONFIG
    config = read_json(path, HINT) if path.is_file() else {}
    template = config.get("chat_template")
    if (folder / TEMPLATE).is_file():
        template = read_text(folder / TEMPLATE, HINT)
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        return None
    return define_tokens(template, config)


def model_template(folder: Path) -> str | None:
    """The template of a checkpoint or Hugging Face model, or that beside the tokenizer of a data
    set; None without one. Raises as `read_chat_template` does."""
    path = folder / "config.json"
    config = read_json(path, HINT) if path.is_file() else {}
    ours = config.get("lathe")
    if isinstance(ours, dict) and not (folder / TEMPLATE).is_file():
        template = ours.get("chat_template")
        return template if isinstance(template, str) else None
    return read_chat_template(folder)


def require_valid_template(template: str | None, source: str, hint: str) -> None:
    """Raise UserError unless a template is valid Jinja for Lathe's gateway."""
    from lathe_serving.gateway.template import ChatTemplate, PromptError  # needs jinja2

    try:
        ChatTemplate(template or "")
    except PromptError as error:
        raise UserError(f"{source}: {error}", hint) from None


def define_tokens(template: str, tokens: Mapping[str, Any]) -> str:
    """The template, with a preamble that defines the special tokens that it uses."""
    return "".join(_assignment(key, tokens) for key in TOKENS if key in template) + template


def _assignment(key: str, config: Mapping[str, Any]) -> str:
    """Jinja that sets a variable to a special token, which is a string or an object."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    return f"{{% set {key} = {json.dumps(text)} %}}" if isinstance(text, str) else ""
