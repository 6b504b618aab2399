"""The report stage: latency side by side, the gate's verdict, the page."""

from collections.abc import Sequence
from pathlib import Path

from lathe.evaluate.gate import gate
from lathe.evaluate.latency import measure
from lathe.model.folder import read_marker, resolve
from lathe.report.page import report
from lathe.report.summary import Candidate, Row
from lathe_base.artifacts.kinds import PAGE, open_export
from lathe_base.config.settings import Recipe
from lathe_base.storage import claim_output_file


def report_run(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    output: Path,
    sensitivity: Path | None = None,
    deployed: Path | None = None,
    certificate: Path | None = None,
) -> list[Row]:
    """Write the page of a run to the file `output` and return the rows of its table.

    The gate compares the last candidate with the first by `recipe.Gate` if both are evaluated. The
    latency of exported candidates is measured in turn, so that noise affects all of them equally.

    Raises:
        UserError: a folder that lacks the files of its stage.
    """
    folders = [f for c in candidates for f in (c.model, c.evaluation, c.exported)]
    claim_output_file(output, PAGE, *folders, sensitivity, deployed, certificate)
    for candidate in candidates:
        read_marker(resolve(candidate.model))
        if candidate.exported:
            open_export(candidate.exported)
    exported = {c.name: c.exported for c in candidates if c.exported}
    latency = measure(exported) if exported else None
    first, last = candidates[0].evaluation, candidates[-1].evaluation
    verdict = gate(recipe, first, last) if first and last and len(candidates) > 1 else None
    return report(output, candidates, sensitivity, deployed, latency, verdict, certificate)
