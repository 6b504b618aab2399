"""The evaluation tasks, one file each; `lathe.evaluate.tasks.task` says what one is."""

from typing import Any

from lathe.errors import UserError
from lathe.evaluate.tasks.cloze import Cloze
from lathe.evaluate.tasks.multiple_choice import MultipleChoice
from lathe.evaluate.tasks.task import Task
from lathe.evaluate.tasks.text import TextPerplexity

TEXT, CLOZE = TextPerplexity(), Cloze()
TASKS: dict[str, Task[Any, Any]] = {task.name: task for task in (TEXT, CLOZE, MultipleChoice())}
"""In the order of tables."""

SLOTS = (TEXT, CLOZE)
"""Tasks that `metrics.json` has under their own names, each measured on one file at most."""


def task_named(name: str, hint: str) -> Task[Any, Any]:
    """The task of a name.

    Raises:
        UserError: there is none; `hint` is what to do.
    """
    if name not in TASKS:
        raise UserError(f"no task {name!r}, but {', '.join(TASKS)}", hint)
    return TASKS[name]
