"""The CUDA images, on a machine without a GPU.

`serve` and `serve-vllm` are not included, since they are based on NVIDIA's image of Triton.
"""

import json
import shutil

import pytest

from tests.images.conftest import ROOT, build
from tests.support.podman import podman, run

pytestmark = pytest.mark.containers

NAMES = ("train", "paddle")
NEEDED = 40e9
"""Required disk space in bytes for wheels, layers and temporary copies."""
LIMITS = {"train": 8e9, "paddle": 15e9}
LARGE = 50_000_000
TWICE = f"""
import collections, json, pathlib
found = collections.defaultdict(list)
for path in pathlib.Path("/opt").rglob("*"):
    if path.is_file() and not path.is_symlink() and path.stat().st_size > {LARGE}:
        found[f"{{path.name}} {{path.stat().st_size}}"].append(str(path))
print(json.dumps({{name: paths for name, paths in found.items() if len(paths) > 1}}))
"""


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """References of the CUDA images by name."""
    if (free := shutil.disk_usage(ROOT).free) < NEEDED:
        pytest.skip(
            f"{free / 1e9:.0f} GB of disk space are free, {NEEDED / 1e9:.0f} GB are required"
        )
    return build(tmp_path_factory, "cuda", NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_flavour_and_size(cuda: dict[str, str], name: str) -> None:
    about = json.loads(podman("image", "inspect", cuda[name]))[0]
    assert about["Labels"]["lathe.flavour"] == "cuda" and cuda[name].endswith("-cuda")
    print(f"{name}: {about['Size'] / 1e9:.2f} GB in {len(about['RootFS']['Layers'])} layers")
    assert about["Size"] < LIMITS[name]


def test_torch_is_built_for_cuda_and_onnxruntime_is_not(cuda: dict[str, str]) -> None:
    code = (
        "import torch, onnxruntime; "
        "print(torch.version.cuda, torch.cuda.is_available(), "
        "'CUDAExecutionProvider' in onnxruntime.get_available_providers())"
    )
    version, is_available, has_provider = run(cuda["train"], "python", "-c", code).split()
    assert version.startswith("13.") and (is_available, has_provider) == ("False", "False")


def test_no_large_file_is_there_twice(cuda: dict[str, str]) -> None:
    assert json.loads(run(cuda["train"], "python", "-c", TWICE)) == {}


def test_a_training_without_the_gpus_that_it_asks_for_says_so(cuda: dict[str, str]) -> None:
    asked = ["lathe", "pretrain", "--data", "nowhere", "-o", "Launch.gpus_per_node=1"]
    done = podman("run", "--rm", "--network=none", cuda["train"], *asked, check=False)
    print(done)


def test_paddle_has_its_cuda(cuda: dict[str, str]) -> None:
    code = "import paddle; print(paddle.is_compiled_with_cuda(), paddle.version.cuda())"
    compiled, version = run(cuda["paddle"], "/opt/paddle/python", "-c", code).split()[-2:]
    assert compiled == "True" and version
