"""Speeds up KFP's compiler when torch is imported; import it in tests that build pipelines.

For every setting of a task, KFP calls `inspect.stack` to get a method's name for an error message.
That function searches all modules for the source of every frame: under pytest, with torch's
thousands of modules, this takes nine tenths of the compilation.

Of what is left, half was to read a pod's settings, which KFP keeps as a dictionary, as a message
again for each that is added, and to write YAML in Python.
"""

import functools
import inspect
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import yaml
from google.protobuf import json_format
from kfp import kubernetes
from kfp.compiler import pipeline_spec_builder
from kfp.dsl import pipeline_task
from kfp.kubernetes import common
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig


def _stack() -> list[inspect.FrameInfo]:
    """Replacement for `inspect.stack` without source lines."""
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in traceback.walk_stack(sys._getframe(1))
    ]


class Settings(dict[str, Any]):
    """A pod's settings, and the message that KFP made them from."""

    message: Any = None


def _settings(message: Any) -> Settings:
    made = Settings(json_format.MessageToDict(message))
    made.message = message
    return made


def _message(task: pipeline_task.PipelineTask) -> Any:
    """Replacement for `get_existing_kubernetes_config_as_message`, which parses the dictionary."""
    known, found = task.platform_config.get("kubernetes"), KubernetesExecutorConfig()
    if isinstance(known, Settings):
        found.CopyFrom(known.message)
        return found
    return json_format.ParseDict(known or {}, found)


pipeline_task.inspect = SimpleNamespace(stack=_stack)
common.get_existing_kubernetes_config_as_message = _message
for module in vars(kubernetes).values():
    if inspect.ismodule(module) and getattr(module, "json_format", None) is json_format:
        patched = SimpleNamespace(**vars(json_format) | {"MessageToDict": _settings})
        setattr(module, "json_format", patched)  # noqa: B010 -- mypy knows no such attribute
_dump_all = functools.partial(yaml.dump_all, Dumper=yaml.CDumper)
pipeline_spec_builder.yaml = SimpleNamespace(**vars(yaml) | {"dump_all": _dump_all})
