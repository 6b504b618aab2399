"""Prompts to answer, and the interface of what answers them.

A model has two answerers. The second one generates in another order and batch size and, where there
is one, with another runtime: the answers that differ are the noise floor, on which two runs of the
same model disagree, because sums in another order are rounded differently.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from lathe.evaluate.score_requests import Resumable
from lathe_base.errors import Code, UserError
from lathe_base.progress import bar

log = logging.getLogger("lathe")

GENERATE_HINT = "generate answers with a checkpoint that torch runs, an export or a server"


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer greedily.

    Attributes:
        prompt: token ids.
        max_tokens: maximum length of the answer; both fit the model's context.
        stop: texts after which the answer may end, as nothing behind them is read.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answerer:
    """One way in which a model generates answers.

    Attributes:
        how: the runtime and the batch, in words.
        generate: yields the index and the new token ids of every request, without the token that
            ended it, in the order in which they are finished.
    """

    how: str
    generate: Callable[[Sequence[AnswerRequest]], Iterator[tuple[int, list[int]]]]


Answerers = Callable[[], tuple[Answerer, Answerer]]
"""Opens both answerers of a model; called at most once."""


@dataclass(frozen=True)
class ResumableAnswers(Resumable):
    """A scorer that also answers, and reuses the journal of an earlier, killed evaluation.

    Attributes:
        answerers: returns both answerers; None if the model cannot generate.
    """

    answerers: Answerers | None = None

    def answers(
        self, requests: Sequence[AnswerRequest], title: str, run: int = 0
    ) -> tuple[list[list[int]], str]:
        """The token ids of every answer, in the order of the requests, and how they were generated.

        Args:
            title: that of the progress bar, which counts answers.
            run: 0, or 1 for the second answerer.

        Raises:
            UserError: the model cannot generate.
        """
        if self.answerers is None:
            raise UserError(
                f"{title}: this engine does not generate answers", GENERATE_HINT, Code.UNSUPPORTED
            )
        answerer = self.answerers()[run]
        names = [
            f"answer {run} {i} {hashlib.sha256(json.dumps(asdict(one)).encode()).hexdigest()}"
            for i, one in enumerate(requests)
        ]
        left = [i for i, name in enumerate(names) if name not in self.journal.found]
        with bar(title, total=len(requests)) as progress:
            progress.advance(len(requests) - len(left))
            for place, ids in answerer.generate([requests[i] for i in left]):
                self.journal.recall(names[left[place]], lambda ids=ids: ids, list)  # type: ignore[misc]
                progress.advance()
        found: list[list[int]] = [self.journal.recall(name, list, list) for name in names]
        n_tokens = sum(map(len, found))
        log.info("%s: %d answers, %s tokens (%s)", title, len(found), f"{n_tokens:,}", answerer.how)
        return found, answerer.how
