"""The digest of the code in the images, for cache keys where it is not known by the image: of local
runs, and of images referenced by a tag, which may stay the same when the image changes."""

import json
from functools import cache
from pathlib import Path

from lathe_base import PACKAGES
from lathe_base.storage import digest, sha256

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = (*PACKAGES, "components")
"""The packages that a step's image contains and its process may import."""


@cache
def code_digest(root: Path = REPOSITORY) -> str:
    """Digest of the packages' files and the images' lock files, the same for all components."""
    found = [path for package in SOURCES for path in (root / package).rglob("*")]
    files = sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)
    files += sorted(root.glob("images/*/*.lock"))
    return digest(json.dumps([[path.relative_to(root).as_posix(), sha256(path)] for path in files]))
