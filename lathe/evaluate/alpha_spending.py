"""Alpha spending for repeated gating: the confidence required at each look.

Every run of a schedule compares another candidate with the same live model. A single comparison
passes a model that is worse than the margin with a probability of at most alpha = (1 - confidence)
/ 2; over many comparisons such a pass becomes likely. Look k therefore has the level alpha / (k (k
+ 1)). These levels sum to alpha, so that by the union bound the probability that any model that is
worse than the margin ever passes against this live model is at most alpha: over any number of
looks, with any stopping rule, and for any dependence between candidates and examples. This is alpha
spending (Foster and Stine, Alpha-investing, Journal of the Royal Statistical Society B 70, 2008;
Tian and Ramdas, Online control of the familywise error rate, Statistical Methods in Medical
Research 30, 2021). An e-process would have more power for one candidate on a growing sample, but
here every look tests another hypothesis.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lathe_base import storage
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake, read_text
from lathe_base.storage import atomic_file, locked

HINT = "move the file away to start over; this discards the count of looks"


class Look(BaseModel):
    """One comparison: digest of the candidate and its data, and the time."""

    model_config = ConfigDict(extra="forbid")

    candidate: str
    at: datetime


class Looks(BaseModel):
    """The history file: the looks against each live model, by its digest."""

    model_config = ConfigDict(extra="forbid")

    looks: dict[str, tuple[Look, ...]] = {}


def confidence_at(look: int, confidence: float) -> float:
    """The confidence of the two-sided interval at the `look`-th comparison, from 1."""
    return 1 - (1 - confidence) / (look * (look + 1))


def spend(history: str | Path, baseline: str, candidate: str) -> int:
    """Record a look at `candidate` against `baseline`, and return its number, from 1.

    It is recorded before the result is known. The same candidate on the same data keeps the number
    of its first look, so that repeating a step spends nothing.

    Args:
        history: file, or address in an object store; created if it does not exist.

    Raises:
        UserError: the file is broken, or another process is writing to it.
    """
    if storage.is_store(str(history)):
        return _spend(history, baseline, candidate)
    with locked(Path(history).parent):
        return _spend(history, baseline, candidate)


def _spend(history: str | Path, baseline: str, candidate: str) -> int:
    path, is_stored = Path(history), storage.is_store(str(history))
    text: str | None = None
    if is_stored and storage.exists(str(history)):
        text = storage.read_text(str(history))
    elif not is_stored and path.exists():
        text = read_text(path)
    try:
        recorded = Looks.model_validate_json(text) if text is not None else Looks()
    except ValidationError as error:
        raise UserError(
            f"{history}: broken: {first_mistake(error)}", HINT, Code.MALFORMED
        ) from None
    looks = recorded.looks.get(baseline, ())
    for number, look in enumerate(looks, start=1):
        if look.candidate == candidate:
            return number
    added = (*looks, Look(candidate=candidate, at=datetime.now(UTC)))
    values = Looks(looks=recorded.looks | {baseline: added}).model_dump(mode="json")
    changed = json.dumps(values, indent=1) + "\n"
    if is_stored:
        storage.replace_text(str(history), changed, text)  # unless another process has changed it
        return len(added)
    with atomic_file(path) as work:
        work.write_text(changed, encoding="utf-8")
    return len(added)
