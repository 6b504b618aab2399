"""FLOP counts against torch's counter and the published formula; peak FLOPs of devices."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lathe.model.architecture import Rope
from lathe.model.config import GPTConfig
from lathe.model.families import LLAMA
from lathe.model.gpt import GPT
from lathe.train.shape import model_config
from lathe.train.speed import data_sheet_flops, measured_flops, peak_flops
from lathe_base.config.recipe import load_recipe
from tests.support.small_models import small_config


@pytest.mark.parametrize(
    "config",
    [
        small_config(),
        small_config(n_head=(1, 3, 4), n_inner=(10, 96, 50)),  # pruned
        small_config(vocab_size=1000, n_head=(4,), n_inner=(192,)),
        small_config(
            architecture=LLAMA,
            kv_heads=(2, 1),
            rope=Rope(),
            tie_word_embeddings=False,
        ),
    ],
    ids=["whole", "pruned", "one layer", "llama"],
)
@pytest.mark.parametrize("seq_len", [64, 24])
def test_equals_the_flop_counter_of_torch(config: GPTConfig, seq_len: int) -> None:
    model, tokens = GPT(config), torch.randint(0, 384, (2, seq_len))
    # The counter does not know fused CPU kernels, and fused GPU kernels compute scores twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert counter.get_total_flops() == config.flops_per_token(seq_len) * tokens.numel()


@pytest.mark.parametrize("name", ["gpt-345m", "gpt-1.3b", "gpt-175b-mp8-pp16"])
def test_equals_the_formula_of_narayanan_et_al(name: str) -> None:
    """Efficient Large-Scale Language Model Training (2021), section 5.1, without recomputation."""
    recipe = load_recipe(name)
    shape, s = recipe.Model, recipe.Data.Train.dataset.max_seq_len
    V, h, L = shape.vocab_size, shape.hidden_size, shape.num_layers
    assert V is not None
    expected = 72 * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    assert model_config(recipe, V).flops_per_token(s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, 835),
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.float16, 0),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, 0),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L40", torch.bfloat16, 0),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA A10G", torch.bfloat16, 0),
        ("Tesla T4", torch.float16, 65),
        ("Tesla T4", torch.float64, 0),
        ("NVIDIA GeForce RTX 4090", torch.float16, 0),
    ],
)
def test_data_sheets(name: str, dtype: torch.dtype, teraflops: float) -> None:
    assert data_sheet_flops(name, dtype) == teraflops * 1e12


def test_tf32_counts_where_torch_would_use_it() -> None:
    try:
        torch.set_float32_matmul_precision("high")
        assert data_sheet_flops("NVIDIA A100-PCIE-40GB", torch.float32) == 156e12
        assert data_sheet_flops("Tesla V100-SXM2-16GB", torch.float32) == 15.7e12
    finally:
        torch.set_float32_matmul_precision("highest")
    assert data_sheet_flops("NVIDIA A100-PCIE-40GB", torch.float32) == 19.5e12


def test_devices_without_a_data_sheet_are_measured() -> None:
    """Any CPU of this century has between 1 GFLOP/s and 1 PFLOP/s."""
    assert 1e9 < measured_flops(torch.device("cpu"), torch.float32) < 1e15


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None
