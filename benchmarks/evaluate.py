"""LAMBADA with `lathe evaluate`, lm-evaluation-harness or transformers, with the same weights.

    python benchmarks/evaluate.py lambada_test.jsonl --model run/dense --export run/dense-onnx
    pip install 'lm-eval==0.4.*'    # not a dependency of Lathe
    python benchmarks/evaluate.py lambada_test.jsonl --tokenizer gpt2/ --peer lm-eval [--rounds 3]

The rows of a table take turns in one process: the peer, Lathe in torch, and with --export Lathe in
onnxruntime. Without --model, weights are random with the GPT-2 124M shape, which affects accuracy
but not speed. Scoring times, including tokenization, and the log-likelihood and verdict of every
passage are compared. Times are CPU time divided by threads, so that other work on the machine does
not count. The peer "transformers" is the loop that its documentation suggests: padded batches in
the order of the file, with logits of all positions.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.evaluate import open_model
from lathe.evaluate.tasks.cloze import read_cloze, score_cloze
from lathe.model.checkpoint import save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe_base.config.settings import GlobalSettings, OfflineEvalSettings, Recipe

SHAPE = (1024, 768, 64, (12,) * 12, (3072,) * 12)
CLOCK = time.process_time  # CPU time, not affected by other processes
WHOLE = 5153  # passages of LAMBADA's test set
TASK = {  # lm-eval's own `lambada_openai`, on a file instead of a download
    "task": "lambada_file",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' '+text.split(' ')[-1]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}


@dataclass(frozen=True)
class Scores:
    seconds: float
    log_likelihood: np.ndarray  # (examples,)
    correct: np.ndarray

    def perplexity(self) -> float:
        return float(np.exp(-self.log_likelihood.mean()))


def by_lathe(folder: Path, cloze: Path, settings: OfflineEvalSettings) -> Scores:
    recipe = Recipe(Global=GlobalSettings(device="cpu"), Offline_Eval=settings)
    subject = open_model(folder, recipe)
    longest = min(settings.max_seq_len, subject.config.n_positions)
    budget = subject.token_budget(settings.batch_size * longest)
    start = CLOCK()
    examples = read_cloze(cloze, subject.tokenizer)
    scores = score_cloze(subject.scorer, examples, longest, budget)
    return Scores(
        CLOCK() - start,
        np.array([s.log_likelihood for s in scores]),
        np.array([s.correct for s in scores]),
    )


def by_transformers(folder: Path, cloze: Path, batch_size: int, dtype: str) -> Scores:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = load_tokenizer(folder)
    start = CLOCK()
    examples, found = read_cloze(cloze, tokenizer), []
    for i in range(0, len(examples), batch_size):
        batch = examples[i : i + batch_size]
        rows = [torch.tensor(example.context + example.label) for example in batch]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
        with torch.inference_mode():
            logits = model(tokens, attention_mask=mask).logits
        for row, length, example in zip(logits, map(len, rows), batch, strict=True):
            n, label = len(example.label), torch.tensor(example.label)
            own = row[length - n - 1 : length - 1].float()
            likelihoods = own.log_softmax(-1).gather(1, label[:, None])
            found.append((likelihoods.sum().item(), bool((own.argmax(-1) == label).all())))
    seconds = CLOCK() - start
    return Scores(seconds, np.array([f[0] for f in found]), np.array([f[1] for f in found]))


def by_lm_eval(folder: Path, cloze: Path, batch_size: int, dtype: str) -> Scores:
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast

    class Timed(HFLM):  # type: ignore[misc]
        seconds = 0.0

        def loglikelihood(self, *args: Any, **kwargs: Any) -> Any:
            start = CLOCK()
            scored = super().loglikelihood(*args, **kwargs)
            self.seconds = CLOCK() - start
            return scored

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    model = Timed(
        pretrained=str(folder),
        tokenizer=tokenizer,
        device="cpu",
        dtype=dtype,
        batch_size=batch_size,
    )
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(cloze)}}}
    found = simple_evaluate(model, tasks=[task], bootstrap_iters=0, log_samples=True)
    samples = sorted(found["samples"]["lambada_file"], key=lambda sample: sample["doc_id"])
    answers = [sample["filtered_resps"][0] for sample in samples]
    return Scores(
        model.seconds, np.array([a[0] for a in answers]), np.array([a[1] for a in answers])
    )


PEERS = {"transformers": by_transformers, "lm-eval": by_lm_eval}


def random_model(folder: Path, tokenizer: Tokenizer) -> Path:
    model = GPT(GPTConfig(tokenizer.get_vocab_size(), *SHAPE))
    model.initialize(0.02, seed=0)
    save_checkpoint(folder, model, tokenizer, "pretrain", Recipe())
    return folder


def table(rounds: list[dict[str, Scores]], threads: int) -> None:
    """Print a row for each title; the others are compared with the first, the peer."""
    theirs, *_ = rounds[0].values()
    n = len(theirs.correct)
    print(f"{'':24}{'passages/s':>12}{'ratio':>8}{'all ' + str(WHOLE):>10}", end="")
    print(f"{'accuracy':>10}{'perplexity':>12}{'same verdict':>15}{'largest difference':>20}")
    peer = next(iter(rounds[0]))
    for title, one in rounds[0].items():
        seconds = float(np.median([scores[title].seconds for scores in rounds])) / threads
        ratio = np.median([scores[peer].seconds / scores[title].seconds for scores in rounds])
        difference = np.abs(theirs.log_likelihood - one.log_likelihood).max()
        same = f"{int((theirs.correct == one.correct).sum())} of {n}"
        print(
            f"{title:24}{n / seconds:12.2f}{ratio:7.2f}x{seconds / n * WHOLE / 60:6.1f} min"
            f"{one.correct.mean():10.4f}{one.perplexity():12.2f}{same:>15}{difference:20.2g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cloze", type=Path)
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of an unpruned float checkpoint, Lathe's or Hugging Face's",
    )
    parser.add_argument("--export", type=Path, nargs="*", default=[], help="exports to include")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of GPT-2's tokenizer, for random weights"
    )
    parser.add_argument("--peer", choices=PEERS, default="transformers")
    parser.add_argument("--limit", type=int, help="number of passages, from the start of the file")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--batch-size", type=int, default=8, help="batch size of the peer")
    for side in ("peer", "lathe"):
        types = ["float32", "bfloat16"]
        parser.add_argument(f"--{side}-dtype", default="float32", choices=types)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with TemporaryDirectory() as scratch:
        cloze = Path(scratch) / "cloze.jsonl"
        lines = given.cloze.read_text().splitlines(keepends=True)
        cloze.write_text("".join(lines[: given.limit]))
        model = given.model or random_model(
            Path(scratch) / "model", load_tokenizer(given.tokenizer)
        )
        lathe = OfflineEvalSettings(dtype=given.lathe_dtype)
        rows: dict[str, Callable[[], Scores]] = {
            f"{given.peer} {given.peer_dtype}": lambda: PEERS[given.peer](
                model, cloze, given.batch_size, given.peer_dtype
            ),
            f"Lathe {given.lathe_dtype}": lambda: by_lathe(model, cloze, lathe),
        }
        for folder in given.export:
            rows[f"Lathe {folder.name}"] = partial(by_lathe, folder, cloze, OfflineEvalSettings())
        rounds = [{title: row() for title, row in rows.items()} for _ in range(given.rounds)]
    print(f"\n{len(lines[: given.limit])} passages, {given.threads} threads")
    table(rounds, given.threads)


if __name__ == "__main__":
    main()
