r"""Speculative decoding by prompt lookup: one stream, with and without drafts.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/speculation.py [--rounds 3]
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/speculation.py [--rounds 3] \
        --text novel.txt --export run/int8-onnx

GPT-2 124M shape, INT8, random weights, one thread, the server's loop without Triton, one request at
a time, with and without drafts in turns; measured by CPU time of the loop, as in `arrivals.py`. The
first table is the cost of a step with several tokens, and how often its logits differ from those of
single-token steps.

A random model does not generate anything like a text. In the cases with "dictated" text, sampled
tokens are replaced by a given text that a better model might write. `--export` takes the model of
an export, which should be trained, instead: passages of `--text` are dictated to it, and it
completes their beginnings itself. The first figures are then the differences between the
log-probabilities of that text in steps of one token and of several.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from arrivals import Mixed
from export import write
from numpy.typing import NDArray
from streams import complete

from lathe_base.parameters import Params
from lathe_serving.runtime import sequence_group, text_generator
from lathe_serving.runtime.contract import Receiver, Watcher
from lathe_serving.runtime.exported_model import ExportedModel
from lathe_serving.runtime.protocol import Chunk
from lathe_serving.runtime.sampling import log_softmax, next_token
from lathe_serving.runtime.text_generator import TextGenerator

REQUESTS = 8
PROMPT, NEW = 100, 120
CHANGED = 10  # one of this many tokens of the prompt is changed in its copy
GREEDY = Params(decode_strategy="greedy_search", max_tokens=NEW, min_tokens=NEW)
SAMPLED = Params(max_tokens=NEW, min_tokens=NEW, top_k=0, top_p=1.0)

Tokens = NDArray[np.int64]


@dataclass
class Case:
    """Prompts, and the parameters or the text to continue them with."""

    prompts: list[Tokens]
    params: Params
    dictated: list[Tokens] | None = None


class Counts(Watcher):
    def __init__(self) -> None:
        self.tokens = self.accepted = 0

    def drafted(self, tokens: int, accepted: int) -> None:
        self.tokens, self.accepted = self.tokens + tokens, self.accepted + accepted


class Stream:
    """An engine that processes one request at a time."""

    def __init__(self, exported: Path) -> None:
        self.counts = Counts()
        with patch.object(text_generator, "Batcher", Mixed):
            self.generator = TextGenerator(exported, NEW, 1, 1, watcher=self.counts)

    def ask(self, prompt: Tokens, params: Params, speculates: bool) -> tuple[float, list[int]]:
        """Run a request; returns CPU seconds after the first token, and the tokens."""
        batcher, tokens = self.generator._batcher, []
        assert isinstance(batcher, Mixed)
        batcher._speculates = speculates

        def take(chunk: Chunk | Exception) -> None:
            assert isinstance(chunk, Chunk), chunk
            tokens.extend(chunk.tokens)

        assert self.generator.submit(prompt.tolist(), params, Receiver(take, lambda: False))
        while not tokens:
            batcher.step()
        begun = time.thread_time()
        while batcher.step():
            pass
        return time.thread_time() - begun, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--export", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        if arguments.export:
            stream = Stream(arguments.export)
            differences(stream.generator, arguments.text)
            shown = dictated(stream.generator, arguments.text)
        else:
            exported = write(Path(scratch))["int8"]
            complete(exported)
            stream, shown = Stream(exported), cases()
            steps(stream.generator.model)
        print(f"{'':44}{'tok/s':>8}{'drafts':>9}{'':14}{'accepted':>10}{'same':>8}")
        for name, case in shown.items():
            show(name, stream, case, arguments.rounds)


def differences(generator: TextGenerator, text: Path, rows: int = 8, length: int = 256) -> None:
    """Print how the log-probabilities of a text differ between steps of one token and of
    several."""
    model = generator.model
    ids = np.array(generator.tokenizer.encode(text.read_text(encoding="utf-8")).ids)
    changes, others = [], 0
    for row in ids[: rows * length].reshape(rows, length):
        cache = model.start(1)
        one = log_softmax(np.concatenate([model.step(cache, token[None, None]) for token in row]))
        several = log_softmax(model.read(model.start(1), row))
        targets = np.arange(length - 1), row[1:]
        changes.append(several[targets] - one[targets])
        others += int((several.argmax(1) != one.argmax(1)).sum())
    change = np.concatenate(changes)
    error = change.std() / len(change) ** 0.5
    print(f"log-probabilities of {len(change)} tokens in steps of several, minus in steps of one:")
    print(
        f"mean {change.mean():.4f} +- {error:.4f}, absolute mean {np.abs(change).mean():.3f} and "
        f"maximum {np.abs(change).max():.3f}; {others} of {rows * length} argmax differ"
    )


def steps(model: ExportedModel, past: int = 200, rounds: int = 30) -> None:
    """Print the cost of a step with several tokens, and how its logits differ."""
    cache, generator = model.start(1), np.random.default_rng(0)
    model.step(cache, generator.integers(0, model.vocab_size, (1, past)))
    seconds: dict[int, list[float]] = {n: [] for n in (1, 2, 3, 4, 6, 8, 12, 16)}
    differ = likeliest = rows = 0
    for _ in range(rounds):
        tokens = generator.integers(0, model.vocab_size, 16)
        for n, taken in seconds.items():
            cache.lengths[0], begun = past, time.thread_time()
            every = model.read(cache, tokens[:n])
            taken.append(time.thread_time() - begun)
        cache.lengths[0] = past
        for row, token in zip(every, tokens, strict=True):
            alone = model.step(cache, token[None, None])[0]
            differ, rows = differ + (not np.array_equal(row, alone)), rows + 1
            likeliest += int(row.argmax() != alone.argmax())
    one = np.median(seconds[1])
    print(f"a step of one token: {1e3 * one:.1f} ms; of several:")
    print("  ".join(f"{n}: {np.median(taken) / one:.2f}x" for n, taken in seconds.items()))
    print(
        f"of {rows} logits, {differ} differ from those of single steps, {likeliest} in the argmax"
    )


def cases() -> dict[str, Case]:
    """Cases of random tokens."""
    generator = np.random.default_rng(0)
    prompts = [*generator.integers(0, 50256, (REQUESTS, PROMPT))]
    others = [*generator.integers(0, 50256, (REQUESTS, NEW))]
    copies = [np.resize(prompt, NEW) for prompt in prompts]
    edited = [copy.copy() for copy in copies]
    for copy, other in zip(edited, others, strict=True):
        copy[CHANGED - 1 :: CHANGED] = other[CHANGED - 1 :: CHANGED]
    few = [*generator.integers(0, 30, (REQUESTS, PROMPT + NEW))]
    return {
        "greedy": Case(prompts, GREEDY),
        "dictated, the prompt again": Case(prompts, GREEDY, copies),
        f"dictated, every {CHANGED}th token changed": Case(prompts, GREEDY, edited),
        "sampled at temperature 1": Case(prompts, SAMPLED),
        "dictated, 30 tokens at random": Case(
            [text[:PROMPT] for text in few], SAMPLED, [text[PROMPT:] for text in few]
        ),
    }


def dictated(generator: TextGenerator, text: Path) -> dict[str, Case]:
    """Cases of passages of a text, dictated and completed by the model."""
    ids = np.array(generator.tokenizer.encode(text.read_text(encoding="utf-8")).ids)
    new = min(NEW, generator.n_positions // 2)
    n_prompt = min(PROMPT, generator.n_positions - new)
    starts = np.linspace(0, len(ids) - PROMPT - NEW, REQUESTS).astype(int).tolist()
    prompts = [ids[start : start + n_prompt] for start in starts]
    limits: dict[str, Any] = {"max_tokens": new, "min_tokens": new}
    return {
        "dictated, the text": Case(
            [ids[start : start + PROMPT] for start in starts],
            SAMPLED,
            [ids[start + PROMPT : start + PROMPT + NEW] for start in starts],
        ),
        "the export, greedy": Case(prompts, Params(decode_strategy="greedy_search", **limits)),
        "the export, sampled": Case(prompts, Params(**limits)),
    }


@contextmanager
def dictation(text: Tokens | None) -> Iterator[None]:
    """Replace sampled tokens by a text, after sampling."""

    def choose(logits: Any, seen: Any, n_generated: int, *rest: Any) -> int:
        chosen = next_token(logits, seen, n_generated, *rest)
        return chosen if text is None else int(text[n_generated])

    with patch.object(sequence_group, "next_token", choose):
        yield


def show(name: str, stream: Stream, case: Case, rounds: int) -> None:
    """Print the speeds with and without drafts, and the drafts' acceptance."""
    ratios, same = [], 0
    for turn in range(rounds):
        taken = {False: 0.0, True: 0.0}
        for i, prompt in enumerate(case.prompts):
            answers = {}
            for speculates in (False, True) if (i + turn) % 2 else (True, False):
                seed = Params(**{**vars(case.params), "seed": i})
                with dictation(case.dictated[i] if case.dictated else None):
                    seconds, answers[speculates] = stream.ask(prompt, seed, speculates)
                taken[speculates] += seconds
            same += answers[False] == answers[True]
        ratios.append(taken[False] / taken[True])
    counts, stream.counts = stream.counts, Counts()
    stream.generator._batcher._watcher = stream.counts
    new = len(case.prompts) * (len(answers[True]) - 1)
    print(
        f"{name:44}{new / taken[False]:8.1f}{np.median(ratios):8.3f}x"
        f" {f'({min(ratios):.2f} to {max(ratios):.2f})':13}"
        f"{f'{counts.accepted // rounds} of {counts.tokens // rounds}':>10}"
        f"{f'{same}/{rounds * len(case.prompts)}':>8}",
        flush=True,
    )


if __name__ == "__main__":
    main()
