"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, in every layout, become the same model."""

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from lathe.backends.megatron_checkpoint import import_megatron
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.megatron_checkpoints import Checkpoint
from tests.support.small_models import small_config
from tests.support.tables import quick_only

RECIPE = load_recipe("megatron-345m", ["Model.num_attention_heads=4"])
IDS = torch.arange(40).reshape(2, 20) * 7 % 257


@pytest.fixture(scope="module")
def model() -> GPT:
    found = GPT(small_config(n_head=(4,) * 4, n_inner=(96,) * 4)).eval()
    found.initialize(0.2, seed=1)
    for i, (_, parameter) in enumerate(found.named_parameters()):  # also biases and norms
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        parameter.data += 0.1 * noise
    return found


@pytest.fixture
def tokenizer(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def imported(source: Path, tokenizer: Path) -> GPT:
    output = source.parent / f"{source.name}-imported"
    import_megatron(RECIPE, source, tokenizer, output)
    return load_checkpoint(output).model.eval()


def assert_same(found: GPT, model: GPT) -> None:
    assert found.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def refused(code: Code, source: Path, tokenizer: Path) -> str:
    output = source.parent / "refused"
    with raises(code) as caught:
        import_megatron(RECIPE, source, tokenizer, output)
    assert not output.exists() and caught.value.hint
    return str(caught.value)


LAYOUTS: dict[str, Callable[[Checkpoint, Path], Path]] = {
    "deepspeed": Checkpoint.deepspeed,
    "deepspeed-old-names": lambda made, folder: made.deepspeed(folder, "transformer"),
    "deepspeed-pipeline": Checkpoint.pipeline,
    "deepspeed-pipeline-head": lambda made, folder: made.pipeline(folder, repeats_head=True),
    "megatron": Checkpoint.megatron,
    "megatron-wrapped": lambda made, folder: made.megatron(folder, wrapped=True),
}


# Layouts name files and tensors, versions order what is in them: every one of each is quick.
@pytest.mark.parametrize(
    ("layout", "version", "tp"),
    quick_only(
        product(LAYOUTS, (0, 1.0, 2.0, 3.0), (1, 2)),
        [
            *(("deepspeed", version, 2) for version in (0, 1.0, 3.0)),
            *(("megatron", version, tp) for version, tp in ((0, 2), (2.0, 1), (3.0, 2))),
            *((layout, 3.0, 2) for layout in LAYOUTS if layout not in ("deepspeed", "megatron")),
        ],
    ),
)
def test_every_layout_is_the_same_model(
    layout: str, tp: int, version: float, model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    LAYOUTS[layout](Checkpoint(model, tp, version=version), tmp_path / "ckpts")
    assert_same(imported(tmp_path / "ckpts", tokenizer), model)


@pytest.mark.parametrize(
    ("pp", "chunks", "tp"),
    quick_only(
        [(*pipeline, tp) for pipeline in ((2, 1), (4, 1), (2, 2)) for tp in (1, 2)],
        [(2, 1, 2), (4, 1, 1), (2, 2, 2)],
    ),
)
def test_pipeline_ranks_are_joined(
    tp: int, pp: int, chunks: int, model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    made = Checkpoint(model, tp, pp)
    assert_same(imported(made.megatron(tmp_path / "ckpts", chunks), tokenizer), model)
    if chunks == 1:
        assert_same(imported(made.pipeline(tmp_path / "deepspeed"), tokenizer), model)


def test_the_folder_of_a_step_and_its_parent_are_the_same(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    step = Checkpoint(model).deepspeed(tmp_path / "ckpts")
    assert_same(imported(step, tokenizer), model)
    (tmp_path / "ckpts/latest").unlink()  # then the other tracker counts
    assert_same(imported(tmp_path / "ckpts", tokenizer), model)


def test_files_from_before_torch_1_6_are_read(model: GPT, tmp_path: Path, tokenizer: Path) -> None:
    source = Checkpoint(model, tp=2, legacy=True).deepspeed(tmp_path / "ckpts")
    assert_same(imported(source, tokenizer), model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(
    dtype: torch.dtype, model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    found = imported(Checkpoint(model, 2, dtype=dtype).pipeline(tmp_path / "ckpts"), tokenizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.to(dtype).float()), name


def test_views_of_one_flat_buffer_are_read(model: GPT, tmp_path: Path, tokenizer: Path) -> None:
    """The weights of DeepSpeed's fused optimizer share a storage, which a file has once."""
    made = Checkpoint(model)
    flat = torch.cat([tensor.flatten() for tensor in made.state.values()])
    offset = 0
    for name, tensor in made.state.items():
        made.state[name] = flat[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
    source = made.deepspeed(tmp_path / "ckpts")
    assert_same(imported(source, tokenizer), model)


def megatron_logits(state: dict[str, Tensor], config: GPTConfig, ids: Tensor) -> Tensor:
    """Megatron's arithmetic on Megatron's tensors: `ParallelTransformer` on one process."""
    heads, layer = config.n_head[0], 0
    positions = state["embedding.position_embeddings.weight"][: ids.shape[1]]
    hidden = state["embedding.word_embeddings.weight"][ids] + positions
    mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    while (block := f"encoder.layers.{layer}.") and f"{block}input_layernorm.weight" in state:
        x = norm(f"{block}input_layernorm", hidden)
        mixed = linear(f"{block}self_attention.query_key_value", x)
        mixed = mixed.view(*mixed.shape[:2], heads, -1).transpose(1, 2)
        q, k, v = mixed.chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + linear(f"{block}self_attention.dense", context)
        x = norm(f"{block}post_attention_layernorm", hidden)
        x = F.gelu(linear(f"{block}mlp.dense_h_to_4h", x), approximate="tanh")
        hidden = hidden + linear(f"{block}mlp.dense_4h_to_h", x)
        layer += 1
    hidden = norm("encoder.final_layernorm", hidden)
    return hidden @ state["embedding.word_embeddings.weight"].T


@torch.no_grad()
def test_the_logits_are_megatrons_and_transformers(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    from transformers import GPT2LMHeadModel

    made = Checkpoint(model, tp=1)
    tree = made.tree(0, range(4))["language_model"]
    flat = {f"encoder.{name}": tensor for name, tensor in tree["encoder"].items()}
    words = tree["embedding"]
    flat |= {f"embedding.{name}.weight": inner["weight"] for name, inner in words.items()}
    expected = megatron_logits(flat, model.config, IDS)
    source = Checkpoint(model, tp=2, pp=2, version=0).pipeline(tmp_path / "ckpts")
    found = imported(source, tokenizer)
    torch.testing.assert_close(found(IDS), expected, rtol=1e-5, atol=1e-5)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "ckpts/global_step5-imported").eval()
    torch.testing.assert_close(theirs(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_flags_takes_the_recipes_heads(
    model: GPT, tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Checkpoint(model, args=None).deepspeed(tmp_path / "ckpts")
    assert_same(imported(source, tokenizer), model)
    assert "taking 4 attention heads" in caplog.text
    wrong = load_recipe("megatron-345m", ["Model.num_attention_heads=32"])
    with raises(Code.MISMATCH, "32 heads"):
        import_megatron(wrong, source, tokenizer, tmp_path / "out")


def test_a_checkpoint_without_a_version_has_the_oldest_order(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    source = Checkpoint(model, version=None).megatron(tmp_path / "ckpts")
    assert_same(imported(source, tokenizer), model)


def test_the_metadata_and_the_card_say_where_it_is_from(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    imported(Checkpoint(model).deepspeed(tmp_path / "ckpts"), tokenizer)
    output = tmp_path / "ckpts/global_step5-imported"
    assert load_checkpoint(output).meta["engine"] == "megatron"
    assert "Imported from a checkpoint of Megatron." in (output / "README.md").read_text()
    assert load_file(output / "model.safetensors")["transformer.wte.weight"].shape == (384, 48)


def test_the_exact_gelu_is_warned_about(
    model: GPT, tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"bias_gelu_fusion": False, "openai_gelu": False}
    with caplog.at_level(logging.WARNING, logger="lathe"):
        imported(Checkpoint(model, flags=flags).deepspeed(tmp_path / "ckpts"), tokenizer)
    assert "trained with the exact GELU" in caplog.text


def remove(*names: str) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        for name in names:
            for path in step.glob(name):
                path.unlink()

    return change


@pytest.mark.parametrize(
    ("layout", "change", "code", "says"),
    [
        ("deepspeed", remove("mp_rank_00*"), Code.INCOMPLETE, "tensor-parallel rank 0 of 2"),
        ("deepspeed", remove("mp_rank_01*"), Code.INCOMPLETE, "1 of 2 tensor-parallel ranks"),
        ("deepspeed", remove("*"), Code.WRONG_KIND, "Megatron"),
        ("pipeline", remove("mp_rank_*"), Code.INCOMPLETE, "mp_rank_00_model_states.pt"),
        ("pipeline", remove("layer_04-model_01*"), Code.INCOMPLETE, "tensor-parallel rank 1 of 2"),
        ("pipeline", remove("layer_04-*"), Code.INCOMPLETE, "3 layers, but it was trained with 4"),
        ("pipeline", remove("layer_01-*"), Code.INCOMPLETE, "'wte.weight'"),
        ("pipeline", remove("layer_08-*"), Code.MISMATCH, "ln_f.weight: absent"),
        (
            "megatron",
            remove("mp_rank_01_001/*"),
            Code.INCOMPLETE,
            "mp_rank_01_001: no model_optim_rng.pt",
        ),
    ],
)
def test_missing_parts_are_named(
    layout: str, change: Callable[[Path], None], code: Code, says: str,
    model: GPT, tmp_path: Path, tokenizer: Path,
) -> None:  # fmt: skip
    made = Checkpoint(model, 2, 2 if layout == "megatron" else 1)
    step = getattr(made, layout)(tmp_path / "ckpts")
    change(step)
    assert says in refused(code, step, tokenizer)


def test_a_missing_pipeline_rank_is_named(model: GPT, tmp_path: Path, tokenizer: Path) -> None:
    step = Checkpoint(model, 1, 4).megatron(tmp_path / "ckpts")
    (step / "mp_rank_00_001").rename(tmp_path / "elsewhere")
    assert "pipeline rank 1 " in refused(Code.INCOMPLETE, step, tokenizer)
    (tmp_path / "elsewhere").rename(step / "mp_rank_00_001")
    (step / "mp_rank_00_003").rename(tmp_path / "elsewhere")
    assert "3 layers, but it was trained with 4" in refused(Code.INCOMPLETE, step, tokenizer)


def test_half_a_model_without_flags_is_not_taken_for_a_whole_one(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    step = Checkpoint(model, 2, args=None).deepspeed(tmp_path / "ckpts")
    remove("mp_rank_01*")(step)
    assert "attention of width 24 with 4 heads" in refused(Code.INCOMPLETE, step, tokenizer)


def altered(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """A change of one tensor of a block's file."""

    def alter(tensors: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name])

    return alter


@pytest.mark.parametrize(
    ("alter", "code", "says"),
    [
        (altered("input_layernorm.weight", lambda x: x + 1), Code.MISMATCH, "tensor-parallel ran"),
        (altered("mlp.dense_4h_to_h.bias", lambda x: x + 1), Code.MISMATCH, "tensor-parallel ran"),
        (
            altered("mlp.dense_h_to_4h.bias", lambda x: x / 0),
            Code.NOT_FINITE,
            "mlp.dense_h_to_4h.bias",
        ),
        (
            altered("mlp.dense_h_to_4h.bias", lambda x: x.int()),
            Code.UNSUPPORTED,
            "mlp.dense_h_to_4h.bias holds int32",
        ),
        (altered("mlp.dense_h_to_4h.weight", lambda x: x[0]), Code.MISMATCH, "not a matrix"),
        (
            altered("self_attention.query_key_value.bias", lambda x: x[:-1]),
            Code.MISMATCH,
            "2 heads",
        ),
        (
            altered("mlp.dense_h_to_4h.weight", lambda x: x[:, 1:]),
            Code.MISMATCH,
            "dense_h_to_4h.weight",
        ),
        (
            altered("mlp.dense_h_to_4h.weight", lambda x: "text"),
            Code.MALFORMED,
            "mlp.dense_h_to_4h.weight",
        ),
        (lambda t: t.pop("mlp.dense_4h_to_h.bias"), Code.INCOMPLETE, "mlp.c_proj.bias"),
        (lambda t: t.update(other=torch.zeros(2)), Code.UNSUPPORTED, "other "),
        (
            lambda t: t.update({"attention.dense.bias": torch.zeros(2)}),
            Code.DUPLICATE,
            "attention.dense.bias",
        ),
        (lambda t: t.clear(), Code.UNSUPPORTED, "layer_04-model_01"),
    ],
    ids=range(12),
)
def test_tensors_that_contradict_each_other_are_named(
    alter: Callable[[dict[str, Any]], None], code: Code, says: str,
    model: GPT, tmp_path: Path, tokenizer: Path,
) -> None:  # fmt: skip
    step = Checkpoint(model, 2).pipeline(tmp_path / "ckpts")
    path = step / "layer_04-model_01-model_states.pt"
    tensors = torch.load(path, weights_only=True)
    alter(tensors)
    torch.save(tensors, path)
    assert says in refused(code, step, tokenizer)


def test_an_output_layer_of_its_own_is_refused(model: GPT, tmp_path: Path, tokenizer: Path) -> None:
    step = Checkpoint(model).pipeline(tmp_path / "ckpts", repeats_head=True)
    path = step / "layer_09-model_00-model_states.pt"
    tensors = torch.load(path, weights_only=True)
    tensors["word_embeddings.weight"] += 1
    torch.save(tensors, path)
    assert "word embedding" in refused(Code.UNSUPPORTED, step, tokenizer)


@pytest.mark.parametrize(
    ("saved", "code", "says"),
    [
        ({"flags": {"num_experts": [8]}}, Code.UNSUPPORTED, "experts"),
        (
            {"flags": {"apply_residual_connection_post_layernorm": True}},
            Code.UNSUPPORTED,
            "--apply-residual-connection-post-layernorm",
        ),
        ({"flags": {"num_layers": "many"}}, Code.INVALID_VALUE, "num_layers is 'many'"),
        ({"flags": {"num_attention_heads": -4}}, Code.INVALID_VALUE, "num_attention_heads is -4"),
        ({"flags": {"num_attention_heads": 5}}, Code.MISMATCH, "5 heads"),
        ({"version": 1.5}, Code.WRONG_VERSION, "checkpoint_version is 1.5"),
        ({"version": "3"}, Code.WRONG_VERSION, "checkpoint_version is '3'"),
    ],
)
def test_flags_of_another_model_are_refused(
    saved: dict[str, Any], code: Code, says: str, model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    made = Checkpoint(model, **({"version": 3.0} | saved | {"version": 3.0}))
    made.version = saved.get("version", 3.0)
    made.tensors = Checkpoint(model).tensors  # type: ignore[method-assign]
    assert says in refused(code, made.deepspeed(tmp_path / "ckpts"), tokenizer)


def test_formats_that_are_not_supported_are_explained(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    zero = tmp_path / "zero"
    zero.mkdir()
    (zero / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert "ZeRO stage 3" in refused(Code.UNSUPPORTED, zero, tokenizer)
    core = tmp_path / "core"
    core.mkdir()
    (core / "__0_0.distcp").touch()
    assert "--ckpt-convert-format torch" in refused(Code.UNSUPPORTED, core, tokenizer)
    step = Checkpoint(model).pipeline(tmp_path / "experts")
    (step / "layer_3_expert_0_mp_rank_00_model_states.pt").touch()
    assert "experts" in refused(Code.UNSUPPORTED, step, tokenizer)


@pytest.mark.parametrize("tracker", ["../elsewhere", "/etc", "", "a b", "global_step9", "9"])
def test_a_tracker_names_a_folder_beside_it(
    tracker: str, model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    Checkpoint(model).deepspeed(tmp_path / "ckpts")
    (tmp_path / "ckpts/latest").write_text(tracker)
    code = Code.NOT_FOUND if tracker in ("global_step9", "9") else Code.MALFORMED
    refused(code, tmp_path / "ckpts", tokenizer)


def test_sources_that_are_not_folders_are_rejected(
    model: GPT, tmp_path: Path, tokenizer: Path
) -> None:
    step = Checkpoint(model).deepspeed(tmp_path / "ckpts")
    assert "not a folder" in refused(Code.NOT_FOUND, step / "mp_rank_00_model_states.pt", tokenizer)
    assert "nothing" in refused(Code.NOT_FOUND, tmp_path / "nothing", tokenizer)
    path = step / "mp_rank_00_model_states.pt"
    path.unlink()
    path.symlink_to(path.name)
    assert path.name in refused(Code.BAD_PATH, step, tokenizer)
    path.unlink()
    path.mkdir()
    assert path.name in refused(Code.WRONG_KIND, step, tokenizer)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    tmp_path: Path, tokenizer: Path
) -> None:
    tiny = GPT(small_config(vocab_size=128))
    tiny.initialize(0.2, seed=1)
    source = Checkpoint(tiny).deepspeed(tmp_path / "ckpts")
    assert "257 ids, the model 128" in refused(Code.WRONG_TOKENIZER, source, tokenizer)
