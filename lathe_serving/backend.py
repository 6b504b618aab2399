"""Triton's Python backend for text generation: requests in, decoupled responses out.

Runs inside Triton's stub process, the only one that can import `triton_python_backend_utils`; its
environment has only numpy, onnxruntime, openvino with onnx, tokenizers and llguidance. Requests
share one running batch, and a failing request does not affect the others.
"""

import gc
import json
import logging
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from lathe_base.errors import UserError
from lathe_serving.answer import Answer, ResponseSender
from lathe_serving.metrics import Metrics
from lathe_serving.runtime.open_model import REFERENCE_RUNTIME
from lathe_serving.runtime.params import FIELDS, Params, parse
from lathe_serving.runtime.protocol import BUSY, CANCEL, PROMPTS, REQUEST_ID, decode, model_settings
from lathe_serving.runtime.text_generator import TextGenerator

log = logging.getLogger("lathe")


class TritonPythonModel:
    """The interface that Triton calls; see https://github.com/triton-inference-server/python_backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model next to `model.py`; its settings are JSON `parameters` of config.pbtxt."""
        settings = model_settings(args)
        self.defaults = parse(settings["generation"], Params())
        folder = Path(args["model_repository"]) / args["model_version"]
        self.max_queue: int = settings["max_queue"]
        self.responses = ResponseSender()
        self.generator = TextGenerator(
            folder,
            settings["max_tokens"],
            threads=settings["threads"],
            max_running=settings["max_running"],
            max_queue=self.max_queue,
            prefix_bytes=2**20 * settings.get("prefix_cache_mib", 0),
            speculates=settings.get("speculation", "off") == "prompt_lookup",
            watcher=Metrics(args["model_name"]),
            runtime=settings.get("runtime", REFERENCE_RUNTIME),
        )
        pb_utils.Logger.log_info(f"{args['model_name']} runs with {self.generator.runtime}")

    def execute(self, requests: list[Any]) -> None:
        """Parse and queue each request; responses are sent from the batch's thread."""
        for request in requests:
            sender = request.get_response_sender()
            given = dict(json.loads(request.parameters() or "{}"))
            if CANCEL in given:
                self.responses.abandon(given[CANCEL])
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            name = given.pop(REQUEST_ID, request.request_id())
            answer = Answer(name, sender, self.responses)
            try:
                prompt, answer.params = _read(request, given, self.defaults)
                if not self.generator.submit(prompt, answer.params, answer.receiver):
                    full = UserError(
                        f"{BUSY}: {self.max_queue} requests are already waiting",
                        "try again in a moment, or raise Serving.max_queue",
                    )
                    answer.refuse(pb_utils.TritonError.UNAVAILABLE, full)
            except UserError as error:
                answer.refuse(pb_utils.TritonError.INVALID_ARG, error)
            except Exception as error:
                log.exception("failed to accept a request")
                answer.refuse(pb_utils.TritonError.INTERNAL, error)

    def finalize(self) -> None:
        """Cancel all requests: Triton is shutting down or unloading the model.

        Metrics and response senders, which notify Triton when they end, have to end here: at
        interpreter exit Triton no longer listens, and its stub 2.51 crashes.
        """
        self.generator.close()
        self.responses.close()
        vars(self).clear()
        gc.collect()  # an answer and its receiver refer to each other


def _read(request: Any, given: dict[str, Any], defaults: Params) -> tuple[str | list[int], Params]:
    """Read prompt and parameters; these come as optional tensors or Triton request parameters."""
    if microseconds := request.timeout():  # Triton's own parameter `timeout`
        given["timeout_seconds"] = microseconds / 1e6
    for name in FIELDS:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            continue
        if name in given:
            raise UserError(
                f"{name} is given both as input and as parameter", "give only one of them"
            )
        value = tensor.as_numpy().item()
        given[name] = decode(value, name) if isinstance(value, bytes) else value
    params = parse(given, defaults)
    text, ids = (pb_utils.get_input_tensor_by_name(request, name) for name in PROMPTS)
    if (text is None) == (ids is None):
        what = "missing" if text is None else "given together with input_ids"
        raise UserError(f"text_input is {what}", "give the prompt as text_input or as input_ids")
    if text is None:
        return ids.as_numpy().tolist(), params
    return decode(text.as_numpy().item(), "text_input"), params
