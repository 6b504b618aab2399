r"""Lathe beside the engines that a user would take instead: bytes, speed and what quantizing costs.

    python benchmarks/league.py run/dense --data run/data --trained run/int8 run/int4

Every engine that installs has an environment of its own below the output (`--prepare` stops when
they are made and the models are converted); one that does not is a line that says so. Speeds are of
the GPT-2 124M shape with random weights: all engines take turns, each in its own process with one
thread, on the processor time of that process. Perplexities are of the checkpoint, on the text that
`lathe prepare` held out in `--data`, each with the engine's own quantization; `--trained` are
checkpoints of `lathe quantize` that started from it. Environments and converted models are kept and
not made again; the figures are in `league.json`, `league.md` and `league.svg`, which are written
after every round.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from export import SHAPE
from peers.entries import ENTRIES, Entry, n_bytes, trained
from peers.page import CASES, Found, chart, table
from peers.process import Failed, Worker, convert, make_environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lathe.config.settings import Recipe
from lathe.data.tokens import TokenDataset
from lathe.model.checkpoint import save_checkpoint
from lathe.model.folder import checkpoint_digest
from lathe.model.gpt import GPT

CALIBRATION = 32  # windows
WINDOW = 512  # tokens at most


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and files of tokens (N, T) that engines are calibrated and scored with."""

    name: str
    model: Path
    calibration: Path
    heldout: Path

    @classmethod
    def below(cls, folder: Path, name: str, model: Path | None = None) -> "Subject":
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        files = place / "calibration.npy", place / "heldout.npy"
        return cls(name, (model or place / "model").resolve(), *(f.resolve() for f in files))

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def config(self) -> dict[str, object]:
        config: dict[str, object] = json.loads((self.model / "config.json").read_text())
        return config


def random_shape(folder: Path) -> Subject:
    """The 124M shape with random weights, and random tokens to calibrate it."""
    subject = Subject.below(folder, "shape")
    if not subject.calibration.exists():
        model = GPT(SHAPE)
        model.initialize(0.02, seed=0)
        save_checkpoint(subject.model, model, _tokenizer(SHAPE.vocab_size), "pretrain", Recipe())
        tokens = np.random.default_rng(0).integers(1, SHAPE.vocab_size, (8, 128))
        np.save(subject.calibration, tokens)
    return subject


def _tokenizer(size: int) -> Tokenizer:
    """One that is never used: engines are fed with ids, but some do not load without it."""
    words = ["<|endoftext|>", *(f"t{i}" for i in range(size - 4)), "a", "b", "ab"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_texts(model: Path, data: Path, windows: int, folder: Path) -> Subject:
    """A checkpoint with windows of the text that it was trained on, and of what was held out."""
    subject = Subject.below(folder, checkpoint_digest(model)[:12], model)
    length = min(WINDOW, int(str(subject.config["n_positions"])))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = (data / "heldout.txt").read_text(encoding="utf-8")
    heldout = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
    ((_, documents), *_) = TokenDataset.open(data).parts
    seen, i = np.empty(0, np.int64), 0
    while len(seen) < CALIBRATION * length:
        seen, i = np.concatenate([seen, documents[i]]), i + 1
    for file, tokens, most in (
        (subject.calibration, seen, CALIBRATION),
        (subject.heldout, heldout, windows),
    ):
        count = min(most, len(tokens) // length)
        np.save(file, tokens[: count * length].reshape(count, length).astype(np.int64))
    return subject


class League:
    """What is found of every entry, by its title; one that has failed has only `failed`."""

    def __init__(self, folder: Path, entries: list[Entry]) -> None:
        self.folder, self.entries = folder, entries
        self.found: Found = {entry.title: {} for entry in entries}

    def standing(self) -> list[Entry]:
        return [e for e in self.entries if "failed" not in self.found[e.title]]

    @contextmanager
    def noted(self, entry: Entry) -> Iterator[None]:
        """Note that an entry fails, and go on with the others."""
        try:
            yield
        except Failed as error:
            print(f"{entry.title}: {error}", file=sys.stderr)
            self.found[entry.title] = {"failed": str(error)}

    def prepare(self, subject: Subject) -> None:
        for entry in self.standing():
            if entry.checkpoint and not subject.heldout.exists():
                continue
            print(f"prepare {entry.title}, {subject.name}", file=sys.stderr)
            with self.noted(entry):
                make_environment(entry, self.folder / "environments")
                model = (entry.checkpoint or subject.model).resolve()
                place = self.converted(entry, subject)
                convert(entry, self.folder / "environments", model, subject.calibration, place)

    def converted(self, entry: Entry, subject: Subject) -> Path:
        return (self.folder / subject.name / entry.key).resolve()

    def start(self, entry: Entry, subject: Subject) -> Worker:
        folder = self.converted(entry, subject)
        return Worker(entry, self.folder / "environments", folder, subject.vocabulary)

    def speeds(self, subject: Subject, rounds: int) -> None:
        """Seconds of every case, one number a round; the first round is not counted."""
        with ExitStack() as stack:
            workers = {}
            for entry in self.standing():
                if not entry.checkpoint:
                    with self.noted(entry):
                        workers[entry] = stack.enter_context(self.start(entry, subject))
                        self.found[entry.title] |= {
                            "version": workers[entry].version,
                            "bytes": n_bytes(self.converted(entry, subject)),
                        }
            for turn in range(rounds + 1):
                print(f"round {turn} of {rounds}", file=sys.stderr)
                for case, question in CASES.items():
                    for entry in [entry for entry in self.standing() if entry in workers]:
                        with self.noted(entry):
                            values = workers[entry].ask(*question)
                            if turn:
                                found = self.found[entry.title].setdefault(case, [])
                                found.append(float(np.median(values)))
                self.save()

    def score(self, subject: Subject) -> None:
        """The mean loss of every window."""
        for entry in self.standing():
            with self.noted(entry), self.start(entry, subject) as worker:
                self.found[entry.title] |= {
                    "version": worker.version,
                    "losses": worker.ask("score", str(subject.heldout)),
                }
        self.save()

    def save(self) -> None:
        (self.folder / "league.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (self.folder / "league.md").write_text(table(self.found) + "\n")
        chart(self.found, self.folder / "league.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="trained checkpoint, not quantized")
    parser.add_argument("--data", type=Path, help="output of `lathe prepare` for it")
    parser.add_argument("--trained", type=Path, nargs="*", default=[], help="quantized ones")
    parser.add_argument("--output", type=Path, default=Path("build/league"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=64, help="of held-out text")
    parser.add_argument("--only", nargs="*", default=[], help="modules of benchmarks/peers")
    parser.add_argument("--prepare", action="store_true", help="measure nothing yet")
    settings = parser.parse_args()
    if settings.model and not settings.data:
        parser.error("a checkpoint needs --data")
    entries = [e for e in ENTRIES if not settings.only or e.module in settings.only]
    league = League(settings.output, entries + [trained(path) for path in settings.trained])
    subjects = [random_shape(settings.output)]
    if settings.model:
        texts = with_texts(settings.model, settings.data, settings.windows, settings.output)
        subjects.append(texts)
    for subject in subjects:
        league.prepare(subject)
    if settings.prepare:
        return
    for subject in subjects[1:]:
        league.score(subject)
    league.speeds(subjects[0], settings.rounds)
    print(table(league.found))


if __name__ == "__main__":
    main()
