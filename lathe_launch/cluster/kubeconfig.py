"""Loads the user's kubeconfig file, including what the official client does not support:
`proxy-url`, proxies and certificate authorities from the environment, and renewed tokens in a
`tokenFile`."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from kubernetes.config import ConfigException  # type: ignore[import-untyped]
from kubernetes.config.kube_config import (  # type: ignore[import-untyped]
    KubeConfigLoader,
    KubeConfigMerger,
)

from lathe_base.errors import printable
from lathe_base.storage.network import as_proxy, authorities, proxy_for


class _Loader(KubeConfigLoader):  # type: ignore[misc]
    def _load_from_exec_plugin(self) -> bool | None:
        """The base class logs why the plugin failed, and continues without credentials."""
        said: list[str] = []

        def take(record: logging.LogRecord) -> bool:
            said.append(record.getMessage())
            return False

        root, silent = logging.getLogger(), logging.NullHandler()
        root.addFilter(take)
        root.addHandler(silent)  # or else `logging.error` installs a handler for good
        try:
            loaded: bool | None = super()._load_from_exec_plugin()
        finally:
            root.removeFilter(take)
            root.removeHandler(silent)
        if said:
            command = self._user["exec"].safe_get("command")
            words = printable(" ".join(" ".join(said).split()), 600)
            raise ConfigException(f"the credential plugin {command} failed: {words}")
        return loaded


def load_kubeconfig(settings: Any, context: str | None = None) -> str | None:
    """Fill the `Configuration` of a client from KUBECONFIG, else ~/.kube/config, and return the
    context's namespace, if it names one.

    Args:
        context: a context of the file; its current one by default.

    Raises:
        ConfigException: there is no such file or context, or it is malformed.
    """
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        merged = KubeConfigMerger(files)
    except yaml.YAMLError as error:
        raise ConfigException(f"{files}: {' '.join(str(error).split())}") from None
    if merged.config is None:
        raise ConfigException(f"{files}: no such file")
    loader = _Loader(
        merged.config,
        active_context=context,
        config_base_path=None,  # each file's own folder
        config_persister=merged.save_changes,
    )
    loader.load_and_set(settings)
    settings.ssl_ca_cert = settings.ssl_ca_cert or authorities()
    named = loader._cluster.safe_get("proxy-url")
    if proxy := as_proxy(named) if named else proxy_for(settings.host):
        if not proxy.address.startswith(("http://", "https://")):
            raise ConfigException(f"proxy {proxy.address}: only http:// and https:// are supported")
        settings.proxy, settings.proxy_headers = proxy
    if loader._user and (name := loader._user.safe_get("tokenFile")):
        file = Path(loader._user.path).absolute().parent / name

        def renew(client: Any) -> None:
            with suppress(OSError):  # while the file is replaced, the token before is good
                if token := file.read_text(encoding="utf-8").strip():
                    client.api_key["authorization"] = f"Bearer {token}"

        # Called before every request: the token is read again each time, as kubectl does.
        settings.refresh_api_key_hook = renew
    namespace: str | None = loader.current_context["context"].get("namespace")
    return namespace
