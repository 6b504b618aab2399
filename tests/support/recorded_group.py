"""Records the collectives of a real training run: `python -m tests.support.recorded_group JSON`.

JSON contains the number of processes and the pieces of work: stage, recipe, overrides and paths, of
which the last is the output. Every process writes the collectives of its trainer to
`OUTPUT.RANK.json`. All of them read a trial's blank tokens, so that validation takes as many passes
as in a trial.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from lathe.plan.rank import blank_tokens
from lathe.plan.record import Collective, Recorder
from lathe.train import run
from lathe.train.trainer import Trainer
from lathe.train.workers import Workers
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.ports import free_port
from tests.support.small_run import STAGES

Piece = tuple[str, str, list[str], list[str]]


def to_json(call: Collective) -> list[Any]:
    """Return a call as JSON, without its call site."""
    tensors = [[list(shape), str(dtype)] for shape, dtype in call.tensors]
    return [call.kind, list(call.ranks), tensors, call.peer]


def work(rank: int, size: int, port: int, pieces: list[Piece]) -> None:
    place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    original, calls = Trainer.run, list[Collective]()

    def recorded(trainer: Trainer) -> Any:
        trainer.at.step = 1  # as in a trial, which looks for no saved state
        trainer.states.newest = lambda: None  # type: ignore[method-assign]
        with Recorder() as recorder:
            at = original(trainer)
        calls[:] = recorder.collectives
        return at

    def made(
        recipe: Recipe, stages: Any, _: object, output: Path, workers: Workers, *rest: Any
    ) -> Trainer:
        blank = blank_tokens(recipe, workers.data_size)
        return Trainer(recipe, stages, blank, output, workers, *rest)

    Trainer.run, run.Trainer = recorded, made  # type: ignore
    for stage, name, overrides, paths in pieces:
        recipe = load_recipe(name, overrides)
        STAGES[stage](recipe, *map(Path, paths))
        Path(f"{paths[-1]}.{rank}.json").write_text(json.dumps([to_json(call) for call in calls]))


def main(size: int, pieces: list[Piece]) -> int:
    fork, port = multiprocessing.get_context("fork"), free_port()
    group = [fork.Process(target=work, args=(r, size, port, pieces)) for r in range(size)]
    for process in group:
        process.start()
    for process in group:
        process.join()
    return max(abs(process.exitcode or 0) for process in group)


if __name__ == "__main__":
    sys.exit(main(*json.loads(sys.argv[1])))
