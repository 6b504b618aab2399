"""CTranslate2: its own layers, INT8 weights, activations rounded to INT8 by token."""

from collections.abc import Callable
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerDecoderModelSpec
from numpy.typing import NDArray

from peers.engine import Engine, Ids, Weights


class CTranslate2(Engine):
    version = f"CTranslate2 {ctranslate2.__version__}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        w = Weights.read(model)
        spec = TransformerDecoderModelSpec.from_config(
            w.n_layer, w.n_head, pre_norm=True, activation=Activation.GELUTanh
        )
        decoder = spec.decoder
        decoder.scale_embeddings = False
        decoder.embeddings.weight = decoder.projection.weight = w["wte.weight"]
        decoder.position_encodings.encodings = w["wpe.weight"]
        norms = {"ln_f": decoder.layer_norm}
        linears = {}
        for i, layer in enumerate(decoder.layer):
            attention, ffn = layer.self_attention, layer.ffn
            norms |= {f"h.{i}.ln_1": attention.layer_norm, f"h.{i}.ln_2": ffn.layer_norm}
            linears |= {
                f"h.{i}.attn.c_attn": attention.linear[0],
                f"h.{i}.attn.c_proj": attention.linear[1],
                f"h.{i}.mlp.c_fc": ffn.linear_0,
                f"h.{i}.mlp.c_proj": ffn.linear_1,
            }
        for name, norm in norms.items():
            norm.gamma, norm.beta = w[f"{name}.weight"], w[f"{name}.bias"]
        for name, linear in linears.items():
            linear.weight, linear.bias = w.linear(name), w[f"{name}.bias"]
        spec.register_vocabulary([str(i) for i in range(len(w["wte.weight"]))])
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
        spec.validate()
        spec.optimize(quantization="int8")
        spec.save(str(output))

    def __init__(self, folder: Path) -> None:
        self.model = ctranslate2.Generator(
            str(folder), compute_type="int8", inter_threads=1, intra_threads=1
        )

    def prefill(self, prompt: Ids) -> None:
        self.decode(prompt[None], 0, lambda: None)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> None:
        last = len(prompts) - 1

        def generated(step: ctranslate2.GenerationStepResult) -> bool:
            if step.batch_id == last:
                tick()
            return False

        self.model.generate_batch(
            _words(prompts),
            min_length=steps + 1,
            max_length=steps + 1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=generated,
        )

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        return np.array(self.model.score_batch(_words(tokens[None]))[0].log_probs)


def _words(rows: Ids) -> list[list[str]]:
    return [[str(token) for token in row] for row in rows.tolist()]
