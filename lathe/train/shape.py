"""The shape of the model that a recipe trains, and what of it is trained."""

from typing import Literal

from lathe.model.architecture import Architecture, Rope
from lathe.model.config import GPTConfig
from lathe.model.config_json import attention_kinds, read_rope
from lathe.model.families import ARCHITECTURES
from lathe_base.config.settings import LoraSettings, ModelSettings, Recipe
from lathe_base.errors import Code, UserError

VOCAB_MULTIPLE = 128
StageName = Literal["pretrain", "finetune", "prune", "quantize"]
ROTARY_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def model_config(recipe: Recipe, data_vocab_size: int) -> GPTConfig:
    """The recipe's shape; `Model.vocab_size` defaults to the data's, padded.

    Raises:
        UserError: a setting that the family does not have, or heads that cannot share keys and
            values equally.
    """
    m = recipe.Model
    family = ARCHITECTURES[m.architecture]
    _require_family_settings(m, family)
    groups = m.num_key_value_heads or m.num_attention_heads
    if m.num_attention_heads % groups:
        raise UserError(
            f"Model.num_attention_heads {m.num_attention_heads} cannot share "
            f"num_key_value_heads {groups} equally",
            "choose a number of key-value heads that divides it",
            Code.INVALID_VALUE,
        )
    # Rows of the token embedding are padded so that tensor parallelism divides them evenly.
    if m.vocab_size_divisible_unit:
        multiple = m.vocab_size_divisible_unit * recipe.Distributed.mp_degree
    else:
        multiple = 1 if m.vocab_size else VOCAB_MULTIPLE
    tie = m.tie_word_embeddings
    rope = _rope(m, family) if family.positions == "rotary" else None
    window = m.sliding_window or (family.defaults["sliding_window"] if family.local_theta else None)
    values = {**family.defaults, "sliding_window": window, "use_sliding_window": True}
    config = GPTConfig(
        vocab_size=-(-(m.vocab_size or data_vocab_size) // multiple) * multiple,
        n_positions=m.max_position_embeddings,
        n_embd=m.hidden_size,
        head_dim=m.head_dim or m.hidden_size // m.num_attention_heads,
        n_head=(m.num_attention_heads,) * m.num_layers,
        n_inner=(m.ffn_size,) * m.num_layers,
        layer_norm_epsilon=m.rms_norm_eps or family.epsilon,
        architecture=family,
        kv_heads=(groups,) * m.num_layers if family.has_head_dim else (),
        biases=tuple(key for key in family.biases if family.defaults.get(key)),
        rope=rope,
        attention=tuple(attention_kinds(values, family, m.num_layers, rope, "Model")),
        tie_word_embeddings=family.ties if tie is None else tie,
    )
    if config.rope is not None and config.rope.n_rotated(config.head_dim) % 2:
        raise UserError(
            f"Model: {config.rope.n_rotated(config.head_dim)} rotated features per head is an odd "
            "number",
            "choose another head_dim or partial_rotary_factor",
            Code.INVALID_VALUE,
        )
    return config


def _rope(settings: ModelSettings, family: Architecture) -> Rope:
    rope_settings = {
        "rope_theta": settings.rope_theta,
        "partial_rotary_factor": settings.partial_rotary_factor,
    }
    defaults = {family.rope_keys.get(key, key): value for key, value in family.defaults.items()}
    rope_values = {key: defaults.get(key) if x is None else x for key, x in rope_settings.items()}
    rope_values = {key: value for key, value in rope_values.items() if value is not None}
    return read_rope({**rope_values, **settings.rope_scaling}, "Model.rope_scaling")


def _require_family_settings(settings: ModelSettings, family: Architecture) -> None:
    """Raise UserError for a given setting that the family does not have."""
    foreign = {
        **dict.fromkeys(("num_key_value_heads", "head_dim"), not family.has_head_dim),
        **dict.fromkeys(ROTARY_KEYS, family.positions != "rotary"),
        "rms_norm_eps": family.norm != "rms_norm",
        "sliding_window": family.layer_types is None,
        "tie_word_embeddings": settings.tie_word_embeddings
        not in (
            None,
            *family.arithmetic.get("tie_word_embeddings", (True, False)),
        ),
    }
    for name, is_foreign in foreign.items():
        value = getattr(settings, name)
        if is_foreign and value not in (None, {}):
            raise UserError(
                f"Model.{name} is {value}, which {family.title} does not have",
                f"remove it, or choose another Model.architecture than {family.model_type}",
                Code.UNSUPPORTED,
            )


def recipe_stage(recipe: Recipe) -> StageName:
    """The recipe's stage: the one enabled in `Compress`; else finetuning if it trains adapters; or
    pretrain, which stands for finetuning all weights too."""
    if recipe.Compress.Quantization.enable:
        return "quantize"
    if recipe.Compress.Prune.enable:
        return "prune"
    return "pretrain" if recipe.Finetune.lora.rank is None else "finetune"


def trained_adapters(recipe: Recipe) -> LoraSettings | None:
    """The adapters that the recipe's stage trains; None if it trains all weights."""
    return recipe.Finetune.lora if recipe_stage(recipe) == "finetune" else None
