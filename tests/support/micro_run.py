"""A recipe and a corpus small enough that every stage takes seconds."""

import random
from pathlib import Path

from tests.support import fake_kfp, quick_kfp  # noqa: F401

RECIPE = """
Global: {seed: 7, local_batch_size: 4, micro_batch_size: 4}
Engine:
  max_steps: 3
  logging_freq: 1
  eval_freq: 3
  eval_iters: 1
  mix_precision: {dtype: float32}
Optimizer: {lr: {max_lr: 1.0e-2, min_lr: 1.0e-3, warmup_rate: 0}}  # three steps learn something
Prepare: {vocab_size: 300}
Data:
  Train: {dataset: {max_seq_len: 64, split: [80, 10, 10]}}
  Eval: {dataset: {max_seq_len: 64, split: [80, 10, 10]}}
Model:
  vocab_size:
  hidden_size: 32
  num_layers: 2
  num_attention_heads: 2
  max_position_embeddings: 64
Compress: {Prune: {enable: true, ratio: 0.5}, Quantization: {enable: true}}
Sensitivity: {calibration_batches: 1, eval_batches: 1}
Generation: {decode_strategy: greedy_search, max_dec_len: 8}
Export: {prompts: 2, new_tokens: 4}
Serving: {http_port: 0, grpc_port: 0, metrics_port: 0, gateway_port: 0}
Gate: {max_accuracy_drop: 1.0, max_perplexity_increase: 10.0}
"""


def write_recipe(folder: Path) -> Path:
    path = folder / "micro.yaml"
    path.write_text(RECIPE)
    return path


def write_corpus(parent: Path) -> Path:
    """Write 40 documents of sentences with few distinct words.

    A cloze passage requires that its last word occurred before.
    """
    draw = random.Random(0)
    subjects = ["the turner", "a child", "the old clerk", "my neighbour", "the captain"]
    verbs = ["saw", "mended", "sold", "carried", "forgot"]
    things = ["lamp", "wheel", "ladder", "kettle", "drum", "letter", "basket"]
    folder = parent / "corpus"
    folder.mkdir()
    for n in range(40):
        sentences = [
            f"{draw.choice(subjects).capitalize()} {draw.choice(verbs)} the {draw.choice(things)}."
            for _ in range(60)
        ]
        (folder / f"{n:02}.txt").write_text(" ".join(sentences))
    return folder
