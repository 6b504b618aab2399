"""Other projects' untrained INT4, run with the Python of an environment that has their package:

    PYTHON benchmarks/quality_peers.py autoround MODEL TOKENS OUTPUT --group-size 32

`quality.py --peers` runs it. MODEL is a Hugging Face folder, TOKENS a NumPy file of calibration
text (rows, length), and OUTPUT becomes a Hugging Face folder with the dequantized weights. Only the
blocks' linears are quantized: integers with a 16-bit scale and a zero point for every group.
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

Peer = Callable[[Any, Any, Tensor, argparse.Namespace], None]


def autoround(model: Any, tokenizer: Any, rows: Tensor, given: argparse.Namespace) -> None:
    """AutoRound: rounding and clipping learned block by block with signed gradients."""
    tuner = import_module("auto_round").AutoRound(
        model,
        scheme="W4A16",
        tokenizer=tokenizer,
        dataset=[*torch.split(rows, 8)],
        iters=given.iterations,
        nsamples=len(rows),
        seqlen=rows.shape[1],
        batch_size=8,
        group_size=given.group_size,
        sym=False,
        device_map="cpu",
    )
    tuner.quantize()


def llmcompressor(*names: str) -> Peer:
    """llm-compressor with these modifiers, as its examples use them."""
    modules = {
        "GPTQModifier": "llmcompressor.modifiers.gptq",
        "QuantizationModifier": "llmcompressor.modifiers.quantization",
        "AWQModifier": "llmcompressor.modifiers.transform.awq",
    }

    def run(model: Any, tokenizer: Any, rows: Tensor, given: argparse.Namespace) -> None:
        weights = {"num_bits": 4, "strategy": "group", "group_size": given.group_size}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"symmetric": False}}}
        recipe = []
        for name in names:
            rounds = name != "AWQModifier"
            options = {"config_groups": groups, "ignore": ["lm_head"]} if rounds else {}
            recipe.append(getattr(import_module(modules[name]), name)(**options))
        texts = import_module("datasets").Dataset.from_dict(
            {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
        )
        if not torch.cuda.is_available():  # it pins memory all the same
            setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # noqa: B010
        import_module("llmcompressor").oneshot(
            model=model,
            processor=tokenizer,
            dataset=texts,
            recipe=recipe,
            max_seq_length=rows.shape[1],
            num_calibration_samples=len(rows),
        )
        forward = import_module("compressed_tensors.quantization.lifecycle.forward")
        for module in model.modules():
            if scheme := getattr(module, "quantization_scheme", None):
                weight = module.weight.data
                weight.copy_(forward.forward_quantize(module, weight, "weight", scheme.weights))

    return run


PEERS: dict[str, Peer] = {
    "autoround": autoround,
    "llmcompressor-gptq": llmcompressor("GPTQModifier"),
    "llmcompressor-awq": llmcompressor("AWQModifier", "QuantizationModifier"),
    "llmcompressor-awq-gptq": llmcompressor("AWQModifier", "GPTQModifier"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=200, help="AutoRound's, for every block")
    given = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(given.model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    kept = set(model.state_dict())
    rows = torch.from_numpy(np.load(given.tokens)).long()
    PEERS[given.peer](model, tokenizer, rows, given)
    weights = {name: x for name, x in model.state_dict().items() if name in kept}
    save_file(
        {name: x.float().contiguous() for name, x in weights.items()},
        given.output / "model.safetensors",
    )
    for name in ("tokenizer.json", "config.json"):
        (given.output / name).write_bytes((given.model / name).read_bytes())


if __name__ == "__main__":
    main()
