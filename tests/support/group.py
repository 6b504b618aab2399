"""Runs stages in a group of processes: `python -m tests.support.group WORKERS WORK` (JSON).

The workers are forked after torch is imported; torchrun would import it in every worker and in
itself.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

from lathe_base.config.recipe import load_recipe
from lathe_base.console import log_to_stderr
from lathe_base.ports import free_port
from tests.support.small_run import STAGES


def work(
    rank: int, workers: int, port: int, pieces: list[tuple[str, str, list[str], list[str]]]
) -> None:
    place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    log_to_stderr()
    for stage, recipe, overrides, paths in pieces:
        STAGES[stage](load_recipe(recipe, overrides), *map(Path, paths))


def main(workers: int, pieces: list[tuple[str, str, list[str], list[str]]]) -> int:
    """Run the workers; returns 1, after killing the others, as soon as one of them fails."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    group = [fork.Process(target=work, args=(r, workers, port, pieces)) for r in range(workers)]
    for process in group:
        process.start()
    while None in (codes := [process.exitcode for process in group]) and not any(codes):
        time.sleep(0.01)
    for process in group:
        process.kill()
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
