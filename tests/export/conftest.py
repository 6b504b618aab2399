"""Fixtures of the export tests."""

import multiprocessing

import pytest


@pytest.fixture
def quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of engines from one that has imported them, in place of starting each."""
    multiprocessing.set_forkserver_preload(["lathe.export.engines"])
    monkeypatch.setattr(
        "lathe.export.engines.get_context", lambda _: multiprocessing.get_context("forkserver")
    )
