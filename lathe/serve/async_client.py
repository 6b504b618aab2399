"""The former place of `lathe.serve.client.async_client`."""

import warnings

from lathe.serve.client.async_client import AsyncClient

__all__ = ["AsyncClient"]

warnings.warn(
    "lathe.serve.async_client is lathe.serve.client.async_client now",
    DeprecationWarning,
    stacklevel=2,
)
