"""Export formats in addition to the ONNX graph, for engines other than Lathe's server. Each is a
module of this package:

- `ENGINE` is the engine of `lathe.export.engines` that verifies the files,
- `require(config, folder)` rejects models that the format or its engines do not support,
- `written(model, folder)` is the model whose tensors the format has, padded or the same,
- `write(checkpoint, folder, dtype)` writes its files and returns their names,
- `read(folder, config)` reads the weights back, to check every value.

To add a format, add a module, its name to `Export.formats`, and a row to
`tests/export/test_formats.py`.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from lathe.export.weight_formats import stored_matrices
from lathe.model.checkpoint import Checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.integer_weights import IntegerWeight
from lathe_base.config.settings import ExportSettings
from lathe_base.errors import Code, StageError, UserError
from lathe_base.progress import track

PRECISION, SMALLEST_SUBNORMAL = 2.0**-10, 2.0**-24
"""Maximum relative and absolute error of a value that is read back, because scales and floats may
be float16. A scale below 6e-5 is less precise in float16; a value is at most 128 scales."""


class Format(Protocol):
    """A module of this package."""

    ENGINE: str

    def require(self, config: GPTConfig, folder: Path) -> None:
        """Raise UserError for a model that the format or its engines do not support."""

    def written(self, model: GPT, folder: Path) -> GPT:
        """The model with the tensors that the format has, which computes what `model` does."""

    def write(self, checkpoint: Checkpoint, folder: Path, dtype: str) -> list[str]:
        """Write the files into a folder; returns their names."""

    def read(self, folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield every written tensor in float32, named and shaped as in `stored_matrices`
        of the model that is `written`."""


def format_module(name: str) -> Format:
    """The module of a format in `Export.formats`.

    Raises:
        UserError: a package that it needs is not installed.
    """
    # Where that package is installed, `import openvino` reports itself to Google Analytics.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        module = import_module(f"{__name__}.{name.replace('-', '_')}")
    except ImportError as error:
        raise UserError(
            f"{name} cannot be written: {error}", "pip install lathe[formats]", Code.NOT_INSTALLED
        ) from None
    return cast(Format, module)


def require_formats(settings: ExportSettings, config: GPTConfig, folder: Path) -> None:
    """Raise UserError for a format of `Export.formats` that does not support the model."""
    for name in settings.formats:
        format_module(name).require(config, folder)


def write_formats(
    checkpoint: Checkpoint, folder: Path, settings: ExportSettings
) -> dict[str, list[str]]:
    """Write the formats of `Export.formats` into an export folder, and read each back.

    Returns:
        The names of each format's files.

    Raises:
        UserError: a model or tokenizer that a format does not support.
        StageError: a written value differs from the checkpoint's.
    """
    is_quantized = checkpoint.model.config.quantization is not None
    dtype = "float16" if is_quantized else settings.dtype
    formats_by_file: dict[str, list[str]] = {}
    for name in settings.formats:
        formats_by_file[name] = format_module(name).write(checkpoint, folder, dtype)
        require_values(checkpoint, folder, name)
    return formats_by_file


def require_values(checkpoint: Checkpoint, folder: Path, name: str) -> None:
    """Compare every value in a format's files with the fake-quantized model's.

    Raises:
        StageError: one differs; names its tensor.
    """
    module = format_module(name)
    model = module.written(checkpoint.model, checkpoint.folder)
    written = dict(module.read(folder, model.config))
    for tensor, value in track(stored_matrices(model), f"check {name}", len(written)):
        wanted = value.floats if isinstance(value, IntegerWeight) else value
        got = written.pop(tensor, torch.empty(0))
        is_equal = got.shape == wanted.shape and bool(
            ((got - wanted).abs() <= PRECISION * wanted.abs() + 128 * SMALLEST_SUBNORMAL).all()
        )
        if not is_equal:
            raise StageError(
                f"{folder}: {tensor} in {name} differs from the checkpoint", Code.NOT_PROVED
            )
    if written:
        raise StageError(
            f"{folder}: {name} has {min(written)}, which the checkpoint does not have",
            Code.NOT_PROVED,
        )
