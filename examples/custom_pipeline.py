"""A pipeline of your own from Lathe's components: which pruning criterion costs less?

    .venv/bin/python examples/custom_pipeline.py run
    .venv/bin/python examples/custom_pipeline.py compile criteria.yaml

`run` uses Kubeflow's local runner, with every step a subprocess, and prints the perplexities.
`compile` writes the YAML that a Kubeflow server takes.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kfp import compiler, dsl, local
from kfp.dsl.graph_component import GraphComponent

from components.evaluate.component import evaluate
from components.prepare.component import prepare
from components.pretrain.component import pretrain
from components.prune.component import prune

CRITERIA = ("l1_norm", "taylor")


def build(overrides: Sequence[str] = ()) -> GraphComponent:
    """The pipeline, in which every step has these overrides of its recipe."""
    common = list(overrides)

    @dsl.pipeline(name="criteria", description="One dense model, pruned by several criteria.")
    def criteria(corpus: str = "") -> None:
        data = prepare(recipe="tiny", overrides=common, corpus=corpus).outputs["data"]
        dense = pretrain(recipe="tiny", overrides=common, data=data).outputs["model"]
        models = {"dense": dense}
        for criterion in CRITERIA:
            own = [*common, f"Compress.Prune.criterion={criterion}"]
            task = prune(recipe="tiny-prune", overrides=own, model=dense, data=data)
            models[criterion] = task.set_display_name(f"prune by {criterion}").outputs["pruned"]
        for name, model in models.items():
            task = evaluate(recipe="tiny", overrides=common, model=model, data=data)
            task.set_display_name(f"evaluate {name}")

    return criteria


def run(pipeline: GraphComponent, folder: Path, corpus: str) -> dict[str, float]:
    """Perplexity of every model, in the order of the evaluations: dense, then the criteria."""
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(folder.absolute()))
    pipeline(corpus=corpus)
    newest = max(folder.glob("criteria-*"), key=lambda path: path.stat().st_mtime)
    found = sorted(newest.glob("evaluate*/evaluation/metrics.json"))
    values = [json.loads(path.read_text())["text"]["perplexity"] for path in found]
    return dict(zip(("dense", *CRITERIA), values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "compile"])
    parser.add_argument("output", nargs="?", type=Path, default=Path("run/criteria"))
    parser.add_argument("--corpus", default="", help="text; the recipe's own when empty")
    parser.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    pipeline = build(options.override)
    if options.action == "compile":
        compiler.Compiler().compile(pipeline, str(options.output))
        return
    for name, perplexity in run(pipeline, options.output, options.corpus).items():
        print(f"{name:8} perplexity {perplexity:.1f}")


if __name__ == "__main__":
    main()
