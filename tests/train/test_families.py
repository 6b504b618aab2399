"""Families other than GPT-2 train like transformers' classes, in every layout, and resume."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from lathe.data.tokens import TokenDataset
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.train.batches import Batch, TrainBatches
from lathe.train.pretrain import new_model, pretrain
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL, kill_after_saves, records, run_layouts, start
from tests.support.tables import quick_only

STEPS = 6
SHAPE = (
    *SMALL,
    "Model.architecture=qwen3",
    "Model.num_layers=4",
    "Model.num_key_value_heads=2",
    "Model.ffn_hidden_size=56",
    "Model.rope_theta=500",
)
UNTIED, TIED = "Model.tie_word_embeddings=False", "Model.tie_word_embeddings=True"
LLAMA = (*SHAPE, "Model.architecture=llama", TIED)
QWEN2 = (*SHAPE, "Model.architecture=qwen2", UNTIED)
BASE = (
    *SHAPE,
    UNTIED,
    "Engine.max_steps=5",
    "Engine.eval_freq=5",
    "Global.global_batch_size=16",
    "Global.local_batch_size=",
    "Engine.save_load.save_steps=1000",
)
DP, MP, PP = (f"Distributed.{name}_degree=2" for name in ("dp", "mp", "pp"))
SP, SHARD = "Model.sequence_parallel=True", "Distributed.sharding.sharding_degree=2"
STAGE3 = "Distributed.sharding.sharding_stage=3"
TWO = {
    "dp2": (DP,),
    "mp2": (MP,),
    "mp2-sequence-parallel": (MP, SP),
    "pp2": (PP,),
    "pp2-tied": (PP, TIED),
    "pp2-interleaved": (PP, "Model.virtual_pp_degree=2"),
    "sharding2-stage3-recompute": (SHARD, STAGE3, "Model.use_recompute=True"),
}
FOUR = {"mp2-pp2-sequence-parallel": (MP, PP, SP), "mp2-sharding2": (MP, SHARD, STAGE3)}


WINDOW = "Model.sliding_window=9"
OTHERS = {
    "smollm3": (TIED, WINDOW),
    "gemma3_text": (TIED, WINDOW, "Model.num_layers=6", "Model.rope_theta="),
    "phi3": (UNTIED, WINDOW, "Model.partial_rotary_factor=0.5"),
    "olmo2": (UNTIED,),
    "starcoder2": (TIED, WINDOW),
    "gpt_neox": (UNTIED, "Model.num_key_value_heads=", "Model.partial_rotary_factor=0.5"),
    "opt": ("Model.num_key_value_heads=", "Model.rope_theta="),
}


def family(name: str) -> tuple[str, ...]:
    return (*SHAPE, f"Model.architecture={name}", *OTHERS[name])


TRAINED = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": (*SHAPE, UNTIED),
    **{name: family(name) for name in OTHERS},
}


@pytest.mark.parametrize("name", quick_only(TRAINED, ("llama", "gemma3_text", "opt")))
def test_steps_equal_a_loop_with_transformers(
    name: str, small_data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    length = (f"Engine.max_steps={STEPS}", "Optimizer.lr.decay_steps=20")
    recipe = load_recipe("tiny", (*TRAINED[name], *length))
    model = new_model(model_config(recipe, 257), recipe.Model)
    model.initialize(0.02, recipe.Global.seed)
    save_checkpoint(tmp_path / "start", model, byte_tokenizer, "pretrain", Recipe())
    config = AutoConfig.from_pretrained(tmp_path / "start")
    config.dropout = 0.0  # OPT's default is 0.1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "start", config=config).train()
    batches = TrainBatches(recipe, TokenDataset.open(small_data), Batch(8, 8, 8, 1), 0)
    named = list(theirs.named_parameters())
    spared = [p for n, p in named if "norm" in n or n.endswith("bias")]
    decayed = [p for n, p in named if "norm" not in n and not n.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}],
        betas=(0.9, 0.999),
    )
    trace = []
    for step in range(STEPS):
        x = torch.from_numpy(batches(step, 0))
        logits = theirs(x[:, :-1]).logits
        loss = -logits.log_softmax(-1).gather(2, x[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (step + 1) / 2  # 2 warm-up steps
            if step >= 2:
                cosine = 0.5 * (1 + math.cos(math.pi * (step + 1 - 2) / 18))
                group["lr"] = 2e-4 + (2e-3 - 2e-4) * cosine
        optimizer.step()
        trace.append(loss.item())
    batches.close()
    pretrain(recipe, small_data, tmp_path / "run")
    np.testing.assert_allclose(records(tmp_path / "run", "loss"), trace, atol=1e-4)
    assert trace[-1] < trace[0] - 0.1


def test_weights_begin_as_those_of_transformers(small_data: Path) -> None:
    """Matrices and embeddings start as N(0, initializer_range), biases as 0 and norms as 1."""
    recipe = load_recipe("tiny", (*QWEN2, "Model.hidden_size=128", "Model.ffn_hidden_size=256"))
    model = new_model(model_config(recipe, 257), recipe.Model)
    model.initialize(0.02, seed=1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05), name


@pytest.fixture(scope="module")
def alone(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for name, tie in (("untied", UNTIED), ("tied", TIED)):
        pretrain(load_recipe("tiny", (*BASE, tie)), small_data, folder / name)
    return folder


@pytest.fixture(scope="module")
def runs(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run for every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for workers, layouts in ((2, TWO), (4, FOUR)):
        wanted = {folder / name: ("tiny", *BASE, *o) for name, o in layouts.items()}
        run_layouts(small_data, wanted, workers)
    return folder


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
@pytest.mark.slow
def test_layout_traces_the_losses_of_one_process(layout: str, runs: Path, alone: Path) -> None:
    one, run = alone / ("tied" if "-tied" in layout else "untied"), runs / layout
    assert len(records(run, "loss")) == 5
    for key in ("loss", "eval_loss", "grad_norm"):
        np.testing.assert_allclose(records(run, key), records(one, key), atol=1e-4)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, one))
    assert ours.keys() == theirs.keys()
    assert ("lm_head.weight" in ours) == ("-tied" not in layout)
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-4, err_msg=name)


OF_OTHERS = {
    "gemma3_text": ("mp2-sequence-parallel", "pp2-tied"),
    "olmo2": ("sharding2-stage3-recompute",),
    "gpt_neox": ("mp2-sequence-parallel", "sharding2-stage3-recompute"),
    "opt": ("mp2", "pp2-tied"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.slow
def test_other_families_trace_the_losses_of_one_process(
    name: str, small_data: Path, tmp_path: Path
) -> None:
    steps = ("Engine.max_steps=4", "Global.global_batch_size=16", "Global.local_batch_size=")
    shape = (*family(name), *steps, "Engine.save_load.save_steps=1000")
    pretrain(load_recipe("tiny", shape), small_data, tmp_path / "one")
    layouts = {tmp_path / layout: ("tiny", *shape, *TWO[layout]) for layout in OF_OTHERS[name]}
    run_layouts(small_data, layouts, 2)
    for run in layouts:
        for key in ("loss", "grad_norm"):
            one = records(tmp_path / "one", key)
            np.testing.assert_allclose(records(run, key), one, atol=1e-4, err_msg=run.name)


def test_norms_of_all_heads_that_tensor_parallelism_would_divide() -> None:
    from lathe.train.layout import configured_layout

    recipe = load_recipe("tiny", (*family("olmo2"), MP))
    with raises(Code.LAYOUT, "OLMo 2", "Distributed.mp_degree 2"):
        configured_layout(model_config(recipe, 257), recipe, 2)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["full", "core_attn"])
def test_recompute_leaves_every_bit(
    granularity: str, small_data: Path, tmp_path: Path, alone: Path
) -> None:
    on = ("Model.use_recompute=True", f"Model.recompute_granularity={granularity}")
    pretrain(load_recipe("tiny", (*BASE, *on)), small_data, tmp_path / "run")
    for key in ("loss", "eval_loss", "grad_norm"):
        assert records(tmp_path / "run", key) == records(alone / "untied", key)


@pytest.mark.slow
def test_killed_run_resumes_bit_identically(small_data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pretrain(load_recipe("tiny", LLAMA), small_data, whole)
    kill_after_saves(
        start("pretrain", small_data, killed, overrides=LLAMA[len(SMALL) :]), killed, 1
    )
    pretrain(load_recipe("tiny", LLAMA), small_data, killed)
    for key in ("loss", "eval_loss", "lr", "grad_norm"):
        assert records(killed, key) == records(whole, key)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (killed, whole))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_training_continues_from_a_checkpoint(small_data: Path, tmp_path: Path) -> None:
    pretrain(load_recipe("tiny", LLAMA), small_data, tmp_path / "first")
    again = load_recipe(
        "tiny", (*SMALL, "Engine.max_steps=5")
    )  # the checkpoint determines the shape
    result = pretrain(again, small_data, tmp_path / "second", tmp_path / "first")
    assert result.first_eval_loss == pytest.approx(
        records(tmp_path / "first", "eval_loss")[-1], abs=1e-5
    )
    assert load_checkpoint(tmp_path / "second").model.config.architecture.model_type == "llama"


@pytest.mark.parametrize(
    ("overrides", "code", "texts"),
    [
        (("Model.rope_theta=500",), Code.UNSUPPORTED, ["Model.rope_theta is 500.0", "GPT-2"]),
        (("Model.num_key_value_heads=2",), Code.UNSUPPORTED, ["num_key_value_heads is 2"]),
        (("Model.head_dim=16",), Code.UNSUPPORTED, ["head_dim is 16"]),
        (("Model.rms_norm_eps=1e-5",), Code.UNSUPPORTED, ["rms_norm_eps is 1e-05"]),
        ((UNTIED,), Code.UNSUPPORTED, ["tie_word_embeddings is False"]),
        ((*SHAPE, "Model.num_key_value_heads=3"), Code.INVALID_VALUE, ["num_key_value_heads 3"]),
        (
            (*SHAPE, "Model.rope_scaling={rope_type: longest, factor: 2}"),
            Code.UNSUPPORTED,
            ["rope_type is 'longest'"],
        ),
        ((*SHAPE, "Model.partial_rotary_factor=0.4"), Code.INVALID_VALUE, ["3 rotated features"]),
    ],
)
def test_settings_that_do_not_belong_to_the_family(
    overrides: tuple[str, ...],
    code: Code,
    texts: list[str],
    small_data: Path,
    tmp_path: Path,
) -> None:
    with raises(code, *texts):
        pretrain(load_recipe("tiny", (*SMALL, *overrides)), small_data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_groups_that_tensor_parallelism_cannot_divide(small_data: Path, tmp_path: Path) -> None:
    from lathe.train.layout import configured_layout

    recipe = load_recipe("tiny", (*SHAPE, "Model.num_key_value_heads=1", MP))
    with raises(Code.LAYOUT, "1 key-value heads", "Distributed.mp_degree 2"):
        configured_layout(model_config(recipe, 257), recipe, 2)
