"""The certificate of killed and resumed training, as a section of a report or a separate page."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from pydantic import BaseModel

from lathe_base.artifacts.kinds import PAGE, checked, read_json
from lathe_base.errors import Code, UserError
from lathe_base.pages.html import Picture, picture, render
from lathe_base.pages.style import Theme, draw
from lathe_base.storage import atomic_file, claim_output_file

HINT = "give the JSON file written by `lathe certify-resume`"
ROW_INCHES, FRAME_INCHES = 0.13, 1.0


class Planned(BaseModel):
    """A planned kill."""

    kind: str


class RecordedKill(BaseModel):
    """A kill in a certificate; see `lathe.release.certify.resume`."""

    planned: Planned
    step: int
    saved_step: int
    unfinished: list[str]


class End(BaseModel):
    """Digests of the final weights of one of the two trainings."""

    file: str


class RecordedDifference(BaseModel):
    """The first tensor that differs."""

    tensor: str
    largest: float | None = None


class Certificate(BaseModel):
    """The parts of a certificate that the page shows."""

    passed: bool
    steps: int
    processes: int
    seed: int
    kills: list[RecordedKill]
    uninterrupted: End
    resumed: End
    difference: RecordedDifference | None = None
    machine: str
    versions: Mapping[str, str]

    def picture(self) -> Picture:
        """A chart of every attempt, from the state it resumed from to its end."""
        title = "Attempts of the killed training"
        alt = f"{title}: {len(self.kills)} kills, at the steps " + ", ".join(
            str(kill.step) for kill in self.kills
        )
        return picture(title, alt, partial(attempts, self.kills, self.steps))


def read_certificate(path: Path) -> Certificate:
    """Read a certificate.

    Raises:
        UserError: it is none.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", HINT, Code.NOT_FOUND)
    return checked(read_json(path, HINT), Certificate, str(path), HINT)


def certificate_page(certificate: Path, output: Path) -> None:
    """Write the page of a certificate to the file `output`.

    Raises:
        UserError: not a certificate, or `output` is something else.
    """
    claim_output_file(output, PAGE, certificate)
    record: Any = read_certificate(certificate)
    page = render(
        "lathe/report/certificate_page.html.j2", "Lathe resume certificate", certificate=record
    )
    with atomic_file(output) as work:
        work.write_text(page, encoding="utf-8")


def attempts(kills: Sequence[RecordedKill], steps: int, theme: Theme) -> str:
    """Draw a line for each attempt, the first one at the top, with the reason for its end."""
    began = [0, *(kill.saved_step for kill in kills)]
    ended = [*(kill.step for kill in kills), steps]

    def paint(axes: Axes, theme: Theme) -> None:
        rows = range(len(began))
        axes.hlines(rows, began, ended, color=theme.muted, linewidth=1.4)
        for i, kind in enumerate(sorted({kill.planned.kind for kill in kills})):
            at = [(row, kill.step) for row, kill in enumerate(kills) if kill.planned.kind == kind]
            axes.plot(
                [step for _, step in at],
                [row for row, _ in at],
                color=theme.color(i),
                marker="x",
                linestyle="none",
                label=f"killed: {kind}",
            )
        axes.plot([steps], [len(kills)], color=theme.ink, marker="o", linestyle="none", label="end")
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("training step")
        axes.legend(loc="lower left", fontsize=8)

    return draw(FRAME_INCHES + ROW_INCHES * max(len(began), 8), theme, paint)
