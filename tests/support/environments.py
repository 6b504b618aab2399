"""Lists the tests that need an environment other than `.venv`.

`python tests/support/environments.py PATH ...` prints the environments (`serve`, `paddle`) that the
tests at these paths need; without paths, those of all tests. Files that are not listed here cannot
use these environments.
"""

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED_BY = {
    "serve": (
        "documents/test_examples.py",
        "hostile",
        "test_defaults.py",
        "manifests/test_serve.py",
        "components/test_in_a_pod.py",
        "pipelines/test_chats.py",
        "pipelines/test_compress.py",
        "pipelines/test_full.py",
        "pipelines/test_production.py",
        "pipelines/test_inputs.py",
        "pipelines/test_run.py",
        "pipelines/test_smollm2.py",
        "pipelines/test_tiny.py",
        "pipelines/test_doctor.py",
        "release/test_deploy.py",
        "release/test_releases.py",
        "release/test_rollout.py",
        "provenance/test_policy.py",
        "serve/test_async_client.py",
        "serve/test_backend.py",
        "serve/test_conversation.py",
        "serve/test_echo.py",
        "serve/runtime/test_families.py",
        "serve/test_gateway_process.py",
        "serve/test_gateway_rollout.py",
        "serve/test_interfaces.py",
        "serve/test_load.py",
        "serve/test_playground.py",
        "serve/test_playground_server.py",
        "serve/test_score.py",
        "serve/test_server.py",
        "serve/test_soak.py",
        "serve/test_state.py",
        "serve/test_vllm.py",
        "serve/gateway/test_agents.py",
        "serve/gateway/test_chat.py",
        "serve/gateway/test_completions.py",
        "serve/gateway/test_connections.py",
        "serve/gateway/test_fuzz.py",
        "serve/gateway/test_hostile.py",
        "serve/gateway/test_isolation.py",
        "serve/gateway/test_keys.py",
        "serve/gateway/test_kserve.py",
        "serve/gateway/test_limits.py",
        "serve/gateway/test_neighbours.py",
        "serve/gateway/test_parity.py",
        "serve/gateway/test_responses.py",
        "serve/gateway/test_structured.py",
        "serve/gateway/test_tokens.py",
        "serve/gateway/test_tools.py",
        "serve/gateway/test_tracing.py",
        "serve/gateway/test_web.py",
        "serve/runtime/test_openvino.py",
        "serve/runtime/test_single_stream.py",
        "storage/test_command.py",
    ),
    "vllm": (
        "serve/runtime/test_contract.py",
        "serve/runtime/test_vllm.py",
        "serve/runtime/test_vllm_quantized.py",
        "serve/test_vllm.py",
    ),
    "paddle": ("launch/test_paddle.py", "paddle", "pipelines/test_run.py"),
}
OPTIONAL = {"vllm"}  # 6 GB: `make vllm-env` makes it for those who want its tests
VARIABLES = {
    "serve": "LATHE_SERVE_PYTHON",
    "vllm": "LATHE_VLLM_PYTHON",
    "paddle": "LATHE_PADDLE_PYTHON",
}
GIVEN = {name: os.environ.get(variable) for name, variable in VARIABLES.items()}
UNNAMED = "/not/named/in/tests/support/environments.py"


def needed(paths: Iterable[str]) -> list[str]:
    """Environments needed for pytest's arguments: paths or node ids."""
    tests = [Path(path.partition("::")[0]).resolve() for path in paths] or [ROOT / "tests"]
    return [
        name
        for name, files in NEEDED_BY.items()
        for here in [[ROOT / "tests" / file for file in files]]
        if any(a.is_relative_to(b) or b.is_relative_to(a) for a in tests for b in here)
    ]


@cache
def _needed_by(path: Path) -> list[str]:
    return needed([str(path)])


def expose(path: Path) -> None:
    """Make only the environments listed for a test file visible to its tests."""
    for name, variable in VARIABLES.items():
        given = GIVEN[name] if name in _needed_by(path) else UNNAMED
        if given is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = given


def require(name: str) -> Path:
    """Interpreter of an environment; skips the test if the environment does not exist."""
    import pytest  # not at the top: make runs this file before any environment exists

    given = os.environ.get(VARIABLES[name])
    if given == UNNAMED:
        pytest.fail(f"this test file needs {name}: list it in {__file__}")
    python = Path(given or ROOT / f".venv-{name}" / "bin" / "python")
    if not python.is_file():
        pytest.skip(f"no environment: {python}")
    return python


if __name__ == "__main__":
    chosen = needed(path for path in sys.argv[1:] if not path.startswith("-"))
    print(*(name for name in chosen if name not in OPTIONAL))
