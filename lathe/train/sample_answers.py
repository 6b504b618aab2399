"""Answers of a model before and after finetuning, a file of its checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lathe_base.artifacts.kinds import checked, read_json

SAMPLES = "samples.json"


@dataclass(frozen=True)
class SampleAnswer:
    """The last answer of a validation conversation: `expected` is the data's."""

    prompt: str
    expected: str
    before: str
    after: str


def write_answers(folder: Path, answers: Sequence[SampleAnswer]) -> None:
    """Write the answers into a checkpoint's folder."""
    text = json.dumps([asdict(answer) for answer in answers], ensure_ascii=False, indent=2)
    (folder / SAMPLES).write_text(text + "\n", encoding="utf-8")


def read_answers(folder: Path) -> list[SampleAnswer]:
    """The answers in a checkpoint's folder; empty for one that was not finetuned on conversations.

    Raises:
        UserError: the file is broken.
    """
    path, hint = folder / SAMPLES, "finetune the model again"
    if not path.is_file():
        return []
    return checked(read_json(path, hint, list), list[SampleAnswer], str(path), hint)
