"""Generates and scores text with an export, in onnxruntime or OpenVINO.

Because it runs in Triton's process, no module here imports another package of Lathe except
`lathe_base.errors`.
"""
