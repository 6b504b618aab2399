"""OpenVINO GenAI: weights compressed by nncf, group-quantized activations, paged attention."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from numpy.typing import NDArray

from peers.engine import Engine, Ids
from peers.openvino_graph import build
from peers.weights import Weights

MODES: dict[str, dict[str, Any]] = {
    "INT8": {"mode": "int8_sym"},
    "INT8f32": {"mode": "int8_sym"},
    **{
        name: {"mode": "int4_sym", "group_size": size, "ratio": 1.0, "all_layers": True}
        for name, size in (("INT4", 64), ("INT4g128", 128))
    },
}
# Group size of activations, the fastest for each format. With larger groups than those of the
# weights, INT4 takes twice as long for prefill.
GROUPS = {"INT8": 256, "INT8f32": 64, "INT4": 64, "INT4g128": 128}
OPTIONS = "options.json"


class OpenVINOGenAI(Engine):
    version = f"OpenVINO GenAI {genai.__version__.split('-')[0]}"

    @staticmethod
    def convert(model: Path, calibration: Ids, weights: str, output: Path) -> None:
        import nncf  # slow to import
        from openvino_tokenizers import convert_tokenizer
        from transformers import PreTrainedTokenizerFast

        options = MODES[weights] | {"mode": nncf.CompressWeightsMode(MODES[weights]["mode"])}
        graph = nncf.compress_weights(build(Weights.read(model), chosen=False), **options)
        openvino.save_model(graph, output / "openvino_model.xml", compress_to_fp16=False)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(model / "tokenizer.json"), eos_token="<|endoftext|>"
        )
        for name, part in zip(
            ("tokenizer", "detokenizer"),
            convert_tokenizer(tokenizer, with_detokenizer=True),
            strict=True,
        ):
            openvino.save_model(part, output / f"openvino_{name}.xml")
        config = json.loads((model / "config.json").read_text())
        del config["lathe"]
        (output / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
        settings: dict[str, Any] = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUPS[weights]}
        if weights.endswith("f32"):  # the default is bfloat16, which ruins a pretrained model
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        (output / OPTIONS).write_text(json.dumps(settings))

    def __init__(self, folder: Path, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.max_num_batched_tokens = 2048  # a batch of prompts at once, like the others
        scheduler.enable_prefix_caching = False
        options = json.loads((folder / OPTIONS).read_text()) | {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options)

    def prefill(self, prompt: Ids) -> None:
        self.decode(prompt[None], 0, lambda: None)

    def decode(self, prompts: Ids, steps: int, tick: Callable[[], None]) -> Ids:
        settings = genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True)
        handles = self._ask(prompts, settings)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            tick()
        return np.array([handle.read_all()[0].generated_ids for handle in handles])

    def log_likelihoods(self, tokens: Ids) -> NDArray[np.float64]:
        settings = genai.GenerationConfig(max_new_tokens=1, echo=True, logprobs=1)
        (handle,) = self._ask(tokens[None], settings)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return np.array(handle.read_all()[0].generated_log_probs[1 : len(tokens)])

    def _ask(self, prompts: Ids, settings: genai.GenerationConfig) -> list[Any]:
        return [
            self.pipeline.add_request(i, openvino.Tensor(prompt[None]), settings)
            for i, prompt in enumerate(prompts)
        ]
