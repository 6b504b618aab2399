"""The summary of a run: the table, the paths of its outputs, and next steps."""

import json
import shutil
from pathlib import Path

from rich.console import Console

from lathe.evaluate.wording import outcome
from lathe.report.results import read_results, rows
from lathe.report.summary import summary_table
from lathe.report.usage import total

CHECKPOINTS = {
    "model": "pretrain/model",
    "pruned": "prune/pruned",
    "quantized": "quantize/quantized",
}


def show(folder: Path, pipeline: str, deployed: Path) -> None:
    """Print the summary of a run folder; copies its reports to the top of the folder and links its
    deployment.

    Args:
        folder: the run folder; several runs may have used it.
        deployed: link that `make serve` follows, set to this run's deployment if there is one.
    """
    if metrics := newest(folder, "report*/metrics"):
        wide_console().print(summary_table(rows(json.loads(metrics.read_text(encoding="utf-8")))))
    if usage := read_results(str(folder)).usage:
        print(f"used       {total(usage)}")
    checkpoints = CHECKPOINTS if pipeline != "compress" else {"quantized": "choose/chosen"}
    for name, output in checkpoints.items():
        if path := newest(folder, output):
            print(f"{name:11}{path}")
    if page := newest(folder, "choose/page"):
        shutil.copyfile(page, folder / "compress.html")
        print(f"trials     {folder / 'compress.html'}")
    if page := newest(folder, "report*/page"):
        shutil.copyfile(page, folder / "report.html")
        print(f"report     {folder / 'report.html'}")
    if pipeline not in ("qat", "compress", "full"):
        return
    repository, passed = newest(folder, "rehearse/deployed"), True
    if verdict := newest(folder, "gate/verdict"):
        result = json.loads(verdict.read_text(encoding="utf-8"))
        passed = result["passed"]
        print(
            "\n    ".join([f"gate       {outcome(result['verdict'], passed)}", *result["reasons"]])
        )
    if repository is None or not passed:
        print("not deployed: the quantized model did not pass the gate")
        return
    if deployed.is_symlink():
        deployed.unlink()
    deployed.symlink_to(repository, target_is_directory=True)
    print(f"server     {repository}")
    print('\ntry it: make serve && make client PROMPT="In the beginning"')


def wide_console(columns: int = 100) -> Console:
    """Standard output with at least `columns` columns, for tables wider than the terminal."""
    return Console(width=max(columns, shutil.get_terminal_size().columns), highlight=False)


def newest(folder: Path, output: str) -> Path | None:
    """The latest `<stage>/<output>` under a run folder."""
    paths = sorted(folder.glob(f"**/{output}"), key=lambda path: path.stat().st_mtime)
    return paths[-1].absolute() if paths else None
