"""Builds a folder with one valid artifact of each kind, by real commands, in seconds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.hostile.child import Outcome

SETTINGS = (
    "Model.hidden_size=32",
    "Model.num_layers=2",
    "Model.num_attention_heads=4",
    "Model.max_position_embeddings=32",
    "Data.Train.dataset.split=800,100,100",
    "Data.Train.dataset.max_seq_len=32",
    "Data.Eval.dataset.max_seq_len=32",
    "Global.local_batch_size=4",
    "Global.micro_batch_size=4",
    "Engine.max_steps=2",
    "Engine.eval_freq=2",
    "Engine.eval_iters=1",
    "Engine.save_load.save_steps=1",
    "Prepare.vocab_size=300",
    "Prepare.cloze_examples=4",
    "Prepare.heldout_characters=800",
    "Optimizer.lr.warmup_rate=0",  # two steps learn something
    "Optimizer.lr.max_lr=2e-2",
    "Optimizer.lr.min_lr=2e-2",
    "Offline_Eval.max_seq_len=32",
    "Offline_Eval.overlapping_eval=16",
    "Generation.max_dec_len=4",
    "Generation.decode_strategy=greedy_search",
    "Compress.Prune.calibration_batches=1",
    "Sensitivity.calibration_batches=1",
    "Sensitivity.eval_batches=1",
    "Export.prompts=2",
    "Export.new_tokens=2",
    "Serving.http_port=0",
    "Serving.grpc_port=0",
    "Serving.metrics_port=0",
    "Serving.gateway_port=0",
    "Serving.threads=1",
    "Gate.max_accuracy_drop=1",
    "Gate.max_perplexity_increase=99",
)
RECIPES = {"small.yaml": "tiny", "small-prune.yaml": "tiny-prune", "small-qat.yaml": "tiny-qat"}
RUNS = (
    "prepare --source corpus.jsonl --tokenizer train -r small.yaml --output data",
    "prepare --source corpus.jsonl --tokenizer data -r small.yaml -o Prepare.format=paddle"
    " --output paddled",
    "tokenizer --source corpus.jsonl --tokenizer train -r small.yaml --output vocabulary",
    "tokenize --shard 1/2 --source corpus.jsonl --tokenizer vocabulary -r small.yaml"
    " --output shard-1",
    "tokenize --shard 2/2 --source corpus.jsonl --tokenizer vocabulary -r small.yaml"
    " --output shard-2",
    "blend data=1 paddled=1 --output blended",
    "pretrain --data data -r small.yaml --output dense",
    "prune dense --data data -r small-prune.yaml --output pruned",
    "analyze pruned --data data -r small-qat.yaml --output sensitivity",
    "quantize pruned --data data --sensitivity sensitivity -r small-qat.yaml --output int8",
    "evaluate dense --data data --cloze cloze.jsonl -r small.yaml --output dense-eval",
    "evaluate int8 --data data --cloze cloze.jsonl -r small.yaml --output int8-eval",
    "gate dense-eval int8-eval -r small.yaml --output gate.json",
    "export dense --data data -r small.yaml --output dense-onnx",
    "export int8 --data data -r small-qat.yaml --output int8-onnx",
    "export-paddle dense --output paddle",
    "import-paddle paddle --tokenizer data/tokenizer.json -r small.yaml --output imported",
    "report dense int8 -r small.yaml --output report.html",
    "compress dense --target bytes=0.9 --budget perplexity=9 --trials 1 --data data -r small.yaml"
    " --prune-recipe small-prune.yaml --qat-recipe small-qat.yaml --output compressed",
)
MEGATRON = (
    "import-megatron megatron --tokenizer data/tokenizer.json -r small.yaml"
    " --output imported-megatron"
)
DEPLOY = (
    "deploy dense-onnx --model dense --data data -r small.yaml --no-keep-running --output deployed"
)

Run = Callable[[list[str]], Outcome]


def build(world: Path, run: Run) -> None:
    """Build the world; `run` runs a command line in its folder.

    Raises:
        RuntimeError: a command failed.
    """
    world.mkdir(parents=True)
    _write_texts(world)
    options = [part for value in SETTINGS for part in ("-o", value)]
    for file, name in RECIPES.items():
        (world / file).write_text(_must(run, ["recipe", name, *options]))
    for line in RUNS:
        _must(run, line.split())
    write_megatron(world)
    _must(run, MEGATRON.split())
    shutil.copy(world / "data" / "tokenizer.json", world / "tokenizer.json")
    for name in ("costs.json", "prices.json", "designs.json"):
        shutil.copy(world / "compressed" / name, world / name)
    _strip(world / "dense", world / "plain")
    if run(DEPLOY.split()).status != 0:  # no Triton on this machine: its cases are skipped
        shutil.rmtree(world / "deployed", ignore_errors=True)


def _must(run: Run, argv: list[str]) -> str:
    outcome = run(argv)
    if outcome.status != 0:
        raise RuntimeError(f"lathe {' '.join(argv)}: status {outcome.status}\n{outcome.text}")
    return outcome.text


def _write_texts(world: Path) -> None:
    drinks = ("beer", "wine", "milk")
    verses = [f"{i} bottles of {drinks[i % 3]} on wall {i * 7}, side by side." for i in range(960)]
    documents = [{"text": "\n".join(verses[i : i + 12])} for i in range(0, 960, 12)]
    _write_lines(world / "corpus.jsonl", documents)
    _write_lines(world / "cloze.jsonl", [{"text": " ".join(verses[i : i + 2])} for i in range(4)])
    (world / "prompts.txt").write_text("\n".join(verses[:8]) + "\n")


def write_megatron(world: Path) -> None:
    """Write the dense checkpoint as Megatron-DeepSpeed does, in two tensor-parallel parts."""
    from lathe.model.checkpoint import load_checkpoint
    from tests.support.megatron_checkpoints import Checkpoint

    Checkpoint(load_checkpoint(world / "dense").model, tp=2).deepspeed(world / "megatron")


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _strip(checkpoint: Path, plain: Path) -> None:
    """Make a plain Hugging Face GPT-2 folder of a checkpoint, without Lathe's own parts."""
    plain.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(checkpoint / name, plain / name)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("lathe", None)
    (plain / "config.json").write_text(json.dumps(config))
