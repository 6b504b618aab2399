"""The paddle image is the train image with a second environment for Paddle."""

import subprocess

import pytest

from tests.images.test_contents import inspect
from tests.support.podman import run

pytestmark = pytest.mark.containers

MULTIPLY = """
import os
os.environ["OPS_UNCHANGE_SHAPE"] = "tril_triu,fill_constant"
libraries = os.environ["LD_LIBRARY_PATH"]
import numpy as np, paddle, paddleslim, paddle2onnx, onnxruntime, lathe_base.config.recipe
a = np.arange(6, dtype="float32").reshape(2, 3)
product = paddle.matmul(paddle.to_tensor(a), paddle.to_tensor(a.T)).numpy()
assert np.array_equal(product, a @ a.T), product
print(paddle.__version__, libraries, lathe_base.config.recipe.__file__)
"""
STEP = """
import os, kfp.dsl.executor_main, torch, lathe_base.config.recipe
assert "LD_LIBRARY_PATH" not in os.environ
print(os.environ["LATHE_PADDLE_PYTHON"], lathe_base.config.recipe.__file__)
"""
SOURCE = "/opt/lathe/source/lathe_base/config/recipe.py"


def test_paddle_multiplies(images: dict[str, str]) -> None:
    shown = run(images["paddle"], "/opt/paddle/python", "-c", MULTIPLY).splitlines()[-1]
    assert shown == f"2.6.2 /opt/paddle/cuda {SOURCE}"


def test_a_step_starts_beside_it(images: dict[str, str]) -> None:
    shown = run(images["paddle"], "python3", "-c", STEP, options=["--env=_KFP_RUNTIME=true"])
    assert shown.split() == ["/opt/paddle/python", SOURCE]


def test_the_runtimes_command(images: dict[str, str]) -> None:
    shown = run(images["paddle"], "/opt/paddle/python", "-m", "lathe_paddle", "--help")
    assert "prune" in shown and "quantize" in shown


def test_its_layers_are_the_train_images_and_more(images: dict[str, str]) -> None:
    train, paddle = (inspect(images[name])["RootFS"]["Layers"] for name in ("train", "paddle"))
    assert paddle[: len(train)] == train and len(paddle) > len(train)


def test_the_train_image_says_what_to_do_without_it(images: dict[str, str]) -> None:
    command = ["lathe", "prune", "/model", "-r", "tiny-prune-paddle", "--output", "/tmp/pruned"]
    done = subprocess.run(
        ["podman", "run", "--rm", images["train"], *command], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no such interpreter" in done.stderr and "ENGINE=paddle" in done.stderr
