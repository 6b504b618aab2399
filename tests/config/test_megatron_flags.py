"""Recipes from the flags of Megatron's pretrain_gpt.py: values, refusals, scripts that are read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe_base.config.megatron.recipe import recipe_from_megatron
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from tests.config.test_megatron_recipes import SIZES
from tests.support.errors import raises

SHARED = (
    "--train-iters 500000 --lr-decay-iters 320000 --save ckpts/ckpts_tmp "
    "--data-path ./data/my-gpt_text_sentence --vocab-file ./data/gpt2-vocab.json "
    "--merge-file ./data/gpt2-merges.txt --data-impl mmap --split 949,50,1 "
    "--distributed-backend nccl --lr-decay-style cosine --num-workers 16 --weight-decay 1e-2 "
    "--clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 100 --save-interval 100000 "
    "--eval-interval 1000 --eval-iters 10 --fp16 --tensorboard-dir $TENSORBOARD --seed 1234 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --deepspeed "
    "--deepspeed_config=ds_config.json --zero-stage=0 "
)
RECOMPUTE = "--checkpoint-activations --deepspeed-activation-checkpointing "
MINIMAL_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 16 --train-iters 100 "
    "--lr 1e-3 --lr-decay-style cosine "
)


def script_flags(size: str) -> str:
    """The flags of the script for a model size."""
    (tp, pp, _), hidden, layers, heads, length, total, micro, lr, min_lr = SIZES[size]
    return (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {length} --max-position-embeddings {length} --micro-batch-size {micro} "
        f"--global-batch-size {total} --lr {lr} --min-lr {min_lr} "
        f"{SHARED}{'' if size.endswith('without-mp') else RECOMPUTE}"
    )


def ds_config(folder: Path, **changes: Any) -> Path:
    """The scripts' DeepSpeed configuration, with changes; a change to None removes the key."""
    values: dict[str, Any] = {
        "steps_per_print": 1,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {
            **{"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2},
            **{"min_loss_scale": 1, "initial_scale_power": 12},
        },
        "wall_clock_breakdown": False,
        **changes,
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return path


def translated(tmp_path: Path, *sources: str, gpus: int | None = None) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_from_megatron(sources, gpus))
    return load_recipe(path)


def refused(code: Code, *sources: str, gpus: int | None = None) -> str:
    with raises(code) as caught:
        recipe_from_megatron(sources, gpus)
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("size", SIZES)
def test_the_scripts_flags_give_the_shipped_recipe(size: str, tmp_path: Path) -> None:
    total, micro = SIZES[size][5:7]
    sizes = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro}
    config = ds_config(tmp_path, **sizes)
    found = translated(tmp_path, script_flags(size), str(config), gpus=8)
    assert found == load_recipe(f"megatron-{size}")


SCRIPT = r"""#!/bin/bash
# It doesn't run: "quotes and an apostrophe's end
MP=1; PP=2
if [ "$size" == "345M" ]; then
    HIDDEN=1024   # isn't decided here
else
    HIDDEN=2048
fi
export LR=1.5e-4 MIN_LR="1.5e-5"
touch "$PROOF"
START=$(date +%s)
TENSORBOARD=tb/`hostname`
cat > note.txt <<EOF
a here-document
EOF
options=" \
    --tensor-model-parallel-size $MP \
    --pipeline-model-parallel-size=${PP} --num-layers 24 --hidden-size $HIDDEN \
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 4 --global-batch-size 16 --lr $LR --min-lr $MIN_LR \
    REST"
TRAIN_ARGS=(
    --checkpoint-activations  # in an array
    --deepspeed-activation-checkpointing
)
run_cmd="deepspeed --num_gpus $GPUS ../../pretrain_gpt.py ${options} ${TRAIN_ARGS[@]}"
echo ${run_cmd}
eval ${run_cmd} 2>&1 | tee train.log
"""


def script(folder: Path, text: str = SCRIPT) -> str:
    path = folder / "train.sh"
    path.write_text(text.replace("REST", SHARED))
    return str(path)


def test_a_script_is_read_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROOF", str(tmp_path / "ran"))
    ds_config(tmp_path)  # named by --deepspeed_config, beside the script
    text = SCRIPT.replace("HIDDEN=2048", "HIDDEN=1024")
    found = translated(tmp_path, script(tmp_path, text), gpus=8)
    assert found == load_recipe("megatron-345m")
    assert not (tmp_path / "ran").exists()


def test_a_variable_with_several_values_is_named_and_can_be_given(tmp_path: Path) -> None:
    ds_config(tmp_path)
    said = refused(Code.INCOMPLETE, script(tmp_path), gpus=8)
    assert "--hidden-size" in said and "$HIDDEN" in said and "1024, 2048" in said
    found = translated(tmp_path, "HIDDEN=1024", script(tmp_path), gpus=8)
    assert found == load_recipe("megatron-345m")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("$WIDTH", "--hidden-size: $WIDTH "),
        ("$((2 * 32))", "--hidden-size: the value is the output of a command"),
        ("`nproc`", "--hidden-size: the value is the output of a command"),
        ("$1", "--hidden-size: the value is an argument of the script"),
        ("${WIDTH:-64}", "--hidden-size: the value cannot be read without a shell"),
    ],
)
def test_shell_expansions_are_errors(value: str, says: str) -> None:
    flags = MINIMAL_FLAGS.replace("--hidden-size 64", f"--hidden-size {value}")
    assert says in refused(Code.INCOMPLETE, flags)


OPTIONS = """options="--num-layers 2 --hidden-size 64"
options="${options} \\
    --num-attention-heads 4"
options+=" --seq-length 32"
if [ "${RECOMPUTE}" = "true" ]; then
BRANCH
fi
deepspeed pretrain_gpt.py ${options} --max-position-embeddings 32 --micro-batch-size 4 \\
    --train-iters 100 --lr 1e-3 --lr-decay-style cosine &> train.log
"""


def test_options_that_are_added_to_a_variable_are_read(tmp_path: Path) -> None:
    found = translated(tmp_path, script(tmp_path, OPTIONS.replace("BRANCH", "    OTHER=1")))
    assert (found.Model.num_attention_heads, found.Data.Train.dataset.max_seq_len) == (4, 32)


def test_options_that_a_branch_adds_are_not_taken_for_granted(tmp_path: Path) -> None:
    branch = '    options="${options} --checkpoint-activations"'
    said = refused(Code.INCOMPLETE, script(tmp_path, OPTIONS.replace("BRANCH", branch)))
    assert "$options has several values" in said


def test_variables_that_double_each_other_end(tmp_path: Path) -> None:
    lines = [f'V{i}="$V{i + 1} $V{i + 1}"' for i in range(60)]
    text = "\n".join([*lines, 'V60="--num-layers 2"', "pretrain_gpt.py $V0"])
    assert "V" in refused(Code.INCOMPLETE, script(tmp_path, text))


@given(st.text(alphabet="abc $\"'\\\n`(){}[]<>|&;#=-@*0", max_size=60))
def test_any_text_is_a_recipe_or_a_users_error(text: str) -> None:
    with pytest.raises(UserError):
        recipe_from_megatron([f"--lr x {text}"])


def test_defaults_are_megatrons(tmp_path: Path) -> None:
    found = translated(tmp_path, MINIMAL_FLAGS)
    m, o, e = found.Model, found.Optimizer, found.Engine
    assert (m.hidden_dropout_prob, m.attention_probs_dropout_prob) == (0.1, 0.1)
    assert (o.lr.decay_steps, o.lr.warmup_rate, o.lr.min_lr) == (100, 0.0, 0.0)
    assert (e.eval_iters, e.eval_freq, e.logging_freq) == (100, 1000, 100)
    assert (e.mix_precision.dtype, e.mix_precision.level) == ("float32", "O1")
    assert found.Data.Train.dataset.split == (969, 30, 1)
    assert found.Global.seed == 1234
    assert not m.use_recompute and m.scale_residual_init and m.vocab_size == 50304


def setting(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--ffn-hidden-size 128", {"Model.ffn_hidden_size": 128}),
        ("--max-position-embeddings 64", {"Model.max_position_embeddings": 64}),
        ("--make-vocab-size-divisible-by 8", {"Model.vocab_size": 50264}),
        ("--tensor-model-parallel-size 4", {"Model.vocab_size": 50688}),
        ("--lr-warmup-iters 25", {"Optimizer.lr.warmup_rate": 0.25}),
        (
            "--fp16 --loss-scale 128",
            {
                "Engine.mix_precision.use_dynamic_loss_scaling": False,
                "Engine.mix_precision.scale_loss": 128.0,
            },
        ),
        (
            "--fp16 --initial-loss-scale 65536 --loss-scale-window 300 --hysteresis 3",
            {
                "Engine.mix_precision.scale_loss": 65536.0,
                "Engine.mix_precision.loss_scale_window": 300,
                "Engine.mix_precision.hysteresis": 3,
            },
        ),
        ("--bf16", {"Engine.mix_precision.dtype": "bfloat16", "Engine.mix_precision.level": "O2"}),
        ("--reset-attention-mask --reset-position-ids", {"Data.reset_attention": True}),
        ("--recompute-granularity selective", {"Model.recompute": "core_attn"}),
        ("--recompute-granularity full --recompute-method uniform", {"Model.recompute": "full"}),
        ("--clip-grad 0", {"Optimizer.grad_clip.clip_norm": 1e38}),
        ("--init-method-std 0.006 --seed 7", {"Model.initializer_range": 0.006, "Global.seed": 7}),
        ("--adam-beta2 0.95 --adam-eps 1e-7", {"Optimizer.beta2": 0.95}),
        ("--num-experts 1 --openai-gelu", {"Model.num_layers": 2}),
        ("--lr 5e-4 --lr=2e-3", {"Optimizer.lr.max_lr": 2e-3}),
        (
            "--num-layers 12 --pipeline-model-parallel-size 3 "
            "--num-layers-per-virtual-pipeline-stage 2",
            {"Model.virtual_pp_degree": 2, "Distributed.pp_degree": 3},
        ),
    ],
)
def test_a_flag_becomes_a_setting(flags: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = translated(tmp_path, MINIMAL_FLAGS + flags)
    assert {key: setting(found, key) for key in expected} == expected


def test_samples_become_steps(tmp_path: Path) -> None:
    flags = MINIMAL_FLAGS.replace(
        "--train-iters 100", "--train-samples 1608 --lr-decay-samples 800"
    )
    found = translated(tmp_path, f"{flags} --lr-warmup-samples 80")
    assert found.Engine.max_steps == 100  # of 16 samples; the rest of 8 is not trained
    assert (found.Optimizer.lr.decay_steps, found.Optimizer.lr.warmup_rate) == (50, 0.1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_over_the_data_parallel_ranks(stage: int, tmp_path: Path) -> None:
    flags = f"{MINIMAL_FLAGS} --zero-stage {stage} --tensor-model-parallel-size 2"
    degrees = translated(tmp_path, flags, gpus=8).Distributed
    assert (degrees.dp_degree, degrees.mp_degree) == (1, 2)
    assert (degrees.sharding.sharding_degree, degrees.sharding.sharding_stage) == (4, stage)
    assert "--gpus" in refused(Code.MISSING_OPTION, flags)


def test_deepspeeds_configuration_decides(tmp_path: Path) -> None:
    config = ds_config(
        tmp_path,
        train_batch_size=16,
        gradient_clipping=None,
        zero_optimization={"stage": 1, "cpu_offload": True},
        fp16={"enabled": True},
    )
    text = recipe_from_megatron([f"{MINIMAL_FLAGS} --fp16", str(config)], gpus=4)
    found = translated(tmp_path, f"{MINIMAL_FLAGS} --fp16", str(config), gpus=4)
    assert found.Optimizer.grad_clip.clip_norm == 1e38
    assert "clip_norm: 1e+38 # never clips: DeepSpeed clips only with gradient_clipping" in text
    assert found.Distributed.sharding.sharding_degree == 4
    assert found.Distributed.sharding.sharding_offload
    precision = found.Engine.mix_precision
    assert (precision.scale_loss, precision.loss_scale_window) == (2.0**16, 1000)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        (
            {"train_batch_size": 8},
            Code.MISMATCH,
            "--global-batch-size 16: .*has train_batch_size 8",
        ),
        ({"train_micro_batch_size_per_gpu": 2}, Code.MISMATCH, "--micro-batch-size 4: "),
        ({"gradient_clipping": 0.5}, Code.MISMATCH, "--clip-grad 1.0: .*has gradient_clipping 0.5"),
        ({"fp16": {"enabled": False}}, Code.MISMATCH, "float16, .* in float32"),
        ({"zero_optimization": {"stage": 2}}, Code.MISMATCH, "--zero-stage 0: .*stage 2"),
        ({"curriculum_learning": {"enabled": True}}, Code.UNSUPPORTED, "curriculum_learning "),
        (
            {"fp16": {"enabled": "yes", "loss_scale": "x"}},
            Code.INVALID_VALUE,
            "fp16.loss_scale is x",
        ),
        (
            {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
            Code.UNSUPPORTED,
            "consecutive_hysteresis",
        ),
        ({"fp16": []}, Code.INVALID_VALUE, "fp16 "),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2000}},
            Code.INVALID_VALUE,
            "scale_loss",
        ),
    ],
)
def test_a_contradiction_is_named(
    changes: dict[str, Any], code: Code, says: str, tmp_path: Path
) -> None:
    config = ds_config(tmp_path, **changes)
    flags = f"{MINIMAL_FLAGS} --fp16 --clip-grad 1.0 --zero-stage 0"
    message = refused(code, flags, str(config), gpus=4)
    assert re.search(says, message), message


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--num-experts 4", Code.UNSUPPORTED, "--num-experts 4: "),
        ("--curriculum-learning", Code.UNSUPPORTED, "--curriculum-learning: "),
        ("--rampup-batch-size 16 8 300000", Code.UNSUPPORTED, "--rampup-batch-size 16 8 300000: "),
        ("--lr-decay-style linear", Code.UNSUPPORTED, "cosine"),
        ("--lr-decay-style constant", Code.UNSUPPORTED, "cosine"),
        ("--optimizer sgd", Code.UNSUPPORTED, "adam"),
        ("--swiglu", Code.UNSUPPORTED, "--swiglu: "),
        ("--eod-mask-loss", Code.UNSUPPORTED, "--eod-mask-loss: "),
        ("--reset-attention-mask", Code.UNSUPPORTED, "--reset-position-ids"),
        ("--layernorm-epsilon 1e-6", Code.UNSUPPORTED, "1e-5"),
        ("--kv-channels 32", Code.UNSUPPORTED, "--kv-channels 32: "),
        ("--fp16 --bf16", Code.CONFLICTING_OPTIONS, "--bf16"),
        ("--lr-decay-samples 800", Code.CONFLICTING_OPTIONS, "--train-iters"),
        ("--num-layers two", Code.INVALID_VALUE, "--num-layers two: "),
        ("--lr nan", Code.INVALID_VALUE, "--lr nan: "),
        ("--lr", Code.INVALID_VALUE, "--lr: has 0 values"),
        ("--fp16 true", Code.INVALID_VALUE, "--fp16 true: "),
        ("--hidden-size 65", Code.INVALID_VALUE, "hidden_size 65 "),
        ("--min-lr 1", Code.INVALID_VALUE, "min_lr 1.0 "),
        ("--split 1,2", Code.INVALID_VALUE, "Data.Train.dataset.split"),
        ("--split a,b,c", Code.INVALID_VALUE, "--split a,b,c: "),
    ],
)
def test_unsupported_flags_are_rejected_by_name(flags: str, code: Code, says: str) -> None:
    assert says in refused(code, MINIMAL_FLAGS + flags)


@pytest.mark.parametrize(
    ("flag", "code", "says"),
    [
        ("--num-layers 2", Code.MISSING_OPTION, "--num-layers"),
        ("--lr 1e-3", Code.MISSING_OPTION, "--lr\n"),
        ("--train-iters 100", Code.MISSING_OPTION, "--train-iters"),
        ("--micro-batch-size 4", Code.MISSING_OPTION, "--micro-batch-size"),
        ("--lr-decay-style cosine", Code.UNSUPPORTED, "--lr-decay-style"),
    ],
)
def test_a_missing_flag_is_named(flag: str, code: Code, says: str) -> None:
    assert says in refused(code, MINIMAL_FLAGS.replace(flag, ""))


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("nothing", Code.NOT_FOUND, "nothing: "),
        ("pretrain_bert.py --num-layers 2", Code.WRONG_KIND, "pretrain_bert.py"),
        ("pretrain_gpt.py extra --num-layers 2", Code.MALFORMED, "extra "),
        ("--num-layers '2", Code.MALFORMED, "a quote does not end"),
        (
            "pretrain_gpt.py --lr 1; pretrain_gpt.py --lr 2",
            Code.AMBIGUOUS,
            "2 different pretrain_gpt.py",
        ),
    ],
)
def test_other_texts_are_refused(source: str, code: Code, says: str) -> None:
    assert says in refused(code, source)


def test_flags_that_are_not_taken_are_named_once(tmp_path: Path) -> None:
    text = recipe_from_megatron(
        [
            f"{MINIMAL_FLAGS} --save out --no-bias-gelu-fusion --frobnicate 3 --load in "
            "--data-path d/text"
        ]
    )
    comments = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "without effect on the numbers: --save." in comments
    assert "--no-bias-gelu-fusion: GELU was exact" in comments
    assert "--frobnicate: unknown to Lathe" in comments
    assert "lathe import-megatron" in comments and "--data d`" in comments
    for flag in ("--save", "--no-bias-gelu-fusion", "--frobnicate", "--load", "--data-path"):
        assert comments.count(flag) == 1
    assert "frobnicate" not in str(load_recipe("megatron").model_dump())


def test_a_newline_in_a_flag_stays_in_its_comment(tmp_path: Path) -> None:
    text = recipe_from_megatron([f"{MINIMAL_FLAGS} --frob 'x\nModel:' --data-path 'a\nModel:/c'"])
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert load_recipe(path).Model.num_layers == 2
