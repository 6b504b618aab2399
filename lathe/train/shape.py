"""The shape of the model that a recipe trains."""

from lathe.config.settings import Recipe
from lathe.model.config import GPTConfig

VOCAB_MULTIPLE = 128


def model_config(recipe: Recipe, data_vocab_size: int) -> GPTConfig:
    """The recipe's shape; `Model.vocab_size` defaults to the data's, padded to a multiple of
    128."""
    m = recipe.Model
    padded = -(-data_vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return GPTConfig(
        vocab_size=m.vocab_size or padded,
        n_positions=m.max_position_embeddings,
        n_embd=m.hidden_size,
        head_dim=m.hidden_size // m.num_attention_heads,
        n_head=(m.num_attention_heads,) * m.num_layers,
        n_inner=(m.ffn_size,) * m.num_layers,
    )
