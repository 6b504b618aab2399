"""The former location of `lathe.serve.client.async_client`."""

import warnings

from lathe.serve.client.async_client import AsyncClient

__all__ = ["AsyncClient"]

warnings.warn(
    "lathe.serve.async_client has moved to lathe.serve.client.async_client",
    DeprecationWarning,
    stacklevel=2,
)
