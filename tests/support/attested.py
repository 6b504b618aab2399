"""A small run of real steps with signed attestations, from a corpus to an export that passed the
gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from lathe.data.prepare import prepare
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.gate import gate
from lathe.export.export import export
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.provenance.keys import SIGNING_KEY, generate
from tests.support.small_run import SMALL

OVERRIDES = [
    *SMALL,
    *("Engine.max_steps=8", "Prepare.vocab_size=300", "Prepare.cloze_examples=20"),
    *("Export.prompts=2", "Export.new_tokens=4", "Serving.threads=1"),
    *("Gate.max_perplexity_increase=10.0", "Gate.max_accuracy_drop=1.0"),
]


@dataclass(frozen=True)
class AttestedRun:
    """Outputs of the steps: every attribute is a path in `folder`, unless defined here."""

    folder: Path

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe("tiny", OVERRIDES)

    @property
    def public(self) -> Path:
        return self.folder / "key.pub"

    @property
    def corpus_bytes(self) -> bytes:
        return (self.folder / "corpus.txt").read_bytes()

    def __getattr__(self, name: str) -> Path:
        return self.folder / name


def make(folder: Path, texts: Sequence[str]) -> None:
    """Run the steps.

    Args:
        texts: the corpus.
    """
    folder.mkdir()
    recipe = load_recipe("tiny", OVERRIDES)
    generate(folder / "key.pem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGNING_KEY, str(folder / "key.pem"))
        (folder / "corpus.txt").write_text("\n\n".join(texts), encoding="utf-8")
        data = folder / "data"
        prepare(recipe, data, str(folder / "corpus.txt"))
        for name, seed in (("dense", 1), ("other", 2)):
            own = recipe.Global.model_copy(update={"seed": seed})
            pretrain(recipe.model_copy(update={"Global": own}), data, folder / name)
            evaluate(recipe, folder / name, folder / f"{name}-eval", data)
        gate(recipe, folder / "dense-eval", folder / "other-eval", folder / "verdict.json")
        export(recipe, folder / "other", data, folder / "onnx")
        export(recipe, folder / "dense", data, folder / "dense_onnx")
