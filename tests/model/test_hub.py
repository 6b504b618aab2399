"""Models of the Hugging Face Hub without access to the Hub."""

from pathlib import Path

import pytest

from tests.support.command_line import lathe


@pytest.mark.parametrize("command", [("evaluate",), ("export",), ("prune",), ("generate", "Hello")])
def test_a_failed_download_is_one_message(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    verb, *rest = command
    done = lathe(verb, "hf://openai-community/no-such-model", *rest, cwd=tmp_path)
    assert done.returncode == 2
    told = "error[not-found]: hf://openai-community/no-such-model: "
    assert done.stderr.startswith(told) and "  hint: " in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_name_that_cannot_be_one(tmp_path: Path) -> None:
    done = lathe("export", "hf://a b//c", cwd=tmp_path)
    assert done.returncode == 2 and "error[not-found]: hf://a b//c: " in done.stderr
