"""The paddle image computes with Paddle, imports PaddleSlim, and can be a pipeline's step."""

import pytest

from tests.images.podman import run

pytestmark = [pytest.mark.containers, pytest.mark.slow]

MULTIPLY = """
import os
os.environ["OPS_UNCHANGE_SHAPE"] = "tril_triu,fill_constant"
import numpy as np, paddle, paddleslim, paddle2onnx, onnxruntime
a = np.arange(6, dtype="float32").reshape(2, 3)
product = paddle.matmul(paddle.to_tensor(a), paddle.to_tensor(a.T)).numpy()
assert np.array_equal(product, a @ a.T), product
print(paddle.__version__)
"""


def test_paddle_multiplies(images: dict[str, str]) -> None:
    assert run(images["paddle"], "python", "-c", MULTIPLY).split()[-1] == "2.6.2"


def test_a_step_starts_in_it(images: dict[str, str]) -> None:
    starts = "import kfp.dsl.executor_main, lathe.recipe; print(lathe.recipe.__file__)"
    shown = run(images["paddle"], "python3", "-c", starts, options=["--env=_KFP_RUNTIME=true"])
    assert shown.startswith("/opt/lathe/source/")
