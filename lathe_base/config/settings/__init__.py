"""The typed settings of every stage, in the groups and key names of PaddleFleetX.

`Launch`, `Prepare`, `Finetune`, `Sensitivity`, `Export`, `Serving`, `Gate`, `Card` and `Production`
are Lathe's own groups. A key's description is the text below it, which `lathe recipe --explain KEY`
prints and `docs/reference/settings.md` is generated from.
"""

from typing import Any

from pydantic import Field, model_validator

from lathe_base.config.settings.compression import (
    CompressSettings,
    DistillSettings,
    PruneSettings,
    QuantizationSettings,
    SensitivitySettings,
)
from lathe_base.config.settings.placement import (
    DistributedSettings,
    LaunchSettings,
    Placement,
    Placements,
    Sharding,
)
from lathe_base.config.settings.quality import CardSettings, GateSettings, OfflineEvalSettings
from lathe_base.config.settings.serving import (
    ExportSettings,
    GenerationSettings,
    InferenceSettings,
    ProductionSettings,
    ServingSettings,
)
from lathe_base.config.settings.training import (
    DataPart,
    Dataset,
    DataSettings,
    EngineSettings,
    FinetuneSettings,
    GlobalSettings,
    GradClip,
    LearningRate,
    LoraSettings,
    MixPrecision,
    ModelSettings,
    OptimizerSettings,
    PrepareSettings,
    SaveLoad,
)
from lathe_base.config.settings.types import Settings

__all__ = [
    "CardSettings",
    "CompressSettings",
    "DataPart",
    "DataSettings",
    "Dataset",
    "DistillSettings",
    "DistributedSettings",
    "EngineSettings",
    "ExportSettings",
    "FinetuneSettings",
    "GateSettings",
    "GenerationSettings",
    "GlobalSettings",
    "GradClip",
    "InferenceSettings",
    "LaunchSettings",
    "LearningRate",
    "LoraSettings",
    "MixPrecision",
    "ModelSettings",
    "OfflineEvalSettings",
    "OptimizerSettings",
    "Placement",
    "Placements",
    "PrepareSettings",
    "ProductionSettings",
    "PruneSettings",
    "QuantizationSettings",
    "Recipe",
    "SaveLoad",
    "SensitivitySettings",
    "ServingSettings",
    "Settings",
    "Sharding",
]


class Recipe(Settings):
    """All settings of a run; a stage reads the groups it needs."""

    Global: GlobalSettings = GlobalSettings()
    """Device, seed and batch size."""
    Engine: EngineSettings = EngineSettings()
    """The training loop."""
    Prepare: PrepareSettings = PrepareSettings()
    """Tokenization of a corpus."""
    Data: DataSettings = DataSettings()
    """Training and validation data."""
    Model: ModelSettings = ModelSettings()
    """Architecture and activations."""
    Distributed: DistributedSettings = DistributedSettings()
    """Parallel training layout."""
    Launch: LaunchSettings = LaunchSettings()
    """Machines to train on, and placement of pods."""
    Optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW and its learning rate."""
    Finetune: FinetuneSettings = FinetuneSettings()
    """Finetuning of a pretrained model."""
    Compress: CompressSettings = CompressSettings()
    """Pruning, distillation and quantization."""
    Sensitivity: SensitivitySettings = SensitivitySettings()
    """Sensitivity analysis of linear layers."""
    Generation: GenerationSettings = GenerationSettings()
    """Text generation parameters."""
    Offline_Eval: OfflineEvalSettings = OfflineEvalSettings()
    """Evaluation of models."""
    Export: ExportSettings = ExportSettings()
    """ONNX export and its verification."""
    Serving: ServingSettings = ServingSettings()
    """The Triton server."""
    Gate: GateSettings = GateSettings()
    """Margins of the quality gate."""
    Card: CardSettings = CardSettings()
    """License and intended use for the model card."""
    Production: ProductionSettings = ProductionSettings()
    """Releases and their acceptance tests."""
    Inference: InferenceSettings = Field(default=InferenceSettings(), exclude=True)
    """Exported model to deploy."""

    @model_validator(mode="before")
    @classmethod
    def _decay_to_the_end(cls, values: Any) -> Any:
        """An empty `Optimizer.lr.decay_steps` is `Engine.max_steps`, as in PaddleFleetX."""
        # Before the group is validated, which makes the default of an empty value.
        rates = _group(_group(values, "Optimizer"), "lr")
        steps = _group(values, "Engine").get("max_steps")
        if "decay_steps" in rates and rates["decay_steps"] is None and steps is not None:
            rates["decay_steps"] = steps
        return values


def _group(values: Any, name: str) -> dict[str, Any]:
    group = values.get(name) if isinstance(values, dict) else None
    return group if isinstance(group, dict) else {}
