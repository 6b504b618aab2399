"""The former location of `lathe_serving.client.async_client`."""

import warnings

from lathe_serving.client.async_client import AsyncClient

__all__ = ["AsyncClient"]

warnings.warn(
    "lathe_serving.async_client has moved to lathe_serving.client.async_client",
    DeprecationWarning,
    stacklevel=2,
)
