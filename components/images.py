"""The container images that the components run in: the one place that names them."""

import os

TRAIN = os.environ.get("LATHE_TRAIN_IMAGE", "localhost/lathe-train:0.1.0")
"""Python, torch, onnxruntime and lathe, as locked in images/train/requirements.lock."""
