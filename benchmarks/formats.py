"""One export in every engine that reads one of its formats.

    lathe export run/int8 --format gguf --format compressed-tensors --format openvino
    python benchmarks/formats.py run/int8-onnx run/int8 --data run/data [--rounds 5]

Fidelity is measured as by `lathe prove`; engines that fail it or are not installed get a row that
says so. Decoding is greedy, in float32 if the engine has a choice, with torch's number of threads;
engines take turns, and times are of tokens after the first.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lathe.export.engines import ENGINES, Engine, open_engine
from lathe.export.fidelity import Fidelity
from lathe.export.prompts import proof_prompts
from lathe.export.prove import prove_in_engine
from lathe.model.checkpoint import load_checkpoint
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import StageError, UserError

STEPS = 32  # timed tokens
HEAD = ("engine", "MB", "logits' error", "KL from float", "top-1 of the checkpoint")
REST = ("top-1 of float", "greedy", "perplexity", "of float", "ms a token")
WEIGHTS = {".onnx", ".safetensors", ".gguf", ".bin"}


@dataclass
class Found:
    """Results of an engine; `seconds` has the time per token in each round."""

    engine: Engine
    title: str
    n_bytes: int
    fidelity: Fidelity
    seconds: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", default="smollm2", help="name or path of the recipe")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    given = parser.parse_args()
    recipe, found = load_recipe(given.recipe), list[Found]()
    for name, (file, *_) in ENGINES.items():
        print(name, file=sys.stderr)
        try:
            proof = prove_in_engine(recipe, given.exported, given.model, given.data, name)
            engine = open_engine(name, given.exported)
        except (StageError, UserError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        size = n_bytes(given.exported / file)
        found.append(Found(engine, proof.engine, size, proof.fidelity, []))
    checkpoint = load_checkpoint(given.model)
    length = checkpoint.model.config.n_positions
    prompts, _ = proof_prompts(checkpoint.tokenizer, given.data, recipe.Export, length)
    for turn in range(given.rounds + 1):
        for one in found:
            seconds = seconds_per_token(one.engine, prompts[-1])
            if turn:  # the first round warms up
                one.seconds.append(seconds)
    print(table(found))


def n_bytes(place: Path) -> int:
    """Size of a file, or of a folder's weights."""
    files = place.iterdir() if place.is_dir() else [place]
    return sum(f.stat().st_size for f in files if f.suffix in WEIGHTS and "token" not in f.name)


def seconds_per_token(engine: Engine, prompt: list[int]) -> float:
    """Mean time per token, without the first token."""
    times = []
    for steps in (1, STEPS + 1):
        start = time.perf_counter()
        engine.greedy(prompt, steps)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / STEPS


def table(found: list[Found]) -> str:
    """Format the results as Markdown."""
    lines = [[*HEAD, *REST], ["---"] * (len(HEAD) + len(REST))]
    for one in found:
        own = one.fidelity
        lines.append(
            [
                one.title,
                f"{one.n_bytes / 1e6:.0f}",
                f"{own.logit_error:.2g}",
                f"{own.kl:.2g}",
                f"{own.torch_agreement:.1%}",
                f"{own.argmax_agreement:.1%}",
                f"{own.greedy_agreement:.1%}",
                f"{own.perplexity:.2f}",
                f"{own.float_perplexity:.2f}",
                f"{1000 * median(one.seconds):.1f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
