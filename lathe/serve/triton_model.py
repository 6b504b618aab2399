"""`model.py` of a Triton model repository: the code itself is in the installed package."""

from lathe.serve.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
