"""Hugging Face transformers with PyTorch in float32."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from peers.engine import Engine, Ids, log_likelihoods


class Transformers(Engine):
    version = f"transformers {transformers.__version__}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        for name in ("model.safetensors", "config.json"):
            os.symlink((model / name).resolve(), output / name)

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def prefill(self, prompt: Ids) -> None:
        self.model(torch.from_numpy(prompt[None]), logits_to_keep=1).logits.argmax(-1)

    @torch.inference_mode()
    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        out = self.model(torch.from_numpy(prompts), logits_to_keep=1, use_cache=True)
        tokens = [out.logits[:, -1:].argmax(-1)]
        tick()
        for _ in range(steps):
            out = self.model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
            tokens.append(out.logits[:, -1:].argmax(-1))
            tick()
        return torch.cat(tokens, 1).numpy()

    @torch.inference_mode()
    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        return log_likelihoods(self.model(torch.from_numpy(tokens[None])).logits[0].numpy(), tokens)
