"""A temporary server for comparing several exports."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import UserError
from lathe_base.inputs import first_mistake
from lathe_serving.repository import write_models
from lathe_serving.runtime.protocol import score_name
from lathe_serving.server import ANY_PORTS, TritonServer, start


@contextmanager
def serve_exports(exports: Mapping[str, Path]) -> Iterator[TritonServer]:
    """Serve exports on one Triton with the OpenAI API while the block runs.

    Args:
        exports: export folders by model name.

    Raises:
        UserError: not an export, or an invalid model name.
        StageError: the server does not start.
    """
    for name, folder in exports.items():
        try:
            serving = ServingSettings(model_name=name, **ANY_PORTS)
        except ValidationError as error:
            what = f"{folder}: {first_mistake(error)}"
            raise UserError(what, f"give it another name: NAME={folder}") from None
        if score_name(name) in exports:
            raise UserError(
                f"{score_name(name)}: reserved for the scoring model of {name}",
                f"give it another name: NAME={exports[score_name(name)]}",
            )
    with TemporaryDirectory(prefix="lathe-playground-") as scratch:
        repository = Path(scratch) / "models"
        write_models(exports, repository, serving, GenerationSettings())
        with start(repository, serving, Path(scratch) / "state", with_gateway=True) as server:
            yield server
