"""The base class of all groups of settings."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator


class UndeclaredSetting(LookupError):
    """A step reads a setting that is not declared for it, which is a defect of Lathe."""


class Settings(BaseModel):
    """A group of settings; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    if not TYPE_CHECKING:  # it would hide misspelled names from the type checker

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # absent from an excerpt
                group = type(self).__name__
                raise UndeclaredSetting(f"{group}.{name} is not declared for this step")
            return super().__getattr__(name)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, values: Any) -> Any:
        """`dp_degree:` with no value is YAML's null: the default, unless null has a meaning."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if value is not None
            or key not in fields
            or type(None) in get_args(fields[key].annotation)
        }

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Integers and strings are not coerced to booleans, nor booleans to numbers; reject text
        that cannot be written to a file."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        is_boolean = bool in (annotation, *get_args(annotation))
        if is_boolean and not isinstance(value, bool | None):
            raise ValueError("must be True or False")
        if value is False and "off" in get_args(annotation):
            return "off"  # which YAML reads as false
        if isinstance(value, bool) and not is_boolean:
            raise ValueError("must not be a boolean")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError("invalid character: NUL or an unpaired surrogate")
        return value


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested groups into full keys, `Group.key`."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{above}{key}.")
        else:
            flattened[f"{above}{key}"] = value
    return flattened
