"""Names of torch's operations that start no kernel."""

VIEWS = (
    "_?(unsafe_)?(view|t|transpose|expand|slice|select|unsqueeze|squeeze|as_strided|detach|alias"
    "|split|split_with_sizes|permute|unbind|reshape|is_pinned)|(new_)?empty(_like|_strided)?"
)
"""A pattern of those that make another view of a tensor, or one without values."""
