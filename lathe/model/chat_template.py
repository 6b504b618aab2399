"""The chat template of a Hugging Face folder."""

from pathlib import Path

from lathe.artifacts.kinds import read_json
from lathe.inputs import read_text

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
CHAT_FILES = (TEMPLATE, TOKENIZER_CONFIG)


def read_chat_template(folder: Path) -> str | None:
    """The template of `chat_template.jinja`, or else of `tokenizer_config.json`; the one named
    `default` where there are several. None if there is none.

    Raises:
        UserError: a file is broken.
    """
    hint = "copy the checkpoint again"
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE, hint)
    if not (folder / TOKENIZER_CONFIG).is_file():
        return None
    found = read_json(folder / TOKENIZER_CONFIG, hint).get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None
