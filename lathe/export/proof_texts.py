"""The texts that an engine's tokenizer has to encode like the checkpoint's."""

from collections.abc import Iterator, Sequence

from lathe.data.probes import described, probes
from lathe.model.chat_template import FIX, sample_chat
from lathe.model.checkpoint import Checkpoint


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
        yield "a chat of three turns", sample_chat(template, str(checkpoint.folder), FIX)
