"""Other projects' untrained INT4, run with the Python of an environment that has their package:

    PYTHON benchmarks/quality_peers.py autoround MODEL TOKENS OUTPUT --group-size 32

`quality.py --peers` runs it. MODEL is a Hugging Face folder, TOKENS a NumPy file of calibration
text (rows, length), and OUTPUT becomes a Hugging Face folder with the dequantized weights. Only the
blocks' linears are quantized: integers with a 16-bit scale for every group and, but with ModelOpt,
a zero point.
"""

import argparse
import os
from collections.abc import Callable
from contextlib import chdir
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
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


def gptqmodel(**options: Any) -> Peer:
    """GPTQModel, with other options than its defaults."""

    def run(model: Any, tokenizer: Any, rows: Tensor, given: argparse.Namespace) -> None:
        # Of two cores it takes one, and demands two.
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
        package = import_module("gptqmodel")
        config = package.GPTQConfig(
            bits=4, group_size=given.group_size, sym=False, offload_to_disk=False, **options
        )
        folder = str(given.model.resolve())
        texts = [{"input_ids": [row], "attention_mask": [[1] * len(row)]} for row in rows.tolist()]
        with TemporaryDirectory() as scratch, chdir(scratch):  # it writes its log here
            quantized = package.GPTQModel.load(folder, config, device="cpu")
            quantized.quantize(texts, batch_size=8, tokenizer=tokenizer)
            packed, floats = Path(scratch, "packed"), Path(scratch, "floats")
            quantized.save(str(packed))
            tool = import_module("gptqmodel.utils.model_dequant")
            tool.dequantize_model(packed, floats, target_dtype=torch.float32)
            for file in floats.glob("*.safetensors"):
                model.load_state_dict(load_file(file), strict=False)

    return run


def modelopt(model: Any, _: Any, rows: Tensor, given: argparse.Namespace) -> None:
    """ModelOpt's AWQ: scales of inputs, then clipping, by search. It has no zero points."""
    quantization = import_module("modelopt.torch.quantization")
    config = deepcopy(quantization.INT4_AWQ_CFG) | {"algorithm": {"method": "awq_full"}}
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] == "*weight_quantizer":
            entry["cfg"]["block_sizes"][-1] = given.group_size

    def read(model: Any) -> None:
        for batch in rows.chunk(2):  # the search for clipping takes minutes for each
            model(batch)

    quantization.quantize(model, config, read)
    for module in model.modules():
        if getattr(module, "weight_quantizer", None) and module.weight_quantizer.is_enabled:
            # Whatever it does to its inputs before.
            weight = module(torch.eye(module.in_features)).detach().T
            module.weight_quantizer.disable()
            module.input_quantizer.disable()
            module.weight.data.copy_(weight)


def nncf(model: Any, _: Any, rows: Tensor, given: argparse.Namespace) -> None:
    """NNCF's AWQ with scale estimation; its GPTQ is for OpenVINO's models only."""
    package = import_module("nncf")
    hooks = import_module("nncf.torch.function_hook")
    floats = {name: x for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)}
    quantized = package.compress_weights(
        model,
        mode=package.CompressWeightsMode.INT4_ASYM,
        group_size=given.group_size,
        dataset=package.Dataset([{"input_ids": row[None]} for row in rows]),
        subset_size=len(rows),
        awq=True,
        scale_estimation=True,
        backup_mode=package.BackupMode.NONE,
    )
    decompressors = hooks.get_hook_storage(quantized).post_hooks
    for name, linear in floats.items():
        key = f"{name}.weight".replace(".", ":") + "__0"
        if key in decompressors:
            (decompress,) = decompressors[key].values()
            weight = decompress(linear.weight).detach()
            linear.weight = torch.nn.Parameter(weight)


PEERS: dict[str, Peer] = {
    "autoround": autoround,
    "gptqmodel": gptqmodel(),
    "gptqmodel-gptaq": gptqmodel(gptaq={"alpha": 0.25}),
    "llmcompressor-gptq": llmcompressor("GPTQModifier"),
    "llmcompressor-awq": llmcompressor("AWQModifier", "QuantizationModifier"),
    "llmcompressor-awq-gptq": llmcompressor("AWQModifier", "GPTQModifier"),
    "modelopt": modelopt,
    "nncf": nncf,
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
    if model.config.tie_word_embeddings:
        kept.discard("lm_head.weight")
    weights = {name: x for name, x in model.state_dict().items() if name in kept}
    save_file(
        {name: x.float().contiguous() for name, x in weights.items()},
        given.output / "model.safetensors",
    )
    for name in ("tokenizer.json", "config.json"):
        (given.output / name).write_bytes((given.model / name).read_bytes())


if __name__ == "__main__":
    main()
