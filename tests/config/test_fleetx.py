"""PaddleFleetX's configurations: all that it has published, and what becomes of each key."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from lathe.train.schedule import clip_factor, is_decayed
from lathe.train.shape import model_config
from lathe_base.config.fleetx import with_locations
from lathe_base.config.fleetx_keys import KEYS, Moved, Same
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import flat
from lathe_base.config.text import write as write_values
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.fleetx import CONFIGURATIONS, published, write_configurations

GLUE = "training by epochs, as in finetuning on GLUE, is not supported"
REFUSED = {
    "finetune_gpt_base.yaml": GLUE,
    "finetune_gpt_345M_single_card_glue.yaml": GLUE,
    "pretrain_moe_345M_single_card.yaml": "mixture-of-experts models are not supported",
}
"""Reasons for which a file is refused, by its name; all others load."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published files, as YAML."""
    root = tmp_path_factory.mktemp("published")
    write_configurations(root)
    return root


def merged(name: str) -> dict[str, Any]:
    """A published file over its bases, merged independently of Lathe."""
    own = dict(CONFIGURATIONS[name])
    base = own.pop("_base_", None)
    return over(merged(str(PurePosixPath(name).parent / base)), own) if base else own


def over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in values.items():
        is_group = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = over(out[key], value) if is_group else value
    return out


def leaves(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def row(key: str) -> str | None:
    """The table's row for a key: its own, or that of a group that it is in."""
    while key and key not in KEYS:
        key = key.rpartition(".")[0]
    return key or None


def recipe_value(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


@published
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_published_file_loads_with_its_values_or_is_rejected_with_a_reason(
    name: str, folder: Path
) -> None:
    if reason := REFUSED.get(PurePosixPath(name).name):
        with raises(Code.UNSUPPORTED, reason):
            load_recipe(folder / name)
        return
    recipe = load_recipe(folder / name)
    compared = 0
    for key, value in leaves(merged(name)):
        found = row(key)
        assert found is not None, f"{key}: no row"
        fate = KEYS[found]
        if isinstance(fate, Moved):
            key = fate.to + key.removeprefix(found)
            fate = KEYS.get(row(key) or "", Same())
        if value is None or not isinstance(fate, Same):
            continue
        actual = recipe_value(recipe, key)
        expected = float(value) if isinstance(actual, float) else value
        assert actual == (tuple(value) if key.endswith("split") else expected), key
        compared += 1
    assert compared >= (3 if name.endswith("export_gpt_fp16_single_card.yaml") else 10)


@published
def test_every_published_key_has_a_row() -> None:
    keys = {key for values in CONFIGURATIONS.values() for key, _ in leaves(values)}
    assert len(keys) == 225
    assert [key for key in sorted(keys - {"_base_"}) if row(key) is None] == []


def test_the_same_and_moved_keys_are_settings() -> None:
    schema = Recipe.model_json_schema()
    settings = set(explained(schema, schema["$defs"]))
    targets = {key for key, fate in KEYS.items() if isinstance(fate, Same)}
    targets |= {fate.to for fate in KEYS.values() if isinstance(fate, Moved)}
    for target in targets:
        assert target in settings or row(target) is not None, target
    assert {key for key in KEYS if isinstance(KEYS[key], Same)} <= settings


def explained(
    schema: dict[str, Any], definitions: dict[str, Any], above: str = ""
) -> Iterator[str]:
    for name, field in schema["properties"].items():
        yield f"{above}{name}"
        if "$ref" in field:
            inner = definitions[field["$ref"].rpartition("/")[2]]
            yield from explained(inner, definitions, f"{above}{name}.")


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(text)
    return load_recipe(tmp_path / "recipe.yaml", overrides)


def test_the_first_layout_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        """
Global: {device: gpu, seed: 1}
Data:
  batch_size: {global_batch_size: 64, local_batch_size: 8, micro_batch_size: 4}
  dataset: {input_dir: ./tokens, split: '98,2,0', max_seq_len: 512}
Engine: {mix_precision: {use_pure_fp16: True}}
Optimizer: {name: Adam, adam_beta1: 0.8, lr: {name: consine}, grad_clip: 0.5}
Eval: {eval_path: "None", ckpt_dir: "None", overlapping_eval: 16}
Quantization: {enable: True, channel_wise_abs_max: False, pretrained: ./model}
""",
    )
    sizes, data, optimizer = recipe.Global, recipe.Data, recipe.Optimizer
    assert (sizes.global_batch_size, sizes.local_batch_size, sizes.micro_batch_size) == (64, 8, 4)
    for part in (data.Train.dataset, data.Eval.dataset):
        assert (part.input_dir, part.split, part.max_seq_len) == ("./tokens", (98, 2, 0), 512)
    assert (optimizer.name, optimizer.beta1, optimizer.grad_clip.clip_norm) == (
        "FusedAdamW",
        0.8,
        0.5,
    )
    assert recipe.Offline_Eval.eval_path is recipe.Engine.save_load.ckpt_dir is None
    assert recipe.Offline_Eval.overlapping_eval == 16
    assert recipe.Compress.Quantization.weight_quantize_type == "abs_max"
    assert recipe.Compress.pretrained == "./model"
    assert recipe.Engine.mix_precision.is_pure


def test_keys_that_change_no_number_are_named_once_with_their_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "base.yaml").write_text(
        "Profiler:\n  enable: False\nFused: {tensor_fusion: True}\n"
    )
    with caplog.at_level(logging.WARNING, logger="lathe"):
        load(
            tmp_path,
            "_base_: base.yaml\nModel:\n  fused_linear: True\n  no_recompute_layers:\n",
            "Model.use_flash_attn=True",
        )
    [warning] = caplog.messages
    assert f"{tmp_path}/recipe.yaml: Model.fused_linear (3)" in warning
    assert f"{tmp_path}/base.yaml: Fused (3), Profiler (1)" in warning
    assert "-o Model.use_flash_attn=True" in warning
    assert "no_recompute_layers" not in warning  # it is empty


@pytest.mark.parametrize("enabled", ["enable: True", "enable: True, level: o2"])
def test_mixed_precision_defaults_to_float16_at_o2(tmp_path: Path, enabled: str) -> None:
    def precision(base: str, *overrides: str) -> tuple[str, str]:
        (tmp_path / "base.yaml").write_text(base)
        text = f"_base_: base.yaml\nEngine: {{mix_precision: {{{enabled}}}}}\n"
        found = load(tmp_path, text, *overrides).Engine.mix_precision
        return found.dtype, found.level

    assert precision("") == ("float16", "O2")
    assert precision("Engine: {mix_precision: {dtype: bfloat16}}") == ("bfloat16", "O2")
    assert precision("Engine: {mix_precision: {dtype: float32}}") == ("float16", "O2")
    assert precision("", "Engine.mix_precision.dtype=bfloat16") == ("bfloat16", "O2")
    assert precision("", "Engine.mix_precision.enable=False")[0] == "float32"


def test_minus_one_means_never(tmp_path: Path) -> None:
    text = "Engine: {max_steps: -1, eval_freq: -1, eval_iters: -1, save_load: {save_steps: -1}}"
    engine = load(tmp_path, text).Engine
    assert engine.max_steps == 0
    assert engine.eval_freq == engine.save_load.save_steps == 2**31 - 1
    assert engine.eval_iters == 10


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (
            "Engine:\n  num_train_epochs: 3\n",
            Code.UNSUPPORTED,
            r"recipe.yaml:2: .*num_train_epochs is 3: .*max_steps",
        ),
        ("Data: {Train: {sampler: {shuffle: True}}}", Code.UNSUPPORTED, "sampler.shuffle is True"),
        ("Optimizer: {lr: {use_increments: False}}", Code.UNSUPPORTED, "use_increments is False"),
        ("Optimizer: {name: Adam}", Code.UNSUPPORTED, "Optimizer.name is Adam"),
        ("Model: {num_experts: [4]}", Code.UNSUPPORTED, "Model.num_experts"),
        ("Model: {topk: 1}", Code.UNSUPPORTED, "Model.topk"),
        ("Model: {num_classes: 2}", Code.UNSUPPORTED, "Model.num_classes"),
        (
            "Model: {module: GPTFinetuneModule}",
            Code.UNSUPPORTED,
            "Model.module is GPTFinetuneModule",
        ),
        (
            "Engine: {mix_precision: {custom_black_list: [gelu]}}",
            Code.UNSUPPORTED,
            "custom_black_list",
        ),
        (
            "Engine: {mix_precision: {use_fp16_guard: True}}",
            Code.UNSUPPORTED,
            "use_fp16_guard is True",
        ),
        (
            "Quantization: {quantizable_layer_type: [Conv2D]}",
            Code.UNSUPPORTED,
            "quantizable_layer_type",
        ),
        (
            "Quantization: {weight_preprocess_type: PACT}",
            Code.UNSUPPORTED,
            "weight_preprocess_type is PACT",
        ),
        (
            "Data: {Train: {dataset: {input_dir: a}}, Eval: {dataset: {input_dir: b}}}",
            Code.INVALID_VALUE,
            "input_dir a .*Eval.dataset.input_dir b",
        ),
        ("Engine: {eval_freq: 1, eval_freq: 2}", Code.MALFORMED, "eval_freq .*line 1"),
    ],
)
def test_a_key_that_changes_numbers_is_refused_by_its_name(
    tmp_path: Path, text: str, code: Code, says: str
) -> None:
    with raises(code) as caught:
        load(tmp_path, text)
    assert re.search(says, caught.value.what), caught.value.what
    assert caught.value.hint


def test_a_key_may_be_given_twice_with_one_value(tmp_path: Path) -> None:
    text = "Generation:\n  top_k: 3\n  use_topp_sampling: True\n  use_topp_sampling: True\n"
    assert load(tmp_path, text).Generation.top_k == 3


def test_the_vocabulary_is_padded_for_the_ranks_that_share_it(tmp_path: Path) -> None:
    """50,304 is a multiple of 128, but not of 128 for each of eight ranks."""
    text = (
        "Model: {vocab_size: 50304, vocab_size_divisible_unit: 128}\nDistributed: {mp_degree: %d}"
    )
    for ranks, rows in ((1, 50304), (2, 50432), (8, 51200)):
        assert model_config(load(tmp_path, text % ranks), 50257).vocab_size == rows
    assert model_config(load(tmp_path, "Model: {vocab_size: 50257}"), 9).vocab_size == 50257
    assert model_config(load(tmp_path, "Model: {vocab_size: }"), 50257).vocab_size == 50304


def test_adamw_decays_every_parameter_and_fusedadamw_no_bias_or_norm(tmp_path: Path) -> None:
    def decayed(name: str) -> list[str]:
        recipe = load(tmp_path, f"Optimizer: {{name: {name}}}")
        family = model_config(recipe, 300).architecture
        names = ("h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.0.ln_1.weight", "h.0.mlp.alpha")
        return [name for name in names if is_decayed(name, family, recipe.Optimizer)]

    assert decayed("FusedAdamW") == ["h.0.mlp.c_fc.weight"]
    assert decayed("AdamW") == ["h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.0.ln_1.weight"]


def test_a_clip_norm_of_zero_clips_nothing(tmp_path: Path) -> None:
    settings = load(tmp_path, "Optimizer: {grad_clip: 0}").Optimizer.grad_clip
    assert clip_factor(1e6, settings) == 1.0
    settings = load(tmp_path, "Optimizer: {grad_clip: 2}").Optimizer.grad_clip
    assert clip_factor(8.0, settings) == pytest.approx(0.25)


def test_an_empty_decay_lasts_to_the_last_update(tmp_path: Path) -> None:
    text = "Engine: {max_steps: 70}\nOptimizer: {lr: {decay_steps: }}"
    assert load(tmp_path, text).Optimizer.lr.decay_steps == 70
    assert load(tmp_path, text, "Engine.max_steps=80").Optimizer.lr.decay_steps == 80


def test_paths_are_not_part_of_a_runs_settings(tmp_path: Path) -> None:
    text = "Compress: {pretrained: a}\nInference: {model_dir: b}\nModel: {pretrained: c}\n"
    text += "Engine: {save_load: {output_dir: d, ckpt_dir: e}}\nData: {dataset: {input_dir: f}}"
    recipe = load(tmp_path, text)
    assert recipe.model_dump() == Recipe().model_dump()
    printed = write_values(with_locations(recipe))
    assert load(tmp_path, printed) == recipe


EVERYWHERE = {
    "Global.device",  # auto
    "Global.global_batch_size",  # given or computed
    "Global.local_batch_size",
    "Model.ffn_hidden_size",  # given or computed
    "Model.vocab_size_divisible_unit",
    "Prepare.cloze_examples",
}
SPLIT = {"Data.Train.dataset.split", "Data.Eval.dataset.split"}  # release 2.4's
QUANTIZATION = {
    f"Compress.Quantization.{key}"
    for key in ("weight_quantize_type", "activation_preprocess_type", "freeze_embedding")
} | {"Compress.Quantization.skip_tensor_map." + f"block_{i}" for i in (3, 5, 6, 7, 10, 20, 21)}
COMMAND = {  # what the documented command overrides
    "Engine.max_steps": 100000,
    "Model.hidden_dropout_prob": 0.0,
    "Model.attention_probs_dropout_prob": 0.0,
    "Optimizer.lr.decay_steps": 72000,
}
PRUNE_COMMAND = COMMAND | {
    "Optimizer.weight_decay": 0.0,
    "Optimizer.lr.max_lr": 2.5e-5,
    "Optimizer.lr.min_lr": 5e-6,
}
QAT_COMMAND = COMMAND | {
    "Optimizer.weight_decay": 0.02,
    "Optimizer.lr.max_lr": 5e-6,
    "Optimizer.lr.min_lr": 1e-6,
}
SCHEDULE = {"Engine.max_steps", "Optimizer.lr.decay_steps", "Optimizer.lr.warmup_rate"}


@published
@pytest.mark.parametrize(
    ("name", "file", "command", "differences"),
    [
        ("gpt-345m", "pretrain_gpt_345M_single_card", {}, SPLIT),
        ("gpt-1.3b", "pretrain_gpt_1.3B_single_card", {}, SPLIT),
        ("gpt-1.3b-dp8", "pretrain_gpt_1.3B_dp8", {}, SPLIT),
        ("gpt-6.7b", "pretrain_gpt_6.7B_sharding16", {}, SPLIT | {"Engine.logging_freq"}),
        ("gpt-175b-mp8-pp16", "pretrain_gpt_175B_mp8_pp16", {}, SPLIT),
        ("generation-345m", "generation_gpt_345M_single_card", {}, SPLIT),
        ("eval-345m-wikitext", "eval_gpt_345M_single_card", {}, SPLIT | {"Offline_Eval.eval_path"}),
        ("prune-345m-fleetx", "prune_gpt_345M_single_card", PRUNE_COMMAND, set()),
        ("prune-345m", "prune_gpt_345M_single_card", PRUNE_COMMAND, SPLIT | SCHEDULE),
        (
            *("qat-345m-fleetx", "qat_gpt_345M_single_card", QAT_COMMAND),
            {
                "Compress.Quantization.smoothing",
                "Compress.Quantization.prefix",
                "Distributed.dp_degree",
            },
        ),
        (
            *("qat-345m", "qat_gpt_345M_single_card", QAT_COMMAND),
            SPLIT | SCHEDULE | QUANTIZATION | {"Distributed.dp_degree"},
        ),
        ("qat-345m-mp8", "qat_gpt_345M_mp8", QAT_COMMAND, SPLIT | SCHEDULE | QUANTIZATION),
        (
            *("qat-6.7b-sharding16", "qat_gpt_6.7B_sharding16", QAT_COMMAND),
            SPLIT | SCHEDULE | QUANTIZATION | {"Compress.Quantization.activation_quantize_type"},
        ),
    ],
)
def test_a_shipped_recipe_differs_from_the_published_one_only_as_documented(
    name: str, file: str, command: dict[str, Any], differences: set[str], folder: Path
) -> None:
    overrides = [f"{key}={value}" for key, value in command.items()]
    path = folder / "fleetx/ppfleetx/configs/nlp/gpt" / f"{file}.yaml"
    theirs = flat(load_recipe(path, overrides).model_dump())
    ours = flat(load_recipe(name).model_dump())
    different = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert different - EVERYWHERE <= differences
