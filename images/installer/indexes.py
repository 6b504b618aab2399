"""Where packages come from: the indexes and folders that pip and uv are configured with.

uv reads none of pip's settings by itself, and asks every index for every package: one that does not
answer would end an installation, so each is asked once before it begins.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from pathlib import Path
from tempfile import TemporaryDirectory

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds, which PyPI does not have."""

PATIENCE = 5.0
"""Seconds in which an index has to answer."""

PIP_TO_UV = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "keyring-provider": ("UV_KEYRING_PROVIDER",),
}
"""A setting of pip: the variable that tells it to uv, and an older one that may have done so."""

PIP_BEFORE_OTHERS = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
}
"""A setting of pip that comes before these variables, which are not for packages alone."""


class IndexAnswer(Enum):
    """Whether an index has a package."""

    FOUND = auto()
    ABSENT = auto()
    SILENT = auto()


def pip_settings() -> dict[str, str]:
    """pip's settings of this machine by name: configuration files, then `PIP_*` variables."""
    listed = ""
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)=(['\"].*)$", listed, re.MULTILINE)
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, name, value in found:
        sections[section][name] = str(ast.literal_eval(value))
    for variable, value in os.environ.items():
        if variable.startswith("PIP_"):
            sections[":env:"][variable[4:].lower().replace("_", "-")] = value
    merged = sections["global"] | sections["install"] | sections[":env:"]
    return {name.removeprefix("default-"): value for name, value in merged.items() if value}


def uv_environment(pip: dict[str, str]) -> dict[str, str]:
    """This process's environment, with pip's settings for uv where uv has none of its own."""
    environment = dict(os.environ)
    for name, variables in PIP_TO_UV.items():
        if name in pip and not any(os.environ.get(variable) for variable in variables):
            words = pip[name].split()
            if name == "find-links":  # pip passes over folders that are not there, uv does not
                words = [word for word in words if "://" in word or Path(word).is_dir()]
            if words:
                environment[variables[0]] = ("," if name == "find-links" else " ").join(words)
    for name, variables in PIP_BEFORE_OTHERS.items():
        if name in pip:
            environment |= dict.fromkeys(variables, pip[name])
    # Never download a Python silently. Every package is pinned by its hash, so
    # that whichever index has it may give it.
    return environment | {
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_INDEX_STRATEGY": environment.get("UV_INDEX_STRATEGY", "unsafe-best-match"),
    }


def extra_indexes(environment: dict[str, str]) -> list[str]:
    """The indexes beside the main one."""
    words = (environment.get(name, "").split() for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL"))
    return [word for group in words for word in group]


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    """A copy of the environment without these variables."""
    return {name: value for name, value in environment.items() if name not in names}


def ask(
    uv: Path, requirement: str, environment: dict[str, str], indexes: Iterable[str]
) -> tuple[IndexAnswer, dict[str, IndexAnswer]]:
    """Ask where a package can be had, everywhere at the same time.

    Args:
        requirement: a pinned line of a lock file with its hashes.
        indexes: those to be asked one by one, at most `PATIENCE` seconds each.

    Returns:
        what the configured sources say without any extra index, and what each of `indexes` says.
    """
    alone = without(environment, "UV_INDEX", "UV_EXTRA_INDEX_URL")
    bare = without(alone, "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_FIND_LINKS")
    quick = bare | {"UV_HTTP_TIMEOUT": str(int(PATIENCE) - 1), "UV_HTTP_RETRIES": "0"}

    def one(index: str) -> IndexAnswer:
        return _ask(uv, requirement, quick | {"UV_DEFAULT_INDEX": index}, PATIENCE)

    addresses = list(indexes)
    with ThreadPoolExecutor(len(addresses) + 1) as pool:
        configured = pool.submit(_ask, uv, requirement, alone, None)
        answers = list(pool.map(one, addresses))
        return configured.result(), dict(zip(addresses, answers, strict=True))


def _ask(
    uv: Path, requirement: str, environment: dict[str, str], seconds: float | None
) -> IndexAnswer:
    with TemporaryDirectory() as folder:
        wanted = Path(folder, "requirement.txt")
        wanted.write_text(requirement)
        command = [uv, "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--quiet"]
        command += ["--python", sys.executable, "--target", folder, "--requirements", wanted]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return IndexAnswer.SILENT
    # uv's status is 1 where the package is not there, and 2 where it could not ask.
    return {0: IndexAnswer.FOUND, 1: IndexAnswer.ABSENT}.get(done.returncode, IndexAnswer.SILENT)


def address(index: str) -> str:
    """An index's address without the credentials that it may carry."""
    return re.sub(r"//[^/@]*@", "//", index)
