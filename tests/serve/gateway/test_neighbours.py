"""The matrix of `benchmarks/neighbours.py` on a small model: nobody's requests hold others up."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TRIES = 4  # other processes may have the processor during one of them


@pytest.fixture(scope="module")
def neighbours() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import neighbours

        yield neighbours


@pytest.fixture(scope="module")
def address(
    neighbours: ModuleType, exported: Path, triton: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("neighbours")
    with neighbours.served(exported, folder, threads=1) as server:
        yield urlsplit(server.state.openai).netloc


@pytest.mark.slow
def test_a_neighbours_first_token_waits_for_one_step(
    neighbours: ModuleType, address: str, exported: Path
) -> None:
    n_positions = json.loads((exported / "export.json").read_text())["n_positions"]
    left = neighbours.CELLS
    for _ in range(TRIES):
        cells = [neighbours.measure(address, *cell, n_positions, 4, 2) for cell in left]
        for cell in cells:
            print(cell, f"{cell.share:.2f}")
        left = [(cell.path, cell.kind) for cell in cells if cell.share > 1]
        if not left:
            return
    raise AssertionError(left)
