"""The texts that an engine's tokenizer has to encode like the checkpoint's."""

from collections.abc import Iterator, Sequence

from lathe.data.probes import described, probes
from lathe.model.checkpoint import Checkpoint
from lathe_base.errors import UserError
from lathe_serving.gateway.template import ChatTemplate, PromptError

TURNS = (
    {"role": "user", "content": "What is 12 * 34?\n\n```py\nprint(12 * 34)\n```"},
    {"role": "assistant", "content": "It's 408."},
    {"role": "user", "content": "  And \u6f22\u5b57, in English? \U0001f917"},
)
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def proof_texts(checkpoint: Checkpoint, prompts: Sequence[list[int]]) -> Iterator[tuple[str, str]]:
    """What a text is, and the text: held-out prompts, code and other texts that tokenizers split
    differently, every added token, and a chat of three turns if the model has a template.

    Raises:
        UserError: the chat template cannot render a chat.
    """
    tokenizer = checkpoint.tokenizer
    for prompt in prompts:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        yield described(text), text
    yield from probes(tokenizer)
    if template := checkpoint.model.config.chat_template:
        try:
            yield "a chat of three turns", _chat(template)
        except PromptError as error:
            raise UserError(f"{checkpoint.folder}: {error}", "fix its chat template") from None


def _chat(template: str) -> str:
    """A chat; with a system message, if the template takes one."""
    compiled = ChatTemplate(template)
    try:
        return compiled.render([SYSTEM, *TURNS])
    except PromptError:
        return compiled.render(TURNS)
