"""Peak memory of a conversion, in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.model.config import GPTConfig
from tests.support.small_export import make_model, save

CONVERT = """
import re, sys
from pathlib import Path
from lathe.export.export import write
from lathe.model.checkpoint import load_checkpoint
from lathe_base.config.settings import ExportSettings

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak()
write(load_checkpoint(sys.argv[1]), Path(sys.argv[2]), ExportSettings())
print(peak() - before)
"""
SHAPE = GPTConfig(8192, 64, 768, 64, (12,) * 8, (3072,) * 8)


@pytest.mark.parametrize("flavour", ["float32", "int8"])
@pytest.mark.slow
def test_less_than_twice_the_model(tmp_path: Path, byte_tokenizer: Tokenizer, flavour: str) -> None:
    folder = save(make_model(SHAPE, int8=flavour == "int8"), byte_tokenizer, tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", CONVERT, str(folder), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert size > 100e6
    assert size < int(run.stdout.splitlines()[-1]) < 2 * size, size
