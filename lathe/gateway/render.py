"""`python -m lathe.gateway.render EXPORT`: the process of `Renderer`; a JSON object a line."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.gateway.template import ChatTemplate, ChatTokenizer, PromptError
from lathe.runtime.text import TokenBytes

MEMORY = 256 * 2**20  # bytes beyond what the tokenizer takes


def main(folder: Path) -> None:
    """Answer until the end of standard input."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    n_positions = json.loads((folder / "export.json").read_text(encoding="utf-8"))["n_positions"]
    longest = n_positions * TokenBytes(tokenizer).longest
    source = json.loads((folder / "config.json").read_text(encoding="utf-8"))["lathe"][
        "chat_template"
    ]
    chat: ChatTokenizer | PromptError
    _limit_memory()  # constants are computed as a template is compiled
    try:
        chat = ChatTokenizer(ChatTemplate(source), tokenizer, longest)
    except PromptError as error:
        chat = error
    for line in sys.stdin:
        print(json.dumps(_answer(chat, json.loads(line))), flush=True)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(chat: ChatTokenizer | PromptError, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if isinstance(chat, PromptError):
            raise chat
        return {"ids": chat.ids(**request)}
    except PromptError as error:
        return {"error": str(error), "is_broken": error.is_broken}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
