"""Lathe: train, prune, quantize, prove and serve GPT-2/3-family language models."""

__version__ = "0.1.0"
