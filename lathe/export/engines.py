"""Engines other than Lathe's server, for the proof of the files that they read.

Each computes logits (B, T, V) of token ids (B, T) from an export folder, in float32 where it has a
choice. Those that are not in Lathe's environment are imported when they are asked for.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from lathe.errors import UserError
from lathe.export.fidelity import Logits
from lathe.export.formats import compressed_tensors, gguf
from lathe.serve.runtime.exported_model import MODEL
from lathe.serve.runtime.open_model import Runtime, open_model

Array = NDArray[np.float32]


class Engine(Logits, Protocol):
    """A model that an engine has loaded."""

    version: str
    """The engine and its version."""


class OnnxRuntime:
    """The ONNX graph in onnxruntime."""

    version = f"onnxruntime {onnxruntime.__version__}"
    runtime: Runtime = "onnxruntime"

    def __init__(self, folder: Path) -> None:
        self.model = open_model(folder, torch.get_num_threads(), self.runtime).model

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        found: Array = self.model.logits(tokens)
        return found


class OpenVINO(OnnxRuntime):
    """The ONNX graph in OpenVINO, as the server runs it."""

    runtime: Runtime = "openvino"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        openvino = import_module("openvino")
        self.version = f"OpenVINO {openvino.__version__}"


class LlamaCpp:
    """The GGUF file in llama.cpp, by llama-cpp-python."""

    def __init__(self, folder: Path) -> None:
        try:
            module = import_module("llama_cpp")
        except ImportError as error:
            raise _missing("llama-cpp-python", error) from None
        float32 = module.GGML_TYPE_F32  # of cached keys and values, which are float16 by default
        self.model = module.Llama(
            str(folder / gguf.FILE),
            n_ctx=0,
            logits_all=True,
            type_k=float32,
            type_v=float32,
            flash_attn=False,
            n_threads=torch.get_num_threads(),
            verbose=False,
        )
        self.version = f"llama.cpp of llama-cpp-python {module.__version__}"

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        self.model.reset()
        self.model.eval(tokens[0].tolist())
        return np.array(self.model.scores[None, : tokens.shape[1]], np.float32)


class Transformers:
    """The folder of compressed-tensors in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        try:
            module = import_module("transformers")
            import_module("compressed_tensors")
        except ImportError as error:
            raise _missing("transformers compressed-tensors", error) from None
        place = folder / compressed_tensors.FOLDER
        load = module.AutoModelForCausalLM.from_pretrained
        self.model = load(place, dtype=torch.float32, local_files_only=True).eval()
        self.version = f"transformers {module.__version__}"

    @torch.inference_mode()
    def logits(self, tokens: NDArray[np.int64]) -> Array:
        found: Array = self.model(torch.from_numpy(tokens)).logits.numpy()
        return found


ENGINES: dict[str, tuple[str, Callable[[Path], Engine]]] = {
    "onnxruntime": (MODEL, OnnxRuntime),
    "openvino": (MODEL, OpenVINO),
    "llama.cpp": (gguf.FILE, LlamaCpp),
    "transformers": (compressed_tensors.FOLDER, Transformers),
}
"""By name, the file or folder of an export that an engine reads, and its class."""


def open_engine(name: str, folder: Path) -> Engine:
    """Load an export in an engine.

    Raises:
        UserError: an unknown engine, one that is not installed, or an export without its format.
    """
    if name not in ENGINES:
        raise UserError(f"{name}: unknown engine", f"use one of {', '.join(ENGINES)}")
    file, engine = ENGINES[name]
    if not (folder / file).exists():
        form = "gguf" if file == gguf.FILE else compressed_tensors.FOLDER
        raise UserError(
            f"{folder}: has no {file}, which {name} reads",
            f"export the model again with --format {form}",
        )
    return engine(folder)


def _missing(packages: str, error: ImportError) -> UserError:
    return UserError(f"an engine cannot be imported: {error}", f"pip install {packages}")
