"""Beam search of one request in numpy: the rules, and the tokens, of `lathe.model.generate`."""

import numpy as np
from numpy.typing import NDArray

from lathe_serving.runtime.protocol import Chunk, FinishReason
from lathe_serving.runtime.sampling import log_softmax, penalize
from lathe_serving.runtime.sequence_group import Request, SequenceGroup, Step
from lathe_serving.runtime.text import TextStream


class Beams(SequenceGroup):
    """`params.num_beams` branches; the best `num_return_sequences` are delivered at the end, best
    first."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._max_tokens, self._vocabulary = request.max_tokens, request.vocabulary
        self._scores = np.zeros(1)  # (branches,)
        self._tokens = np.zeros((1, 0), np.int64)  # (branches, so far)
        self._ended: list[tuple[float, list[int]]] = []

    def choose(self, logits: NDArray[np.float32]) -> Step:
        """Select the surviving beams; at the first step all of them extend the prompt's branch."""
        self.begun = True
        N, V = self.width, self._vocabulary.size
        totals = self._scores[:, None] + self._log_probabilities(logits)
        flat = totals.ravel()
        best = np.argpartition(-flat, min(2 * N, flat.size - 1))[: 2 * N]
        best = best[np.argsort(-flat[best], kind="stable")]  # (2N,), no more than N of them end
        scores, beams = flat[best], best // V
        tokens = np.concatenate([self._tokens[beams], (best % V)[:, None]], 1)
        count = tokens.shape[1]
        ends = np.isin(tokens[:, -1], self._vocabulary.end_ids) | (count == self._max_tokens)
        for rank in np.flatnonzero(ends[:N]):
            self._ended.append((self._final(scores[rank], count), tokens[rank].tolist()))
        self._ended = sorted(self._ended, key=lambda entry: -entry[0])[:N]
        going = np.flatnonzero(~ends)[:N]
        self._scores, self._tokens = scores[going], tokens[going]
        if count == self._max_tokens or (
            # Even the best running beam can no longer enter the finished ones.
            len(self._ended) == N and self._final(self._scores[0], count) <= self._ended[-1][0]
        ):
            self._deliver_best("length")
            return Step([], [])
        return Step(self._tokens[:, -1].tolist(), beams[going].tolist())

    def _log_probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        scores = log_softmax(logits)
        for row, tokens in zip(scores, self._tokens, strict=True):
            if self._params.repetition_penalty != 1.0:
                seen = np.zeros(self._vocabulary.size, bool)
                seen[self.prompt] = seen[tokens] = True
                row[:] = penalize(row, seen, self._params.repetition_penalty)
        if self._tokens.shape[1] < self._params.min_tokens:
            scores[:, self._vocabulary.end_ids] = -np.inf
        return scores

    def _final(self, score: float, count: int) -> float:
        return float(score / count**self._params.length_penalty)

    def expire(self) -> None:
        count = self._tokens.shape[1]
        for score, tokens in zip(self._scores, self._tokens, strict=True):
            self._ended.append((self._final(score, count), tokens.tolist()))
        self._ended.sort(key=lambda entry: -entry[0])
        self._deliver_best("timeout")

    def _deliver_best(self, cut: FinishReason) -> None:
        for index, (_, ids) in enumerate(self._ended[: self._params.num_return_sequences]):
            reason = cut
            if ids[-1] in self._vocabulary.end_ids:
                ids, reason = ids[:-1], "stop"
            stream = TextStream(self._vocabulary.token_bytes, self._params.stop)
            text = "".join(stream.add(token) for token in ids) + stream.rest()
            self.deliver(Chunk(text, ids, reason, index, prompt_tokens=len(self.prompt)))
