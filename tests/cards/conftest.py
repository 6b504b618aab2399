"""A small model through all stages, with everything stated that can be."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.config.recipe import load_recipe
from lathe.data.prepare import prepare
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.gate import gate
from lathe.export.export import export
from lathe.train.pretrain import pretrain
from tests.support.small_run import SMALL

STATED = (
    "Card.license=Apache-2.0",
    "Card.language=en",
    "Card.intended_use=To count bottles | and walls.",
    "Card.out_of_scope=To count anything else.",
    "Card.contact=The bottle team",
    "Prepare.license=CC0-1.0",
)
INT4 = ("Compress.Quantization.weight_bits=4", "Compress.Quantization.group_size=32")
QUICK = (
    "Export.prompts=4",
    "Export.new_tokens=4",
    "Engine.max_steps=2",
    "Generation.max_dec_len=4",
)


@dataclass(frozen=True)
class Stages:
    """The folders of the stages.

    Attributes:
        models: checkpoint folders by name.
        evaluations: of the dense and the INT8 model.
        verdict: of the INT8 model beside the dense one.
        exported: of the INT8 model.
    """

    data: Path
    models: Mapping[str, Path]
    evaluations: Mapping[str, Path]
    verdict: Path
    exported: Path


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Stages:
    folder = tmp_path_factory.mktemp("cards")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    lines = [f"{i} bottles of beer on wall {i * 7}.\n\n" for i in range(2000)]
    (folder / "corpus.txt").write_text("".join(lines))
    recipe = load_recipe("tiny", [*SMALL, *STATED, *QUICK])
    data = folder / "data"
    prepare(recipe, data, str(folder / "corpus.txt"), str(folder / "tokenizer.json"))
    models = {name: folder / name for name in ("dense", "pruned", "int8", "int4")}
    pretrain(recipe, data, models["dense"])
    prune(
        load_recipe("tiny-prune", [*SMALL, *STATED, *QUICK]),
        models["dense"],
        data,
        models["pruned"],
    )
    qat = [*SMALL, *STATED, *QUICK, "Engine.max_steps=0"]
    quantize(load_recipe("tiny-qat", qat), models["pruned"], data, models["int8"])
    quantize(load_recipe("tiny-qat", [*qat, *INT4]), models["dense"], data, models["int4"])
    export(recipe, models["int8"], data, folder / "onnx")
    (folder / "cloze.jsonl").write_text('{"text": "7 bottles of beer on wall"}\n' * 12)
    (folder / "text.txt").write_text("".join(lines[-60:]))
    inputs = {"cloze": folder / "cloze.jsonl", "text": folder / "text.txt"}
    evaluations = {name: folder / f"{name}-eval" for name in ("dense", "int8")}
    for name, output in evaluations.items():
        evaluate(recipe, models[name], output, **inputs)
    gate(recipe, evaluations["dense"], evaluations["int8"], folder / "gate.json")
    return Stages(data, models, evaluations, folder / "gate.json", folder / "onnx")
