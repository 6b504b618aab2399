"""Peak FLOP/s of a device, for MFU: the model's FLOPs per token x tokens/s / peak.

MFU, model FLOPs utilization, is defined in PaLM (Chowdhery et al. 2022, appendix B).
"""

import re
import time
from functools import cache

import torch
from torch import Tensor

# Dense TFLOP/s of NVIDIA's data sheets: float16, bfloat16, TF32, float32; 0 where the hardware has
# no such unit. The first name that is found in the device's counts.
DATA_SHEETS: dict[str, tuple[float, float, float, float]] = {
    r"B200": (2250, 2250, 1125, 75),
    r"H20": (148, 148, 74, 44),
    r"H100 PCIe": (756, 756, 378, 51),
    r"H[12]00 NVL": (835, 835, 417, 60),
    r"G?H200|H100": (989, 989, 494, 67),
    r"A100": (312, 312, 156, 19.5),
    r"V100-SXM[23]": (125, 0, 0, 15.7),
    r"V100-PCIE": (112, 0, 0, 14),
    r"L40S": (362, 362, 183, 91.6),
    r"L4": (121, 121, 60, 30.3),
    r"A10": (125, 125, 62.5, 31.2),
    r"T4": (65, 0, 0, 8.1),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of matrix products of a GPU in `dtype`: from its data sheet, or for unknown GPUs
    and MIG slices measured with one large product in about 0.2 s; None for a CPU, whose peak other
    processes share.

    float32 counts as TF32 where torch would use it (`torch.set_float32_matmul_precision`).
    """
    if device.type != "cuda":
        return None
    known = data_sheet_flops(torch.cuda.get_device_name(device), dtype)
    return known or measured_flops(device, dtype)


def data_sheet_flops(name: str, dtype: torch.dtype) -> float:
    """FLOP/s of the GPU with this driver name; 0 if it is unknown."""
    is_tf32 = torch.get_float32_matmul_precision() != "highest"
    for pattern, (half, bfloat, tf32, single) in DATA_SHEETS.items():
        if re.search(rf"\b({pattern})\b", name) and "MIG" not in name:
            single = tf32 if is_tf32 and tf32 else single
            peaks = {torch.float16: half, torch.bfloat16: bfloat, torch.float32: single}
            return 1e12 * peaks.get(dtype, 0)
    return 0


@cache
def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product; lower than the peak if other processes share the device."""
    size, seconds = 256, 0.0
    while seconds < 0.01 and size < 16384:  # large enough to make launch overhead negligible
        size *= 2
        matrix = torch.randn(size, size, device=device).to(dtype)
        _product_seconds(matrix)
        seconds = _product_seconds(matrix)
    ends = time.perf_counter() + 0.15
    while time.perf_counter() < ends:
        seconds = min(seconds, _product_seconds(matrix))
    return 2 * size**3 / seconds


def _product_seconds(matrix: Tensor) -> float:
    started = time.perf_counter()
    matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - started
