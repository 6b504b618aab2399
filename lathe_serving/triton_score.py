"""`model.py` of the scoring model of a Triton repository; see `triton_model`."""

from lathe_serving.score_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
