"""Finetuning on conversations, against literal implementations with transformers and peft."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.rank import validation_batches
from lathe.data.blend import blend
from lathe.data.chat_samples import ChatSamples, pack
from lathe.data.prepare import prepare
from lathe.data.tokens import TokenDataset, TokenSequences
from lathe.model import lora
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from lathe.model.lora import merge_adapters
from lathe.train.batches import Batch, EvalBatches, TrainBatches, first_batches
from lathe.train.finetune import finetune
from lathe.train.state_folder import committed_steps
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import LoraSettings
from lathe_base.errors import Code
from tests.support.chats import write_conversations, write_model
from tests.support.errors import raises
from tests.support.families import TOKENS, make, save
from tests.support.small_models import small_config
from tests.support.small_run import SMALL, kill_after_saves, records, run_group, start
from tests.support.tables import quick_only

CHAT = (
    *("Prepare.chat=True", "Data.Train.dataset.split=8,1,1", "Data.reset_attention=True"),
    *("Data.Train.dataset.max_seq_len=48", "Data.Eval.dataset.max_seq_len=48"),
    *("Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0"),
)
LORA = (
    "Finetune.lora.rank=4",
    "Finetune.lora.alpha=8",
    "Finetune.samples=2",
    "Finetune.sample_tokens=8",
)
OPTIONS = (*CHAT, "Engine.max_steps=4", "Finetune.samples=0")


def settings(*overrides: str) -> tuple[str, ...]:
    return (*SMALL, *OPTIONS, *overrides)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """A llama with grouped-query attention, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, byte_tokenizer, family="llama", kv_heads=(2, 2))
    return folder


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_conversations(folder / "c.jsonl")
    prepare(load_recipe("tiny", settings()), folder / "tokens", str(folder / "c.jsonl"), model)
    return folder / "tokens"


def test_packing_needs_few_rows_and_keeps_every_example() -> None:
    sizes = np.random.default_rng(0).integers(1, 65, 5000)
    rows = pack(sizes, 64)
    assert sorted(i for row in rows for i in row) == list(range(5000))
    assert max(int(sizes[row].sum()) for row in rows) <= 64
    assert len(rows) <= 1.02 * sizes.sum() / 64


def reference_loss(model: torch.nn.Module, data: TokenSequences, examples: Sequence[int]) -> Tensor:
    """Mean over the assistant's tokens of all examples, each alone, with transformers."""
    losses = []
    for i in examples:
        ids = torch.tensor(data[i].astype(np.int64))[None]
        labels = torch.where(torch.tensor(data.mask(i) != 0), ids[0], -100)
        logits = model(ids).logits[0]
        each = F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="none")
        losses.append(each[labels[1:] != -100])
    return torch.cat(losses).mean()


def test_the_loss_and_gradients_are_those_of_examples_alone(
    model: Path, data: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", settings("Engine.max_steps=1"))
    finetune(recipe, model, data, tmp_path / "run")
    tokens = TokenDataset.open(data)
    assert isinstance(tokens, TokenSequences)
    batches = TrainBatches(recipe, tokens, Batch(8, 8, 8, 1), 0)
    examples = [int(i) for row in batches.documents(0, 0) for i in row.split(", ")]
    assert len(examples) > 12  # several a row
    twin = AutoModelForCausalLM.from_pretrained(model)
    expected = reference_loss(twin, tokens, examples)
    gradients = torch.autograd.grad(expected, list(twin.parameters()))
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    assert records(tmp_path / "run", "loss")[0] == pytest.approx(expected.item(), abs=1e-6)
    assert records(tmp_path / "run", "grad_norm")[0] == pytest.approx(float(norm), rel=1e-5)
    validation = EvalBatches(recipe, tokens, 8, 2)
    assert isinstance(validation.samples, ChatSamples)
    rows = map(validation.samples.origin, range(validation.count))
    with torch.no_grad():
        whole = reference_loss(twin, tokens, [int(i) for row in rows for i in row.split(", ")])
    assert records(tmp_path / "run", "eval_loss")[0] == pytest.approx(float(whole), abs=1e-5)


def segments(rows: NDArray[np.int64], positions: NDArray[np.int64], masks: NDArray[np.bool_]):
    """Tokens and mask of every piece of text in packed rows, each with the token after it."""
    for row, position, mask in zip(rows, positions, masks, strict=True):
        starts = [*np.flatnonzero(position == 0), len(position)]
        for begin, end in pairwise(starts):
            yield torch.tensor(row[begin : end + 1]), torch.tensor(mask[begin:end])


def segment_logits(model: torch.nn.Module, batch: tuple[NDArray[Any], ...]):
    """(logits, targets) of all tokens that count, each piece of text computed alone."""
    found = []
    for tokens, mask in segments(*batch):
        if mask.any():
            found.append((model(tokens[None, :-1]).logits[0][mask], tokens[1:][mask]))
    return map(torch.cat, zip(*found, strict=True))


@pytest.fixture(scope="module")
def mixed(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A blend of conversations and of plain text."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(1)
    texts = ["".join(rng.choice(list("abcdef "), 60)) for _ in range(100)]
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain = load_recipe("tiny", settings("Prepare.chat=False"))
    prepare(plain, folder / "text", str(folder / "t.jsonl"), model)
    return blend([(data, 1.0), (folder / "text", 1.0)], folder / "blend").folder


def test_conversations_blend_with_text_all_of_which_counts(
    model: Path, mixed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe("tiny", settings("Engine.max_steps=1", "Engine.eval_iters=4"))
    with caplog.at_level("INFO", "lathe"):
        finetune(recipe, model, mixed, tmp_path / "run")
    tokens = TokenDataset.open(mixed)
    twin = AutoModelForCausalLM.from_pretrained(model)
    batches = TrainBatches(recipe, tokens, Batch(8, 8, 8, 1), 0)
    read = batches(0, 0), batches.positions(0, 0), batches.masks(0, 0)
    assert {row.split()[0] for row in batches.documents(0, 0)} == {"1-tokens", "2-text"}
    with torch.no_grad():
        expected = F.cross_entropy(*segment_logits(twin, read))
    assert records(tmp_path / "run", "loss")[0] == pytest.approx(expected.item(), abs=1e-5)

    validation = EvalBatches(recipe, tokens, 8, 4, micro=4)
    assert validation.sets == ["1-tokens", "2-text"]
    losses: dict[str, list[Tensor]] = {name: [] for name in validation.sets}
    for i in range(len(validation)):
        read = validation[i], validation.positions(i), validation.masks(i)
        place = validation.set_index(i)
        with torch.no_grad():
            each = F.cross_entropy(*segment_logits(twin, read), reduction="none")
        losses[validation.sets[place]].append(each)
    apart = {name: torch.cat(each) for name, each in losses.items()}
    for name, each in apart.items():
        found = records(tmp_path / "run", f"eval_loss.{name}")[0]
        assert found == pytest.approx(float(each.mean()), abs=1e-5)
        assert f"; {name} {found:.4f}" in caplog.text
    whole = torch.cat([*apart.values()]).mean()
    assert records(tmp_path / "run", "eval_loss")[0] == pytest.approx(float(whole), abs=1e-5)


def test_distillation_counts_the_same_tokens(
    model: Path, data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    shape: dict[str, Any] = {"family": "llama", "kv_heads": (2, 2), "n_inner": (64, 64)}
    teacher = write_model(tmp_path / "teacher", byte_tokenizer, **shape)
    distill = f"Compress.Distill={{teacher: {teacher}, alpha: 0.7, temperature: 2.0, hidden: 0.5}}"
    recipe = load_recipe("tiny", settings("Engine.max_steps=1", distill))
    finetune(recipe, model, data, tmp_path / "run")
    batches = TrainBatches(recipe, TokenDataset.open(data), Batch(8, 8, 8, 1), 0)
    read = batches(0, 0), batches.positions(0, 0), batches.masks(0, 0)
    twin, guide = map(AutoModelForCausalLM.from_pretrained, (model, teacher))
    hidden: dict[Any, list[Tensor]] = {twin: [], guide: []}
    for each in hidden:
        each.lm_head.register_forward_hook(lambda m, x, _, to=hidden[each]: to.append(x[0][0]))
    with torch.no_grad():
        (own, targets), (wanted, _) = (segment_logits(each, read) for each in (twin, guide))
        divergence = F.kl_div(
            *(F.log_softmax(x / 2, -1) for x in (own, wanted)), reduction="none", log_target=True
        ).sum(1)
        masks = [mask for _, mask in segments(*read) if mask.any()]
        ours, theirs = (
            torch.cat([x[mask] for x, mask in zip(found, masks, strict=True)])
            for found in hidden.values()
        )
    away = 1 - F.cosine_similarity(ours, theirs, dim=1)
    expected = 0.3 * F.cross_entropy(own, targets) + 0.7 * 4 * divergence.mean()
    expected += 0.5 * away.mean()
    assert records(tmp_path / "run", "loss")[0] == pytest.approx(expected.item(), abs=1e-5)


QUANTIZED = {
    "int8": ("activation_quantize_type=moving_average_abs_max",),
    "dynamic int8": ("activation_quantize_type=dynamic",),
    "int4 by gptq": ("weight_bits=4", "group_size=32", "gptq_batches=4"),
}


@pytest.mark.parametrize("case", quick_only(QUANTIZED, ["dynamic int8"]))
def test_qat_counts_the_assistants_tokens(
    case: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """The validation loss before training is that of every example alone, with the plan's
    rounding, and training lowers it."""
    chosen = [f"Compress.Quantization.{key}" for key in QUANTIZED[case]]
    for name, steps in (("before", 0), ("after", 4)):
        more = ("Compress.Quantization.enable=True", *chosen, f"Engine.max_steps={steps}")
        recipe = load_recipe("tiny", settings(*more))
        quantize(recipe, model, data, tmp_path / name)
    quantized = load_checkpoint(tmp_path / "before").model.eval()
    tokens = TokenDataset.open(data)
    assert isinstance(tokens, TokenSequences)
    validation = EvalBatches(recipe, tokens, 8, 2)
    losses = []
    for row in map(validation.samples.origin, range(validation.count)):  # type: ignore[union-attr]
        for i in map(int, row.split(", ")):
            ids = torch.tensor(tokens[i].astype(np.int64))[None]
            each = F.cross_entropy(logits(quantized, ids)[0, :-1], ids[0, 1:], reduction="none")
            losses.append(each[torch.tensor(tokens.mask(i)[1:] != 0)])
    found = records(tmp_path / "before", "eval_loss")[0]
    assert found == pytest.approx(float(torch.cat(losses).mean()), abs=1e-4)
    assert records(tmp_path / "after", "eval_loss")[-1] < found


def test_statistics_are_of_packed_conversations(data: Path) -> None:
    recipe = load_recipe("tiny", settings("Data.reset_attention=False"))
    tokens = TokenDataset.open(data)
    for batch in [*first_batches(recipe, tokens, 2), validation_batches(recipe, tokens)[0]]:
        assert (batch[:, -4:] == tokens.eos_id).mean() < 0.7  # no padding but at few ends
        assert (batch == tokens.eos_id).sum(1).min() >= 4  # two conversations or more


def test_accumulation_does_not_change_the_loss(model: Path, data: Path, tmp_path: Path) -> None:
    for name, micro in (("one", 8), ("many", 1)):
        recipe = load_recipe("tiny", settings(f"Global.micro_batch_size={micro}"))
        finetune(recipe, model, data, tmp_path / name)
    for key in ("loss", "eval_loss", "grad_norm"):
        found, expected = (records(tmp_path / name, key) for name in ("many", "one"))
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_long_conversations_end_with_an_answer_or_are_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": r, "content": r[0] * 8} for r in ("user", "assistant")] * 3
    rows = [
        {"messages": turns},
        {"prompt": "x" * 80, "completion": "y"},
        {"prompt": "x", "completion": "y"},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe("tiny", settings("Data.Train.dataset.split=1,0,0"))
    made = prepare(recipe, tmp_path / "tokens", str(tmp_path / "c.jsonl"), model)
    tokens = TokenDataset.open(made.folder)
    assert isinstance(tokens, TokenSequences)
    samples = ChatSamples(tokens, range(3), 48, 0, 0, packs=True)
    assert (samples.cut, samples.dropped, len(samples)) == (1, 1, 2)
    kept = {samples.origin(i): int((samples.positions(i) > 0).sum()) for i in range(2)}
    assert kept.keys() == {"0", "2"}
    of_first = next(i for i in range(2) if samples.origin(i) == "0")
    assert samples.mask(of_first).nonzero()[0].max() == 43  # the end of the 4th of 6 turns
    full = ChatSamples(tokens, range(1), 43, 0, 0, packs=True)  # a row that ends there too
    assert full.mask(0).nonzero()[0].max() == 43
    with caplog.at_level("WARNING"):
        TrainBatches(recipe, tokens, Batch(1, 1, 1, 1), 0).announce(1)
    assert "of 3 conversations, 1 are longer than 49 tokens" in caplog.text
    with raises(Code.TOO_LITTLE_DATA, tokens.folder, "49 tokens"):
        ChatSamples(tokens, range(1, 2), 48, 0, 0, packs=True)


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def test_adapters_are_merged_and_read_again(model: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = load_recipe("tiny", settings(*LORA))
    result = finetune(recipe, model, data, run)
    assert result.eval_loss < result.first_eval_loss
    assert {path.name for path in run.iterdir()} >= {"adapter", "samples.json", "lathe.json"}
    tuned, base = load_checkpoint(run).model, load_checkpoint(model).model
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert (logits(tuned, tokens) - logits(base, tokens)).abs().max() > 1e-3
    merge_adapters(base, run / "adapter")
    torch.testing.assert_close(logits(base, tokens), logits(tuned, tokens), atol=1e-5, rtol=0)
    answers = json.loads((run / "samples.json").read_text())
    assert len(answers) == 2 and answers[0]["prompt"].endswith("a:")
    assert answers[0]["expected"].endswith(".")


FAMILIES = {
    "llama": {"kv_heads": (2, 2)},
    "gpt2": {},
    "phi3": {"kv_heads": (2, 2)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_adapters_and_merges_to_the_same_logits(
    family: str, data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    peft = pytest.importorskip("peft", reason="peft, which is compared, is not installed")
    write_model(tmp_path / "base", byte_tokenizer, family=family, **FAMILIES[family])
    recipe = load_recipe("tiny", settings(*LORA, "Optimizer.lr.max_lr=0.05"))
    finetune(recipe, tmp_path / "base", data, tmp_path / "run")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    adapted = peft.PeftModel.from_pretrained(twin, tmp_path / "run/adapter").eval()
    expected = logits(load_checkpoint(tmp_path / "run").model, tokens)
    torch.testing.assert_close(logits(adapted, tokens), expected, atol=2e-5, rtol=0)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens), expected, atol=2e-5, rtol=0)
    # And the other way: what peft writes is read.
    config = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, init_lora_weights=False, target_modules="all-linear"
    )
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    theirs = peft.get_peft_model(twin, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "base").model
    merge_adapters(ours, tmp_path / "theirs")
    torch.testing.assert_close(logits(ours, tokens), logits(theirs, tokens), atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", ["gpt-neox", "opt", "phi4 mini", "gemma3", "qwen3"])
def test_adapters_of_every_family_are_those_of_hugging_faces_modules(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """Against a literal implementation: each module named in the file adds scale B A x."""
    twin = make(case)
    save(twin, tmp_path / "base", byte_tokenizer)
    ours = load_checkpoint(tmp_path / "base").model
    settings = LoraSettings(rank=3, alpha=6)
    lora.insert(ours, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if lora.is_adapter(name):
                parameter.normal_(0, 0.1)
    before = logits(twin, TOKENS)
    expected = logits(ours.eval(), TOKENS)
    family = ours.config.architecture
    lora.save_adapters(tmp_path / "a", lora.adapter_tensors(ours), family, settings, "base")
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    targets = json.loads((tmp_path / "a/adapter_config.json").read_text())["target_modules"]
    for name, module in twin.named_modules():
        prefix = f"base_model.model.{name}.lora"
        if f"{prefix}_A.weight" not in tensors:
            continue
        assert any(name.endswith(target) for target in targets)
        a, b = (tensors.pop(f"{prefix}_{side}.weight") for side in "AB")
        module.register_forward_hook(lambda _, x, y, a=a, b=b: y + 2 * (x[0] @ a.T @ b.T))
    assert not tensors  # all were modules
    assert (expected - before).abs().max() > 0.01
    torch.testing.assert_close(logits(twin, TOKENS), expected, atol=2e-4, rtol=1e-4)
    lora.merge(ours)
    torch.testing.assert_close(logits(ours, TOKENS), expected, atol=2e-4, rtol=1e-4)
    base = load_checkpoint(tmp_path / "base").model
    merge_adapters(base, tmp_path / "a")
    torch.testing.assert_close(logits(base, TOKENS), expected, atol=2e-4, rtol=1e-4)


BROKEN = {
    "use_dora": (lambda config: config.update(use_dora=True), Code.UNSUPPORTED, "use_dora True"),
    "alpha": (lambda config: config.update(lora_alpha="8"), Code.MALFORMED, "lora_alpha '8'"),
}


def test_adapters_of_other_models_are_named(model: Path, data: Path, tmp_path: Path) -> None:
    finetune(load_recipe("tiny", settings(*LORA)), model, data, tmp_path / "run")
    adapter = tmp_path / "run/adapter"
    whole = (adapter / "adapter_config.json").read_text()
    for change, code, text in BROKEN.values():
        config = json.loads(whole)
        change(config)  # type: ignore[no-untyped-call]
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        with raises(code, text):
            merge_adapters(load_checkpoint(model).model, adapter)
    (adapter / "adapter_config.json").write_text(whole)
    wide = GPT(small_config(n_embd=60, head_dim=15))
    with raises(Code.MISMATCH, adapter / "adapter_model.safetensors"):
        merge_adapters(wide, adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"x")
    with raises(Code.MALFORMED, adapter / "adapter_model.safetensors"):
        merge_adapters(load_checkpoint(model).model, adapter)


@pytest.mark.slow
def test_a_killed_lora_run_resumes_bit_identically(model: Path, data: Path, tmp_path: Path) -> None:
    options = settings(*LORA, "Engine.max_steps=30", "Engine.save_load.save_steps=3")
    finetune(load_recipe("tiny", options), model, data, tmp_path / "whole")
    run = tmp_path / "killed"
    process = start("finetune", model, data, run, overrides=options[len(SMALL) :])
    kill_after_saves(process, run, saves=1)
    states = committed_steps(run / "state")
    names = {n for path in states[-1].glob("*.safetensors") for n in load_file(path)}
    kinds = {name.split(".")[0] for name in names}
    assert kinds == {"model", "optimizer", "rng"}
    assert all(".lora_" in name for name in names if not name.startswith("rng"))
    finetune(load_recipe("tiny", options), model, data, run)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_unsupported_starts_are_rejected(model: Path, data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", settings("Engine.max_steps=0"))
    quantize(recipe, model, data, tmp_path / "q")
    with raises(Code.WRONG_KIND, tmp_path / "q"):
        finetune(recipe, tmp_path / "q", data, tmp_path / "run")


GROUPS = {
    "dp2": ("Distributed.dp_degree=2",),
    "pp2": ("Distributed.pp_degree=2",),
    "sharding2": (
        *("Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3"),
    ),
    "mp2": ("Distributed.mp_degree=2", "Model.sequence_parallel=True"),
}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), LORA], ids=["whole", "lora"])
def test_layouts_trace_the_losses_of_one_process(
    lora: tuple[str, ...], model: Path, data: Path, tmp_path: Path
) -> None:
    given = settings(
        *lora, "Finetune.samples=0", "Global.global_batch_size=8", "Global.local_batch_size="
    )
    finetune(load_recipe("tiny", given), model, data, tmp_path / "alone")
    layouts = {name: o for name, o in GROUPS.items() if not (lora and name == "mp2")}
    run_group(
        2,
        [
            ("finetune", "tiny", (*given, *o), (model, data, tmp_path / name))
            for name, o in layouts.items()
        ],
    )
    for name in layouts:
        for key in ("loss", "eval_loss", "grad_norm"):
            found, expected = (records(tmp_path / run, key) for run in (name, "alone"))
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)
