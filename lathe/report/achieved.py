"""The measured cost of INT8 for the model that was quantized by a sensitivity analysis."""

from collections.abc import Sequence
from pathlib import Path

from lathe.artifacts.kinds import read_json
from lathe.compress.sensitivity.page import Achieved
from lathe.compress.sensitivity.result import analysis_digest
from lathe.model.folder import checkpoint_digest
from lathe.report.summary import Candidate, Row


def find_achieved(
    sensitivity: Path, candidates: Sequence[Candidate], rows: Sequence[Row]
) -> Achieved | None:
    """The measured cost for the analysis in the folder `sensitivity`; None if the model that was
    quantized by it, or its parent, is not among the candidates or was not evaluated on a text."""
    digest = analysis_digest(sensitivity)
    by_digest = {checkpoint_digest(c.model): row for c, row in zip(candidates, rows, strict=True)}
    for candidate, row in zip(candidates, rows, strict=True):
        run = candidate.model / "run.json"
        inputs = read_json(run, "train the model again") if run.is_file() else {}
        parent = by_digest.get(inputs.get("model", ""))
        if inputs.get("sensitivity") == digest and parent and parent.perplexity and row.perplexity:
            return Achieved(row.name, parent.name, parent.perplexity, row.perplexity)
    return None
