"""Read a YAML recipe: `_base_` inheritance, `-o A.B.c=v` overrides, typed and checked.

A recipe is named by a path, or by the bare name of one that ships in `lathe/recipes/`.
"""

import difflib
import json
import logging
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lathe.errors import UserError
from lathe.settings import Recipe

log = logging.getLogger("lathe")

SHIPPED = Path(str(files("lathe") / "recipes"))

# Keys of PaddleFleetX recipes that have no meaning here: dropped with one warning, so that an
# existing file still reads. A trailing dot-star stands for the whole group.
SEED_KEYS_IGNORED = frozenset(
    """
    Profiler Inference Fused Offline_Eval.logging_freq
    Engine.run_mode Engine.num_train_epochs Engine.test_iters Engine.save_load.save_epoch
    Engine.save_load.output_dir Engine.save_load.ckpt_dir
    Engine.mix_precision.custom_black_list Engine.mix_precision.custom_white_list
    Model.module Model.name Model.type_vocab_size Model.fused_linear Model.no_recompute_layers
    Data.Test
    Data.Train.sampler Data.Train.loader Data.Train.dataset.name
    Data.Eval.sampler Data.Eval.loader Data.Eval.dataset.name
    Distributed.sharding.comm_overlap Distributed.sharding.reduce_overlap
    Distributed.sharding.broadcast_overlap
    Optimizer.tensor_fusion
    Generation.use_topp_sampling Generation.inference
    Compress.Quantization.quantizable_layer_type Compress.Quantization.onnx_format
    Compress.Quantization.weight_preprocess_type
    Global.logging_freq Global.save_load
    """.split()
)


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Merge a recipe with its bases and `overrides` (`"Engine.max_steps=100"`) and check it.

    Raises:
        UserError: no such recipe, an unknown key (names the nearest known one), a value of the
            wrong type or out of range (names the file and line it came from).
    """
    path = _find(name)
    values, origins = _read(path, ())
    try:
        merged = OmegaConf.merge(OmegaConf.create(values), OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: {error}", "write overrides as -o Group.key=value, lists as [a,b]"
        ) from error
    for override in overrides:
        origins[override.split("=", 1)[0].strip()] = f"-o {override}"
    assert isinstance(plain, dict)
    dropped = _drop_seed_keys(plain)
    if dropped:
        log.warning("%s: keys without a meaning here, ignored: %s", path, ", ".join(dropped))
    try:
        return Recipe.model_validate(plain)
    except ValidationError as error:
        raise _explain(error.errors()[0], plain, origins, path) from None


def recipe_from_json(text: str) -> Recipe:
    """The inverse of `Recipe.model_dump_json`, as `lathe.json` records a recipe."""
    return Recipe.model_validate(json.loads(text))


def _find(name: str | Path) -> Path:
    for path in (Path(name), SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    shipped = sorted(p.stem for p in SHIPPED.glob("*.yaml"))
    near = difflib.get_close_matches(str(name), shipped, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no recipe {str(name)!r}", f"{hint}give a YAML file, or one of {', '.join(shipped)}"
    )


def _read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """A file merged over its `_base_`, and for each dotted key the file and line that set it."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path}: _base_ goes in a circle", "remove one _base_ line")
    if not path.is_file():
        raise UserError(
            f"{seen[-1]}: _base_ names {path}, which does not exist",
            "_base_ is a path relative to the file that names it",
        )
    try:
        node = yaml.compose(path.read_text())
        values = OmegaConf.to_container(OmegaConf.load(path)) if node else {}
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not YAML: {error}", "mend the file") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a mapping of groups", "write Group: {key: value}")
    origins = dict(_lines(node, path.name)) if node else {}
    base = values.pop("_base_", None)
    if base is None:
        return _merge({}, values), origins
    base_values, base_origins = _read(path.parent / base, (*seen, path))
    return _merge(base_values, values), base_origins | origins


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Recursive; a group of `over` that says `_inherited_: False` replaces instead."""
    out = {} if over.get("_inherited_") is False else dict(base)
    for key, value in over.items():
        if isinstance(value, dict):
            inherited = out.get(key)
            out[key] = _merge(inherited if isinstance(inherited, dict) else {}, value)
        elif key != "_inherited_":
            out[key] = value
    return out


def _lines(node: yaml.Node, name: str, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            found.append((dotted, f"{name}:{key.start_mark.line + 1}"))
            found += _lines(value, name, f"{dotted}.")
    return found


def _drop_seed_keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Remove ignored keys, and empty ones (`key:` with no value means the default)."""
    dropped = []
    for key in list(values):
        dotted = f"{prefix}{key}"
        if dotted in SEED_KEYS_IGNORED:
            del values[key]
            dropped.append(dotted)
        elif isinstance(values[key], dict):
            dropped += _drop_seed_keys(values[key], f"{dotted}.")
    return dropped


def _explain(
    detail: ErrorDetails, values: dict[str, Any], origins: dict[str, str], path: Path
) -> UserError:
    location = [str(part) for part in detail["loc"]]
    dotted = ".".join(location)
    origin = next(
        (origins[key] for n in range(len(location), 0, -1) if (key := ".".join(location[:n])) in origins),
        path.name,
    )
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(location[-1], known, 1, cutoff=0.5)
        cure = f"did you mean {'.'.join([*location[:-1], near[0]])}?" if near else ""
        return UserError(
            f"{origin}: unknown key {dotted}", cure or f"known keys here: {', '.join(known)}"
        )
    message = detail["msg"].removeprefix("Value error, ")
    return UserError(f"{origin}: {dotted}: {message} (found {detail['input']!r})", "mend the value")


def _known_keys(groups: Sequence[str]) -> list[str]:
    model: Any = Recipe
    for group in groups:
        field = model.model_fields.get(group)
        if field is None or not issubclass(field.annotation, BaseModel):
            return []
        model = field.annotation
    return list(model.model_fields)
