"""Every file of every artifact, damaged in several ways, for the verbs that read it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS, Command
from tests.hostile.paths import case_needs

Reader = tuple[str, str]
"""A verb, and the argument that takes the artifact."""

OF_DATA: list[Reader] = [("pretrain", "--data"), ("blend", "first")]
OF_TEXT: list[Reader] = [("evaluate", "--data"), ("export", "--data")]
OF_MODEL: list[Reader] = [
    *[("generate", "model"), ("prune", "model"), ("export", "model")],
    *[("evaluate", "model"), ("report", "first"), ("pretrain", "--init")],
]
OF_PLAIN: list[Reader] = [("evaluate", "model"), ("prune", "model")]
OF_EXPORT: list[Reader] = [("deploy", "exported"), ("evaluate", "model")]

# Files covered by a digest: any changed byte must be an error.
SEALED: dict[str, list[Reader]] = {
    "data/tokens.bin": OF_DATA,
    "data/tokens.idx": OF_DATA,
    "data/tokenizer.json": OF_DATA,
    "data/heldout.txt": OF_TEXT,
    "paddled/tokens_ids.npy": [("blend", "second"), ("pretrain", "--data")],
    "paddled/tokens_idx.npz": [("blend", "second")],
    "blended/1-data/tokens.bin": [("pretrain", "--data")],
    "blended/2-paddled/tokens_idx.npz": [("pretrain", "--data")],
    "vocabulary/tokenizer.json": [("tokenize", "--tokenizer")],
    "shard-1/tokens.bin": [("join", "first")],
    "shard-2/text.jsonl.zst": [("join", "second")],
    "dense/model.safetensors": OF_MODEL,
    "dense/config.json": OF_MODEL,
    "dense/tokenizer.json": OF_MODEL,
    "int8/model.safetensors": [("evaluate", "model"), ("report", "second")],
    "pruned/model.safetensors": [("analyze", "model"), ("quantize", "model")],
    "dense-onnx/model.onnx": OF_EXPORT,
    "dense-onnx/config.json": OF_EXPORT,
    "dense-onnx/tokenizer.json": OF_EXPORT,
    "dense-eval/blocks.jsonl": [("gate", "baseline")],
    "dense-eval/examples.jsonl": [("gate", "candidate")],
}
# Files without a digest: damage that leaves a valid file cannot be detected.
OPEN: dict[str, list[Reader]] = {
    "data/data.json": OF_DATA,
    "vocabulary/origin.json": [("tokenize", "--tokenizer")],
    "shard-1/shard.json": [("join", "first")],
    "blended/data.json": [("pretrain", "--data")],
    "dense/lathe.json": OF_MODEL,
    "plain/model.safetensors": OF_PLAIN,
    "plain/config.json": OF_PLAIN,
    "plain/tokenizer.json": OF_PLAIN,
    "dense-onnx/export.json": OF_EXPORT,
    "dense-eval/metrics.json": [("gate", "baseline"), ("report", "first")],
    "dense-eval/samples.json": [("report", "first")],
    "sensitivity/sensitivity.json": [("quantize", "--sensitivity"), ("report", "--sensitivity")],
    "deployed/deploy.json": [("report", "--deployed")],
    "paddle/mp_00_sharding_00_pp_00/model.pdparams": [("import-paddle", "source")],
    "megatron/global_step5/mp_rank_00_model_states.pt": [("import-megatron", "source")],
    "megatron/latest": [("import-megatron", "source")],
    "tokenizer.json": [("prepare", "--tokenizer"), ("import-paddle", "--tokenizer")],
}
# Data sets and tokenizers of other tools have no metadata file, and Megatron-LM's second tracker
# stands for DeepSpeed's.
FOREIGN = {
    ("data/data.json", "absent"),
    ("vocabulary/origin.json", "absent"),
    ("megatron/latest", "absent"),
}
MAY_LACK = {"dense-eval/samples.json"}


def absent(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(share: float, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def text(path: Path) -> None:
    path.write_text("Once upon a time\n")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


ALWAYS: dict[str, Callable[[Path], None]] = {
    "absent": absent,
    "empty": empty,
    "text": text,
    "a-folder": folder,
    "dangling-link": dangling,
    "first-byte": partial(flipped, 0.0),
}
IF_SEALED: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "byte-at-a-third": partial(flipped, 1 / 3),
    "byte-in-the-middle": partial(flipped, 0.5),
    "last-byte": partial(flipped, 1.0),
}

TELLING = ("empty", "byte-in-the-middle")
"""Kinds of damage to test with every reader of a file; others are tested with the first reader."""


def cases() -> Iterator[Case]:
    for files, is_sealed in ((SEALED, True), (OPEN, False)):
        for file, readers in files.items():
            for number, (verb, name) in enumerate(readers):
                for damage, change in (ALWAYS | IF_SEALED).items():
                    if damage == "absent" and file in MAY_LACK:
                        continue
                    if damage not in TELLING and (
                        number or (damage in IF_SEALED and not is_sealed)
                    ):
                        continue
                    is_seen = is_sealed or (damage in ALWAYS and (file, damage) not in FOREIGN)
                    yield _case(COMMANDS[verb], name, file, damage, change, is_seen)


def _case(
    command: Command,
    name: str,
    file: str,
    damage: str,
    change: Callable[[Path], None],
    is_seen: bool,
) -> Case:
    artifact = file.split("/")[0]
    values = {**command.arguments, **command.options}
    weight = "=1" if "=" in values.get(name, "") else ""
    beside = {"dense-eval", "dense-onnx"} if command.verb == "report" else set()
    changes = {} if artifact in beside else {name: artifact + weight}
    return Case(
        command.verb,
        f"{file} damaged",
        damage,
        command.argv(**changes),
        needs=case_needs(command, artifact),
        make=(partial(_damaged, file, change),),
        expect="refused" if is_seen else "any",
        names=file.split("/")[0] if is_seen else "",
        writes=(command.written,) if command.written else (),
    )


def _damaged(file: str, change: Callable[[Path], None], box: Path) -> None:
    change(box / file)
