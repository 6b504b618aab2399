"""Write the pipelines as Kubernetes objects: `python -m pipelines.objects FILE VERSION`.

Where Pipelines keeps its definitions in the Kubernetes API, these do for a repository that a GitOps
controller applies what `make submit` does by hand.
"""

import sys
import tempfile
from pathlib import Path

from kfp import compiler

from pipelines.compile import PIPELINES

NAMESPACE = "lathe"


def write(path: Path, version: str) -> None:
    """A Pipeline and a PipelineVersion `<pipeline>-<version>` of each, in one YAML file.

    Args:
        version: lower-case letters, digits, dots and dashes: a version's content never changes,
            so name it after the commit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = []
    with tempfile.TemporaryDirectory() as work:
        for name, pipeline in PIPELINES.items():
            file = Path(work) / f"{name}.yaml"
            options = compiler.KubernetesManifestOptions(
                pipeline_version_name=f"{name}-{version}",
                namespace=NAMESPACE,
                include_pipeline_manifest=True,
            )
            compiler.Compiler().compile(
                pipeline,
                str(file),
                kubernetes_manifest_format=True,
                kubernetes_manifest_options=options,
            )
            documents.append(file.read_text())
    path.write_text("---\n".join(documents))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
