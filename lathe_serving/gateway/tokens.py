"""/tokenize and /detokenize, as in vLLM."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from lathe_serving.gateway.answers import Json
from lathe_serving.gateway.chat import prompt_of
from lathe_serving.gateway.models import Model
from lathe_serving.gateway.renderer import Renderer
from lathe_serving.gateway.requests import Body, Conversation, Id


class TokenizeText(Body):
    """A text to tokenize."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Conversation):
    """Messages whose prompt is to be tokenized."""

    return_token_strs: bool = False
    add_special_tokens: bool = False

    @field_validator("add_special_tokens")
    @classmethod
    def _is_default_template(cls, value: bool) -> bool:
        if value:
            raise ValueError("not supported with messages: the chat template adds special tokens")
        return value


class Detokenize(Body):
    """Tokens to convert to text."""

    tokens: Annotated[list[Id], Field(max_length=2**20)]


def read_tokenize(given: Any) -> TokenizeText | TokenizeChat:
    """Parse the body of /tokenize; raises ValidationError."""
    kind = TokenizeChat if isinstance(given, dict) and "messages" in given else TokenizeText
    return kind.model_validate(given)


async def tokenize(request: TokenizeText | TokenizeChat, model: Model, renderer: Renderer) -> Json:
    """The tokens, as the model would read them."""
    if isinstance(request, TokenizeChat):
        ids = await prompt_of(request, model, renderer)
    else:
        ids = await renderer.tokenize(request.prompt, request.add_special_tokens)
    strings = await renderer.names(ids) if request.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": model.n_positions,
        "tokens": ids,
        "token_strs": strings,
    }


async def detokenize(request: Detokenize, renderer: Renderer) -> Json:
    """The text, with its special tokens."""
    return {"prompt": await renderer.detokenize(request.tokens)}
