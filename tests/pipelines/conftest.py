"""Fixtures: a recipe and a corpus small enough that stages take seconds, and a fake KFP server."""

import functools
import os

import pytest

from lathe_serving import environment
from pipelines.cluster import doctor, submit
from pipelines.compiler.compile import with_own_digest
from tests.support import fake_kfp, quick_kfp  # noqa: F401
from tests.support.compiled import build_once
from tests.support.micro_run import write_corpus, write_recipe

described_once = functools.cache(environment._described)
with_own_digest_once = functools.cache(with_own_digest)  # of what was built once


@pytest.fixture(autouse=True)
def _environments_described_once(monkeypatch):
    """Every check asks the interpreter of another environment what it has."""
    monkeypatch.setattr(environment, "_described", described_once)


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


@pytest.fixture
def kfp(monkeypatch, tmp_path):
    """Run a fake Kubeflow Pipelines server and set the environment for it; fixes the commit."""
    with fake_kfp.serve() as server:
        for name in list(os.environ):
            if name.startswith(("LATHE_", "AWS_", "KFP_", "KUBE")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("LATHE_NETWORK_PATIENCE", "0")
        monkeypatch.setenv("LATHE_KFP_ENDPOINT", server.url)
        monkeypatch.setattr(submit, "_commit", lambda: "0123456789ab")
        for command in (submit, doctor):
            monkeypatch.setattr(command, "build", build_once)
        monkeypatch.setattr(submit, "with_own_digest", with_own_digest_once)
        yield server
