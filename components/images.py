"""The container images of the components."""

import json
import os
from pathlib import Path

from lathe_base import __version__

PUSHED = Path(__file__).resolve().parents[1] / "images" / "refs.json"
"""Image references by digest, as last written by `make push`."""


def reference(name: str) -> str:
    """The image in LATHE_<NAME>_IMAGE, else the one pushed last.

    If nothing was pushed, or the variable is empty, it is the one that `make images` built last on
    this machine.
    """
    built = f"localhost/lathe-{name}:{__version__}"
    if (image := os.environ.get(f"LATHE_{name.upper()}_IMAGE")) is not None:
        return image or built
    pushed: dict[str, str] = (
        json.loads(PUSHED.read_text(encoding="utf-8")) if PUSHED.exists() else {}
    )
    return pushed.get(name, built)


TRAIN = reference("train")
"""Everything except Paddle: images/train."""

PADDLE = reference("paddle")
"""The same, plus PaddlePaddle and PaddleSlim: images/paddle."""

SERVE = reference("serve")
"""Triton, and the environment of its Python backend: images/serve."""
