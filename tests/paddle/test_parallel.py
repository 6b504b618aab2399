"""Tensor parallelism: Paddle rejects CPUs, and the CPU is the only obstacle."""

import subprocess
from pathlib import Path

import pytest

from lathe.backends.paddle_support import require_supported
from lathe_base.config.recipe import load_recipe
from tests.paddle.conftest import run_paddle
from tests.paddle.test_stages import SMALL
from tests.support import small_run
from tests.support.stages import prune

PREAMBLE = """
from lathe_paddle.environment import prepare
prepare()
from pathlib import Path
import numpy as np, paddle
from lathe_paddle import fake_quant, workers
from lathe_paddle.gpt import GPT, next_token_loss
from lathe.model.config import GPTConfig
from lathe.model.quantization import QuantizationPlan
from lathe_base.config.recipe import load_recipe
workers.require_device = lambda recipe: None
recipe = load_recipe("tiny", ["Global.device=cpu", "Distributed.mp_degree=2"])
config = GPTConfig(384, 64, 48, 12, (4, 2), (96, 40))
tokens = paddle.to_tensor(np.random.RandomState(0).randint(0, 384, (2, 17)))
paddle.seed(0)
model = GPT(config)
"""

# gloo versions of the two collectives of parallel linears for which Paddle has only GPU kernels.
COLLECTIVES = """
from paddle.distributed.fleet.layers.mpu import mp_ops
import paddle.distributed.collective as collective

def summed(x):
    x = x.clone()
    paddle.distributed.all_reduce(x)
    return x

class Identity(paddle.autograd.PyLayer):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: summed(g))

class Sum(paddle.autograd.PyLayer):
    forward = staticmethod(lambda ctx, x: summed(x))
    backward = staticmethod(lambda ctx, g: g.clone())

for module in (mp_ops, collective):
    module._c_identity = lambda x, *_, **__: Identity.apply(x)
    module._mp_allreduce = lambda x, *_, **__: Sum.apply(x)
"""

DIVIDED = """
whole = next_token_loss(model, tokens)
whole.backward()
slope, loss = model.h[0].ln_1.weight.grad.numpy().copy(), float(whole)
weights = {n: p.numpy().copy() for n, p in model.named_parameters()}
model.clear_gradients()
with workers.join_workers(recipe) as group:
    workers.divide(model, group)
    assert model.h[1].mlp.c_fc.weight.shape == [48, 20]
    divided = next_token_loss(model, tokens)
    divided.backward()
    assert abs(float(divided) - loss) < 1e-5, (float(divided), loss)
    assert np.abs(model.h[0].ln_1.weight.grad.numpy() - slope).max() < 1e-5
    for name, array in workers.whole_weights(model, group).items():
        assert np.array_equal(array, weights[name]), name
    fake_quant.insert(model, QuantizationPlan.w8a8(dict.fromkeys(
        config.linear_names(), 0.0)))
    fake_quant.calibrate(model, [tokens.numpy()])
    fake_quant.share_ranges(model)
    model.eval()
    assert abs(float(next_token_loss(model, tokens)) - loss) < 0.05
print("divided as whole")
"""


def two_processes(python: Path, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "worker.py"
    script.write_text(code)
    logs = str(tmp_path / "logs")
    launcher = ["-m", "paddle.distributed.launch", "--log_dir", logs, "--nproc_per_node", "2"]
    for _ in range(3):
        done = run_paddle(python, *launcher, script)
        if "Connection refused" not in done.stdout:  # Gloo does not wait for its peer to listen
            break
    return done


@pytest.mark.slow
def test_tensor_parallelism_lacks_a_cpu_kernel(paddle_python: Path, tmp_path: Path) -> None:
    done = two_processes(paddle_python, tmp_path, PREAMBLE + DIVIDED)
    assert done.returncode != 0
    logs = (path.read_text() for path in (tmp_path / "logs").glob("workerlog.*"))
    assert any("Do not support c_identity for cpu kernel now" in log for log in logs)


@pytest.mark.slow
def test_with_that_kernel_divided_linears_compute_what_whole_ones_do(
    paddle_python: Path, tmp_path: Path
) -> None:
    done = two_processes(paddle_python, tmp_path, PREAMBLE + COLLECTIVES + DIVIDED)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "divided as whole" in done.stdout


TRAINED = """
from lathe_paddle.prune import prune
data, model, output = {paths!r}
recipe = load_recipe("tiny-prune-paddle", {overrides!r})
prune(recipe, Path(model), Path(data), Path(output))
print("trained divided")
"""


@pytest.mark.slow
def test_a_divided_model_learns_what_a_whole_one_does(
    paddle_python: Path, small_data: Path, small_dense: Path, tmp_path: Path
) -> None:
    """Each process has two heads and 64 channels of every layer."""
    overrides = (*SMALL, "Compress.engine=paddle", "Compress.Prune.ratio=0.5")
    settings = load_recipe("tiny-prune-paddle", overrides)
    prune(settings, small_dense, small_data, tmp_path / "whole")
    divided = [*overrides, "Distributed.mp_degree=2"]
    paths = [str(p) for p in (small_data, small_dense, tmp_path / "divided")]
    code = PREAMBLE + COLLECTIVES + TRAINED.format(paths=paths, overrides=divided)
    done = two_processes(paddle_python, tmp_path, code)
    assert done.returncode == 0, done.stdout[-3000:]
    ours, theirs = (small_run.records(tmp_path / name, "loss") for name in ("whole", "divided"))
    assert theirs == pytest.approx(ours, abs=2e-5)
    norms = [small_run.records(tmp_path / name, "grad_norm") for name in ("whole", "divided")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


ALONE = """
from lathe_paddle.environment import prepare
prepare()
import time
import paddle.distributed as dist
from lathe.train import heartbeats
from lathe_paddle.workers import join_workers
from lathe_base.config.recipe import load_recipe

heartbeats.BEAT_SECONDS = 0.5
settings = ["Global.device=cpu", "Distributed.dp_degree=2", "Distributed.timeout_minutes=0.25"]
with join_workers(load_recipe("tiny", settings)) as workers:
    assert dist.collective._get_global_env().pg_timeout == 15_000
    if workers.is_first:
        time.sleep(33)
    print("has", workers.gather("written" if workers.is_first else None)[0], flush=True)
    workers.barrier()
"""


@pytest.mark.slow
def test_the_first_process_may_work_longer_than_a_collective(
    paddle_python: Path, tmp_path: Path
) -> None:
    """33 s alone, where Paddle's collectives between CPUs end after 30 and the timeout is 15."""
    done = two_processes(paddle_python, tmp_path, ALONE)
    logs = [path.read_text() for path in (tmp_path / "logs").glob("workerlog.*")]
    assert done.returncode == 0, logs
    assert ["has written" in log for log in logs] == [True, True]


RECIPES = ("prune-345m", "prune-6.7b-sharding16", "qat-345m", "qat-345m-mp8", "qat-6.7b-sharding16")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.slow
def test_recipes_are_accepted_and_only_the_device_is_refused(
    name: str, paddle_python: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(name, ["Compress.engine=paddle"])
    require_supported("prune" if recipe.Compress.Prune.enable else "quantize", recipe)
    mp, sharding = recipe.Distributed.mp_degree, recipe.Distributed.sharding.sharding_degree
    script = tmp_path / "script.py"
    script.write_text(
        PREAMBLE.replace("workers.require_device = lambda recipe: None", "")
        + f"""
from lathe_base.errors import UserError
recipe = load_recipe({name!r}, ["Compress.engine=paddle"])
print("degrees", workers.degrees(recipe.Distributed, {mp * sharding}))
try:
    workers.require_device(recipe)
    print("accepted")
except UserError as error:
    print("refused", error)
"""
    )
    done = run_paddle(paddle_python, script)
    assert f"degrees (1, {mp}, {sharding})" in done.stdout, done.stdout[-2000:]
    assert ("refused" if mp > 1 else "accepted") in done.stdout
    assert ("Paddle 2.6 supports tensor parallelism only on GPUs" in done.stdout) == (mp > 1)
