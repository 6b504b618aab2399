"""Compares the outputs of a rebuilt step with the original's attestation."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lathe.model.folder import WEIGHTS
from lathe.release.certify.tensors import first_difference
from lathe_base.provenance.chain import Step
from lathe_base.provenance.policy import GRAPH
from lathe_base.storage import sha256

NOT_COMPARED = {".json": ("config.json", "tokenizer.json"), ".html": (), ".md": ()}
"""Suffixes of files that contain times or paths, and exceptions without any."""

CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Rebuilt:
    """A step that was repeated.

    Attributes:
        same: names of the files that are identical.
        different: names of those that are not.
        detail: the first tensor that differs, and by how much, if the original is available; for
            other files, the first byte.
    """

    step: str
    folder: Path
    same: tuple[str, ...]
    different: tuple[str, ...]
    detail: str = ""


def compare(step: Step, made: Path, original: Path | None) -> Rebuilt:
    """Compare the files of a step.

    Args:
        made: output of the repeated step.
        original: output of the attested step, if it still exists.
    """
    name, products = step.statement.step, step.statement.products
    found = {
        file: (made / file).is_file() and sha256(made / file) == products[file]
        for file in _compared(name, products)
    }
    different = tuple(file for file, is_same in found.items() if not is_same)
    return Rebuilt(
        step=name,
        folder=made,
        same=tuple(file for file, is_same in found.items() if is_same),
        different=different,
        detail=_detail(different, made, original) if different else "",
    )


def _compared(step: str, names: Iterable[str]) -> list[str]:
    """The files that have to be identical."""
    if step == "blend":  # what is in a folder is of a part, and is compared where that is made
        names = (name for name in names if "/" not in name)
    paths = map(Path, names)
    return [str(p) for p in paths if p.name in NOT_COMPARED.get(p.suffix, (p.name,))]


def _detail(different: tuple[str, ...], made: Path, original: Path | None) -> str:
    name = next((n for n in (WEIGHTS, GRAPH) if n in different), different[0])
    if original is None or not (original / name).is_file():
        return f"the original {name} is not available for comparison"
    if not (made / name).is_file():
        return f"{name} was not rebuilt"
    if name not in (WEIGHTS, GRAPH):
        return _first_byte(name, made, original)
    difference = first_difference(original, made, name)
    if difference is None:
        is_original = sha256(original / name) == sha256(made / name)
        return (
            f"{original / name} itself differs from what was attested"
            if is_original
            else f"all tensors of {name} are the same, but the rest of the file differs"
        )
    if difference.largest is None:
        return f"{difference.tensor} has a different shape or type"
    return (
        f"{difference.tensor}: {difference.elements} elements differ, by {difference.largest:.3g} "
        "at most"
    )


def _first_byte(name: str, made: Path, original: Path) -> str:
    at = 0
    with (original / name).open("rb") as one, (made / name).open("rb") as other:
        while (a := one.read(CHUNK)) and a == (b := other.read(CHUNK)):
            at += len(b)
        b = other.read(CHUNK) if not a else b
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if first is None and len(a) == len(b):
        return f"{original / name} itself differs from what was attested"
    return f"{name} differs from byte {at + (min(len(a), len(b)) if first is None else first)}"
