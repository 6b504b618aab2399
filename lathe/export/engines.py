"""Engines other than Lathe's server, for the proof of the files that they read.

Each computes logits (B, T, V) of token ids (B, T) from an export folder, in float32 where it has a
choice. Those that are not in Lathe's environment are imported when they are asked for.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lathe.errors import UserError
from lathe.export.fidelity import Logits
from lathe.export.formats import compressed_tensors, gguf
from lathe.serve.runtime.exported_model import MODEL
from lathe.serve.runtime.open_model import open_model

Array = NDArray[np.float32]


class Engine(Logits, Protocol):
    """A model that an engine has loaded."""

    version: str
    """The engine and its version."""


class OnnxRuntime:
    """The ONNX graph in one of the server's runtimes."""

    def __init__(self, folder: Path, runtime: Any = "onnxruntime") -> None:
        self.model = open_model(folder, torch.get_num_threads(), runtime).model
        module = import_module(runtime)
        self.version = f"{runtime} {module.__version__}"

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        found: Array = self.model.logits(tokens)
        return found


class OpenVINO(OnnxRuntime):
    """The ONNX graph in OpenVINO, as the server runs it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "openvino")


class LlamaCpp:
    """The GGUF file in llama.cpp, by llama-cpp-python."""

    def __init__(self, folder: Path) -> None:
        module = _import("llama_cpp", "llama-cpp-python")
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
        module = _import("transformers", "transformers")
        _import("compressed_tensors", "compressed-tensors")
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


def _import(module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{package} cannot be imported: {error}", f"pip install {package}"
        ) from None
