"""Instruction following: whether the answer follows instructions that a program can check.

The files are JSONL in IFEval's form, and the accuracies its four (Zhou et al.,
Instruction-following evaluation for large language models, 2023): of prompts, all of whose
instructions are followed, and of instructions, each by the strict and by the loose criterion of
`lathe.evaluate.instructions`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lathe.evaluate.comparison import Accuracy
from lathe.evaluate.instructions import (
    Instruction,
    is_followed,
    is_followed_loosely,
    parse_instruction,
)
from lathe.evaluate.intervals import ratio_stderr
from lathe.evaluate.tasks.generative import Generative, Prompt, Row
from lathe_base.errors import Code, UserError


class Instructions(Generative[list[Instruction]]):
    """A JSONL file with the ids and arguments of every prompt's instructions."""

    name = "instructions"
    example = (
        '{"prompt": "...", "instruction_id_list": ["length_constraints:number_words"], '
        '"kwargs": [{"relation": "less than", "num_words": 50}]}'
    )
    measures = (
        Accuracy(
            key="strict",
            title="prompts followed",
            axis="% of prompts followed",
            column="strict",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
        Accuracy(
            key="loose",
            title="prompts followed, loosely",
            axis="% of prompts followed",
            column="loose",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
    )
    extra = ("instructions_strict", "instructions_loose")

    def parse(self, row: Mapping[str, Any], where: str) -> list[Instruction]:
        names, arguments = row.get("instruction_id_list"), row.get("kwargs")
        if not isinstance(names, list) or not names:
            raise UserError(
                f"{where}: no instruction_id_list", f"a line is {self.example}", Code.MALFORMED
            )
        if not isinstance(arguments, list) or len(arguments) != len(names):
            raise UserError(
                f"{where}: kwargs is not a list of {len(names)}, as instruction_id_list",
                f"a line is {self.example}",
                Code.MALFORMED,
            )
        return [
            parse_instruction(name, given, where)
            for name, given in zip(names, arguments, strict=True)
        ]

    def judge(self, answer: str, expected: list[Instruction]) -> Row:
        strict = [is_followed(one, answer) for one in expected]
        loose = [is_followed_loosely(one, answer) for one in expected]
        return {
            "strict": all(strict),
            "loose": all(loose),
            "followed": strict,
            "followed_loosely": loose,
        }

    def show(self, expected: list[Instruction]) -> str:
        return "; ".join(
            ", ".join([one.id, *(f"{key} {value}" for key, value in one.model_dump().items())])
            for one in expected
        )

    def summarize(self, units: Sequence[Row], examples: list[Prompt[list[Instruction]]]) -> Row:
        figures = super().summarize(units, examples)
        for key, column in (
            ("instructions_strict", "followed"),
            ("instructions_loose", "followed_loosely"),
        ):
            followed = np.array([float(sum(unit[column])) for unit in units])
            counts = np.array([float(len(unit[column])) for unit in units])
            figures[key] = float(followed.sum() / counts.sum())
            figures[f"{key}_stderr"] = ratio_stderr(followed, counts)
        return figures
