"""What tasks have in common whose examples a model answers with a text of its own.

A line of their files has a `prompt`, or `messages` in OpenAI's form that the model's chat template
renders, and what is expected of the answer, which each task defines. Answers are greedy. An answer
ends at the model's end token, at a stop text, which is removed, or at the limit of tokens.

Prompts that are too long lose tokens on the left, as in lm-evaluation-harness; conversations are
an error, because their template would be cut.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lathe.data.chats import conversation
from lathe.data.tokenizer import continuation
from lathe.evaluate.comparison import AGAIN, Accuracy
from lathe.evaluate.intervals import mean_stderr
from lathe.evaluate.scoring import (
    GENERATE_HINT,
    AnswerRequest,
    ResumableScorer,
    ScoreLimits,
    Scorer,
)
from lathe.evaluate.tasks.task import Reader, Task
from lathe_base.errors import Code, UserError
from lathe_base.inputs import lines, open_file, parse_json, require_text
from lathe_serving.runtime.text import TooManyTokens, encode_prompts

Expected = TypeVar("Expected")
Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt(Generic[Expected]):
    """An encoded example.

    Attributes:
        text: the prompt, or the messages, for a reader.
        tokens: ids of that text, without what a template adds.
        truncated: tokens cut from the left of the prompt.
        document: what the example is about, if its line has a `document`.
        decode: the text of an answer's token ids.
    """

    text: str
    tokens: list[int]
    request: AnswerRequest
    expected: Expected
    truncated: int
    document: int | str | None
    reader: Reader

    def answer(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text of an answer, up to the first stop text, and whether the limit cut it."""
        text = continuation(self.reader.tokenizer, self.request.prompt, ids)
        ends = [end for stop in self.request.stop if (end := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)], False
        return text, len(ids) >= self.request.max_tokens


class Generative(Task[list[Prompt[Expected]], Row], Generic[Expected]):
    """A task whose examples a model answers.

    To add one, define `parse` and `judge`, and an `Accuracy` for every column that `judge` returns.

    Attributes:
        example: a line of its files, for error messages.
    """

    loss = None
    generates = True
    measures: ClassVar[tuple[Accuracy, ...]]
    example: ClassVar[str]

    @abstractmethod
    def parse(self, row: Mapping[str, Any], where: str) -> Expected:
        """What is expected of the answer to a row.

        Raises:
            UserError: it is malformed; names `where`, the file and line.
        """

    @abstractmethod
    def judge(self, answer: str, expected: Expected) -> Row:
        """Whether the answer is right, by column; other columns are only recorded."""

    @abstractmethod
    def show(self, expected: Expected) -> str:
        """What is expected, for a reader."""

    def prompt(self, row: Mapping[str, Any]) -> Any:
        """The prompt of a row without messages."""
        return row.get("prompt")

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any], Expected]]:
        """Yield file and line, the row, and what is expected; raises as `read` does."""
        count = 0
        with open_file(path, f"give a JSONL file of lines like {self.example}") as file:
            for number, line in enumerate(lines(file, path), start=1):
                if line.strip():
                    where, count = f"{path}:{number}", count + 1
                    row = parse_json(line, where, f"a line is {self.example}", allow_nan=False)
                    if not isinstance(row, dict):
                        raise UserError(
                            f"{where}: not an object", f"a line is {self.example}", Code.MALFORMED
                        )
                    yield where, row, self.parse(row, where)
        if not count:
            raise UserError(
                f"{path}: no examples", f"a line is {self.example}", Code.TOO_LITTLE_DATA
            )

    def check(self, path: Path) -> None:
        """Check every row without a model; raises as `read` does."""
        for where, row, _ in self.rows(path):
            self._messages(row, where, False)

    def read(self, path: Path, reader: Reader) -> list[Prompt[Expected]]:
        from lathe_serving.gateway.template import PromptError  # slow: jinja2

        prompts = []
        stop, max_tokens = tuple(reader.answers.stop), reader.answers.max_tokens
        room = reader.n_positions - max_tokens
        for where, row, expected in self.rows(path):
            messages, tools = self._messages(row, where, reader.answers.chat)
            if messages:
                text = "\n".join(f"{m['role']}: {m.get('content', '')}" for m in messages)
                try:
                    ids = reader.chat.ids(messages, tools)
                except PromptError as error:
                    raise UserError(
                        f"{where}: {error}", "correct or remove the line", Code.MALFORMED
                    ) from None
                except TooManyTokens:
                    raise UserError(
                        f"{where}: the conversation exceeds the model's context of "
                        f"{reader.n_positions} tokens",
                        "remove the line",
                        Code.TOO_LONG,
                    ) from None
                if len(ids) > room:
                    raise UserError(
                        f"{where}: the conversation has {len(ids)} tokens, and an answer up to "
                        f"{max_tokens}, but the model's context is {reader.n_positions}",
                        "remove the line, or lower max_tokens in Offline_Eval.answers",
                        Code.TOO_LONG,
                    )
            else:
                text = self.prompt(row)
                (ids,) = encode_prompts(reader.tokenizer, [text])
            # What is too long loses its beginning; `tokens` are looked up in the training text, in
            # which nobody's template is.
            document = row.get("document")
            prompts.append(
                Prompt(
                    text,
                    encode_prompts(reader.tokenizer, [text])[0],
                    AnswerRequest(ids[-room:], max_tokens, stop),
                    expected,
                    max(len(ids) - room, 0),
                    document if isinstance(document, int | str) else None,
                    reader,
                )
            )
        return prompts

    def _messages(self, row: Mapping[str, Any], where: str, as_chat: bool) -> tuple[Any, Any]:
        """The messages of a row and its tools; none for a prompt that is not to be one."""
        chat = row
        if row.get("messages") is None:
            prompt = self.prompt(row)
            if not isinstance(prompt, str) or not prompt.strip():
                raise UserError(
                    f"{where}: no messages, and no text as prompt",
                    f"a line is {self.example}",
                    Code.MALFORMED,
                )
            require_text(prompt, where)
            if not as_chat:
                return None, None
            chat = {"messages": [{"role": "user", "content": prompt}]}
        messages, tools = conversation(chat, where)
        # As the rows of a training set do.
        if messages[-1]["role"] == "assistant":
            raise UserError(
                f"{where}: the last message is the assistant's, so nothing is left to answer",
                "end the messages with the user's",
                Code.INVALID_VALUE,
            )
        return messages, tools

    def score(
        self, scorer: Scorer, examples: list[Prompt[Expected]], limits: ScoreLimits
    ) -> list[Row]:
        if not isinstance(scorer, ResumableScorer):
            raise UserError(
                f"{self.name}: this model does not generate answers",
                GENERATE_HINT,
                Code.UNSUPPORTED,
            )
        requests = [example.request for example in examples]
        answers, how = scorer.answers(requests, self.name)
        rows: list[Row] = []
        for index, (example, ids) in enumerate(zip(examples, answers, strict=True)):
            answer, is_cut = example.answer(ids)
            rows.append(
                {
                    "index": index,
                    "prompt": example.text,
                    "expected": self.show(example.expected),
                    "answer": answer,
                    "tokens": len(ids),
                    "cut": is_cut,
                    "truncated": example.truncated,
                    "how": how,
                    "document": example.document,
                    **self.judge(answer, example.expected),
                }
            )
        # The noise floor: the same questions again, next to the first answers.
        if limits.answers_twice:
            answers, how = scorer.answers(requests, f"{self.name}, noise floor", run=1)
            for row, example, ids in zip(rows, examples, answers, strict=True):
                answer, _ = example.answer(ids)
                verdict = self.judge(answer, example.expected)
                row |= {f"answer{AGAIN}": answer, f"how{AGAIN}": how}
                row |= {f"{m.column}{AGAIN}": verdict[m.column] for m in self.measures}
        return rows

    def tokens(
        self, units: Sequence[Row], examples: list[Prompt[Expected]]
    ) -> Iterator[NDArray[np.int64]]:
        for example in examples:
            yield np.array(example.tokens)

    def summarize(self, units: Sequence[Row], examples: list[Prompt[Expected]]) -> Row:
        figures: Row = {"examples": len(units)}
        for measure in self.measures:
            right = np.array([float(unit[measure.column]) for unit in units])
            figures[measure.key], figures[f"{measure.key}_stderr"] = mean_stderr(right)
            # The noise floor is a number of answers, as the gate compares it with a number of lost
            # ones.
            again = [unit.get(f"{measure.column}{AGAIN}") for unit in units]
            if None not in again:
                figures[f"{measure.key}_floor"] = int((right != np.array(again, float)).sum())
        figures["tokens"] = math.fsum(unit["tokens"] for unit in units) / len(units)
        figures["cut"] = sum(unit["cut"] for unit in units)
        figures["truncated"] = sum(unit["truncated"] > 0 for unit in units)
        return figures
