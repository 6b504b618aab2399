"""Write every pipeline's IR YAML: `python -m pipelines.compile [FOLDER]`."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from kfp import compiler, dsl
from kfp.dsl.graph_component import GraphComponent

from pipelines.compress import compress
from pipelines.full import full
from pipelines.pretrain import pretrain
from pipelines.prune import prune
from pipelines.qat import qat
from pipelines.resources import Pool, in_pool

FUNCTIONS: dict[str, Callable[..., None]] = {
    "pretrain": pretrain,
    "prune": prune,
    "qat": qat,
    "compress": compress,
    "full": full,
}


def build(name: str, pool: Pool = Pool(), fresh: bool = False) -> GraphComponent:  # noqa: B008
    """The pipeline `name` for the machines of `pool`.

    Its default `overrides` name these machines too, so that a run which somebody starts from the
    UI trains on what its tasks ask for.

    Args:
        fresh: `prepare` reads the corpus again in every run, though its address is the same, and
            so every stage works again when the text has changed.
    """
    function = FUNCTIONS[name]
    with in_pool(pool):
        pipeline = dsl.pipeline(name=name)(_with_default(function, overrides=pool.overrides))
    if fresh:
        tasks = pipeline.component_spec.implementation.graph.root.dag.tasks
        tasks["prepare"].caching_options.enable_cache = False
    return pipeline


def _with_default(function: Callable[..., None], **defaults: object) -> Callable[..., None]:
    @functools.wraps(function)
    def clone(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs)

    signature = inspect.signature(function)
    parameters = [
        p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()
    ]
    clone.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return clone


PIPELINES = {name: build(name) for name in FUNCTIONS}


def write(folder: Path, pool: Pool = Pool()) -> list[Path]:  # noqa: B008
    """Compile each pipeline to `<folder>/<name>.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.yaml" for name in FUNCTIONS]
    for path in paths:
        compiler.Compiler().compile(build(path.stem, pool), str(path))
    return paths


if __name__ == "__main__":
    for written in write(Path(*sys.argv[1:] or ["build"])):
        print(written)
