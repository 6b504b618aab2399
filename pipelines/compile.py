"""Write every pipeline's IR YAML: `python -m pipelines.compile [FOLDER]`."""

import sys
from pathlib import Path

from kfp import compiler

from pipelines.compress import compress
from pipelines.full import full
from pipelines.pretrain import pretrain
from pipelines.prune import prune
from pipelines.qat import qat

PIPELINES = {
    "pretrain": pretrain,
    "prune": prune,
    "qat": qat,
    "compress": compress,
    "full": full,
}


def write(folder: Path) -> list[Path]:
    """Compile each pipeline to `<folder>/<name>.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.yaml" for name in PIPELINES]
    for path in paths:
        compiler.Compiler().compile(PIPELINES[path.stem], str(path))
    return paths


if __name__ == "__main__":
    for written in write(Path(*sys.argv[1:] or ["build"])):
        print(written)
