"""`model.py` of a Triton model repository: the code itself is in the installed package."""

from lathe_serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
