"""Translates the flags of `pretrain_gpt.py` to a recipe."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lathe_base.config.megatron.command import Command, read_command
from lathe_base.config.megatron.flags import CHANGES, REFUSED, SPLIT, TAKEN, WITHOUT_EFFECT
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import flat
from lathe_base.errors import Code, UserError, printable

BASE = "megatron"
ALWAYS = ("Global.", "Model.hidden_size", "Model.num_", "Optimizer.lr.m", "Distributed.")
"""Keys that a recipe states even if the base has the same value."""

GPT2_VOCABULARY = 50257
UNCLIPPED = 1.0e38
"""A norm that no gradient reaches."""


def recipe_from_megatron(sources: Sequence[str], gpus: int | None = None) -> str:
    """The text of a recipe, to save as a file, that trains as the flags do; comments name every
    flag that is not taken.

    Args:
        sources: see `read_command`.
        gpus: number of GPUs, which determines the data-parallel degree; None leaves it to the
            launcher.

    Raises:
        UserError: a flag that changes the numbers and is not supported, one that is missing, a
            value that does not fit, or a `ds_config.json` that contradicts the flags.
    """
    command = read_command(sources)
    # Flags that change the numbers, unless their value is the one that does not.
    for flag in command.flags:
        if flag not in REFUSED:
            continue
        if flag == "num-experts" and set(command.flags[flag]) <= {"1"}:
            continue
        if flag.endswith("parallel-size") and command.flags[flag] == ["1"]:
            continue
        command.refuse(flag, f"changes the numbers and is not supported: {REFUSED[flag]}",
                       "remove the flag, if the training may differ", Code.UNSUPPORTED)  # fmt: skip
    # Every setting that the flags decide is checked, also those that equal the base's.
    settings: dict[str, Any] = {}
    comments: dict[str, str] = {}
    for key, value, comment in translate_settings(command, gpus):
        settings[key] = value
        if comment:
            comments[key] = comment
    recipe = _checked(settings, command)
    # The text states what differs from the base, and what a reader looks for first.
    base = flat(load_recipe(BASE).model_dump(mode="json"))
    values = flat(recipe.model_dump(mode="json"))
    shown = {k: v for k, v in settings.items() if k.startswith(ALWAYS) or base[k] != values[k]}
    lines = ["# From the flags of Megatron's pretrain_gpt.py.", *_notes(command), f"_base_: {BASE}"]
    tree: dict[str, Any] = {}
    for key, value in shown.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    for group in ("Global", "Engine", "Data", "Model", "Optimizer", "Distributed"):
        if group in tree:
            lines += [f"\n{group}:", *_lines(tree[group], comments, f"{group}.", 1)]
    return "\n".join([*lines, ""])


def _checked(settings: dict[str, Any], command: Command) -> Recipe:
    """The settings as a recipe.

    Raises:
        UserError: one is out of range.
    """
    try:
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return load_recipe(BASE, overrides)
    except UserError as error:
        raise UserError(f"{command.source}: {error.what}", "change the flag", error.code) from None


def _notes(command: Command) -> Iterator[str]:
    """Yield a comment for the data, and for the flags that are not taken."""
    paths = command.flags.get("data-path", [])
    if len(paths) == 1:
        folder = printable(paths[0].rpartition("/")[0] or ".")
        yield from _wrapped(
            f"--data-path: train with `lathe pretrain --recipe THIS_FILE --data {folder}`; the "
            "folder has the .bin and .idx files and those of the tokenizer."
        )
    elif paths:
        yield "# --data-path: join the weighted data sets with `lathe blend FOLDER=WEIGHT ...`."
    if "load" in command:
        yield from _wrapped(
            "--load: `lathe import-megatron` converts the checkpoint, and `lathe pretrain --init` "
            "starts from its weights."
        )
    for note in command.notes:
        yield from _wrapped(f"{note[:1].upper()}{note[1:]}.")
    others = {**{f"--{f}": CHANGES[f] for f in command.flags if f in CHANGES}}
    silent = [f"--{flag}" for flag in command.flags if flag in WITHOUT_EFFECT]
    known = TAKEN | CHANGES.keys() | WITHOUT_EFFECT | REFUSED.keys()
    for flag in command.flags:
        if flag not in known:
            others[f"--{flag}"] = "unknown to Lathe: check whether it changes the numbers"
    for key, why in (command.deepspeed.not_taken if command.deepspeed else {}).items():
        if why:
            others[f"{key} (DeepSpeed)"] = why
        else:
            silent.append(key)
    for flag, why in others.items():
        yield from _wrapped(f"Not taken: {printable(flag)}: {why}.")
    if silent:
        yield from _wrapped(f"Not taken, without effect on the numbers: {', '.join(silent)}.")


def _wrapped(text: str) -> Iterator[str]:
    line = "#"
    for word in text.split():
        if len(line) + len(word) > 98:
            yield line
            line = "#  "
        line += f" {word}"
    yield line


def _lines(tree: dict[str, Any], comments: dict[str, str], above: str, level: int) -> Iterator[str]:
    """Yield the lines of nested YAML groups."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{'  ' * level}{key}:"
            yield from _lines(value, comments, f"{above}{key}.", level + 1)
            continue
        comment = comments.get(f"{above}{key}")
        shown = value if isinstance(value, str) else repr(value).replace("None", "")
        text = f"{'  ' * level}{key}: {shown}".rstrip()
        yield f"{text} # {comment}" if comment else text


def translate_settings(command: Command, gpus: int | None) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and comment of each setting; `gpus` as in `recipe_from_megatron`.

    Raises:
        UserError: a flag that is missing, contradicts another one or is not supported.
    """
    yield from distributed(command, gpus)
    yield from batch(command, gpus)
    yield from _model(command)
    yield from _schedule(command)
    yield from _precision(command)
    yield "Global.seed", command.required_size("seed"), ""
    yield "Engine.logging_freq", command.required_size("log-interval"), ""
    yield "Engine.eval_freq", command.required_size("eval-interval"), ""
    yield "Engine.eval_iters", command.required_size("eval-iters"), ""
    if "save-interval" in command:
        comment = "a training state is also saved every save_minutes"
        yield "Engine.save_load.save_steps", command.required_size("save-interval"), comment
    split = " ".join(command.flags.get("split", [SPLIT]))
    try:
        parts = [int(x) if x.strip().isdigit() else float(x) for x in split.split(",")]
    except ValueError:
        command.refuse("split", "not three numbers", "write it as 949,50,1", Code.INVALID_VALUE)
    yield "Data.Train.dataset.split", parts, ""
    resets = [f for f in ("reset-attention-mask", "reset-position-ids") if f in command]
    if len(resets) == 1:
        why = "changes the numbers; Lathe resets attention and positions together, or neither"
        command.refuse(
            resets[0],
            why,
            "give both --reset-attention-mask and --reset-position-ids",
            Code.UNSUPPORTED,
        )
    yield "Data.reset_attention", bool(resets), "at document boundaries" if resets else ""


def _model(command: Command) -> Iterator[tuple[str, Any, str]]:
    hidden, layers = command.required_size("hidden-size"), command.required_size("num-layers")
    heads = command.required_size("num-attention-heads")
    length = command.size("seq-length") or command.required_size("encoder-seq-length")
    positions = command.required_size("max-position-embeddings")
    if "kv-channels" in command and command.required_size("kv-channels") * heads != hidden:
        why = f"changes the numbers: heads of hidden-size / num-attention-heads {heads} only"
        command.refuse("kv-channels", why, "remove it", Code.UNSUPPORTED)
    for flag in ("layernorm-epsilon", "norm-epsilon"):
        if command.number(flag) not in (None, 1e-5):
            command.refuse(
                flag, "changes the numbers: GPT-2's is 1e-5", "remove it", Code.UNSUPPORTED
            )
    yield "Data.Train.dataset.max_seq_len", length, ""
    if positions != length:
        yield "Model.max_position_embeddings", positions, ""
    # Megatron pads the vocabulary so that tensor-parallel ranks get equal parts of that multiple.
    multiple = command.required_size("make-vocab-size-divisible-by")
    multiple *= command.required_size("tensor-model-parallel-size")
    padded = -(-GPT2_VOCABULARY // multiple) * multiple if multiple else 0
    comment = f"GPT-2's {GPT2_VOCABULARY} padded to a multiple of {multiple}"
    yield "Model.vocab_size", padded, comment
    yield "Model.hidden_size", hidden, ""
    yield "Model.num_layers", layers, ""
    yield "Model.num_attention_heads", heads, ""
    ffn = command.size("ffn-hidden-size")
    if ffn not in (None, 4 * hidden):
        yield "Model.ffn_hidden_size", ffn, ""
    yield "Model.hidden_dropout_prob", command.required_number("hidden-dropout"), ""
    yield "Model.attention_probs_dropout_prob", command.required_number("attention-dropout"), ""
    yield "Model.initializer_range", command.required_number("init-method-std"), ""
    # `--recompute-activations` is short for the selective granularity, `--checkpoint-activations`
    # the older name of full recomputation.
    selective = command.word("recompute-granularity") == "selective"
    recomputes = {"checkpoint-activations", "recompute-activations", "recompute-granularity"}
    yield "Model.use_recompute", bool(recomputes & command.flags.keys()), ""
    if selective or "recompute-activations" in command:
        yield "Model.recompute_granularity", "core_attn", ""
    if "sequence-parallel" in command:
        yield "Model.sequence_parallel", True, ""
    if "num-layers-per-virtual-pipeline-stage" in command:
        # Megatron gives the layers of a stage, Lathe the number of stages on a rank.
        each = command.required_size("num-layers-per-virtual-pipeline-stage")
        per_rank = layers // max(1, command.required_size("pipeline-model-parallel-size"))
        if not each or per_rank % each:
            why = f"does not divide the {per_rank} layers of a pipeline rank"
            command.refuse(
                "num-layers-per-virtual-pipeline-stage", why, "give a divisor", Code.LAYOUT
            )
        yield "Model.virtual_pp_degree", per_rank // each, ""


def _schedule(command: Command) -> Iterator[tuple[str, Any, str]]:
    """Steps and optimizer; samples become steps of the global batch."""
    if "lr-decay-style" not in command:
        raise UserError(
            f"{command.source}: no --lr-decay-style: the default is linear, which is not supported",
            "add --lr-decay-style cosine, if the learning rate may decay as a cosine",
            Code.UNSUPPORTED,
        )
    # All lengths are in iterations, or all in samples; Megatron refuses a mixture as well.
    by_samples = "train-samples" in command
    unit = "samples" if by_samples else "iters"
    for kind in ("train", "lr-decay", "lr-warmup"):
        other = f"{kind}-{'iters' if by_samples else 'samples'}"
        if command.size(other):
            command.refuse(
                other,
                f"contradicts --train-{unit}",
                f"give --{kind}-{unit}",
                Code.CONFLICTING_OPTIONS,
            )
    batch = 1
    if by_samples:
        total = command.size("global-batch-size") or (command.deepspeed and command.deepspeed.total)
        batch = total or command.required_size("global-batch-size")
    train = command.required_size(f"train-{unit}")
    decay = command.size(f"lr-decay-{unit}") or train
    decay_steps = round(decay / batch)
    comment = f"{decay:,} samples in batches of {batch}" if by_samples else ""
    yield "Engine.max_steps", train // batch, f"{train:,} samples" if by_samples else ""
    warmup = command.number("lr-warmup-fraction")
    first = command.size(f"lr-warmup-{unit}") or 0
    if warmup is not None and first:
        command.refuse(
            "lr-warmup-fraction",
            f"contradicts --lr-warmup-{unit}",
            "give one of them",
            Code.CONFLICTING_OPTIONS,
        )
    yield "Optimizer.lr.decay_steps", decay_steps, comment
    comment = f"{first:,} {'samples' if by_samples else 'steps'}" if first else ""
    if warmup is None:
        warmup = first / decay if decay else 0.0
    yield "Optimizer.lr.warmup_rate", warmup, comment
    yield "Optimizer.lr.max_lr", command.required_number("lr"), ""
    yield "Optimizer.lr.min_lr", command.required_number("min-lr"), ""
    yield "Optimizer.weight_decay", command.required_number("weight-decay"), ""
    yield "Optimizer.beta1", command.required_number("adam-beta1"), ""
    yield "Optimizer.beta2", command.required_number("adam-beta2"), ""
    yield "Optimizer.epsilon", command.required_number("adam-eps"), ""
    # With DeepSpeed, its own configuration decides; `--clip-grad` alone does nothing.
    clip = command.required_number("clip-grad")
    ds = command.deepspeed
    if ds is not None:
        if ds.clip and "clip-grad" in command and ds.clip != clip:
            why = f"{ds.file} has gradient_clipping {ds.clip:g}"
            command.refuse("clip-grad", why, "make them agree", Code.MISMATCH)
        clip = ds.clip
    comment = "" if clip else "never clips"
    if ds is not None and not clip:
        comment += ": DeepSpeed clips only with gradient_clipping"
    yield "Optimizer.grad_clip.clip_norm", clip or UNCLIPPED, comment


def _precision(command: Command) -> Iterator[tuple[str, Any, str]]:
    ds = command.deepspeed
    dtypes = [name for flag, name in (("fp16", "float16"), ("bf16", "bfloat16")) if flag in command]
    if len(dtypes) > 1:
        command.refuse("fp16", "contradicts --bf16", "give one of them", Code.CONFLICTING_OPTIONS)
    dtype = dtypes[0] if dtypes else "float32"
    if ds is not None and ds.dtype != dtype:
        raise UserError(
            f"{command.source}: the flags train in {dtype}, {ds.file} in {ds.dtype}",
            "make them agree: --fp16 and fp16.enabled, or --bf16 and bf16.enabled",
            Code.MISMATCH,
        )
    yield "Engine.mix_precision.dtype", dtype, ""
    yield "Engine.mix_precision.level", "O1" if dtype == "float32" else "O2", ""
    if dtype != "float16":
        return
    # DeepSpeed has a loss scaler of its own, with defaults that differ from Megatron's.
    if ds is not None:
        static, first = ds.scale, 2.0**ds.initial_power
        window, hysteresis, min_scale = ds.window, ds.hysteresis, ds.min_scale
    else:
        static = command.number("loss-scale") or 0.0
        first = command.required_number("initial-loss-scale")
        window = command.required_size("loss-scale-window")
        hysteresis = command.required_size("hysteresis")
        min_scale = command.required_number("min-loss-scale")
    group = "Engine.mix_precision"
    yield f"{group}.use_dynamic_loss_scaling", not static, ""
    yield f"{group}.scale_loss", static or first, "" if static else "the dynamic scale's start"
    if static:
        return
    yield f"{group}.loss_scale_window", window, ""
    yield f"{group}.hysteresis", hysteresis, ""
    if min_scale != 1.0:
        command.notes.append(f"the loss scale may fall to 1, not only to {min_scale:g}")


def _data_parallel(command: Command, gpus: int | None) -> int | None:
    """Number of data-parallel ranks, if the number of GPUs is known."""
    tp = command.required_size("tensor-model-parallel-size")
    pp = command.required_size("pipeline-model-parallel-size")
    if gpus is None:
        return None
    if not tp * pp or gpus % (tp * pp):
        raise UserError(
            f"--gpus {gpus} is not a multiple of {tp} * {pp}, the tensor- and pipeline-parallel "
            "sizes",
            "give the number of all GPUs of the training",
            Code.LAYOUT,
        )
    return gpus // (tp * pp)


def distributed(command: Command, gpus: int | None) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and comment of the settings of the layout; `gpus` as in
    `recipe_from_megatron`.

    Raises:
        UserError: a number of GPUs that the layout does not divide, or that is needed.
    """
    ds, replicas = command.deepspeed, _data_parallel(command, gpus)
    tp = command.required_size("tensor-model-parallel-size")
    pp = command.required_size("pipeline-model-parallel-size")
    stage = command.size("zero-stage") or 0
    if ds is not None:
        if "zero-stage" in command and ds.stage != stage:
            command.refuse(
                "zero-stage", f"{ds.file} has stage {ds.stage}", "make them agree", Code.MISMATCH
            )
        stage = ds.stage
    if stage and replicas is None:
        raise UserError(
            f"{command.source}: ZeRO stage {stage} shards over all data-parallel ranks, whose "
            "number is not in the flags",
            "give the number of GPUs, such as --gpus 8",
            Code.MISSING_OPTION,
        )
    # ZeRO shards over all data-parallel ranks, which a recipe counts as sharding, not as replicas.
    yield "Distributed.dp_degree", "auto" if replicas is None else 1 if stage else replicas, ""
    yield "Distributed.mp_degree", tp, ""
    yield "Distributed.pp_degree", pp, ""
    if stage:
        yield "Distributed.sharding.sharding_degree", replicas, f"ZeRO stage {stage}"
        yield "Distributed.sharding.sharding_stage", stage, ""
        if "cpu-optimizer" in command or (ds and ds.offload):
            yield "Distributed.sharding.sharding_offload", True, ""


def batch(command: Command, gpus: int | None) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and comment of the batch sizes.

    A pipeline in Lathe (1F1B) needs a micro-batch for each stage: where there are fewer, they are
    made smaller, which does not change the numbers of a step.

    Raises:
        UserError: no micro-batch, or sizes that contradict `ds_config.json`.
    """
    ds, replicas = command.deepspeed, _data_parallel(command, gpus)
    total, micro = command.size("global-batch-size"), command.size("micro-batch-size")
    if ds is not None:
        _require_equal(command, "global-batch-size", total, ds.total, "train_batch_size")
        same = "train_micro_batch_size_per_gpu"
        _require_equal(command, "micro-batch-size", micro, ds.micro, same)
        total, micro = total or ds.total, micro or ds.micro
    if not micro:
        raise UserError(
            f"{command.source}: no --micro-batch-size",
            "add it: it has no default",
            Code.MISSING_OPTION,
        )
    pp = command.required_size("pipeline-model-parallel-size")
    # Without a global batch, Megatron's is one micro-batch per data-parallel rank.
    if total is None and replicas is not None:
        total = micro * replicas * ((ds and ds.accumulate) or 1)
    used, comment = micro, ""
    if total is not None and replicas and total % replicas == 0:
        # The largest micro-batch of which a pipeline has as many as stages.
        local = total // replicas
        sizes = [m for m in range(micro, 0, -1) if local % m == 0 and (pp == 1 or local // m >= pp)]
        if local % micro == 0 and sizes and sizes[0] != micro:
            used = sizes[0]
            comment = f"{micro} there, which leaves fewer micro-batches than the {pp} stages"
    elif pp > 1:
        command.notes.append(
            f"a pipeline needs {pp} or more micro-batches per data-parallel rank: give --gpus to "
            "check micro_batch_size"
        )
    yield "Global.global_batch_size", total, ""
    yield "Global.micro_batch_size", used, comment


def _require_equal(
    command: Command, flag: str, value: int | None, other: int | None, key: str
) -> None:
    if value and other and value != other:
        assert command.deepspeed is not None
        command.refuse(
            flag, f"{command.deepspeed.file} has {key} {other}", "make them agree", Code.MISMATCH
        )
