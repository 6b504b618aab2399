"""One export under onnxruntime and OpenVINO, in one process and in turns.

python -m peers.exported EXPORT FLOAT_EXPORT ROUNDS
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from lathe.runtime.exported_model import METADATA, MODEL
from lathe.runtime.open_session import CPUINFO, saturates
from lathe.runtime.session import OnnxModel
from peers.engine import Ids
from peers.exported_graph import BLOCK, Graph, read_weights
from peers.lathe import Lathe
from peers.worker import Measured

CAPACITY = 1024  # tokens of a row
ROWS = 8
COMPARED = (2, 128)  # shape of the tokens whose logits are compared
CASES: tuple[tuple[str, int], ...] = (
    ("prefill", 128),
    ("prefill", 512),
    ("decode", 1),
    ("decode", ROWS),
)
PLAIN = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"} | dict.fromkeys(
    (
        "INFERENCE_PRECISION_HINT",  # bfloat16 by default on a CPU that has it
        "KV_CACHE_PRECISION",
        "KEY_CACHE_PRECISION",
        "VALUE_CACHE_PRECISION",
    ),
    "f32",
)
Part = tuple[int, int, Ids]


class InOpenVINO(Lathe):
    """A row of the batch has CAPACITY / BLOCK blocks of its own.

    Args:
        rounds: see `Graph`.
        group: OpenVINO's own rounding of inputs in so many, which needs a CPU with VNNI; 0: none.
    """

    version = f"OpenVINO {openvino.__version__.split('-')[0]}"

    def __init__(self, folder: Path, rounds: bool, group: int = 0) -> None:
        metadata = json.loads((folder / METADATA).read_text())
        n_head, head_dim = metadata["n_head"], metadata["head_dim"]
        graph = Graph(read_weights(folder / MODEL), n_head, head_dim, rounds).model()
        options = PLAIN | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
        self.compiled = openvino.Core().compile_model(graph, "CPU", options)
        self.request = self.compiled.create_infer_request()
        self.blocks = CAPACITY // BLOCK
        self.caches = []
        for i, heads in enumerate(n_head):
            for part in ("key", "value"):
                cache = np.zeros((ROWS * self.blocks, heads, BLOCK, head_dim), np.float32)
                tensor = openvino.Tensor(cache, shared_memory=True)
                self.request.set_tensor(f"{part}_cache.{i}", tensor)
                self.caches.append(cache)

    def prefill(self, prompt: Ids) -> None:
        self.last([(0, 0, prompt)]).argmax(axis=1)  # parts, as Lathe reads it, take longer

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> None:
        logits = self.last([(row, 0, prompt) for row, prompt in enumerate(prompts)])
        tick()
        for step in range(steps):
            known = prompts.shape[1] + step
            chosen = logits.argmax(axis=1)
            logits = self.last([(row, known, chosen[row : row + 1]) for row in range(len(prompts))])
            tick()

    def logits(self, tokens: Ids) -> NDArray[np.float32]:
        """(B, T, V) of tokens (B, T)."""
        parts = [(row, 0, part) for row, part in enumerate(tokens)]
        return self.infer(parts, np.arange(tokens.size)).reshape(*tokens.shape, -1)

    def last(self, parts: Sequence[Part]) -> NDArray[np.float32]:
        """Logits after the last token of every part."""
        return self.infer(parts, np.cumsum([len(tokens) for *_, tokens in parts]) - 1)

    def infer(self, parts: Sequence[Part], index: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens to rows; a part is a row, how many tokens it has, and new ones."""
        rows, past, tokens = zip(*parts, strict=True)
        known, lengths = np.array(past), np.array([len(new) for new in tokens])
        used = [-(-total // BLOCK) for total in known + lengths]
        blocks = [r * self.blocks + np.arange(n) for r, n in zip(rows, used, strict=True)]
        feeds = {
            "input_ids": np.concatenate(tokens),
            "position_ids": np.concatenate([p + np.arange(len(t)) for _, p, t in parts]),
            "logits_index": index,
            "past_lens": known.astype(np.int32),
            "subsequence_begins": np.cumsum([0, *lengths], dtype=np.int32),
            "block_indices": np.concatenate(blocks).astype(np.int32),
            "block_indices_begins": np.cumsum([0, *used], dtype=np.int32),
            "max_context_len": np.array((known + lengths).max(), np.int32),
        }
        for name, value in feeds.items():
            self.request.set_tensor(name, openvino.Tensor(value, shared_memory=True))
        self.request.infer()
        return np.array(self.request.get_tensor("logits").data)


def runtimes(folder: Path) -> dict[str, Lathe]:
    """What an export runs in, by the name of its line."""
    made: dict[str, Lathe] = {
        "onnxruntime": Lathe(folder),
        "OpenVINO, inputs rounded by the graph": InOpenVINO(folder, rounds=True),
        "OpenVINO, float inputs": InOpenVINO(folder, rounds=False),
    }
    if not saturates(CPUINFO.read_text()):
        table = read_weights(folder / MODEL)["wte.weight"]
        group = 2 * table.shape[2] if table.ndim == 3 else 256
        own = InOpenVINO(folder, rounds=False, group=group)
        made["OpenVINO, inputs rounded by its own kernel"] = own
    return made


def measure(folder: Path, float_folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """By line: `version`; `difference`, the mean difference of logits from onnxruntime's, relative
    to that of onnxruntime's from the float export's; and seconds of every case, one number a round.
    The first round is not counted."""
    made = runtimes(folder)
    vocabulary = json.loads((folder / METADATA).read_text())["vocab_size"]
    tokens = np.random.default_rng(0).integers(1, vocabulary, COMPARED)
    reference = OnnxModel(folder, 1).logits(tokens)
    change = float(np.abs(reference - OnnxModel(float_folder, 1).logits(tokens)).mean())
    found: dict[str, dict[str, Any]] = {}
    for name, engine in made.items():
        found[name] = {"version": engine.version}
        if isinstance(engine, InOpenVINO):
            difference = np.abs(engine.logits(tokens) - reference).mean()
            found[name]["difference"] = float(difference) / change
    measured = {name: Measured(engine, vocabulary) for name, engine in made.items()}
    for turn in range(rounds + 1):
        for method, argument in CASES:
            for name, engine in measured.items():
                seconds = float(np.median(getattr(engine, method)(argument)))
                if turn:
                    found[name].setdefault(f"{method} {argument}", []).append(seconds)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
