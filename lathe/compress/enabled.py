"""Refuse a stage that its recipe disables with `enable: False`."""

from lathe_base.errors import UserError


def require_enabled(group: str, enable: bool | None) -> None:
    """Raise UserError if `Compress.<group>.enable` is False; it defaults to True."""
    if enable is False:
        raise UserError(
            f"Compress.{group}.enable is False in this recipe",
            f"-o Compress.{group}.enable=True, or name another recipe",
        )
