"""Lathe's exports with `Serving.runtime` openvino."""

from pathlib import Path

import openvino

from lathe_serving.runtime.openvino_model import OpenVINOModel
from peers.lathe import Lathe


class LatheOpenVINO(Lathe):
    version = f"OpenVINO {openvino.__version__.split('-')[0]}"

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.model = OpenVINOModel(folder, threads)
