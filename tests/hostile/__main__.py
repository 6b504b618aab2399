"""Runs cases and prints their verdicts: `python -m tests.hostile [--full] [--only TEXT]`."""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.hostile import pool
from tests.hostile.case import VERDICTS, Verdict
from tests.hostile.table import CASES, short


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--full", action="store_true", help="run all cases instead of a sample")
    parser.add_argument("--only", default="", help="run only cases whose id contains this text")
    parser.add_argument("--json", type=Path, help="file to write the verdicts to")
    parser.add_argument("--world", type=Path, help="folder in which to keep the valid artifacts")
    parser.add_argument("--workers", type=int, default=pool.WORKERS)
    parser.add_argument(
        "--list", action="store_true", help="print the ids of the cases without running them"
    )
    options = parser.parse_args()
    chosen = [
        c for c in (CASES if options.full or options.only else short()) if options.only in c.id
    ]
    if options.list:
        print("\n".join(case.id for case in chosen))
        return
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        place = options.world or Path(folder)
        with pool.workers(place, options.workers) as started:
            began = time.monotonic()
            verdicts = pool.run(chosen, started)
            seconds = time.monotonic() - began
    if options.json:
        options.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    print(table(verdicts))
    print(f"\n{len(verdicts)} cases in {seconds:.0f} s\n")
    for verdict in verdicts:
        if verdict.verdict != "right":
            print(describe(verdict))


def table(verdicts: Sequence[Verdict]) -> str:
    """Table of verdict counts, one row per verb."""
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.case.split(" / ")[0], Counter())[verdict.verdict] += 1
    rows = [["", "cases", *VERDICTS]]
    rows += [_row(verb, of_verb) for verb, of_verb in sorted(counts.items())]
    rows += [_row("all", sum(counts.values(), Counter()))]
    return "\n".join(f"{row[0]:22}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


def describe(verdict: Verdict) -> str:
    return f"{verdict.verdict:10} {verdict.case}: {verdict.why}\n           {verdict.command}"


def _row(name: str, counts: Counter[str]) -> list[str]:
    return [name, str(counts.total()), *(str(counts[v] or "") for v in VERDICTS)]


if __name__ == "__main__":
    main()
