"""The settings that each step reads.

A step is given these and no others, as an excerpt of its recipe, and reading another is an error:
what is not here does not invalidate its result. This is a table of its own because the first step
of a run reads it in its pod, where KFP cannot import components.
"""

from collections.abc import Sequence

RESTARTS = "Launch.restarts"
"""A setting that every step reads: `components.stage`."""

TRAINING = (
    *("Global", "Engine", "Data", "Model", "Distributed", "Launch", "Optimizer"),
    *("Compress.engine", "Compress.Distill", "Compress.Quantization"),
)
ON_GPU = ("Global", "Launch.gpus_per_node", "Compress.engine")

SETTINGS: dict[str, Sequence[str]] = {
    "prepare": ("Prepare", "Data"),
    "pretrain": TRAINING,
    "finetune": (*TRAINING, "Finetune"),
    "prune": (*TRAINING, "Compress.Prune"),
    "analyze": (
        *(*ON_GPU, "Engine", "Data", "Model", "Distributed", "Compress.Quantization"),
        *("Sensitivity", "Gate.max_perplexity_increase"),
    ),
    "quantize": (*TRAINING, "Sensitivity.calibration_batches", "Gate.max_perplexity_increase"),
    "estimate": (
        *(*ON_GPU, "Engine", "Data", "Compress.Quantization", "Sensitivity"),
        "Gate.max_perplexity_increase",
    ),
    "evaluate": (*ON_GPU, "Offline_Eval", "Generation"),
    "export": ("Export", "Compress.engine", "Production.require"),
    "price": ("Export", "Compress.Quantization"),
    "choose": ("Gate",),
    "deploy": ("Serving", "Generation", "Export"),
    "gate": ("Gate",),
    "release": (
        *("Production", "Offline_Eval", "Gate", "Serving", "Global", "Generation"),
        "Compress.engine",
    ),
    "report": ("Gate",),
}
"""Component -> groups of the recipe, or `Group.key`."""

SHARED = {"tokenizer": "prepare", "tokenize": "prepare", "join": "prepare"}
SHARED |= {"certify": "pretrain", "design": "export"}
"""Components that read the same settings as another."""

RECIPES = {"prune": "prune_recipe", "finetune": "finetune_recipe"}
RECIPES |= dict.fromkeys(("analyze", "quantize", "estimate"), "qat_recipe")
"""Component -> the argument of a pipeline with the recipe of its settings, if it is another than
`recipe`. A pipeline without that argument has one recipe."""
