r"""Structured output: cost of grammar masks, alone and in the server's loop.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/structured.py run/int8-onnx [--rounds 5]

First, for several constraints, texts are sampled uniformly from the allowed tokens: the time to
compile the constraint, once for validation and once for use, and the time of each token's mask.
Then the server's loop without Triton, one thread: streams that generate a list of objects with a
schema, or as many tokens without constraint, in turns. Time is CPU time of the loop's thread, as in
`arrivals.py`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from arrivals import Mixed

from lathe_base.parameters import Params
from lathe_serving.runtime import text_generator
from lathe_serving.runtime.contract import Receiver
from lathe_serving.runtime.grammar import Grammars
from lathe_serving.runtime.text_generator import TextGenerator

TEXTS, MAX_ROWS, NEW = 6, 150, 100
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 50}
FORMATS = ("date-time", "email", "uuid", "uri", "ipv6")
WORDS = "^[A-Z][a-z]{1,30}( [A-Z][a-z]{1,30}){0,9}$"


def record(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "an object of three fields": {"json": PERSON},
    "five formats, such as `date-time`": {"json": record({f: {"format": f} for f in FORMATS})},
    "30 fields with patterns": {
        "json": record({f"k{i}": {"type": "string", "pattern": WORDS} for i in range(30)})
    },
    "150 optional fields": {
        "json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(150)}}
    },
    "one of 2,000 words": {"json": {"enum": [f"word {i}" for i in range(2000)]}},
    "any object": {"json_object": True},
    "regex: a date": {"regex": "[0-9]{4}-[01][0-9]-[0-3][0-9]"},
    "regex: 20 to 200 words": {"regex": "([a-z]{2,20} ){20,200}"},
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    options = parser.parse_args()
    with patch.object(text_generator, "Batcher", Mixed):
        generator = TextGenerator(options.export, NEW, threads=1, max_running=16, max_queue=16)
    grammars = generator.grammars
    grammars.start(json.dumps({"regex": "a"}), [])  # loads the tokenizer
    print(f"{'constraint':36}{'compile, ms':>12}{'mask, us':>10}{'p99':>8}{'most':>8}")
    for name, constraint in CONSTRAINTS.items():
        seconds, masks = draw(grammars, json.dumps(constraint))
        percentiles = np.percentile(masks, [99, 100]) * 1e6
        print(
            f"{name:36}{seconds * 1e3:12.1f}{np.mean(masks) * 1e6:10.0f}"
            f"{percentiles[0]:8.0f}{percentiles[1]:8.0f}"
        )
    print(f"\n{'streams':>8}{'ms a step without':>20}{'with':>8}{'ratio, median (rounds)':>26}")
    people = json.dumps({"json": PEOPLE})
    for streams in (1, 4, 16):
        turns = [
            (run(generator, streams, ""), run(generator, streams, people))
            for _ in range(options.rounds + 1)
        ][1:]
        ratios = [formed / plain for plain, formed in turns]
        plain, formed = np.median(turns, axis=0) * 1e3
        rounds = f"{np.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{streams:8}{plain:20.2f}{formed:8.2f}{rounds:>26}", flush=True)


def draw(grammars: Grammars, constraint: str) -> tuple[float, list[float]]:
    """Seconds to compile a constraint, and of each mask of randomly sampled texts."""
    started = time.perf_counter()
    grammars.start(constraint, [])
    compiled, masks = time.perf_counter() - started, list[float]()
    for seed in range(TEXTS):
        grammar, rng = grammars.start(constraint, []), np.random.default_rng(seed)
        for _ in range(MAX_ROWS):
            started = time.thread_time()
            allowed = grammar.allowed()
            masks.append(time.thread_time() - started)
            if allowed is None:
                break
            allowed[grammar._end_ids] = False
            if not allowed.any():
                break
            grammar.add(int(rng.choice(np.flatnonzero(allowed))))
    return compiled, masks


def run(generator: TextGenerator, streams: int, constraint: str) -> float:
    """Seconds of a step that decodes this many streams."""
    params = Params(
        max_tokens=NEW, min_tokens=NEW, top_p=1.0, top_k=0, structured_outputs=constraint
    )
    receiver = Receiver(lambda answer: None, lambda: False)
    for number in range(streams):
        assert generator.submit(f"Write a list of people. {number}", params, receiver)
    batcher: Any = generator._batcher
    while len(batcher._waiting) < streams:  # constraints are compiled by another thread
        time.sleep(0.001)
    while batcher._waiting or batcher._reading:
        batcher.step()
    steps, started = 0, time.thread_time()
    while len(batcher._owners) == streams:
        batcher.step()
        steps += 1
    seconds = time.thread_time() - started
    while batcher.step():
        pass
    return seconds / steps


if __name__ == "__main__":
    main()
