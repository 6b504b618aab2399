"""Group quantization against its definition in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lathe.model.fake_quant import RoundGroups, round_activation
from lathe.model.integer_weights import fake_quantize_weight, integer_weight
from lathe.model.quantization import LinearFormat, WeightFormat
from lathe_base.config.settings.types import Bits

INT4 = WeightFormat.grouped(32, 4)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.integers(1, 4),
    st.integers(1, 200),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([4, 8]),
    st.integers(0, 99),
)
def test_a_weight_is_rounded_as_defined(
    n_out: int, n_in: int, size: int, bits: Bits, seed: int
) -> None:
    weight, lowest = normal(n_out, n_in, seed=seed), -(2 ** (bits - 1))
    found = fake_quantize_weight(weight, WeightFormat.grouped(size, bits)).numpy()
    for row, rounded in zip(weight.numpy(), found, strict=True):
        for begin in range(0, n_in, size):
            group = row[begin : begin + size]
            exact = group[np.abs(group).argmax()] / np.float32(lowest)
            scale = exact.astype(np.float16).astype(np.float32)
            integers = np.clip(np.rint(group / scale), lowest, -lowest - 1)
            np.testing.assert_array_equal(rounded[begin : begin + size], integers * scale)


@given(
    st.integers(1, 4),
    st.integers(1, 200),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([-3.0, -0.4, 0.0, 0.4, 3.0]),
    st.integers(0, 99),
)
def test_zero_points_are_as_defined(
    n_out: int, n_in: int, size: int, mean: float, seed: int
) -> None:
    weight, fmt = normal(n_out, n_in, seed=seed) + mean, WeightFormat.grouped(size, 4, True)
    stored = integer_weight(weight, LinearFormat(fmt, None))
    assert stored.zero_points is not None
    assert torch.equal(stored.rows(torch.arange(n_out)).floats, stored.floats)
    torch.testing.assert_close(fake_quantize_weight(weight, fmt), stored.floats, rtol=0, atol=0)
    for row, integers, scales, zeros in zip(
        weight.numpy(), stored.values.numpy(), stored.scales.numpy(), stored.zero_points.numpy(),
        strict=True,
    ):  # fmt: skip
        for i, begin in enumerate(range(0, n_in, size)):
            group, scale, zero = row[begin : begin + size], scales[i], int(zeros[i])
            lowest, highest = min(group.min(), 0), max(group.max(), 0)
            assert 0.98 * (highest - lowest) <= 15 * scale <= highest - lowest
            assert abs(zero + 8 + lowest / scale) <= 0.5 + 1e-5
            expected = np.clip(np.rint(group / scale) + zero, -8, 7)
            np.testing.assert_array_equal(integers[begin : begin + size], expected)
            # What llama.cpp's Q4_1 stores: the scale, and the lowest value.
            for number in (scale, np.float32(-8 - zero) * scale):
                assert np.float32(np.float16(number)) == number


@pytest.mark.parametrize("mean", [0.0, 0.5, 5.0, -5.0])
def test_rounding_to_zero_points_again_changes_nothing(mean: float) -> None:
    fmt, weight = WeightFormat.grouped(32, 4, True), normal(64, 256) + mean
    once = fake_quantize_weight(weight, fmt)
    assert torch.equal(fake_quantize_weight(once, fmt), once)
    without = fake_quantize_weight(weight, INT4)
    assert (once - weight).square().sum() < 0.9 * (without - weight).square().sum()


def test_rounding_again_changes_nothing_and_all_integers_are_used() -> None:
    weight = normal(64, 256)
    formats: tuple[Bits, Bits] = (4, 8)
    for bits in formats:
        fmt = WeightFormat.grouped(64, bits)
        once = fake_quantize_weight(weight, fmt)
        torch.testing.assert_close(fake_quantize_weight(once, fmt), once, rtol=1e-6, atol=0)
    stored = integer_weight(weight, LinearFormat(WeightFormat.grouped(64, 4), "dynamic_int8"))
    integers, scale = stored.values.view(64, -1, 64), stored.scales
    assert set(integers.unique().tolist()) == set(range(-8, 8))
    assert (integers.amin(-1) == -8).all() and (scale < 0).any() and (scale > 0).any()


def test_it_is_more_precise_than_symmetric_rounding_to_15_integers() -> None:
    weight = normal(256, 1024)
    ours = (fake_quantize_weight(weight, WeightFormat.grouped(64, 4)) - weight).pow(2).mean()
    groups = weight.view(256, -1, 64)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    symmetric = (torch.round(groups / scale) * scale - groups).pow(2).mean()
    assert ours < 0.95 * symmetric


def test_a_group_of_zeros_stays_zero() -> None:
    weight = torch.zeros(2, 96)
    weight[0, 40] = 1.0
    assert torch.equal(fake_quantize_weight(weight, INT4), weight)
    zeros = fake_quantize_weight(torch.zeros(2, 96), WeightFormat.grouped(32, 4, True))
    assert torch.equal(zeros, torch.zeros(2, 96))
    assert torch.equal(round_activation(torch.zeros(3, 50), 32), torch.zeros(3, 50))


@pytest.mark.parametrize("n_in", [64, 80])
def test_activations_are_rounded_by_token_and_group(n_in: int) -> None:
    x = normal(2, 3, n_in) * torch.tensor([1.0, 100.0, 0.01])[:, None]
    found = round_activation(x, 32)
    for begin in range(0, n_in, 32):
        part = x[..., begin : begin + 32]
        scale = part.abs().amax(-1, keepdim=True) / 127
        expected = torch.fake_quantize_per_channel_affine(
            part.reshape(6, -1), scale.flatten(), torch.zeros(6, dtype=torch.int32), 0, -128, 127
        )
        torch.testing.assert_close(
            found[..., begin : begin + 32].reshape(6, -1), expected, rtol=1e-5, atol=0
        )


def test_gradients_pass_straight_through() -> None:
    weight, x = normal(4, 80).requires_grad_(), normal(3, 80).requires_grad_()
    (RoundGroups(32)(x) @ fake_quantize_weight(weight, INT4).T).sum().backward()
    assert weight.grad is not None and x.grad is not None
    torch.testing.assert_close(weight.grad, round_activation(x, 32).sum(0).expand(4, -1))
    torch.testing.assert_close(x.grad, fake_quantize_weight(weight, INT4).sum(0).expand(3, -1))
