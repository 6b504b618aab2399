"""The models of a Triton repository that Lathe has written."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

from lathe_base.artifacts.sampling import sampling_defaults
from lathe_base.errors import UserError


@dataclass(frozen=True)
class Model:
    """A model that generates.

    Attributes:
        created: when it was deployed, in seconds since the epoch.
        digest: SHA-256 of its `model.onnx`.
        max_running: number of sequences that it generates concurrently.
        max_wait: maximum expected wait for a slot, in seconds; None means half the recent time per
            prompt.
        folder: its export.
        n_positions: length of its context.
        chat_template: that of the checkpoint; empty if it has none.
        aliases: its additional names.
        recommended: request parameters that its authors recommend, of `generation_config.json`.
    """

    name: str
    created: int
    digest: str
    max_running: int
    folder: Path
    n_positions: int
    max_wait: float | None = None
    chat_template: str = ""
    aliases: tuple[str, ...] = ()
    recommended: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, name: str) -> dict[str, object]:
        """The model's entry in the list of models, under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "lathe",
            "root": self.name,
            "max_model_len": self.n_positions,  # this and `root` as in vLLM
            "has_chat_template": bool(self.chat_template),
            "generation_config": dict(self.recommended),
        }


def read_models(repository: Path) -> dict[str, Model]:
    """The models by their names.

    Raises:
        UserError: there are none, or a config.pbtxt was not written by Lathe.
    """
    models = {}
    for path in sorted(repository.glob("*/config.pbtxt")):
        try:
            config = text_format.Parse(
                path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig()
            )
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {error}", "deploy the model again") from None
        if config.model_transaction_policy.decoupled:  # the others score
            models[config.name] = _model(path, config)
    if not models:
        hint = "give the `repository` folder written by `lathe deploy`, or a downloaded release"
        raise UserError(f"{repository}: no models", hint)
    return models


def models_by_name(models: Iterable[Model]) -> dict[str, Model]:
    """The models by each of their names.

    Raises:
        UserError: two have the same name.
    """
    by_name: dict[str, Model] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if by_name.setdefault(name, model) is not model:
                what = (
                    f"Serving.aliases: {name} is used by both {by_name[name].name} and {model.name}"
                )
                raise UserError(what, "deploy one of them again, without it")
    return by_name


def _model(path: Path, config: model_config_pb2.ModelConfig) -> Model:
    settings = {key: value.string_value for key, value in config.parameters.items()}
    try:
        digest, max_running = (json.loads(settings[key]) for key in ("sha256", "max_running"))
        max_wait = json.loads(settings.get("max_wait_seconds", "null"))
        aliases = json.loads(settings.get("aliases", "[]"))
    except (KeyError, ValueError):
        raise UserError(f"{path}: not written by Lathe", "deploy the model again") from None
    created, folder = int(path.stat().st_mtime), path.parent / "1"
    ours = _setting(folder / "config.json", "lathe")
    template = ours.get("chat_template")
    sampling = sampling_defaults(ours.get("sampling", {}), f"{folder / 'config.json'}: sampling")
    return Model(
        config.name,
        created,
        digest,
        max_running,
        folder,
        _setting(folder / "export.json", "n_positions"),
        max_wait,
        template if isinstance(template, str) else "",
        tuple(aliases),
        sampling.for_requests(),
    )


def _setting(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not written by Lathe", "deploy the model again") from None
