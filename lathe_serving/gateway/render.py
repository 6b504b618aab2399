"""`python -m lathe_serving.gateway.render EXPORT`: the process of `Renderer`.

It reads one JSON object per line, with a task and its arguments.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe_serving.gateway.template import ChatTemplate, ChatTokenizer, PromptError
from lathe_serving.runtime.grammar_compiler import limit_memory
from lathe_serving.runtime.prompt import encode_prompts
from lathe_serving.runtime.text import TokenBytes


def main(folder: Path) -> None:
    """Process tasks until the end of standard input."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    n_positions = json.loads((folder / "export.json").read_text(encoding="utf-8"))["n_positions"]
    longest = n_positions * TokenBytes(tokenizer).longest
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["lathe"]
    source = settings.get("chat_template", "")
    chat: ChatTokenizer | PromptError
    limit_memory()  # constants are computed as a template is compiled
    try:
        chat = ChatTokenizer(ChatTemplate(source), tokenizer, longest)
    except PromptError as error:
        chat = error
    for line in sys.stdin:
        print(json.dumps(_answer(chat, tokenizer, json.loads(line))), flush=True)


def _answer(
    chat: ChatTokenizer | PromptError, tokenizer: Tokenizer, request: dict[str, Any]
) -> dict[str, Any]:
    try:
        match request:
            case {"chat": given}:
                if isinstance(chat, PromptError):
                    raise chat
                return {"done": chat.ids(**given)}
            case {"text": text, "add_special_tokens": True}:
                return {"done": encode_prompts(tokenizer, [text])[0]}
            case {"text": text}:
                return {"done": tokenizer.encode(text, add_special_tokens=False).ids}
            case {"names": ids}:
                return {"done": [tokenizer.id_to_token(i) for i in ids]}
            case {"tokens": ids}:
                wrong = [i for i in ids if i >= 2**32 or tokenizer.id_to_token(i) is None]
                if wrong:
                    size = tokenizer.get_vocab_size()
                    what = f"{wrong[0]} is outside the tokenizer's vocabulary of {size}"
                    raise PromptError(what)
                return {"done": tokenizer.decode(ids, skip_special_tokens=False)}
        raise AssertionError(request)
    except PromptError as error:
        return {"error": str(error), "is_broken": error.is_broken}
    except (UnicodeEncodeError, TypeError):  # of the tokenizer
        return {"error": "incomplete UTF-8 character", "is_broken": False}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
