"""Perplexity of a text, as Megatron-LM and PaddleFleetX measure WikiText.

The whole file is one token stream, read in windows of `seq_len` inputs that advance by `overlap`
tokens. After the first window, only the last `overlap` targets of each are scored, so that every
token is scored once, and nearly all of them with a long context. A token that the tokenizer
prepends, such as `<s>`, begins the text, but not the later windows. `Offline_Eval.windows: lm_eval`
splits it as lm-evaluation-harness does: see `rolling_windows`.

Beside a reference model, two more figures per token, averaged over blocks like the perplexity:
top-1 agreement, and the Kullback-Leibler divergence of the model from the reference,
sum p_reference (log p_reference - log p_model), in nats.

Shapes: B rows of T tokens, n positions, V vocabulary.
"""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import scipy  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.data.tokenizer import eos_id
from lathe.evaluate.comparison import Perplexity
from lathe.evaluate.intervals import ratio_stderr
from lathe.evaluate.scoring import (
    ResumableScorer,
    ScoreLimits,
    Scorer,
    ScoreRequest,
    Scores,
    Targets,
    answer,
)
from lathe.evaluate.tasks.task import Reader, Task
from lathe_base import inputs
from lathe_base.artifacts.journal import Journal
from lathe_base.errors import Code, UserError
from lathe_serving.runtime.text import bos_ids, encode_prompts

log = logging.getLogger("lathe")

MAX_LOSS = 20.0  # the reference caps exp at e^20
MIN_BLOCKS = 10
MAX_WORD_CHARACTERS = 16
"""Characters between spaces, on average, from which a text is taken to have no spaces between its
words, as Chinese, or a word on each line; English has 6, German 7."""
POSITIONS = 256
"""Positions of which both models' (n, V) logits are in memory at a time."""


@dataclass(frozen=True)
class TokenizedText:
    """A tokenized text.

    Attributes:
        tokens: including those that the tokenizer prepends.
        words: of the original file, split at single spaces.
        characters: of the original file, stripped.
        prefix: the context of the first token if that is scored too: the token that the tokenizer
            prepends, or else the end-of-document token.
        begins_with_prefix: whether `tokens` begin with it.
    """

    tokens: list[int]
    words: int
    detokenized: bool
    prefix: int = 0
    begins_with_prefix: bool = False
    characters: int = 0

    @property
    def without_prefix(self) -> list[int]:
        """The tokens without the prefix."""
        return self.tokens[self.begins_with_prefix :]

    @property
    def has_words(self) -> bool:
        """Whether spaces separate its words."""
        return self.characters <= MAX_WORD_CHARACTERS * self.words


@dataclass(frozen=True)
class BlockLoss:
    """Summed loss, nats, of `tokens` consecutive targets of a text, from token `start + 1` on.

    Attributes:
        agreed, divergence: number of targets with top-1 agreement with a reference, and summed nats
            of divergence; see `compare_text`.
    """

    start: int
    tokens: int
    loss: float
    agreed: int | None = None
    divergence: float | None = None


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a text with its standard error.

    Neighbouring tokens are correlated, so the error of the mean loss treats blocks of `seq_len`
    consecutive targets (at least 10 blocks) as the independent units; that of a perplexity follows
    by the delta method. The adjusted perplexity is per word of the original text, comparable
    between tokenizers; for a text without spaces between words it is None, and the character
    perplexity takes its place.

    Perplexities above e^MAX_LOSS are recorded as that, without a standard error.

    Attributes:
        loss: mean nats per token.
        blocks: independent units behind the standard errors.
    """

    tokens: int
    words: int
    detokenized: bool
    loss: float
    loss_stderr: float
    perplexity: float
    perplexity_stderr: float
    adjusted_perplexity: float | None
    adjusted_perplexity_stderr: float | None
    character_perplexity: float | None
    character_perplexity_stderr: float | None
    blocks: int


def read_text(path: Path, tokenizer: Tokenizer) -> TokenizedText:
    """Read and encode a text file; WikiText's tokenized form is detokenized first.

    Raises:
        UserError: no such file, or fewer than two words or tokens in it.
    """
    original = inputs.read_text(path, "give a UTF-8 text file")
    characters, words = len(original.strip()), len(original.strip().split(" "))
    tokenized_form = any(mark in original for mark in (" @-@ ", " @,@ ", " @.@ "))
    text = detokenize(original) if tokenized_form else original
    tokens = encode_prompts(tokenizer, [text])[0]
    bos = bos_ids(tokenizer)
    prefix = bos[0] if bos else eos_id(tokenizer)
    read = TokenizedText(tokens, words, tokenized_form, prefix, bool(bos), characters)
    if len(tokens) < 2 or (words < 2 and read.has_words):
        raise UserError(
            f"{path}: {characters} characters, too short to score",
            "give a longer text",
            Code.TOO_LITTLE_DATA,
        )
    return read


def detokenize(text: str) -> str:
    """Undo WikiText's tokenization; Megatron-LM's `wikitext_detokenizer`, rule by rule."""
    text = text.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(old, new)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    text = re.sub(r"\(\s*([^\)]*?)\s*\)", r"(\1)", text)
    text = re.sub(r"\[\s*([^\]]*?)\s*\]", r"[\1]", text)
    text = re.sub(r"{\s*([^}]*?)\s*}", r"{\1}", text)
    text = re.sub(r"\"\s*([^\"]*?)\s*\"", r'"\1"', text)
    text = re.sub(r"'\s*([^']*?)\s*'", r"'\1'", text)
    for old, new in (
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ):
        text = text.replace(old, new)
    return text


def token_losses(
    scorer: Scorer, requests: Sequence[ScoreRequest], seq_len: int, token_budget: int
) -> NDArray[np.float64]:
    """Negative log-likelihood of every token that the windows score, in order, nats.

    Args:
        seq_len: inputs per window.
        token_budget: tokens per batch.
    """
    answers = answer(scorer, requests, seq_len, token_budget, "perplexity")
    return -np.concatenate([scored.log_likelihoods for scored in answers])


def text_windows(text: TokenizedText, limits: ScoreLimits) -> list[ScoreRequest]:
    """The windows over a text, by the rule that `Offline_Eval.windows` names."""
    if limits.rolling:
        return rolling_windows(text.without_prefix, text.prefix, limits.max_length)
    return windows(text.tokens, limits.max_length, limits.overlap)


def windows(tokens: Sequence[int], seq_len: int, overlap: int) -> list[ScoreRequest]:
    """The windows over a text; together they score every token but the first, once and in order."""
    overlap = min(overlap, seq_len)
    stream, n = np.asarray(tokens, np.int64), len(tokens) - 1
    requests = []
    # The last window begins at or before n - seq_len, rounded up to the stride, and may be short.
    for start in range(0, max(n - seq_len, 0) + overlap, overlap):
        window = stream[start : start + seq_len + 1]
        known = seq_len - overlap if start else 0
        requests.append(ScoreRequest(window, len(window) - 1 - known))
    return requests


def rolling_windows(tokens: Sequence[int], prefix: int, seq_len: int) -> list[ScoreRequest]:
    """The windows of lm-evaluation-harness's rolling log-likelihood.

    Each scores `seq_len` tokens, including the very first, which follows `prefix`; later windows
    begin with the token before their first target, and the last one with as many as fit.

    Source: `lm_eval/utils.py::get_rolling_token_windows` with `context_len=1`.
    """
    stream, requests = np.asarray([prefix, *tokens], np.int64), []
    for scored in range(0, len(tokens), seq_len):
        end = min(scored + seq_len, len(tokens))
        begin = max(0, end - seq_len)
        requests.append(ScoreRequest(stream[begin : end + 1], end - scored))
    return requests


def split_blocks(losses: NDArray[np.float64], size: int) -> list[BlockLoss]:
    """Sum per-token losses over blocks of about `size` targets, at least 10 blocks."""
    n = len(losses)
    parts = np.array_split(losses, min(n, max(n // size, MIN_BLOCKS)))
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return [
        BlockLoss(start, len(part), float(part.sum()))
        for start, part in zip(starts.tolist(), parts, strict=True)
    ]


def _perplexity(name: str, loss: float, stderr: float) -> tuple[float, float]:
    """exp of a mean loss, at most e^MAX_LOSS, and its standard error; NaN at the cap."""
    if loss > MAX_LOSS:
        log.warning(
            "%s: e^%.4g, recorded as the cap e^%g = %.4g without a standard error",
            *(name, loss, MAX_LOSS, math.exp(MAX_LOSS)),
        )
        return math.exp(MAX_LOSS), math.nan
    return math.exp(loss), math.exp(loss) * stderr


class TextPerplexity(Task[TokenizedText, BlockLoss]):
    """A UTF-8 file, read in overlapping windows."""

    name = "text"
    unit = "blocks"
    loss = "loss"
    is_stream = True
    extra = ("adjusted_perplexity", "character_perplexity")
    measures = (
        Perplexity(
            key="perplexity",
            title="Perplexity",
            axis="perplexity",
            loss=lambda units: units.column("loss"),
            tokens=lambda units: units.column("tokens"),
            method="linearized ratio over blocks, Student's t",
            unit="blocks",
            margin=lambda gate: gate.max_perplexity_increase,
        ),
    )

    def read(self, path: Path, reader: Reader) -> TokenizedText:
        return read_text(path, reader.tokenizer)

    def score(
        self, scorer: Scorer, examples: TokenizedText, limits: ScoreLimits
    ) -> list[BlockLoss]:
        length, budget = limits.max_length, limits.token_budget
        log.info("perplexity in windows of %d tokens, with a stride of %d", length, limits.overlap)
        losses = token_losses(scorer, text_windows(examples, limits), length, budget)
        return split_blocks(losses, length)

    def tokens(
        self, units: Sequence[BlockLoss], examples: TokenizedText
    ) -> Iterator[NDArray[np.int64]]:
        for block in units:
            yield np.array(examples.tokens[block.start : block.start + block.tokens + 1])

    def summarize(self, units: Sequence[BlockLoss], examples: TokenizedText) -> PerplexityResult:
        text = examples
        sums = np.array([block.loss for block in units])
        counts = np.array([block.tokens for block in units], dtype=float)
        n = counts.sum()
        stderr = ratio_stderr(sums, counts)
        loss = float(sums.sum() / n)
        perplexity, perplexity_stderr = _perplexity("perplexity", loss, stderr)

        # The same total loss over the words of the original text, or over its characters.
        # As the reference, which counts no word for the first token, unless that is scored.
        parts = (text.words if text.has_words else text.characters) - (n < len(text.without_prefix))
        per_unit = float(n / parts)
        name = "adjusted perplexity" if text.has_words else "character perplexity"
        adjusted = _perplexity(name, loss * per_unit, stderr * per_unit)
        unknown = (None, None)
        by_word, by_character = (adjusted, unknown) if text.has_words else (unknown, adjusted)
        return PerplexityResult(
            tokens=len(text.tokens),
            words=text.words,
            detokenized=text.detokenized,
            loss=loss,
            loss_stderr=stderr,
            perplexity=perplexity,
            perplexity_stderr=perplexity_stderr,
            adjusted_perplexity=by_word[0],
            adjusted_perplexity_stderr=by_word[1],
            character_perplexity=by_character[0],
            character_perplexity_stderr=by_character[1],
            blocks=len(units),
        )


@runtime_checkable
class LogitScorer(Protocol):
    """A scorer that also returns logits: torch, or an ONNX file."""

    def logits(self, targets: Targets) -> NDArray[np.float32]:
        """Logits (n, V) of the token after each position; see `Scorer.score`."""


@dataclass(frozen=True)
class DivergenceScorer:
    """A scorer that returns, at every position, the divergence instead of the target's
    log-likelihood, and top-1 agreement instead of whether the target is the argmax.
    """

    model: LogitScorer
    reference: LogitScorer

    def score(self, targets: Targets) -> Scores:
        """See `Scorer.score`."""
        max_length = int(np.bincount(targets.rows).max())
        step = max(1, POSITIONS // max_length)  # whole rows, so that none is computed twice
        divergences, agreed = [], []
        for start in range(0, len(targets.tokens), step):
            # The targets of these rows, with rows that are numbered from 0 again.
            part = (targets.rows >= start) & (targets.rows < start + step)
            rows = targets.tokens[start : start + step]
            shifted = Targets(
                rows, *(x[part] for x in (targets.rows - start, targets.columns, targets.ids))
            )
            ours, theirs = self.model.logits(shifted), self.reference.logits(shifted)
            agreed.append(ours.argmax(1) == theirs.argmax(1))
            # In float64: a divergence is a small difference of large sums.
            log_p, log_q = (
                scipy.special.log_softmax(x.astype(np.float64), axis=1) for x in (theirs, ours)
            )
            divergences.append(np.einsum("nv,nv->n", np.exp(log_p), log_p - log_q))
        return np.concatenate(divergences), np.concatenate(agreed)


@dataclass(frozen=True)
class Agreement:
    """Figures of a text compared with a reference.

    Attributes:
        agreement: top-1 agreement: share of positions with the same most likely token.
        divergence: mean nats per token.
    """

    agreement: float
    agreement_stderr: float
    divergence: float
    divergence_stderr: float


def compare_text(
    model: object,
    reference: object,
    text: TokenizedText,
    blocks: Sequence[BlockLoss],
    limits: ScoreLimits,
    journal: Journal,
) -> tuple[list[BlockLoss], dict[str, Any]]:
    """The blocks of a text with their agreement and divergence, and the figures over all of them.

    Args:
        model, reference: scorers of two models with the same vocabulary.
        blocks: blocks of the text, with the losses of `model`.
        journal: keeps results, so that a killed evaluation can resume.

    Raises:
        UserError: a scorer without logits: a server's, or Paddle's.
    """
    if not isinstance(model, LogitScorer) or not isinstance(reference, LogitScorer):
        raise UserError(
            "--reference requires a checkpoint that torch runs, or an export",
            "omit --reference or --endpoint",
            Code.CONFLICTING_OPTIONS,
        )
    requests = text_windows(text, limits)
    scorer = ResumableScorer(DivergenceScorer(model, reference), journal, "divergence")
    answers = answer(scorer, requests, limits.max_length, limits.token_budget, "reference")
    # The windows cover the text in order, so their positions divide into blocks by number.
    ends = np.cumsum([block.tokens for block in blocks])[:-1]
    divergences = np.split(np.concatenate([a.log_likelihoods for a in answers]), ends)
    agreed = np.split(np.concatenate([a.greedy for a in answers]), ends)
    compared = [
        replace(block, agreed=int(hits.sum()), divergence=float(nats.sum()))
        for block, nats, hits in zip(blocks, divergences, agreed, strict=True)
    ]

    counts = np.array([block.tokens for block in blocks], np.float64)
    total_hits = np.array([part.sum() for part in agreed], float)
    total_nats = np.array([part.sum() for part in divergences], float)
    agreement = Agreement(
        agreement=float(total_hits.sum() / counts.sum()),
        agreement_stderr=ratio_stderr(total_hits, counts),
        divergence=float(total_nats.sum() / counts.sum()),
        divergence_stderr=ratio_stderr(total_nats, counts),
    )
    return compared, asdict(agreement)
