"""Fixtures of the runtimes' tests."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.small_export import PRUNED, make_model, write_unproven


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """An export of a pruned model with random weights, which was not verified."""
    folder = tmp_path_factory.mktemp("export")
    write_unproven(make_model(PRUNED), byte_tokenizer, folder)
    return folder
