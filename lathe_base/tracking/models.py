"""Registers releases in Kubeflow's Model Registry, if LATHE_MODEL_REGISTRY has its address."""

import logging
import os
import warnings
from collections.abc import Mapping

log = logging.getLogger("lathe")

ADDRESS = "LATHE_MODEL_REGISTRY"
FORMAT = "triton"


def register_release(name: str, release: str, address: str, figures: Mapping[str, float]) -> None:
    """Register a release as a version of the model `name`; a registered one is unchanged.

    If the registry fails, a warning is logged, because the release is already live. The token is
    the pod's, or in the file that KF_PIPELINES_SA_TOKEN_PATH names.
    """
    server = os.environ.get(ADDRESS)
    if not server:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tokens that are not there
            from model_registry import ModelRegistry

            registry = ModelRegistry(server, author="lathe", log_level=logging.ERROR)
            if registry.get_registered_model(name) and registry.get_model_version(name, release):
                return
            registry.register_model(
                name,
                address,
                version=release,
                model_format_name=FORMAT,
                model_format_version="1",
                metadata=dict(figures),
            )
        log.info("registered in %s as %s, version %s", server, name, release)
    except Exception as error:
        hint = "; pip install 'lathe[tracking]'" if isinstance(error, ImportError) else ""
        log.warning("not registered in %s: %s%s", server, error, hint)
