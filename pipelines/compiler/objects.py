"""Write the pipelines as Kubernetes objects.

Where Kubeflow Pipelines stores its definitions in the Kubernetes API, a GitOps controller can apply
these objects from a repository instead of `make submit`. Their namespace is LATHE_KFP_NAMESPACE, or
`lathe`.
"""

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from lathe_base.storage import atomic_file
from pipelines.compiler.compile import FUNCTIONS, build, with_own_digest
from pipelines.steps.resources import Variant

NAMESPACE = os.environ.get("LATHE_KFP_NAMESPACE") or "lathe"
LABELS = {"app.kubernetes.io/name": "lathe", "app.kubernetes.io/part-of": "lathe"}


def write(path: Path, version: str, variant: Variant) -> None:
    """Write a Pipeline `lathe-<name>` and a PipelineVersion `lathe-<name>-<version>` for each
    pipeline to one YAML file.

    Args:
        version: lower-case letters, digits, dots and dashes. A version is immutable, so name it
            after the commit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as work, work.open("w", encoding="utf-8") as file:
        things = (thing for name in FUNCTIONS for thing in _objects(name, version, variant))
        yaml.safe_dump_all(things, file)


def _objects(name: str, version: str, variant: Variant) -> list[dict[str, Any]]:
    options = compiler.KubernetesManifestOptions(
        pipeline_name=f"lathe-{name}",
        pipeline_version_name=f"lathe-{name}-{version}",
        pipeline_version_display_name=version,
        namespace=NAMESPACE,
        include_pipeline_manifest=True,
    )
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        compiler.Compiler().compile(
            with_own_digest(name, build(name, variant)),
            file.name,
            kubernetes_manifest_format=True,
            kubernetes_manifest_options=options,
        )
        objects = list(yaml.safe_load_all(Path(file.name).read_text(encoding="utf-8")))
    for thing in objects:
        thing["metadata"]["labels"] = LABELS
        thing["spec"]["description"] = (inspect.getdoc(FUNCTIONS[name]) or "").partition("\n")[0]
    return objects
