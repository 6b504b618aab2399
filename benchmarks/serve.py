"""Generation compared to CTranslate2 and transformers with the same weights.

    pip install ctranslate2     # not a dependency of Lathe
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/serve.py [--threads 1] [--rounds 5]

GPT-2 124M shape, random weights. All take turns in one process, with huge pages as in Lathe's
server; tokens/s and milliseconds are medians, and ratios are what counts. Prompts are prefilled as
in the server. `benchmarks/streams.py` measures the server itself.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from export import SHAPE, write
from transformers import GPT2LMHeadModel

from lathe.model.checkpoint import save_checkpoint
from lathe.model.gpt import GPT
from lathe_base.config.settings import Recipe
from lathe_serving.runtime.batcher import PREFILL_CHUNK
from lathe_serving.runtime.session import OnnxModel

NEW = 48
PROMPTS = (128, 512)
BATCHES = (1, 8)


def prompt(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, SHAPE.vocab_size, (batch, length))


class Lathe:
    def __init__(self, folder: Path, threads: int) -> None:
        self.model = OnnxModel(folder, threads)

    def prefill(self, length: int) -> float:
        tokens = prompt(1, length)
        cache = self.model.start(1, length)
        parts = np.split(tokens, range(PREFILL_CHUNK, length, PREFILL_CHUNK), axis=1)
        return timed(lambda: [self.model.step(cache, part) for part in parts])

    def decode(self, batch: int) -> float:
        cache = self.model.start(batch, 32 + NEW)
        self.model.step(cache, prompt(batch, 32))
        tokens = prompt(batch, 1)
        return NEW * batch / timed(lambda: [self.model.step(cache, tokens) for _ in range(NEW)])


class CTranslate2:
    def __init__(self, hf: Path, folder: Path, threads: int) -> None:
        import ctranslate2

        converter = ctranslate2.converters.TransformersConverter(str(hf))
        converter.convert(str(folder), quantization="int8")
        options = {"compute_type": "int8", "inter_threads": 1, "intra_threads": threads}
        self.model = ctranslate2.Generator(str(folder), device="cpu", **options)

    def _run(self, tokens: np.ndarray, new: int) -> float:
        words = [[f"t{token}" for token in row] for row in tokens]
        options = {"max_length": new, "min_length": new, "sampling_topk": 1, "beam_size": 1}
        return timed(
            lambda: self.model.generate_batch(words, include_prompt_in_result=False, **options)
        )

    def prefill(self, length: int) -> float:
        return self._run(prompt(1, length), 1)

    def decode(self, batch: int) -> float:
        tokens = prompt(batch, 32)
        return NEW * batch / (self._run(tokens, NEW + 1) - self._run(tokens, 1))


class Transformers:
    def __init__(self, hf: Path) -> None:
        self.model = GPT2LMHeadModel.from_pretrained(hf).eval()

    def _run(self, tokens: np.ndarray, new: int) -> float:
        ids = torch.from_numpy(tokens)
        options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
        mask = torch.ones_like(ids)
        return timed(
            lambda: self.model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        )

    def prefill(self, length: int) -> float:
        return self._run(prompt(1, length), 1)

    def decode(self, batch: int) -> float:
        tokens = prompt(batch, 32)
        return NEW * batch / (self._run(tokens, NEW + 1) - self._run(tokens, 1))


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    with torch.inference_mode():
        run()
    return time.perf_counter() - started


def hf_folder(folder: Path) -> Path:
    """Write the same random weights as a GPT-2 folder, with a tokenizer for words t0, t1, ..."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(SHAPE.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    model = GPT(SHAPE)
    model.initialize(0.02, seed=0)
    save_checkpoint(folder, model, tokenizer, "pretrain", Recipe())
    last = f"t{SHAPE.vocab_size - 1}"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=last, eos_token=last, unk_token="t0"
    )
    fast.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with TemporaryDirectory() as scratch:
        folders = write(Path(scratch))
        hf = hf_folder(Path(scratch) / "hf")
        models: dict[str, Any] = {
            "Lathe int8": Lathe(folders["int8"], arguments.threads),
            "onnxruntime fp32": Lathe(folders["fp32"], arguments.threads),
            "CTranslate2 int8": CTranslate2(hf, Path(scratch) / "ct2", arguments.threads),
            "transformers fp32": Transformers(hf),
        }
        cases = {f"prefill {n}": ("prefill", n) for n in PROMPTS}
        cases |= {f"decode b{n}": ("decode", n) for n in BATCHES}
        found: dict[tuple[str, str], list[float]] = {}
        for turn in range(arguments.rounds + 1):
            for case, (what, n) in cases.items():
                for name, model in models.items():
                    value = getattr(model, what)(n)
                    if turn:
                        found.setdefault((case, name), []).append(value)
        sizes = {name: sum(f.stat().st_size for f in folder.glob("model.onnx*"))
                 for name, folder in folders.items()}  # fmt: skip
        shutil.rmtree(hf)
    report(found, list(models), list(cases), arguments.threads)
    print(f"bytes: {sizes['int8'] / sizes['fp32']:.3f} of fp32")


def report(
    found: dict[tuple[str, str], list[float]], names: list[str], cases: list[str], threads: int
) -> None:
    medians = {key: float(np.median(values)) for key, values in found.items()}
    print(f"GPT-2 124M shape, {threads} thread(s); Lathe int8 is ... times as fast")
    print(f"{'':14}" + "".join(f"{name:>28}" for name in names))
    for case in cases:
        ours = medians[case, names[0]]
        row = f"{case:14}"
        for name in names:
            value = medians[case, name]
            is_time = case.startswith("prefill")
            shown = f"{1e3 * value:.1f} ms" if is_time else f"{value:.1f} tok/s"
            row += f"{shown:>18}{(value / ours if is_time else ours / value):>9.2f}x"
        print(row)


if __name__ == "__main__":
    main()
