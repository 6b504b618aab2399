"""Triton's Python backend that scores given tokens with the served model.

The first request loads the weights, so that only servers that score keep a second copy in memory.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from tokenizers import Tokenizer

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.protocol import (
    TEXTS,
    TOKENS,
    TokenScores,
    decode,
    error_message,
    model_settings,
)
from lathe_serving.runtime.score import score_text, score_tokens
from lathe_serving.runtime.session import OnnxModel
from lathe_serving.runtime.text import TokenBytes, TokenLimit


class TritonPythonModel:
    """The interface that Triton calls, as in `lathe_serving.backend`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings, which are the JSON `parameters` of config.pbtxt."""
        settings = model_settings(args)
        self.folder = Path(args["model_repository"]).parent / settings["exported"]
        self.threads: int = settings["threads"]

    @cached_property
    def model(self) -> OnnxModel:
        """The exported model, loaded by the first request."""
        return OnnxModel(self.folder, self.threads)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The exported model's tokenizer."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def limit(self) -> TokenLimit:
        """The limit on a text with its continuation, whose last token is not read."""
        return TokenLimit(self.model.n_positions + 1, TokenBytes(self.tokenizer).longest)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; a failing one does not affect the others."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            log_likelihood, is_greedy = self._score(request)
        except UserError as error:
            refused = pb_utils.TritonError(error_message(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refused)
        outputs = {"log_likelihood": log_likelihood, "is_greedy": is_greedy}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()])

    def _score(self, request: Any) -> TokenScores:
        tensors = {
            name: tensor.as_numpy()
            for name in (*TOKENS, *TEXTS)
            if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is not None
        }
        if set(tensors) == set(TOKENS):
            return score_tokens(self.model, *(tensors[name] for name in TOKENS))
        if set(tensors) == set(TEXTS):
            texts = [decode(tensors[name].item(), name) for name in TEXTS]
            return score_text(self.model, self.tokenizer, self.limit, *texts)
        raise UserError(
            f"inputs {', '.join(tensors) or 'missing'}",
            f"give {', '.join(TEXTS)}; or {', '.join(TOKENS)}",
            Code.INVALID_REQUEST,
        )
