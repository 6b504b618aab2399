"""Combine several token data sets into one folder, to train on a weighted blend of them."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lathe.data.tokenizer import load_tokenizer, save_tokenizer
from lathe.data.tokens import TokenBlend, TokenDataset, TokenSequences
from lathe_base.artifacts.kinds import DATA
from lathe_base.errors import Code, UserError
from lathe_base.provenance.step import attested
from lathe_base.storage import atomic_folder, claim_output_folder

HELD_OUT = ("heldout.txt", "cloze.jsonl")
MAX_BLEND_PARTS = 255  # a part's number is one byte


def parse_part(text: str) -> tuple[Path, float]:
    """Parse `FOLDER=WEIGHT`; raises UserError if it is malformed."""
    folder, equals, weight = text.rpartition("=")
    if not folder or not equals:
        raise UserError(
            f"{text}: not of the form FOLDER=WEIGHT", "write run/novels=0.7", Code.INVALID_VALUE
        )
    try:
        return Path(folder), float(weight)
    except ValueError:
        raise _bad_weight(Path(folder), weight) from None


@attested("blend", "parts")
def blend(parts: Sequence[tuple[Path, float]], output: Path) -> TokenBlend:
    """Write `output`, a data set whose parts every stage samples by these weights.

    Each part becomes a folder inside, of hard links where the file system supports them and of
    copies elsewhere, so `output` does not depend on the originals. The held-out sets are the first
    part's.

    Raises:
        UserError: fewer than two parts, or one that is given twice, missing, broken, itself a blend
            or of another tokenizer, or a weight that is not a positive number.
    """
    folders = [folder for folder, _ in parts]
    claim_output_folder(output, DATA, *folders)
    opened, tokenizer = _open_parts(parts)
    # Links to all parts, or copies, then what a plain data set has too: tokenizer, held-out sets,
    # metadata.
    with atomic_folder(output, DATA) as work:
        entries: list[dict[str, Any]] = []
        for i, (part, (_, weight)) in enumerate(zip(opened, parts, strict=True), 1):
            name = f"{i}-{part.folder.resolve().name}"
            (work / name).mkdir()
            for path in filter(Path.is_file, part.folder.iterdir()):
                _link(path, work / name / path.name)
            # The digest by which `TokenDataset.open` notices a part that was changed.
            metadata = json.dumps(part.metadata, sort_keys=True).encode()
            entries.append(
                {
                    "folder": name,
                    "weight": weight,
                    "documents": part.metadata["documents"],
                    "tokens": part.metadata["tokens"],
                    "metadata_sha256": hashlib.sha256(metadata).hexdigest(),
                }
            )
        save_tokenizer(tokenizer, work / "tokenizer.json")
        for held_out in (opened[0].folder / name for name in HELD_OUT):
            if held_out.is_file():
                _link(held_out, work / held_out.name)
        summary = {
            "documents": sum(entry["documents"] for entry in entries),
            "tokens": sum(entry["tokens"] for entry in entries),
            "vocab_size": max(part.vocab_size for part in opened),
            "eos_id": opened[0].eos_id,
            "blend": entries,
        }
        (work / DATA.metadata_file).write_text(
            json.dumps(summary, indent=2) + "\n", encoding="utf-8"
        )
    blended = TokenDataset.open(output)
    assert isinstance(blended, TokenBlend)
    return blended


def _open_parts(
    parts: Sequence[tuple[Path, float]],
) -> tuple[list[TokenSequences], Tokenizer]:
    """Open the parts, which have one tokenizer; raises as `blend` does."""
    if not 2 <= len(parts) <= MAX_BLEND_PARTS:
        raise UserError(
            f"{len(parts)} data sets to blend",
            f"give two or more, at most {MAX_BLEND_PARTS}",
            Code.INVALID_VALUE,
        )
    opened = []
    for folder, weight in parts:
        if not 0 < weight < math.inf:
            raise _bad_weight(folder, weight)
        part = TokenDataset.open(folder)
        if not isinstance(part, TokenSequences):
            raise UserError(
                f"{folder}: is itself a blend", "give its parts instead", Code.WRONG_KIND
            )
        opened.append(part)
    seen: set[Path] = set()
    for folder, _ in parts:
        if folder.resolve() in seen:
            raise UserError(
                f"{folder}: given twice",
                "give it once, with the sum of the weights",
                Code.DUPLICATE,
            )
        seen.add(folder.resolve())
    tokenizer = load_tokenizer(opened[0].folder)
    for part in opened[1:]:
        theirs = load_tokenizer(part.folder)
        if theirs.to_str() != tokenizer.to_str():
            raise UserError(
                f"{part.folder}: another tokenizer ({theirs.get_vocab_size():,} ids) than "
                f"{opened[0].folder}'s ({tokenizer.get_vocab_size():,} ids)",
                f"prepare it with --tokenizer {opened[0].folder}",
                Code.WRONG_TOKENIZER,
            )
    return opened, tokenizer


def _bad_weight(folder: Path, weight: float | str) -> UserError:
    return UserError(
        f"{folder}: weight {weight} is not a positive number",
        "write run/novels=0.7 run/code=0.3",
        Code.INVALID_VALUE,
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
