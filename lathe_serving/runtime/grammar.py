"""Structured output: the tokens allowed next in a constrained text, computed by llguidance.

A constraint is written as in vLLM's `structured_outputs`: a JSON object with one of CONSTRAINTS.
Unlike llguidance's default, white space between the parts of a JSON text is bounded, so that a text
with a bounded schema always ends. A new constraint is first compiled in a separate process:
`lathe_serving.runtime.grammar_compiler`.

Source: https://github.com/guidance-ai/llguidance
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe_base.errors import Code
from lathe_base.parameters import CONSTRAINTS
from lathe_serving.runtime.grammar_compiler import (
    JSON_OPTIONS,
    LimitedProcess,
    LimitExceeded,
    compiled,
    llguidance,
    read_tokenizer,
)
from lathe_serving.runtime.protocol import InvalidRequest
from lathe_serving.runtime.text import TokenBytes

CACHED = 32  # constraints that are compiled already
MAX_ERROR_CHARACTERS = 300
MAX_DIGITS = 100  # of a number in JSON, before or after its point
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""Classes of a regular expression as in ECMAScript and JSON Schema; llguidance's are Unicode's."""


class GrammarError(InvalidRequest):
    """A constraint is not supported."""


class Digits:
    """The digits and quotes in the tokens of a vocabulary.

    Attributes:
        trailing: (V,) number of digits at the end of a token.
        is_all: (V,) whether a token consists of digits.
        begins: (V,) whether it begins with one.
        quotes: (V,) whether it begins with a quotation mark.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        token_bytes = TokenBytes(tokenizer)
        names = [token_bytes[i] for i in range(min(size, tokenizer.get_vocab_size()))]
        names += [b""] * (size - len(names))
        self.trailing = [len(name) - len(name.rstrip(b"0123456789")) for name in names]
        self.is_all = [name.isdigit() for name in names]
        self.begins = np.array([name[:1].isdigit() for name in names])
        self.quotes = np.array([name[:1] == b'"' for name in names])


class Grammar:
    """The state of a constrained text.

    Args:
        matcher: llguidance's `LLMatcher`.
        size: size of the vocabulary.
        end_ids: the tokens that may end the text, which are not part of it.
        digits: limits the digits of numbers to MAX_DIGITS, if the text contains JSON.
        n_digits: those at the end of the text.
    """

    def __init__(
        self,
        matcher: Any,
        size: int,
        end_ids: Sequence[int],
        digits: Digits | None = None,
        n_digits: int = 0,
    ) -> None:
        self._matcher, self._size, self._end_ids = matcher, size, list(end_ids)
        self._digits, self._n_digits = digits, n_digits

    def copy(self) -> "Grammar":
        """A copy with the same state."""
        matcher = self._matcher.deep_copy()
        return Grammar(matcher, self._size, self._end_ids, self._digits, self._n_digits)

    def allowed(self) -> NDArray[np.bool_] | None:
        """Mask of the tokens that may come next (V,), or None if the text is complete and cannot
        continue.

        Raises:
            GrammarError: computing the mask is too expensive.
        """
        # One bit for each token, padded to whole words.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error(), Code.TOO_LARGE)
        mask = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        # A text with an end as its only continuation is complete; otherwise it may end wherever the
        # grammar accepts it, with any of the ids, of which llguidance knows only the model's own.
        mask[self._end_ids] = False
        if self._matcher.is_stopped() or not mask.any():
            return None
        mask[self._end_ids] = self._matcher.is_accepting()
        if self._digits is not None and self._n_digits >= MAX_DIGITS:
            # A number is followed by other characters, but, unlike a string, not by a quote.
            shorter: NDArray[np.bool_] = mask & ~self._digits.begins
            if shorter.any() and not (mask & self._digits.quotes).any():
                return shorter
        return mask

    def add(self, token: int) -> None:
        """Append an allowed token, not one that ends the text."""
        self._matcher.consume_token(token)
        if self._digits is not None:
            before = self._n_digits if self._digits.is_all[token] else 0
            self._n_digits = before + self._digits.trailing[token]


class Grammars:
    """Compiles constraints for one tokenizer, and caches the most recent ones.

    Args:
        size: size of the model's vocabulary; the tokenizer's may be smaller.
        end_ids: those of the model.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: Sequence[int]) -> None:
        self._source, self._size, self._end_ids = tokenizer, size, list(end_ids)
        self._checker = LimitedProcess("lathe_serving.runtime.grammar_compiler", self._arguments)
        self._compiled = lru_cache(CACHED)(self._compile)

    def start(self, constraint: str, stop_ids: Sequence[int]) -> Grammar:
        """An empty text under a constraint.

        Args:
            stop_ids: additional tokens that may end it.

        Raises:
            GrammarError: the constraint is invalid, not supported by llguidance, or too large.
            UserError: llguidance is not installed.
        """
        matcher = self._compiled(constraint).deep_copy()  # the cached one stays at the beginning
        # A number in JSON may have any number of digits, so a model might never end one.
        digits = self._digits if '"json' in constraint or "%json" in constraint else None
        return Grammar(matcher, self._size, [*self._end_ids, *stop_ids], digits)

    def close(self) -> None:
        """End the process that checks new constraints."""
        self._checker.close()

    @cached_property
    def _digits(self) -> Digits:
        return Digits(self._source, self._size)

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(*self._arguments())

    def _arguments(self) -> tuple[str, int, list[int]]:
        return self._source.to_str(), self._size, self._end_ids

    def _compile(self, constraint: str) -> Any:
        tokenizer, library, code = self._tokenizer, llguidance(), Code.INVALID_VALUE
        try:
            kind, value = parse_constraint(constraint)
            if kind == "json":
                grammar = library.LLMatcher.grammar_from_json_schema(value, defaults=JSON_OPTIONS)
            else:
                grammar = str(library.grammar_from(kind, value))
            # In a process with limits first: here an expensive grammar would take all of Triton's
            # backend with it.
            error = self._checker.ask(grammar)
        except LimitExceeded as limit:
            error, code = str(limit), Code.TOO_LARGE
        except (ValueError, TypeError, RecursionError) as wrong:
            error = str(wrong)
        if error:
            raise _refused(error, code)
        return compiled(grammar, tokenizer)


def parse_constraint(constraint: str) -> tuple[str, Any]:
    """The kind of a constraint and what it consists of: `json` and a schema, `regex` or `grammar`
    and a text; raises ValueError or TypeError."""
    parsed = json.loads(constraint)
    fields = parsed if isinstance(parsed, dict) else {}
    chosen = {name: value for name, value in fields.items() if value not in (None, False)}
    if len(chosen) != 1 or not chosen.keys() <= set(CONSTRAINTS):
        raise ValueError(f"give one of {', '.join(CONSTRAINTS)}")
    ((kind, value),) = chosen.items()
    if kind in ("json", "json_object"):
        return "json", {"type": "object"} if kind == "json_object" else value
    if kind == "choice":
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not is_list or not value:
            raise ValueError("choice must be a list of strings")
        # As an expression it is one lexeme, where a rule of many alternatives exceeds LIMITS.
        return "regex", "|".join(map(re.escape, value))
    if not isinstance(value, str):
        raise ValueError(f"{kind} must be a string")
    if kind == "regex":
        value = re.sub(r"\\(.)", lambda match: ASCII.get(match[1], match[0]), value, flags=re.S)
    return kind, value


def _refused(error: str, code: Code) -> GrammarError:
    what = " ".join(error.split())[:MAX_ERROR_CHARACTERS]
    return GrammarError(
        f"structured_outputs: {what}",
        "see https://github.com/guidance-ai/llguidance/tree/main/docs for the supported features",
        code,
    )
