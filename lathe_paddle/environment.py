"""Prepares the process for importing paddle, and lists the versions that work together."""

import logging
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from lathe_base.errors import Code, UserError

log = logging.getLogger("lathe")

# The only set that prunes, trains, quantizes and exports end to end.
VERSIONS = {
    "paddlepaddle": ("2.6.2", "paddleslim 2.6.0 is built on it"),
    "paddleslim": ("2.6.0", "the last with the pruners and QAT of PaddleFleetX"),
    "paddle2onnx": (
        "1.2.6",
        "1.2.7 to 1.3.1 silently drop every QuantizeLinear and DequantizeLinear of a MatMul",
    ),
    "numpy": ("1.26.4", "paddlepaddle 2.6.2 is built for numpy 1"),
}
ALTERNATIVES = {"paddlepaddle": ("paddlepaddle-gpu",)}
HINT = "run `make paddle-env`, which installs the versions of images/paddle/requirements.lock"


def prepare() -> None:
    """Make this process ready for `import paddle`; call it before that.

    Raises:
        UserError: a package is absent or of a version that is known not to work.
    """
    for package, (wanted, reason) in VERSIONS.items():
        installed = _version(package, *ALTERNATIVES.get(package, ()))
        if installed is None:
            raise UserError(f"{package} is not installed in {sys.prefix}", HINT, Code.NOT_INSTALLED)
        if installed != wanted:
            raise UserError(
                f"{package} is {installed}, not {wanted}: {reason}", HINT, Code.WRONG_VERSION
            )
    # Paddle's library exports its own zlib. Code that needs the system's must load that first, or
    # it ends in a segmentation fault.
    import zlib  # noqa: F401

    # Otherwise PaddleSlim's pruner treats the causal mask as something that heads depend on.
    os.environ["OPS_UNCHANGE_SHAPE"] = "tril_triu,fill_constant"
    # On CPUs, Paddle copies non-contiguous views element by element: a step is a third slower.
    os.environ["FLAGS_use_stride_kernel"] = "0"  # noqa: SIM112
    warnings.filterwarnings("ignore", message="Setuptools is replacing distutils")
    warnings.filterwarnings("ignore", category=UserWarning, module="paddle")


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
