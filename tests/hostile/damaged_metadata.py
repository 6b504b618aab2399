"""Metadata files with invalid contents, keys and values, and impossible model configs."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS
from tests.hostile.damage import Reader
from tests.hostile.paths import case_needs

CONTENTS: dict[str, bytes] = {
    "{}": b"{}",
    "[]": b"[]",
    "null": b"null",
    "a text": b'"text"',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"files":' * 20_000 + b"1" + b"}" * 20_000,
    "not UTF-8": b'{"files": "caf\xe9"}',
    "a long number": b'{"documents": ' + b"9" * 5000 + b"}",
    "NaN": b"NaN",
    "files: {}": b'{"files": {}}',
    "files: null": b'{"files": null}',
}
READ: dict[str, Reader] = {
    "data/data.json": ("pretrain", "--data"),
    "blended/data.json": ("pretrain", "--data"),
    "dense/lathe.json": ("prune", "model"),
    "int8/lathe.json": ("report", "second"),
    "plain/config.json": ("evaluate", "model"),
    "plain/tokenizer.json": ("evaluate", "model"),
    "dense-onnx/export.json": ("deploy", "exported"),
    "dense-eval/metrics.json": ("gate", "baseline"),
    "sensitivity/sensitivity.json": ("quantize", "--sensitivity"),
    "deployed/deploy.json": ("report", "--deployed"),
    "tokenizer.json": ("prepare", "--tokenizer"),
    "vocabulary/origin.json": ("tokenize", "--tokenizer"),
    "shard-1/shard.json": ("join", "first"),
}
KEYS = {
    "data/data.json": "made_from boundaries format documents tokens vocab_size eos_id part_tokens"
    " cloze_examples files",
    "blended/data.json": "documents tokens vocab_size eos_id blend",
    "dense/lathe.json": "stage n_params metrics files recipe",
    "plain/config.json": "model_type vocab_size n_positions n_embd n_layer n_head"
    " layer_norm_epsilon",
    "dense-onnx/export.json": "flavour n_head head_dim n_positions vocab_size eos_id sha256 source"
    " proof",
    "dense-eval/metrics.json": "model text protocol digests",
    "sensitivity/sensitivity.json": "mode metric model baseline linears skip",
    "deployed/deploy.json": "prompts identical serving samples",
    "vocabulary/origin.json": "source trained_on files",
    "shard-1/shard.json": "shard of source corpus_sha256 text_key tokenizer_sha256 trained_on"
    " text_sha256 documents tokens blocks files",
}
NEEDED = ("files", "sha256", "proof", "source", "boundaries", "eos_id", "vocab_size", "documents")
NEEDED += ("blend", "linears", "skip")
"""Required keys."""
NAN = math.nan
CHANGES: dict[str, list[tuple[str, Any]]] = {
    "data/data.json": [
        ("boundaries", [0, 0, 0, 0]),
        ("boundaries", [0, 99999, 99999, 99999]),
        ("boundaries", [64, 10, 3, 1]),
        ("boundaries", [-1, 64, 72, 80]),
        ("boundaries", [0, 64]),
        ("boundaries", []),
        ("boundaries", [0, 1.5, 2, 3]),
        ("eos_id", -1),
        ("eos_id", 10**9),
        ("eos_id", "0"),
        ("eos_id", None),
        ("vocab_size", 0),
        ("vocab_size", -5),
        ("vocab_size", 3),
        ("documents", -1),
        ("documents", 10**12),
        ("tokens", NAN),
        ("format", "parquet"),
        ("part_tokens", [1, 2]),
        ("part_tokens", [-1, -1, -1]),
        ("files", {}),
        ("files", {"tokens.bin": {}}),
        ("files", {"../small.yaml": {"bytes": 1, "sha256": "0" * 64}}),
        ("files", {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}),
    ],
    "blended/data.json": [
        ("blend", []),
        ("blend", [{}]),
        ("blend.0.weight", NAN),
        ("blend.0.weight", -1),
        ("blend.0.weight", 0),
        ("blend.0.folder", "../data"),
        ("blend.0.folder", "/"),
        ("blend.0.folder", "nope"),
        ("blend.0.metadata_sha256", "0" * 64),
        ("vocab_size", 3),
    ],
    "dense/lathe.json": [
        ("files", {}),
        ("files", {"model.safetensors": 3}),
        ("files", {"../small.yaml": "0" * 64}),
        ("files", {"/etc/passwd": "0" * 64}),
        ("n_params", -1),
        ("stage", 3),
        ("recipe", []),
    ],
    "plain/config.json": [
        ("n_head", 0),
        ("n_head", -4),
        ("n_head", 3),
        ("n_head", 4.5),
        ("n_head", True),
        ("n_head", "4"),
        ("n_embd", 0),
        ("n_embd", 1.5),
        ("n_embd", 6_000_000),
        ("n_embd", NAN),
        ("n_layer", 0),
        ("n_layer", -1),
        ("n_layer", 10**9),
        ("n_layer", 3),
        ("n_positions", 0),
        ("n_positions", 10**10),
        ("vocab_size", 0),
        ("vocab_size", 10**10),
        ("vocab_size", 10),
        ("layer_norm_epsilon", NAN),
        ("layer_norm_epsilon", -1),
        ("layer_norm_epsilon", "1e-5"),
        ("activation_function", "relu"),
        ("model_type", "bert"),
        ("lathe", []),
        ("lathe", {"head_dim": 8, "n_head": [], "n_inner": []}),
    ],
    "dense-onnx/export.json": [
        ("proof", {}),
        ("proof", None),
        ("proof.max_error", NAN),
        ("proof.max_error", -1),
        ("proof.tolerance", math.inf),
        ("proof.tolerance", "much"),
        ("sha256", "0" * 64),
        ("sha256", ""),
        ("source", "0" * 64),
        ("flavour", "fp8"),
        ("eos_id", -1),
        ("n_head", []),
        ("n_head", [0, 0]),
    ],
    "dense-eval/metrics.json": [
        ("text.perplexity", NAN),
        ("text.perplexity", -1),
        ("text.loss", "low"),
        ("text.blocks", -1),
        ("text.blocks", 3),
        ("text.blocks", 10**9),
        ("cloze.accuracy", 7),
        ("cloze.accuracy", NAN),
        ("cloze.examples", 2.5),
        ("digests", {}),
        ("digests.text", 3),
    ],
    "sensitivity/sensitivity.json": [
        ("skip", ["h.0.no.such"]),
        ("skip", [3]),
        ("skip", "h.0.attn.c_attn"),
        ("baseline", NAN),
        ("baseline", math.inf),
        ("linears", []),
        ("linears.0.score", NAN),
        ("linears.0.name", "../../x"),
        ("linears.0.n_params", -1),
        ("model", "0" * 64),
        ("metric", "beauty"),
    ],
    "deployed/deploy.json": [
        ("samples", [{}]),
        ("samples", [{"prompt": 3, "text": None}]),
        ("prompts", -1),
        ("serving.http_port", 99999),
        ("serving.model_name", "../../x"),
    ],
}
# Changes to the config of an INT8 checkpoint whose digest in lathe.json is updated.
PLANS: list[tuple[str, Any]] = [
    ("lathe.quantization.activation_scales.lm_head", 0.0),
    ("lathe.quantization.activation_scales.lm_head", -0.1),
    ("lathe.quantization.activation_scales.lm_head", NAN),
    ("lathe.quantization.activation_scales.lm_head", math.inf),
    ("lathe.quantization.activation_scales.lm_head", "0.1"),
    ("lathe.quantization.activation_scales", {"h.7.attn.c_attn": 0.1}),
    ("lathe.quantization.activation_scales", []),
    ("lathe.quantization.kv_cache_bits", 4),
    ("lathe.quantization.kv_cache_bits", 8),  # without scales among the tensors
    ("lathe.quantization.weight_bits", 0),
    ("lathe.quantization.weight_bits", 3),
    ("lathe.quantization.activation_bits", 16),
    ("lathe.quantization.weight_quantize_type", "guess"),
    ("lathe.quantization", []),
    ("lathe.quantization.more", 1),
    ("lathe.n_head", [3]),
    ("lathe.n_head", [0, 3]),
    ("lathe.n_inner", [104, -88]),
    ("lathe.head_dim", 0),
    ("layer_norm_epsilon", NAN),
]


def cases() -> Iterator[Case]:
    for metadata in READ:
        for name, content in CONTENTS.items():
            yield _case(metadata, "has other content", name, partial(_write, metadata, content))
    for metadata, keys in KEYS.items():
        for key in keys.split():
            yield _case(metadata, "has a key of another type", key, partial(_retype, metadata, key))
            if key in NEEDED:
                yield _case(metadata, "lacks a key", key, partial(_remove, metadata, key))
    for metadata, changes in CHANGES.items():
        for key, value in changes:
            name = f"{key}={_shown(value)}"
            yield _case(metadata, "has a wrong value", name, partial(_set, metadata, key, value))
    for key, value in PLANS:
        yield _plan("evaluate", "model", key, value)


def _case(
    metadata: str,
    row: str,
    name: str,
    step: Callable[[Path], None],
) -> Case:
    verb, argument = READ[metadata]
    command = COMMANDS[verb]
    artifact = metadata.split("/")[0]
    return Case(
        verb,
        f"{metadata} {row}",
        name,
        command.argv(**{argument: artifact}),
        needs=case_needs(command, artifact),
        make=(step,),
        names=artifact,
        writes=(command.written,) if command.written else (),
    )


def _plan(verb: str, argument: str, key: str, value: Any) -> Case:
    command = COMMANDS[verb]
    return Case(
        verb,
        "int8/config.json has a wrong value and the right digest",
        f"{key}={_shown(value)}",
        command.argv(**{argument: "int8"}),
        needs=case_needs(command, "int8"),
        make=(partial(_set, "int8/config.json", key, value), partial(seal, "int8/config.json")),
        names="int8",
    )


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


def _write(metadata: str, content: bytes, box: Path) -> None:
    (box / metadata).write_bytes(content)


def _retype(metadata: str, key: str, box: Path) -> None:
    values = json.loads((box / metadata).read_text())
    known = values.get(key)
    values[key] = 3 if isinstance(known, str) else "text" if not isinstance(known, dict) else [1]
    (box / metadata).write_text(json.dumps(values))


def _remove(metadata: str, key: str, box: Path) -> None:
    values = json.loads((box / metadata).read_text())
    values.pop(key, None)
    (box / metadata).write_text(json.dumps(values))


def _set(metadata: str, dotted: str, value: Any, box: Path) -> None:
    values = json.loads((box / metadata).read_text())
    *way, last = dotted.split(".")
    inner: Any = values
    for part in way:
        inner = inner[int(part)] if isinstance(inner, list) else inner[part]
    inner[int(last) if isinstance(inner, list) else last] = value
    (box / metadata).write_text(json.dumps(values))


def seal(file: str, box: Path) -> None:
    """Update the digest of a file in its folder's lathe.json."""
    path = box / file
    marker = path.with_name("lathe.json")
    values = json.loads(marker.read_text())
    digest, known = hashlib.sha256(path.read_bytes()).hexdigest(), values["files"][path.name]
    if isinstance(known, dict):
        values["files"][path.name] = known | {"bytes": path.stat().st_size, "sha256": digest}
    else:
        values["files"][path.name] = digest
    marker.write_text(json.dumps(values))
