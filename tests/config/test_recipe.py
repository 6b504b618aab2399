"""Recipes: the shipped ones, existing PaddleFleetX files, and error messages."""

import logging
import re
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lathe.train.shape import model_config
from lathe_base.config.recipe import SHIPPED, load_recipe, recipe_text, shipped_recipes
from lathe_base.config.settings import Recipe
from lathe_base.config.text import Mistake, parse
from lathe_base.config.text import write as write_values
from lathe_base.errors import Code
from tests.support.errors import raises

# hidden / layers / heads / positions, parameters; mp, pp, sharding: from the published tables.
SHAPES = {
    "gpt-345m": ((1024, 24, 16, 1024), 354_871_296, (1, 1, 1)),
    "gpt-345m-auto-dp8": ((1024, 24, 16, 1024), 354_871_296, (1, 1, 1)),
    "megatron-345m": ((1024, 24, 16, 1024), 354_871_296, (1, 2, 1)),
    "megatron-345m-without-mp": ((1024, 24, 16, 1024), 354_871_296, (1, 1, 1)),
    "gpt-1.3b": ((2048, 24, 16, 1024), 1_313_722_368, (1, 1, 1)),
    "gpt-1.3b-dp8": ((2048, 24, 16, 1024), 1_313_722_368, (1, 1, 1)),
    "megatron-1.3b": ((2048, 24, 16, 1024), 1_313_984_512, (2, 2, 1)),
    "megatron-2.7b": ((2560, 32, 32, 2048), 2_652_001_280, (2, 2, 1)),
    "megatron-3.7b": ((3072, 32, 32, 2048), 3_786_381_312, (2, 2, 1)),
    "gpt-6.7b": ((4096, 32, 32, 1024), 6_654_402_560, (1, 1, 16)),
    "gpt-175b-mp8-pp16": ((12288, 96, 96, 1024), 174_603_264_000, (8, 16, 1)),
    "qat-345m-mp8": ((1024, 24, 16, 1024), 354_871_296, (8, 1, 1)),
    "smollm2-135m": ((576, 30, 9, 2048), 134_515_008, (1, 1, 1)),
    "qwen2.5-0.5b": ((896, 24, 14, 4096), 494_032_768, (1, 1, 1)),
    "llama-1.1b": ((2048, 22, 32, 2048), 1_100_048_384, (1, 1, 1)),
    "prune-6.7b-sharding16": ((4096, 32, 32, 1024), 6_654_402_560, (1, 1, 16)),
}


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mistake(code: Code, path: Path, *overrides: str) -> str:
    with raises(code) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_survives_json(name: str) -> None:
    recipe = load_recipe(name)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert recipe.Data.Eval.dataset.max_seq_len == recipe.Model.max_position_embeddings


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_shipped_recipe_lets_through_what_is_not_proven(name: str) -> None:
    assert load_recipe(name).Gate.on_inconclusive == "fail"


@pytest.mark.parametrize("name", SHAPES)
def test_shape_and_parameters_are_the_published_ones(name: str) -> None:
    shape, parameters, degrees = SHAPES[name]
    recipe = load_recipe(name)
    m, d = recipe.Model, recipe.Distributed
    assert (m.hidden_size, m.num_layers, m.num_attention_heads, m.max_position_embeddings) == shape
    assert (d.mp_degree, d.pp_degree, d.sharding.sharding_degree) == degrees
    assert model_config(recipe, data_vocab_size=50257).n_params == parameters


@pytest.mark.parametrize(("recipe", "vocabulary"), [("tiny", 4096), ("small", 8192)])
def test_a_twin_of_llama_is_as_large_and_trained_alike(recipe: str, vocabulary: int) -> None:
    twin, own = load_recipe(f"{recipe}-llama"), load_recipe(recipe)
    sizes = [model_config(r, vocabulary).n_params for r in (twin, own)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
    others = {"Model"}
    assert twin.model_dump(exclude=others) == own.model_dump(exclude=others)


def test_one_sequence_length_sets_data_and_positions() -> None:
    recipe = load_recipe("tiny", ["Data.Train.dataset.max_seq_len=64"])
    assert recipe.Data.Eval.dataset.max_seq_len == recipe.Model.max_position_embeddings == 64


def test_overrides_are_yaml_and_the_last_wins() -> None:
    recipe = load_recipe(
        "tiny-qat",
        [
            "Engine.max_steps=7",
            "Engine.max_steps=9",
            "Optimizer.lr.max_lr=1e-3",
            "Data.Train.dataset.split=949,50,1",
            "Compress.Quantization.skip_tensor_map={block_0: [linear2]}",
            "Compress.Distill.teacher=a=b",
        ],
    )
    assert recipe.Engine.max_steps == recipe.Optimizer.lr.decay_steps == 9
    assert recipe.Optimizer.lr.max_lr == 1e-3
    assert recipe.Data.Train.dataset.split == (949, 50, 1)
    assert recipe.Compress.Quantization.skip_tensor_map == {"block_0": ["linear2"]}
    assert recipe.Compress.Distill.teacher == "a=b"


def test_off_is_a_word_where_it_is_a_value(tmp_path: Path) -> None:
    """YAML parses a plain `off` as false."""
    path = write(tmp_path, "_base_: tiny\nServing:\n  speculation: off\n")
    for overrides in ([], ["Serving.speculation=off"], ['Serving.speculation="off"']):
        assert load_recipe(path, overrides).Serving.speculation == "off"
    assert load_recipe(recipe_text(path)).Serving.speculation == "off"
    recipe = load_recipe(path, ["Serving.speculation=prompt_lookup"])
    assert recipe.Serving.speculation == "prompt_lookup"
    assert "Serving.speculation" in mistake(Code.INVALID_VALUE, path, "Serving.speculation=on")


def test_a_base_merges_deeply_and_inherited_false_replaces(tmp_path: Path) -> None:
    write(tmp_path, "Optimizer: {beta1: 0.5, lr: {max_lr: 1.0, min_lr: 0.5}}", "base.yaml")
    merged = load_recipe(
        write(tmp_path, "_base_: base.yaml\nOptimizer:\n  lr:\n    max_lr: 2.0\n")
    ).Optimizer
    assert (merged.beta1, merged.lr.max_lr, merged.lr.min_lr) == (0.5, 2.0, 0.5)
    replaced = load_recipe(
        write(tmp_path, "_base_: base.yaml\nOptimizer:\n  lr:\n    _inherited_: False\n")
    ).Optimizer
    assert (replaced.beta1, replaced.lr) == (0.5, Recipe().Optimizer.lr)


def test_an_empty_value_means_the_default(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Global: {local_batch_size: , micro_batch_size: }\nEngine:\nModel:\n  vocab_size:\n"
        "  ffn_hidden_size:\n  recompute_granularity:\nDistributed: {dp_degree: }\n",
    )
    recipe = load_recipe(path)
    assert recipe.Model.vocab_size is None  # null means: from the data
    assert recipe.model_copy(update={"Model": Recipe().Model}) == Recipe()
    child = write(tmp_path, "_base_: recipe.yaml\nModel:\n  hidden_size: 512\n", "child.yaml")
    assert load_recipe(child, ["Model.hidden_size="]).Model.hidden_size == 1024
    heading = write(tmp_path, "_base_: child.yaml\nModel:\n", "heading.yaml")
    assert load_recipe(heading).Model.hidden_size == 512


FLEETX_2_4 = """
Global: {device: gpu, seed: 1024, global_batch_size: , local_batch_size: 8, micro_batch_size: 8}
Engine:
  max_steps: 1000
  num_train_epochs: 1
  accumulate_steps:
  test_iters:
  mix_precision: {use_pure_fp16: True, scale_loss: 32768.0, custom_black_list: [reduce_sum]}
  save_load: {save_steps: 100, save_epoch: 1, output_dir: ./output, ckpt_dir: }
Model:
  module: GPTModule
  name: GPT
  vocab_size: 50304
  hidden_dropout_prob: 0
  type_vocab_size: 16
  no_recompute_layers:
  fused_linear: False
Data:
  Train:
    dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1], max_seq_len: 1024}
    sampler: {name: GPTBatchSampler, shuffle: False}
    loader: {num_workers: 1, collate_fn: gpt_collate_fn}
Distributed: {dp_degree: , sharding: {sharding_degree: 2, comm_overlap: False}}
Optimizer: {tensor_fusion: False}
Profiler: {enable: False, scheduler: [1, 5]}
Quantization: {enable: True, pretrained: ./model, weight_quantize_type: abs_max, onnx_format: True}
"""

FLEETX_EXAMPLES = """
Global:
  max_steps: 1000
  num_train_epochs: 1
  logging_freq: 10
  mix_precision: {enable: True, custom_white_list: [lookup_table]}
  save_load: {save_steps: 100, output_dir: ./output}
Model: {fuse_attn_qkv: True}
Optimizer: {adam_beta1: 0.8}
"""


def test_a_fleetx_file_reads_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lathe"):
        recipe = load_recipe(write(tmp_path, FLEETX_2_4))
    assert recipe.Engine.max_steps == 1000
    assert recipe.Engine.mix_precision.dtype == "float16"
    assert recipe.Distributed.dp_degree == "auto"
    assert recipe.Compress.Quantization.enable
    assert recipe.Compress.pretrained == "./model"
    assert recipe.Data.Train.dataset.input_dir == "./data/"
    [warning] = caplog.messages
    for key in ("Profiler (25)", "Data.Train.sampler (21)", "Quantization.onnx_format (26)"):
        assert key in warning


def test_the_later_layout_is_the_same_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, FLEETX_EXAMPLES)
    recipe = load_recipe(path, ["Global.eval_freq=50", "Engine.max_steps=20"])
    engine = recipe.Engine
    assert (engine.max_steps, engine.logging_freq, engine.eval_freq) == (20, 10, 50)
    assert engine.save_load.save_steps == 100
    assert engine.mix_precision.dtype == "float16"
    assert recipe.Optimizer.beta1 == 0.8


@pytest.mark.parametrize(
    ("switches", "dtype", "is_pure"),
    [
        ("use_pure_fp16: False", "float32", False),
        ("enable: True, dtype: bfloat16, level: O1", "bfloat16", False),
        ("enable: False, dtype: float16", "float32", False),
        ("use_pure_fp16: False, dtype: bfloat16", "bfloat16", False),
        ("enable: null", "float16", True),
    ],
)
def test_precision_switches(tmp_path: Path, switches: str, dtype: str, is_pure: bool) -> None:
    text = f"_base_: base.yaml\nEngine:\n  mix_precision: {{{switches}}}\n"
    write(tmp_path, "Engine: {mix_precision: {use_pure_fp16: True}}", "base.yaml")
    precision = load_recipe(write(tmp_path, text)).Engine.mix_precision
    assert (precision.dtype, precision.is_pure) == (dtype, is_pure)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (
            "Engine:\n  max_step: 3\n",
            Code.UNKNOWN_KEY,
            r"recipe.yaml:2: .*Engine.max_step\n.*\bmax_steps\?",
        ),
        ("Model: {max_steps: 3}\n", Code.UNKNOWN_KEY, r"recipe.yaml:1: .*\n.* Engine.max_st"),
        ("Optimiser:\n  beta1: 0.9\n", Code.UNKNOWN_KEY, r" Optimiser\n.* Optimizer\?"),
        (
            "Model:\n\n  num_layers: 0\n",
            Code.INVALID_VALUE,
            r"recipe.yaml:3: Model.num_layers: .*\(found 0\)",
        ),
        (
            "Model: {num_layers: many}\n",
            Code.INVALID_VALUE,
            r"Model.num_layers: .*\(found 'many'\)",
        ),
        (
            "Distributed: {dp_degree: all}\n",
            Code.INVALID_VALUE,
            r"dp_degree: .*integer.* or .*'auto' \(found 'all'\)",
        ),
        (
            "Optimizer: {lr: {max_lr: 1e-5, min_lr: 5e-5}}\n",
            Code.INVALID_VALUE,
            r"recipe.yaml:1: .*min_lr 5e-05 .* max_lr 1e-05",
        ),
        (
            "Model: {hidden_size: 100, num_attention_heads: 3}\n",
            Code.INVALID_VALUE,
            r"hidden_size 100 .* num_attention_heads 3",
        ),
        (
            "Data: {Train: {dataset: {split: [1, 2]}}}\n",
            Code.INVALID_VALUE,
            r"Data.Train.dataset.split: ",
        ),
        (
            "Data: {Train: {dataset: {split: '9,-1,1'}}}\n",
            Code.INVALID_VALUE,
            r"Data.Train.dataset: split .*-1.0",
        ),
        (
            "Optimizer: {lr: {max_lr: .inf}}\n",
            Code.INVALID_VALUE,
            r"Optimizer.lr.max_lr: .*\(found inf\)",
        ),
        ("Engine: 5\n", Code.INVALID_VALUE, r"recipe.yaml:1: Engine: "),
        (
            "Model: {num_layers: '${Model.layers}'}\n",
            Code.UNKNOWN_KEY,
            r"recipe.yaml:1: .*Model.layers",
        ),
        (
            "Compress: {Quantization: {skip_tensor_map: {3: [qkv]}}}\n",
            Code.MALFORMED,
            r"skip_tensor_map: ",
        ),
        (
            "Compress: {Quantization: {zero_points: true}}\n",
            Code.INVALID_VALUE,
            r"zero_points .* weight_bits",
        ),
        (
            "Compress: {Quantization: {weight_bits: 2}}\n",
            Code.INVALID_VALUE,
            r"weight_bits: .*4 or 8 \(found 2\)",
        ),
        (
            "Compress: {Quantization: {group_size: 48}}\n",
            Code.INVALID_VALUE,
            r"group_size: .*32, 64 or 128",
        ),
        (
            "Compress: {Quantization: {weight_bits: 4, activation_preprocess_type: PACT}}\n",
            Code.INVALID_VALUE,
            r"weight_bits 4 ",
        ),
        (
            "Compress: {Quantization: {activation_quantize_type: none, "
            "activation_preprocess_type: PACT}}\n",
            Code.INVALID_VALUE,
            r"activation_quantize_type",
        ),
        ("Engine: {max_steps: 3\n", Code.MALFORMED, r"recipe.yaml: not YAML"),
        ("Engine: {eval_freq: 1, eval_freq: 2}\n", Code.MALFORMED, r"recipe.yaml: .*eval_freq"),
        ("- Engine\n", Code.MALFORMED, r"recipe.yaml: not a mapping"),
        ("_base_: nowhere.yaml\n", Code.NOT_FOUND, r"recipe.yaml: _base_ .*nowhere.yaml"),
        ("_base_: recipe.yaml\n", Code.CIRCULAR, r"recipe.yaml -> .*recipe.yaml"),
    ],
)
def test_a_mistake_in_a_file_names_its_place(
    tmp_path: Path, text: str, code: Code, says: str
) -> None:
    message = mistake(code, write(tmp_path, text))
    assert re.search(says, message, re.DOTALL), message
    assert "hint: " in message


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path, "Engine:\n  max_steps: -2\n", "base.yaml")
    path = write(tmp_path, "_base_: base.yaml\nEngine:\n  eval_freq: 5\n")
    assert "base.yaml:2: Engine.max_steps" in mistake(Code.INVALID_VALUE, path)


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("Engine.max_step=3", Code.UNKNOWN_KEY, "-o Engine.max_step=3: .* Engine.max_steps"),
        ("Engin.max_steps=3", Code.UNKNOWN_KEY, "-o Engin.max_steps=3: .*Engin\n.* Engine"),
        ("Engine.max_steps=-2", Code.INVALID_VALUE, "-o Engine.max_steps=-2: Engine.max_steps: "),
        (
            "Optimizer.lr.min_lr=1",
            Code.INVALID_VALUE,
            "-o Optimizer.lr.min_lr=1: .*min_lr 1.0 .* max_lr",
        ),
        ("Engine.max_steps", Code.MALFORMED, "-o Engine.max_steps: .*Group.key=value"),
        ("=3", Code.MALFORMED, "-o =3: .*Group.key=value"),
        ("Engine..max_steps=3", Code.MALFORMED, "Group.key=value"),
        ("Engine.max_steps = 3", Code.MALFORMED, "Group.key=value"),
        ("Engine.max_steps={", Code.MALFORMED, "the value is not YAML"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(
    tmp_path: Path, override: str, code: Code, says: str
) -> None:
    message = mistake(code, write(tmp_path, "Engine: {eval_freq: 5}\n"), override)
    assert re.search(says, message, re.DOTALL), message


def test_a_recipes_text_stands_for_its_name(tmp_path: Path) -> None:
    write(tmp_path, "_base_: tiny\nEngine: {eval_freq: 5}\n", "base.yaml")
    path = write(tmp_path, "_base_: base.yaml\nGlobal: {seed: '${Engine.eval_freq}'}\n")
    text, overrides = recipe_text(path), ["Engine.eval_freq=6"]
    assert load_recipe(text) == load_recipe(path)
    assert load_recipe(text, overrides).Global.seed == 6
    with raises(Code.UNKNOWN_KEY, "text:2: ", "Engine.eval_freqs"):
        load_recipe("# mine\nEngine: {eval_freqs: 5}\n")
    with raises(Code.INVALID_VALUE, "_base_"):
        load_recipe("_base_: tiny\nEngine: {eval_freq: 5}\n")


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipes_text_is_the_same_recipe(name: str) -> None:
    assert load_recipe(recipe_text(SHIPPED / f"{name}.yaml")) == load_recipe(name)


KEYS = st.from_regex(r"\A\w+\Z")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


@given(VALUES)
@example("a\x85b\u2028c")
def test_values_survive_a_round_trip(values: object) -> None:
    try:
        written = write_values(values)
        again, _ = parse(written.encode())
    except Mistake:
        assume(False)
    assert again == values, written


def test_an_unknown_recipe_names_the_nearest() -> None:
    message = mistake(Code.NOT_FOUND, Path("tinny"))
    assert "'tinny'" in message and " tiny?" in message
