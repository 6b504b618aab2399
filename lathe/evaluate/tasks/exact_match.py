"""Exact match: whether the answer, after normalization, is the expected one.

For numbers the protocol is that of lm-evaluation-harness's task `gsm8k` (Cobbe et al., Training
verifiers to solve math word problems, 2021). `strict` takes the first number behind `####`, and
`flexible` the last number of the answer. For any other expected text, `strict` compares the whole
answer, and `flexible` compares both without case, punctuation and articles, as SQuAD's evaluation
does (Rajpurkar et al., 2016).
"""

import re
import string
from collections.abc import Mapping
from typing import Any

from lathe.evaluate.comparison import Accuracy
from lathe.evaluate.tasks.generative import Generative
from lathe_base.errors import Code, UserError

# The patterns of lm-evaluation-harness's gsm8k.yaml, down to their flaws: published figures are
# computed with them.
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
"""Removed from numbers before they are compared."""


class ExactMatch(Generative[str]):
    """A JSONL file with the expected `answer` of every prompt, also in GSM8K's form."""

    name = "exact_match"
    example = (
        '{"prompt": "...", "answer": "42"}, {"messages": [...], "answer": "Paris"} or GSM8K\'s '
        '{"question": "...", "answer": "... #### 42"}'
    )
    measures = (
        Accuracy(
            key="strict",
            title="exact match",
            axis="% of answers right",
            column="strict",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
        Accuracy(
            key="flexible",
            title="flexible match",
            axis="% of answers right",
            column="flexible",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
    )

    def prompt(self, row: Mapping[str, Any]) -> Any:
        if isinstance(question := row.get("question"), str) and "prompt" not in row:
            return f"Question: {question}\nAnswer:"
        return row.get("prompt")

    def parse(self, row: Mapping[str, Any], where: str) -> str:
        answer = row.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(
                f"{where}: answer {answer!r} is neither a text nor a number",
                f"a line is {self.example}",
                Code.MALFORMED,
            )
        return answer

    def judge(self, answer: str, expected: str) -> dict[str, bool]:
        wanted = _plain_number(expected)
        if NUMBER.fullmatch(wanted):
            strict = (STRICT.findall(answer) or [""])[0]
            # The last match has one of two groups.
            flexible = "".join((FLEXIBLE.findall(answer) or [""])[-1])
            return {
                "strict": _plain_number(strict) == wanted,
                "flexible": _plain_number(flexible) == wanted,
            }
        wanted = expected.rpartition("#### ")[2].strip()
        return {
            "strict": answer.strip() == wanted,
            "flexible": _plain_text(answer) == _plain_text(wanted),
        }

    def show(self, expected: str) -> str:
        return expected


def _plain_number(text: str) -> str:
    text = text.strip()
    for pattern in IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()


def _plain_text(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))
