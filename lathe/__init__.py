"""Lathe: train, prune, quantize, prove and serve GPT-2/3-family language models."""

import os

from lathe.former_names import install
from lathe_base import __version__

__all__ = ["__version__"]

install()

# Threads of OpenMP wait for each other in a loop, for milliseconds by default. Where other work
# makes two of them share a core, that loop is what the core does, and training takes ten times as
# long. A loop this short costs nothing where they have cores of their own. It has to be set before
# torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
