"""An export and token ids become texts and scores, with onnxruntime or OpenVINO.

No module here imports another package of Lathe but `lathe.errors`: it runs in Triton's process.
"""
