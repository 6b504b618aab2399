"""A recipe that says `enable: False` is not for this stage."""

from lathe.errors import UserError


def require_enabled(group: str, enable: bool | None) -> None:
    """Raise UserError where `Compress.<group>.enable` is False; not given means True."""
    if enable is False:
        raise UserError(
            f"Compress.{group}.enable is False in this recipe",
            f"-o Compress.{group}.enable=True, or name another recipe",
        )
