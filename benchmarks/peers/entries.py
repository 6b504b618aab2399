"""The league's entries, with their versions and formats."""

from dataclasses import dataclass
from pathlib import Path

from lathe.model.folder import checkpoint_digest

WEIGHTS = {".onnx", ".safetensors", ".gguf", ".bin", ".xml"}
COMMON = ("numpy==2.4.6", "safetensors==0.8.0")
OPENVINO = (
    "openvino==2026.4.1",
    "nncf==3.4.0",
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "transformers==5.23.0",
)
LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf==0.19.0")


@dataclass(frozen=True)
class Entry:
    """An engine with one weight format: a row of the table.

    Attributes:
        module: module of this package that defines the engine.
        weights: format passed to the engine's `convert`.
        bits: bits per weight, which determine the tolerance relative to float32.
        requirements: packages of its environment; if empty, Lathe's own environment.
        checkpoint: scored instead of the common checkpoint; its speed equals that of another row.
    """

    title: str
    module: str
    weights: str
    bits: int
    requirements: tuple[str, ...] = ()
    checkpoint: Path | None = None

    @property
    def environment(self) -> str:
        """Name of the environment, shared by entries with the same packages."""
        return self.requirements[0].split("==")[0] if self.requirements else ""

    @property
    def key(self) -> str:
        """Name of the folder with the converted model, shared by all of Lathe's runtimes."""
        own = f"-{checkpoint_digest(self.checkpoint)[:12]}" if self.checkpoint else ""
        module = "lathe" if self.module.startswith("lathe") else self.module
        return f"{module}-{self.weights}{own}"


REFERENCE = "Lathe INT8"
TRUTH = "transformers float32"
FLOAT = "Lathe float32"
ENTRIES = [
    Entry(FLOAT, "lathe", "saved", 32),
    Entry(REFERENCE, "lathe", "INT8", 8),
    Entry("Lathe INT8, static scales", "lathe", "INT8static", 8),
    Entry("Lathe INT8, dynamic scales", "lathe", "INT8dynamic", 8),
    Entry("Lathe INT8, single stream", "lathe_single_stream", "INT8", 8),
    Entry("Lathe INT4", "lathe", "INT4", 4),
    Entry("Lathe INT4, groups of 128", "lathe", "INT4g128", 4),
    Entry("Lathe INT8 in OpenVINO", "lathe_openvino", "INT8", 8),
    Entry("Lathe INT4 in OpenVINO", "lathe_openvino", "INT4", 4),
    Entry("Lathe INT4, groups of 128, in OpenVINO", "lathe_openvino", "INT4g128", 4),
    Entry(TRUTH, "transformers", "float32", 32),
    Entry("OpenVINO W8A8", "openvino", "W8A8", 8, OPENVINO),
    Entry("OpenVINO GenAI INT8", "openvino_genai", "INT8", 8, OPENVINO),
    Entry("OpenVINO GenAI INT8, float32", "openvino_genai", "INT8f32", 8, OPENVINO),
    Entry("OpenVINO GenAI INT4", "openvino_genai", "INT4", 4, OPENVINO),
    Entry("OpenVINO GenAI INT4, groups of 128", "openvino_genai", "INT4g128", 4, OPENVINO),
    Entry("llama.cpp Q8_0", "llama_cpp", "Q8_0", 8, LLAMA_CPP),
    Entry("llama.cpp Q4_0", "llama_cpp", "Q4_0", 4, LLAMA_CPP),
    Entry("llama.cpp Q4_K_M", "llama_cpp", "Q4_K_M", 4, LLAMA_CPP),
    Entry("CTranslate2 int8", "ctranslate2", "int8", 8, ("ctranslate2==4.8.5",)),
]


def trained(checkpoint: Path) -> Entry:
    """Entry of a checkpoint of `lathe quantize`."""
    return Entry(f"Lathe {checkpoint.name}, trained", "lathe", "saved", 4, (), checkpoint)


def n_bytes(folder: Path) -> int:
    """Size of a converted model in bytes, without its tokenizer."""
    files = (f for f in folder.iterdir() if f.suffix in WEIGHTS and "tokenizer" not in f.name)
    return sum(file.stat().st_size for file in files)
