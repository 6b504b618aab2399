"""Generates and scores text with an export, in onnxruntime or OpenVINO.

`contract` states what a runtime implements. Because it runs in Triton's process, no module here
imports another package of Lathe except `lathe_base.errors` and `lathe_base.parameters`.
"""
