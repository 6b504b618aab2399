"""The README is short, and its statements about commands and folders are correct."""

import re

from lathe.evaluate.tasks import SLOTS
from lathe.report.summary import SIZES, TIMES
from tests.documents.pages import ROOT, TEXTS, blocks, lines

README = TEXTS["README.md"]


def test_it_begins_with_two_commands() -> None:
    first = [line.split("#")[0].strip() for line in lines(blocks(README, "sh")[0])]
    assert first == ["make run", "make test"]


def test_make_test_runs_in_ci_as_the_readme_says() -> None:
    assert "make test" in README and "make test" in (ROOT / ".ci/run").read_text()


def test_the_folders_are_there() -> None:
    folders = re.findall(r"^\| `([a-z/]+)/` \|", README, re.MULTILINE)
    assert len(folders) >= 7
    assert not [folder for folder in folders if not (ROOT / folder).is_dir()]


def test_the_table_of_the_first_run_has_rows_that_a_run_prints() -> None:
    table = README[README.index("| | dense | pruned | INT8 |") :].split("\n\n")[0]
    titles = re.findall(r"^\| ([A-Z][^|]+?) \|", table, re.MULTILINE)
    known = {column.title for column in (*SIZES, *TIMES)}
    known |= {measure.title for task in SLOTS for measure in task.measures}
    assert len(titles) >= 6 and set(titles) <= known


def test_nearly_every_step_is_a_command() -> None:
    verbs = set(re.findall(r"^## lathe ([a-z]+)", TEXTS["docs/reference/cli.md"], re.M))
    steps = {path.parent.name for path in (ROOT / "components").glob("*/component.py")}
    parts_of_compress = {"estimate", "price", "design", "choose"}
    assert steps - verbs == {"inputs", "notify"} | parts_of_compress
