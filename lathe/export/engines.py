"""Engines other than Lathe's server, to verify the files that they read.

Each computes logits (B, T, V) of token ids (B, T) from an export folder, in float32 if there is a
choice. Engines that are not in Lathe's environment are imported on demand.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from importlib import import_module
from io import StringIO
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lathe.export.formats import compressed_tensors, gguf
from lathe_base.errors import Code, StageError, UserError
from lathe_serving.environment import ROOT, vllm_python
from lathe_serving.runtime.exported_model import MODEL
from lathe_serving.runtime.open_model import open_model

OPENVINO = "openvino"
"""The folder of that format, whose module needs optional packages."""

Array = NDArray[np.float32]


class NotInstalledError(UserError):
    """An engine's package is not installed."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what, hint, Code.NOT_INSTALLED)


class Engine:
    """A model that an engine has loaded.

    Attributes:
        version: the engine and its version.
    """

    version: str

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        """Logits (1, T, V) of tokens (1, T)."""
        raise NotImplementedError

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        """The most likely next token, n times; by default each from a pass over the whole text."""
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(int(self.logits(np.array([tokens]))[0, -1].argmax()))
        return tokens[len(prompt) :]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens at its beginning or end."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class Remote(Engine):
    """An engine in another process, which answers (method, arguments) over a connection."""

    _pipe: Connection

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        answer: Array = self._ask("logits", tokens)
        return answer

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        return list(self._ask("greedy", prompt, n))

    def encode(self, text: str) -> list[int]:
        return list(self._ask("encode", text))

    def _ask(self, method: str, *arguments: Any) -> Any:
        with suppress(OSError):  # it has crashed: the next line says how
            self._pipe.send((method, arguments))
        return self._result()

    def _result(self) -> Any:
        """The process's next answer.

        Raises:
            StageError: it has ended.
        """
        raise NotImplementedError


class Isolated(Remote):
    """Loads `engine(folder)` in a new process, and runs its methods there.

    Raises:
        StageError: from every method, if the process has crashed.
    """

    def __init__(self, name: str, engine: Callable[[Path], Engine], folder: Path) -> None:
        context = get_context("spawn")
        self._name, (self._pipe, other) = name, context.Pipe()
        self._process = context.Process(target=_answer, args=(engine, folder, other), daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else the child runs the command again
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        other.close()
        self.version = self._result()

    def _result(self) -> Any:
        try:
            result = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise StageError(
                f"{self._name} crashed ({how}): it cannot run this model on this processor, or is "
                "another version than its package says",
                Code.KILLED,
            ) from None
        if isinstance(result, Exception):
            raise result
        return result


def _answer(engine: Callable[[Path], Engine], folder: Path, pipe: Connection) -> None:
    """Load the engine, and run requested methods until the other end is closed."""
    try:
        opened = engine(folder)
        pipe.send(opened.version)
    except Exception as error:
        pipe.send(error)
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(opened, method)(*arguments))
        except Exception as error:
            pipe.send(error)  # raised on the other side


class OnnxRuntime(Engine):
    """The ONNX graph in onnxruntime."""

    version = f"onnxruntime {onnxruntime.__version__}"
    runtime = "onnxruntime"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = open_model(folder, torch.get_num_threads(), self.runtime).model

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        logits: Array = self.model.logits(tokens)
        return logits

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        return self.model.greedy([prompt], n, stop_at_eos=False)[0]


class OpenVINO(OnnxRuntime):
    """The ONNX graph in OpenVINO, as the server runs it."""

    runtime = "openvino"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        module = import_module("openvino")
        self.version = f"OpenVINO {module.__version__}"


class LlamaCpp(Engine):
    """The GGUF file in llama.cpp, through llama-cpp-python."""

    def __init__(self, folder: Path) -> None:
        module = import_module("llama_cpp")
        float32 = module.GGML_TYPE_F32  # of cached keys and values, which are float16 by default
        defaults = module.llama_model_default_params

        def without_repacking() -> Any:
            """Disable repacking: it selects AMX kernels, which crash on small matrices, and `Llama`
            has no option for it."""
            settings = defaults()
            settings.use_extra_bufts = False
            return settings

        module.llama_cpp.llama_model_default_params = without_repacking
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

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        self.model.reset()
        generated, new = list[int](), prompt
        for _ in range(n):
            self.model.eval(new)
            new = [int(self.model.scores[self.model.n_tokens - 1].argmax())]
            generated += new
        return generated

    def encode(self, text: str) -> list[int]:
        return list(self.model.tokenize(text.encode(), add_bos=False, special=True))


class Transformers(Engine):
    """The compressed-tensors folder in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        module = import_module("transformers")
        import_module("compressed_tensors")
        export_folder = folder / compressed_tensors.FOLDER
        if compressed_tensors.has_zero_points(export_folder):
            raise UserError(
                f"{export_folder}: has zero points of packed weights, which transformers "
                f"{module.__version__} cannot load",
                "prove it in vllm, or quantize with Compress.Quantization.zero_points=False",
                Code.UNSUPPORTED,
            )
        load = module.AutoModelForCausalLM.from_pretrained
        with redirect_stderr(StringIO()):  # five progress bars, which logs would get too
            self.model = load(export_folder, dtype=torch.float32, local_files_only=True).eval()
        # Not the folder's: a text would end at its end tokens.
        self.model.generation_config = module.GenerationConfig(do_sample=False)
        self.hf_tokenizer = module.AutoTokenizer.from_pretrained(
            export_folder, local_files_only=True
        )
        self.version = f"transformers {module.__version__}"

    @torch.inference_mode()
    def logits(self, tokens: NDArray[np.int64]) -> Array:
        logits: Array = self.model(torch.from_numpy(tokens)).logits.numpy()
        return logits

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        ids = torch.tensor([prompt])
        output_ids = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n)
        return list(output_ids[0, len(prompt) :].tolist())

    def encode(self, text: str) -> list[int]:
        # Not verbose: else it warns of texts longer than the model's positions.
        return list(self.hf_tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class OpenVINOGenAI(Engine):
    """The OpenVINO IR: texts and tokens from OpenVINO GenAI, and logits, which it does not return,
    from OpenVINO."""

    def __init__(self, folder: Path) -> None:
        # Where that package is installed, `import openvino` reports itself to Google Analytics.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        self.genai = import_module("openvino_genai")
        self.openvino = import_module("openvino")
        # Defaults depend on the processor, and round weights and cached keys and values.
        exact = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        export_folder = folder / OPENVINO
        model = self.openvino.Core().compile_model(
            export_folder / "openvino_model.xml", "CPU", exact
        )
        self.request = model.create_infer_request()
        self.pipeline = self.genai.LLMPipeline(str(export_folder), "CPU", **exact)
        self.version = f"openvino-genai {self.genai.get_version()}"

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        self.request.reset_state()
        feeds = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "position_ids": np.arange(tokens.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return np.array(self.request.infer(feeds)["logits"])

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        ids = np.array([prompt])
        tensors = (self.openvino.Tensor(x) for x in (ids, np.ones_like(ids)))
        settings = self.genai.GenerationConfig(max_new_tokens=n, ignore_eos=True)
        return list(
            self.pipeline.generate(self.genai.TokenizedInputs(*tensors), settings).tokens[0]
        )

    def encode(self, text: str) -> list[int]:
        encoded = self.pipeline.get_tokenizer().encode(text, add_special_tokens=False)
        ids: list[int] = encoded.input_ids.data[0].tolist()
        return ids


class VLLM(Remote):
    """The compressed-tensors folder in vLLM, which has an environment of its own. Its logits are
    log-probabilities, which differ from them by a constant at each position."""

    def __init__(self, folder: Path) -> None:
        try:
            python = vllm_python()
        except UserError as error:
            raise NotInstalledError(error.what, error.hint) from None
        self._pipe, other = Pipe()
        command: list[str | Path] = [python, "-m", "lathe_serving.runtime.vllm_logits"]
        with other:
            self._process = subprocess.Popen(
                [*command, folder / compressed_tensors.FOLDER, str(other.fileno())],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                pass_fds=[other.fileno()],
                stdout=sys.stderr,  # vLLM prints there too, and stdout is the command's
            )
        self.version = self._result()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._pipe.close()
            self._process.wait()

    def _result(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            raise StageError(
                f"vLLM ended with status {status}; the log above says why", Code.FAILED
            ) from None


ENGINES: dict[str, tuple[str, Callable[[Path], Engine], str]] = {
    "onnxruntime": (MODEL, OnnxRuntime, ""),
    "openvino": (MODEL, OpenVINO, "openvino"),
    "openvino-genai": (OPENVINO, OpenVINOGenAI, "openvino-genai"),
    "llama.cpp": (gguf.FILE, LlamaCpp, "llama-cpp-python"),
    "vllm": (compressed_tensors.FOLDER, VLLM, ""),
    "transformers": (compressed_tensors.FOLDER, Transformers, "transformers compressed-tensors"),
}
"""Engine name -> (file or folder of an export that it reads, class, packages)."""


def open_engine(name: str, folder: Path) -> Engine:
    """Load an export in an engine.

    Raises:
        UserError: an unknown engine, or an export without its format.
        NotInstalledError: the engine is not installed.
    """
    if name not in ENGINES:
        raise UserError(
            f"{name}: unknown engine", f"use one of {', '.join(ENGINES)}", Code.UNKNOWN_NAME
        )
    file, engine, packages = ENGINES[name]
    if not (folder / file).exists():
        file_format = "gguf" if file == gguf.FILE else file
        raise UserError(
            f"{folder}: has no {file}, which {name} requires",
            f"export the model again with --format {file_format}",
            Code.INCOMPLETE,
        )
    try:
        # llama.cpp crashes on some processors, such as those with AMX, in some models.
        return Isolated(name, engine, folder) if engine is LlamaCpp else engine(folder)
    except ImportError as error:
        raise NotInstalledError(
            f"{name} cannot be imported: {error}", f"pip install {packages}"
        ) from None
