"""The chat template of a model's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lathe_base.artifacts.kinds import read_json
from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
CHAT_FILES = (TEMPLATE, TOKENIZER_CONFIG)
TOKENS = ("bos_token", "eos_token")
HINT = "copy the checkpoint again"
FIX = f"fix or remove the template in {TOKENIZER_CONFIG} or {TEMPLATE}"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
TURNS = (
    {"role": "user", "content": "What is 12 * 34?\n\n```py\nprint(12 * 34)\n```"},
    {"role": "assistant", "content": "It's 408."},
    {"role": "user", "content": "  And \u6f22\u5b57, in English? \U0001f917"},
)


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


def sample_chat(template: str, source: str, hint: str) -> str:
    """A chat of three turns as the template renders it; with a system message, if it takes one.

    Raises:
        UserError: the template is not valid Jinja for Lathe's gateway, or renders neither chat.
    """
    from lathe_serving.gateway.template import ChatTemplate, PromptError  # needs jinja2

    try:
        compiled = ChatTemplate(template)
        try:
            return compiled.render([SYSTEM, *TURNS])
        except PromptError:
            return compiled.render(TURNS)
    except PromptError as error:
        where = "" if error.is_broken else ", in a chat of three turns"
        raise UserError(f"{source}: {error}{where}", hint, Code.MALFORMED) from None


def define_tokens(template: str, tokens: Mapping[str, Any]) -> str:
    """The template, with a preamble that defines the special tokens that it uses."""
    preamble = ""
    for key in TOKENS:
        token = tokens.get(key)  # a string or an object
        text = token.get("content") if isinstance(token, dict) else token
        if key in template and isinstance(text, str):
            preamble += f"{{% set {key} = {json.dumps(text)} %}}"
    return preamble + template
