"""CTranslate2: its own layers, INT8 weights, activations quantized to INT8 per token."""

from collections.abc import Callable
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerDecoderModelSpec
from ctranslate2.specs.common_spec import LayerNormSpec, LinearSpec
from numpy.typing import NDArray

from peers.engine import Engine, Ids
from peers.weights import Matrix, Norm, Weights


class CTranslate2(Engine):
    version = f"CTranslate2 {ctranslate2.__version__}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        w = Weights.read(model)
        is_rotary, is_gated = w.theta is not None, w.block(0).gate is not None
        spec = TransformerDecoderModelSpec.from_config(
            w.n_layer,
            w.n_head,
            pre_norm=True,
            activation=Activation.SWISH if is_gated else Activation.GELUTanh,
            ffn_glu=is_gated,
            rms_norm=w.family.norm == "rms_norm",
            rotary_dim=0 if is_rotary else None,  # 0: the whole head
            rotary_interleave=False,
            rotary_base=w.theta or 0,
            num_heads_kv=w.n_kv_head if w.n_kv_head < w.n_head else None,
        )
        decoder = spec.decoder
        decoder.scale_embeddings = False
        decoder.embeddings.weight = decoder.projection.weight = w.table
        if w.positions is not None:
            decoder.position_encodings.encodings = w.positions
        _fill_norm(decoder.layer_norm, w.final_norm)
        for i, layer in enumerate(decoder.layer):
            block, attention, ffn = w.block(i), layer.self_attention, layer.ffn
            _fill_norm(attention.layer_norm, block.attention_norm)
            _fill_norm(ffn.layer_norm, block.ffn_norm)
            _fill(attention.linear[0], Matrix.joined([block.query, block.key, block.value]))
            _fill(attention.linear[1], block.out)
            _fill(ffn.linear_0, block.gate or block.up)
            if block.gate:
                _fill(ffn.linear_0_noact, block.up)
            _fill(ffn.linear_1, block.down)
        spec.register_vocabulary([str(i) for i in range(len(w.table))])
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
        spec.config.layer_norm_epsilon = w.epsilon
        spec.validate()
        spec.optimize(quantization="int8")
        spec.save(str(output))

    def __init__(self, folder: Path, threads: int) -> None:
        self.model = ctranslate2.Generator(
            str(folder), compute_type="int8", inter_threads=1, intra_threads=threads
        )

    def prefill(self, prompt: Ids) -> None:
        self.decode(prompt[None], 0, lambda: None)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        last = len(prompts) - 1

        def generated(step: ctranslate2.GenerationStepResult) -> bool:
            if step.batch_id == last:
                tick()
            return False

        found = self.model.generate_batch(
            _words(prompts),
            min_length=steps + 1,
            max_length=steps + 1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=generated,
        )
        return np.array([row.sequences_ids[0] for row in found])

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        return np.array(self.model.score_batch(_words(tokens[None]))[0].log_probs)


def _fill_norm(spec: LayerNormSpec, norm: Norm) -> None:
    spec.gamma = norm.weight
    if norm.bias is not None:
        spec.beta = norm.bias


def _fill(spec: LinearSpec, matrix: Matrix) -> None:
    spec.weight = matrix.weight
    if matrix.bias is not None:
        spec.bias = matrix.bias


def _words(rows: Ids) -> list[list[str]]:
    return [[str(token) for token in row] for row in rows.tolist()]
