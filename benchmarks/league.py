r"""Lathe against alternative engines: size, speed and quality loss of quantization.

    python benchmarks/league.py --model run/dense --data run/data --text wiki.test.raw \
        --cloze lambada_test.jsonl
    python benchmarks/league.py --shape smollm2-135m --threads 2

Every engine gets its own environment in the output folder (`--prepare` stops after creating them
and converting the models); engines that cannot be installed get a row that says so. All engines
take turns, each in its own process, measured by CPU time of the process, or of its busiest thread
with more than one of `--threads`. Before that, each engine must prove that it runs the same model:
its log-likelihoods must match those of transformers in float32, except for quantization errors.

With `--model`, an unquantized trained checkpoint, all engines also report the perplexity of a text
and the accuracy on last words of passages, each with its own post-training quantization;
`--trained` are checkpoints of `lathe quantize` that started from the model. The speed of a row
counts if its perplexity is at most 1 % above that of the model in float32, or for 4 bits, above
that of the best engine other than Lathe; other speeds are struck out, and the fastest row of each
width that counts is bold. Without `--model`, weights and tokens are random, and only speed is
measured.

Environments and converted models are reused; the figures are written to `league-NAME-THREADS.json`,
`.md` and `.svg` after every round.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from peers.entries import ENTRIES, TRUTH, Entry, n_bytes, trained
from peers.page import CASES, Found, chart, longest, table
from peers.process import Failed, Worker, convert, make_environment
from peers.subjects import SHAPES, Subject, pretrained, random_shape

# RMS difference of log-likelihoods, relative to their standard deviation. Queries and keys rotated
# in the wrong order give 0.9 in 8 bits, a wrong RoPE base 0.7, missing biases 0.7; two unrelated
# models differ by 1.4.
TOLERANCE = {32: 0.001, 8: 0.5, 4: 1.0}


class League:
    """Measures the entries; `found` has the results by title, or only `failed`.

    Args:
        stem: base name of the result files in the folder.
    """

    def __init__(self, folder: Path, entries: list[Entry], threads: int, stem: str) -> None:
        self.folder, self.entries, self.threads, self.stem = folder, entries, threads, stem
        self.found: Found = {entry.title: {"bits": entry.bits} for entry in entries}

    def standing(self) -> list[Entry]:
        return [e for e in self.entries if "failed" not in self.found[e.title]]

    @contextmanager
    def noted(self, entry: Entry) -> Iterator[None]:
        """Record the failure of an entry, and continue with the others."""
        try:
            yield
        except Failed as error:
            print(f"{entry.title}: {error}", file=sys.stderr)
            self.found[entry.title] = {"failed": str(error)}

    def prepare(self, subject: Subject) -> None:
        for entry in self.standing():
            if entry.checkpoint and subject.has_random_weights:
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
        environments = self.folder / "environments"
        return Worker(entry, environments, folder, subject.vocabulary, self.threads)

    def prove(self, subject: Subject) -> None:
        """Fail entries that do not run the same model.

        Narrower formats of the same engine fail too: they are converted by the same code, but their
        rounding errors are too large to detect a mistake.
        """
        standing = {e.title: e for e in self.standing() if not e.checkpoint}
        truth = self.losses(standing.pop(TRUTH), subject)
        wrong: dict[str, str] = {}  # engine: title of the failed entry
        for title, entry in sorted(standing.items(), key=lambda item: -item[1].bits):
            with self.noted(entry):
                if entry.module in wrong:
                    raise Failed(f"{wrong[entry.module]} does not have the model")
                change = self.losses(entry, subject) - truth
                difference = float(np.sqrt(np.square(change).mean()) / truth.std())
                if not difference <= TOLERANCE[entry.bits]:
                    wrong[entry.module] = title
                    raise Failed(f"does not have the model: {difference:.2f} from float32")
                self.found[title]["difference"] = difference

    def losses(self, entry: Entry, subject: Subject) -> NDArray[np.float64]:
        """Measure the losses of all tokens (N, T - 1).

        For a trained model, stores the means per window, and the scores of passages.
        """
        found = self.found[entry.title]
        with self.start(entry, subject) as worker:
            found["version"] = worker.version
            losses = np.array(worker.ask("score", str(subject.heldout)))
            if not subject.has_random_weights:
                found["losses"] = losses.mean(axis=1).tolist()
                found["cloze"] = worker.ask("cloze", str(subject.cloze))
                print(f"{entry.title}: scored", file=sys.stderr)
                self.save()
        return losses

    def speeds(self, subject: Subject, rounds: int) -> None:
        """Measure the seconds of every case in each round, without the first round."""
        cases = {c: q for c, q in CASES.items() if longest(*q) <= subject.n_positions}
        with ExitStack() as stack:
            workers = {}
            for entry in self.standing():
                if not entry.checkpoint:
                    with self.noted(entry):
                        workers[entry] = stack.enter_context(self.start(entry, subject))
                        size = n_bytes(self.converted(entry, subject))
                        self.found[entry.title]["bytes"] = size
            for turn in range(rounds + 1):
                print(f"round {turn} of {rounds}", file=sys.stderr)
                for case, question in cases.items():
                    for entry in [entry for entry in self.standing() if entry in workers]:
                        with self.noted(entry):
                            values = workers[entry].ask(*question)
                            if turn:
                                found = self.found[entry.title].setdefault(case, [])
                                found.append(float(np.median(values)))
                self.save()

    def score(self, subject: Subject) -> None:
        """Score the checkpoints that were quantized with training."""
        for entry in self.standing():
            if entry.checkpoint:
                with self.noted(entry):
                    self.losses(entry, subject)

    def save(self) -> None:
        (self.folder / f"{self.stem}.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (self.folder / f"{self.stem}.md").write_text(table(self.found) + "\n")
        chart(self.found, self.folder / f"{self.stem}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="trained, unquantized checkpoint")
    parser.add_argument("--data", type=Path, help="output of `lathe prepare` for the model")
    parser.add_argument(
        "--text", type=Path, help="text for perplexity; default: held-out text in --data"
    )
    parser.add_argument("--cloze", type=Path, help="LAMBADA-format JSONL; default: that in --data")
    parser.add_argument(
        "--trained", type=Path, nargs="*", default=[], help="checkpoints quantized with training"
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default=SHAPES[0],
        help="shape of the random model without --model",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of every engine")
    parser.add_argument("--output", type=Path, default=Path("build/league"), help="output folder")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--windows", type=int, default=64, help="number of windows of the text")
    parser.add_argument("--passages", type=int, default=500, help="number of passages of --cloze")
    parser.add_argument(
        "--only", nargs="*", default=[], help="modules in peers, or titles, to include"
    )
    parser.add_argument("--prepare", action="store_true", help="install and convert only")
    settings = parser.parse_args()
    if settings.model and not settings.data:
        parser.error("--model needs --data")
    wanted = {TRUTH, *settings.only}
    entries = [e for e in ENTRIES if not settings.only or {e.module, e.title} & wanted]
    entries += [trained(path) for path in settings.trained]
    if settings.model:
        text = settings.text or settings.data / "heldout.txt"
        cloze = settings.cloze or settings.data / "cloze.jsonl"
        sizes = settings.windows, settings.passages
        subject = pretrained(settings.output, settings.model, settings.data, text, cloze, *sizes)
    else:
        subject = random_shape(settings.output, settings.shape)
    stem = f"league-{subject.name}-{settings.threads}"
    league = League(settings.output, entries, settings.threads, stem)
    league.prepare(subject)
    if settings.prepare:
        return
    league.prove(subject)
    league.score(subject)
    league.speeds(subject, settings.rounds)
    print(table(league.found))


if __name__ == "__main__":
    main()
