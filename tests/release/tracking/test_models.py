"""Registering releases in a model registry, read back with its own client."""

import logging
from collections.abc import Iterator

import pytest

from lathe_base.tracking.models import register_release
from tests.support.fake_model_registry import ModelRegistry, serve

RELEASE = ("gpt", "sha256-0123", "s3://models/releases/gpt/sha256-0123/")
FIGURES = {"perplexity": 12.5, "parameters": 124e6}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRegistry]:
    pytest.importorskip("model_registry")
    with serve() as registry:
        monkeypatch.setenv("LATHE_MODEL_REGISTRY", registry.url)
        yield registry


def test_a_release_is_a_version_with_its_address_and_figures(registry: ModelRegistry) -> None:
    register_release(*RELEASE, FIGURES)
    register_release("gpt", "sha256-4567", "s3://models/releases/gpt/sha256-4567/", {})
    (model,) = registry.models
    assert (model["name"], model["owner"]) == ("gpt", "lathe")
    first, second = registry.versions
    assert (first["name"], second["name"]) == ("sha256-0123", "sha256-4567")
    assert first["registeredModelId"] == second["registeredModelId"] == model["id"]
    figures = {key: value["double_value"] for key, value in first["customProperties"].items()}
    assert figures == FIGURES
    (artifact,) = registry.artifacts[first["id"]]
    assert (artifact["uri"], artifact["modelFormatName"]) == (RELEASE[2], "triton")


def test_one_that_is_registered_stays_as_it_is(
    registry: ModelRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    register_release(*RELEASE, FIGURES)
    caplog.clear()
    caplog.set_level(logging.INFO, "lathe")
    register_release(*RELEASE, {"perplexity": 1.0})
    (version,) = registry.versions
    assert version["customProperties"]["perplexity"]["double_value"] == 12.5
    assert caplog.messages == []


@pytest.mark.parametrize("harm", ["broken", "away"])
def test_a_registry_that_fails_is_a_warning(
    registry: ModelRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: str,
) -> None:
    registry.broken = harm == "broken"
    if harm == "away":
        monkeypatch.setenv("LATHE_MODEL_REGISTRY", "http://127.0.0.1:9")
    caplog.set_level(logging.WARNING)
    register_release(*RELEASE, FIGURES)
    (told,) = caplog.messages
    assert told.startswith("not registered in http://127.0.0.1:") and registry.versions == []
