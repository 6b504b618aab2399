"""Checks a recipe for what the Paddle engine does not support, without importing Paddle."""

from collections.abc import Mapping
from typing import Any

from lathe.evaluate.measure_model import require_float32
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError

CRITERIA = ("l1_norm", "l2_norm")  # of PaddleSlim's L1NormFilterPruner and L2NormFilterPruner
STATIC = "PaddleSlim quantizes the weight and the input of a linear together, with static scales"
HINT = "or use Compress.engine=torch"


def require_supported(verb: str, recipe: Recipe) -> None:
    """Check that the engine supports the recipe in `prune`, `quantize`, `evaluate` or `compress`.

    Raises:
        UserError: it does not support the pruning, quantization, distillation, sequence or pipeline
            parallelism, sharding or precision.
    """
    if verb == "evaluate":
        require_float32(recipe.Offline_Eval, "the Paddle engine evaluates in float32")
        return
    if verb == "compress":
        raise UserError(
            "compress chooses a width for every layer, but PaddleSlim's pruners remove the same "
            "share of all layers",
            "use Compress.engine=torch",
            Code.UNSUPPORTED,
        )
    if verb == "prune":
        wanted: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
            "criterion": (recipe.Compress.Prune.criterion, CRITERIA),
            "scope": (recipe.Compress.Prune.scope, ("uniform",)),
            "layers": (recipe.Compress.Prune.layers, (0,)),
            "heads": (recipe.Compress.Prune.heads, ([],)),
            "rounds": (recipe.Compress.Prune.rounds, (1,)),
            "channel_multiple": (recipe.Compress.Prune.channel_multiple, (1,)),
        }
        for key, (value, possible) in wanted.items():
            if value not in possible:
                raise UserError(
                    f"Compress.Prune.{key} is {value}: PaddleSlim's pruners support only "
                    f"{' or '.join(map(str, possible))}",
                    f"-o Compress.Prune.{key}={possible[0]}, {HINT}",
                    Code.UNSUPPORTED,
                )
    if verb not in ("prune", "quantize"):
        return
    settings = recipe.Compress.Quantization
    kind = settings.activation_quantize_type
    if verb == "quantize" and kind not in ("auto", "moving_average_abs_max"):
        raise UserError(
            f"Compress.Quantization.activation_quantize_type is {kind}: {STATIC}",
            f"-o Compress.Quantization.activation_quantize_type=moving_average_abs_max, {HINT}",
            Code.UNSUPPORTED,
        )
    if verb == "quantize" and (others := settings.named - {"int4", "int8", "static_int8", "float"}):
        raise UserError(
            f"Compress.Quantization names the format {min(others)}: {STATIC}",
            f"name int8 or float instead, {HINT}",
            Code.UNSUPPORTED,
        )
    _require_training(recipe)


def require_no_gpu_needed(recipe: Recipe) -> None:
    """Raise UserError if the training needs what Paddle supports on GPUs only."""
    model, mp = recipe.Model, recipe.Distributed.mp_degree
    if mp > 1:
        raise UserError(
            f"Distributed.mp_degree {mp}: Paddle 2.6 supports tensor parallelism only on GPUs, and "
            "this is a CPU",
            f"run it on GPUs, set the degree to 1, {HINT}",
            Code.UNSUPPORTED,
        )
    if model.recompute and (model.hidden_dropout_prob or model.attention_probs_dropout_prob):
        raise UserError(
            "Model.use_recompute with dropout: Paddle 2.6 supports it only on GPUs, and this is a "
            "CPU",
            "run it on GPUs, or set use_recompute to False or the dropouts to 0",
            Code.UNSUPPORTED,
        )


def _require_training(recipe: Recipe) -> None:
    model, settings = recipe.Model, recipe.Distributed
    if recipe.Compress.Distill.teacher:
        raise UserError(
            "Compress.Distill: the Paddle engine does not support distillation",
            f"-o Compress.Distill.teacher=null, {HINT}",
            Code.UNSUPPORTED,
        )
    if model.sequence_parallel:
        raise UserError(
            "Model.sequence_parallel: the Paddle engine does not support it",
            f"-o Model.sequence_parallel=False, {HINT}",
            Code.UNSUPPORTED,
        )
    if recipe.Data.reset_attention:
        raise UserError(
            "Data.reset_attention: the Paddle engine does not support it",
            f"-o Data.reset_attention=False, {HINT}",
            Code.UNSUPPORTED,
        )
    if settings.pp_degree > 1:
        raise UserError(
            f"Distributed.pp_degree is {settings.pp_degree}, but the Paddle engine has no pipeline "
            "parallelism",
            f"use mp_degree or sharding, {HINT}",
            Code.UNSUPPORTED,
        )
    sharding = settings.sharding
    if sharding.sharding_degree > 1 and (sharding.sharding_stage == 3 or sharding.sharding_offload):
        raise UserError(
            "Distributed.sharding: the Paddle engine shards gradients and moments, not weights, "
            "and has no offload",
            f"set sharding_stage to 2 and sharding_offload to False, {HINT}",
            Code.UNSUPPORTED,
        )
    if recipe.Compress.Quantization.has_int4:
        raise UserError(
            "Compress.Quantization asks for 4 bits: PaddleSlim supports only 8 bits",
            f"-o Compress.Quantization.weight_bits=8 and no int4 formats, {HINT}",
            Code.UNSUPPORTED,
        )
    if recipe.Compress.Quantization.rounding == "gptq":
        raise UserError(
            "Compress.Quantization.rounding is gptq: the Paddle engine only rounds to nearest",
            f"-o Compress.Quantization.rounding=nearest, {HINT}",
            Code.UNSUPPORTED,
        )
    if recipe.Compress.Quantization.kv_cache_bits:
        raise UserError(
            "Compress.Quantization.kv_cache_bits is set: the Paddle engine has no INT8 KV cache",
            f"leave it empty, {HINT}",
            Code.UNSUPPORTED,
        )
    if isinstance(recipe.Compress.Quantization.prefix, int):
        raise UserError(
            f"Compress.Quantization.prefix is {recipe.Compress.Quantization.prefix}: the Paddle "
            "engine does not support a prefix",
            f"-o Compress.Quantization.prefix=none, {HINT}",
            Code.UNSUPPORTED,
        )
    if settings.mp_degree > 1 and recipe.Compress.Quantization.activation_preprocess_type:
        raise UserError(
            "activation_preprocess_type PACT: its bounds do not support mp_degree above 1",
            f"use dp_degree or sharding, leave it empty, {HINT}",
            Code.UNSUPPORTED,
        )
