"""Generates text from an exported model: tokenizer, KV cache and sampling, no server.

Runs where only numpy, onnxruntime and tokenizers are installed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lathe.errors import UserError
from lathe.serve.params import Params
from lathe.serve.piece import Piece
from lathe.serve.sampling import next_token
from lathe.serve.session import OnnxModel
from lathe.serve.text import TextStream, TokenBytes


class Engine:
    """One loaded model; `generate` may be called from many threads at once."""

    def __init__(self, folder: Path, default_max_tokens: int, threads: int = 0) -> None:
        """Load an export folder. `threads`: onnxruntime's threads within a step, 0: every core."""
        self.default_max_tokens = default_max_tokens
        self.model = OnnxModel(folder, threads)
        self.n_positions = self.model.n_positions
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.token_bytes = TokenBytes(self.tokenizer)

    def generate(
        self, prompt: str, params: Params, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[Piece]:
        """Yield a piece a token. `cancelled` is asked before every step.

        Raises:
            UserError: the prompt is empty or too long, or `max_tokens` has no room in the context.
        """
        prompt_ids = self._encode(prompt)
        max_tokens = self._max_tokens(len(prompt_ids), params.max_tokens)
        rng = np.random.default_rng(params.seed)
        text = TextStream(self.token_bytes)
        seen = np.zeros(self.model.vocab_size, bool)
        seen[prompt_ids] = True
        cache = self.model.start(1, capacity=len(prompt_ids) + max_tokens)
        ids = np.array([prompt_ids], np.int64)
        for n in range(max_tokens):
            if cancelled():
                yield Piece("", [], "cancelled")
                return
            logits = self.model.step(cache, ids)[0]
            token = next_token(logits, seen, n, params, self.model.eos_id, rng)
            if token == self.model.eos_id:
                yield Piece("", [], "stop")
                return
            yield Piece(text.add(token), [token], "length" if n + 1 == max_tokens else "")
            seen[token] = True
            ids = np.array([[token]], np.int64)

    def _encode(self, prompt: str) -> list[int]:
        if not prompt:
            raise UserError("text_input is empty", "give at least one character")
        # A token stands for `longest` bytes at most: what cannot fit is not worth tokenizing.
        n_bytes = len(prompt.encode())
        if n_bytes > self.n_positions * self.token_bytes.longest:
            raise UserError(
                f"text_input of {n_bytes:,} bytes cannot fit the model's {self.n_positions} "
                "positions",
                "shorten it",
            )
        ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if len(ids) >= self.n_positions:
            raise UserError(
                f"text_input of {len(ids)} tokens leaves no room in the model's "
                f"{self.n_positions} positions",
                f"shorten it to {self.n_positions - 1} tokens or less",
            )
        return ids

    def _max_tokens(self, n_prompt: int, asked: int | None) -> int:
        room = self.n_positions - n_prompt
        if asked is None:
            return min(self.default_max_tokens, room)
        if asked > room:
            raise UserError(
                f"text_input of {n_prompt} tokens and max_tokens {asked} exceed the model's "
                f"{self.n_positions} positions",
                f"lower max_tokens to {room} or less, or shorten text_input",
            )
        return asked
