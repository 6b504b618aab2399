"""The name of a release: the digest of its files."""

import re
from pathlib import Path

from lathe_base.storage import digest, sha256
from lathe_base.storage.attested import NAMES
from lathe_base.storage.files import files_below

NAME = re.compile(r"sha256-[0-9a-f]{64}")


def name_of(repository: Path) -> str:
    """`sha256-` and the digest of the files' names and contents; see `content_of`."""
    listed = sorted(content_of(repository).items())
    return "sha256-" + digest("".join(f"{found}  {name}\n" for name, found in listed))


def content_of(repository: Path) -> dict[str, str]:
    """SHA-256 of the files of a release by name. Attestations and signature are excluded, because
    they refer to these files, and so are hidden files, which belong to the store."""
    return {
        name: sha256(path)
        for name, path in files_below(repository)
        if path.is_file() and not path.name.startswith(".") and path.name not in NAMES
    }
