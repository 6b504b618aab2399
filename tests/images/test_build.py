"""Checks of `make images` and `make push` before building, and the images that steps use."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from components import images
from images import build

ROOT = Path(build.__file__).resolve().parents[1]


def command(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PATH": str(path)} if path else {})
    return subprocess.run(
        [sys.executable, "-m", "images.build", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_no_builder(tmp_path: Path) -> None:
    git = shutil.which("git")
    assert git
    (tmp_path / "git").symlink_to(git)
    done = command("serve", path=tmp_path)
    assert done.returncode == 2
    assert "none of podman, buildah, docker" in done.stderr and "hint: install" in done.stderr


def test_no_such_image() -> None:
    done = command("serv")
    assert done.returncode == 2 and "serv" in done.stderr and "paddle" in done.stderr


@pytest.fixture
def builds(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs `images.build`; returns the command lines that its builder got."""
    recorder = tmp_path / "podman"
    recorder.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    recorder.chmod(0o755)

    def run(*arguments: str) -> list[str]:
        done = command(*arguments, path=Path(f"{tmp_path}:{os.environ['PATH']}"))
        assert done.returncode == 0, done.stderr
        return (tmp_path / "asked").read_text().splitlines()

    return run


@pytest.mark.parametrize(("image", "parent"), build.PARENTS.items())
def test_an_image_is_built_on_its_parent_of_the_same_tag(
    builds: Callable[..., list[str]], image: str, parent: str
) -> None:
    first, second = builds(image)
    argument = f"--build-arg {parent.upper()}="
    assert f"--file images/{parent}/Containerfile" in first and argument not in first
    assert "--build-arg FLAVOUR=cpu " in first
    assert f"--file images/{image}/Containerfile" in second
    (tag,) = (word for word in first.split() if word.endswith("-cpu"))
    assert f"{argument}{tag} " in second


def test_cuda_servers_are_built_on_nvidias_triton(builds: Callable[..., list[str]]) -> None:
    for line in builds("serve-vllm", "--flavour=cuda"):
        assert f"--build-arg BASE={build.TRITON} " in line
        assert "--build-arg LOCK=cuda.lock " in line


def test_an_image_that_few_need_is_built_by_name_only(builds: Callable[..., list[str]]) -> None:
    files = [line.partition("--file ")[2].split("/")[1] for line in builds()]
    assert files == list(build.IMAGES) and "serve-vllm" not in files


def test_push_needs_a_registry() -> None:
    done = subprocess.run(["make", "push"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "REGISTRY=registry.example.com/team" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit that `build` uses in place of this one."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.com"]
    (tmp_path / "lathe").mkdir()
    (tmp_path / "lathe" / "a.py").write_text("")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    return tmp_path


def test_the_tag_says_when_an_image_is_not_the_commit(checkout: Path) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True
    ).stdout[:12]
    (checkout / "README.md").write_text("goes into no image")
    assert build.tag("cpu") == f"{head}-cpu"
    (checkout / "lathe" / "b.py").write_text("goes into all")
    assert build.tag("cuda") == f"{head}-dirty-cuda"


def test_the_source_label_carries_no_credentials(checkout: Path) -> None:
    address = "https://user:token@git.example.com/team/lathe.git"
    subprocess.run(["git", "remote", "add", "origin", address], cwd=checkout, check=True)
    assert build._source() == "https://git.example.com/team/lathe.git"


def test_a_step_names_the_image_given_or_pushed_or_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "PUSHED", tmp_path / "refs.json")
    built = images.reference("train")
    assert built.startswith("localhost/lathe-train:")
    monkeypatch.delenv("LATHE_TRAIN_IMAGE")
    assert images.reference("train") == built
    pushed = "registry.example.com/lathe-train@sha256:" + 64 * "0"
    images.PUSHED.write_text(json.dumps({"train": pushed}))
    assert images.reference("train") == pushed
    monkeypatch.setenv("LATHE_TRAIN_IMAGE", "registry.example.com/other:1")
    assert images.reference("train") == "registry.example.com/other:1"
    monkeypatch.setenv("LATHE_TRAIN_IMAGE", "")
    assert images.reference("train") == built


@pytest.mark.parametrize(
    ("lock", "has_triton", "expected"),
    [
        ("requirements.lock", False, "requirements.lock"),
        ("requirements.lock", True, "cuda.lock"),
        ("cuda.lock", True, "cuda.lock"),
    ],
)
def test_a_server_on_nvidias_triton_gets_no_other_triton(
    tmp_path: Path, lock: str, has_triton: bool, expected: str
) -> None:
    """Runs the Containerfile's commands in a folder in place of the base image's root."""
    steps = (ROOT / "images/serve/Containerfile").read_text().replace("\\\n", "")
    (install,) = re.findall(r"^RUN (lock=.*)$", steps, re.MULTILINE)
    (link,) = re.findall(r"^RUN (triton=.*)$", steps, re.MULTILINE)
    triton = tmp_path / "opt/tritonserver/bin/tritonserver"
    packages = tmp_path / "opt/lathe/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    wheel = packages / "pytriton/tritonserver"
    if has_triton:
        triton.parent.mkdir(parents=True)
        triton.write_text("NVIDIA's")
        triton.chmod(0o755)
    else:
        for name in ("bin/tritonserver", "backends/python/a", "python_backend_stubs/3.11/b"):
            (wheel / name).parent.mkdir(parents=True, exist_ok=True)
            (wheel / name).write_text("the wheel's")
    (tmp_path / "python3").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "python3").chmod(0o755)
    for step in (install, link):
        script = step.replace("${LOCK}", lock).replace("/opt/", f"{tmp_path}/opt/")
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(["sh", "-ec", script], check=True, env={"PATH": path})
    assert (tmp_path / "asked").read_text().split()[-1] == f"/build/{expected}"
    assert triton.read_text() == ("NVIDIA's" if has_triton else "the wheel's")
    pinned = (ROOT / "images/serve" / expected).read_text()
    assert ("nvidia-pytriton==" in pinned) is not has_triton
