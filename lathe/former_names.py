"""Modules that have moved to other packages can be imported by their former names, with a warning.

Programs of users import `lathe.serve.client` and others, pods run `python -m lathe.storage`, and
model repositories of earlier releases import `lathe.serve.backend`.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import cast

MOVED = {
    "lathe.backends.paddle": "lathe_paddle",
    "lathe.config": "lathe_base.config",
    "lathe.console": "lathe_base.console",
    "lathe.data.ids": "lathe.data.megatron",
    "lathe.data.json_lines": "lathe.data.rows",
    "lathe.errors": "lathe_base.errors",
    "lathe.evaluate.informational": "lathe.evaluate.gate",
    "lathe.export.engine": "lathe.export.engines",
    "lathe.inputs": "lathe_base.inputs",
    "lathe.launch": "lathe_launch",
    "lathe.launch.start": "lathe_launch.local",
    "lathe.model.chat_template": "lathe.data.chat_template",
    "lathe.model.sampling": "lathe_base.artifacts.sampling",
    "lathe.production": "lathe.release",
    "lathe.production.tracking": "lathe_base.tracking",
    "lathe.progress": "lathe_base.progress",
    "lathe.provenance": "lathe_base.provenance",
    "lathe.report.page": "lathe.report.report",
    "lathe.report.pages": "lathe_base.pages",
    "lathe.train.gradients": "lathe.train.optimizer",
    "lathe.train.preemption": "lathe.train.loop",
    "lathe.search.program": "lathe.search.proposals",
    "lathe.search.trial": "lathe.search.result",
    "lathe.serve": "lathe_serving",
    "lathe.serve.async_client": "lathe_serving.client.async_client",
    "lathe.serve.client.comparison": "lathe_serving.client.playground",
    "lathe.serve.client.load_page": "lathe_serving.client.bench",
    "lathe.serve.runtime.params": "lathe_serving.runtime.protocol",
    "lathe.serve.runtime.single_stream_graph": "lathe_serving.runtime.single_stream",
    "lathe.serve.runtime.single_stream_model": "lathe_serving.runtime.single_stream",
    "lathe.storage": "lathe_base.storage",
    "lathe.storage.artifacts": "lathe_base.artifacts",
    "lathe.trial": "lathe.plan",
}
"""Former name of a module or package -> its name."""


def present_name(former: str) -> str | None:
    """Name of a module that has moved; None if it has not."""
    head, parts = former, list[str]()
    while head not in MOVED:
        head, _, last = head.rpartition(".")
        parts.insert(0, last)
        if not head:
            return None
    return ".".join([MOVED[head], *parts])


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("lathe."):  # every import of the process comes here
            return None
        name = present_name(former := name) or name
        if name == former or (spec := find_spec(name)) is None:
            return None
        # Frames of the import system do not count.
        warnings.warn(f"{former} has moved to {name}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(
            former, _Loader(name), is_package=spec.submodule_search_locations is not None
        )


class _Loader(InspectLoader):
    """Makes a former name refer to the module itself, not to a second copy of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what it returns from here.
        sys.modules[cast(ModuleSpec, module.__spec__).name] = import_module(self._name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Code for `python -m` with the former name."""
        spec = find_spec(self._name)
        loader = cast(InspectLoader, cast(ModuleSpec, spec).loader)
        return loader.get_code(self._name)

    def get_source(self, fullname: str) -> str | None:
        """None: tracebacks read the file that the code names."""
        return None


def install() -> None:
    """Find modules by their former names too."""
    # Before the others: bytecode that is left of a former package would pass for a package.
    sys.meta_path.insert(0, _Finder())
