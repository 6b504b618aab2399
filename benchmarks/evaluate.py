"""LAMBADA by `lathe evaluate`'s scorer beside lm-evaluation-harness, on the same weights.

    pip install 'lm-eval==0.4.*'    # not among Lathe's own requirements
    python benchmarks/evaluate.py lambada_test.jsonl --tokenizer gpt2/ [--limit 500] [--rounds 1]

Without --model the weights are random, of the GPT-2 124M shape: speed is the same as trained ones',
accuracy is not. Both score in turns in one process. Compared are the scoring times, tokenization
included, and every example's log-likelihood and verdict.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from lathe.config.settings import GlobalSettings, OfflineEvalSettings, Recipe
from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.lambada import read_cloze, score_cloze
from lathe.evaluate.open_model import open_model
from lathe.model.checkpoint import save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT

SHAPE = (1024, 768, 64, (12,) * 12, (3072,) * 12)
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
    start = time.perf_counter()
    examples = read_cloze(cloze, subject.tokenizer)
    scores = score_cloze(subject.scorer, examples, longest, budget)
    return Scores(
        time.perf_counter() - start,
        np.array([s.log_likelihood for s in scores]),
        np.array([s.correct for s in scores]),
    )


def by_lm_eval(folder: Path, cloze: Path, batch_size: int, dtype: str = "float32") -> Scores:
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast

    class Timed(HFLM):  # type: ignore[misc]
        seconds = 0.0

        def loglikelihood(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            scored = super().loglikelihood(*args, **kwargs)
            self.seconds = time.perf_counter() - start
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


def random_model(folder: Path, tokenizer: Tokenizer) -> Path:
    model = GPT(GPTConfig(tokenizer.get_vocab_size(), *SHAPE))
    model.initialize(0.02, seed=0)
    save_checkpoint(folder, model, tokenizer, "pretrain", Recipe())
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cloze", type=Path)
    parser.add_argument("--model", type=Path, help="unpruned float checkpoint, or HF GPT-2, folder")
    parser.add_argument("--tokenizer", type=Path, help="for random weights: folder of GPT-2's BPE")
    parser.add_argument("--limit", type=int, help="examples, from the start of the file")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="of lm-eval, in examples")
    for side in ("lm-eval", "lathe"):
        types = ["float32", "bfloat16"]
        parser.add_argument(f"--{side}-dtype", default="float32", choices=types)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = OfflineEvalSettings(dtype=arguments.lathe_dtype)
    with TemporaryDirectory() as scratch:
        cloze = Path(scratch) / "cloze.jsonl"
        lines = arguments.cloze.read_text().splitlines(keepends=True)
        cloze.write_text("".join(lines[: arguments.limit]))
        model = arguments.model or random_model(
            Path(scratch) / "model", load_tokenizer(arguments.tokenizer)
        )
        rounds = [
            (
                by_lm_eval(model, cloze, arguments.batch_size, arguments.lm_eval_dtype),
                by_lathe(model, cloze, settings),
            )
            for _ in range(arguments.rounds)
        ]
    print(f"\n{len(rounds[0][0].correct)} examples, {arguments.threads} threads")
    print(f"{'':8}{'type':>10}{'seconds':>10}{'examples/s':>12}{'accuracy':>10}{'perplexity':>14}")
    types = (arguments.lm_eval_dtype, arguments.lathe_dtype)
    for name, dtype, runs in zip(
        ("lm-eval", "Lathe"), types, zip(*rounds, strict=True), strict=True
    ):
        seconds, one = float(np.median([run.seconds for run in runs])), runs[0]
        print(
            f"{name:8}{dtype:>10}{seconds:10.2f}{len(one.correct) / seconds:12.1f}"
            f"{one.correct.mean():10.4f}{one.perplexity():14.2f}"
        )
    theirs, ours = rounds[0]
    difference = np.abs(theirs.log_likelihood - ours.log_likelihood).max()
    ratio = np.median([a.seconds / b.seconds for a, b in rounds])
    same = int((theirs.correct == ours.correct).sum())
    print(f"Lathe is {ratio:.2f}x as fast")
    print(f"same verdict on {same} of {len(ours.correct)}, log-likelihoods within {difference:.2g}")


if __name__ == "__main__":
    main()
