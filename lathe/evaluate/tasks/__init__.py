"""The evaluation tasks, one file each; `lathe.evaluate.tasks.task` has their interface."""

from typing import Any

from lathe.evaluate.tasks.cloze import Cloze
from lathe.evaluate.tasks.exact_match import ExactMatch
from lathe.evaluate.tasks.instructions import Instructions
from lathe.evaluate.tasks.json_schema import JsonSchema
from lathe.evaluate.tasks.multiple_choice import MultipleChoice
from lathe.evaluate.tasks.task import Task
from lathe.evaluate.tasks.text import TextPerplexity
from lathe_base.errors import Code, UserError

TEXT, CLOZE = TextPerplexity(), Cloze()
TASKS: dict[str, Task[Any, Any]] = {
    task.name: task
    for task in (TEXT, CLOZE, MultipleChoice(), ExactMatch(), JsonSchema(), Instructions())
}
"""All tasks, in the order of tables."""

SLOTS = (TEXT, CLOZE)
"""Tasks with a key of their own in `metrics.json`, each measured on one file at most."""


def task_named(name: str, hint: str) -> Task[Any, Any]:
    """The task with this name.

    Raises:
        UserError: no such task, with this `hint`.
    """
    if name not in TASKS:
        raise UserError(
            f"unknown task {name!r}: Lathe supports {', '.join(TASKS)}", hint, Code.UNKNOWN_NAME
        )
    return TASKS[name]
