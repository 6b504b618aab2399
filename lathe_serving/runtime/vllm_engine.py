"""Serves the Hugging Face folder of an export with vLLM: on GPUs or, in another build, on CPUs.

vLLM schedules, computes and samples, in a process of its own. Around it everything stays as with
the other runtimes: prompts are ids of Lathe's tokenizer, new tokens become text by `TextStream`,
which also finds stop strings, and grammars are checked by `Grammars` before vLLM compiles them.
Each branch is a request of vLLM's, so that one can end at a stop string while the others continue;
they share the blocks of their prompt.

What differs from the other runtimes follows from vLLM's sampler: min-p is applied before top-k and
top-p; with structured output, log-probabilities are those among the tokens that the grammar allows,
and a number may have any number of digits; a seed chooses other tokens.

Source: vLLM 0.32, `vllm/v1/engine/async_llm.py` and `vllm/sampling_params.py`.
"""

import asyncio
import ctypes
import json
import locale
import logging
import math
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import numpy as np

from lathe_base.errors import Code, UserError
from lathe_base.parameters import Params
from lathe_serving.runtime.contract import CheckedBackend, Receiver, Watcher
from lathe_serving.runtime.exported_model import end_ids, read_export, x86_flags
from lathe_serving.runtime.grammar import parse_constraint
from lathe_serving.runtime.grammar_compiler import JSON_OPTIONS
from lathe_serving.runtime.protocol import VLLM_FORMAT, Chunk, InvalidRequest
from lathe_serving.runtime.sequence_group import Score
from lathe_serving.runtime.text import TextStream

log = logging.getLogger("lathe")

ASK_SECONDS = 0.01  # between two looks at which requests are cancelled or have timed out
NUMA_LIBRARY = "libnuma.so.1"
CACHE_SHARE = 0.5  # of a CPU's free memory, at most, for keys and values
EXIT_SECONDS = 1.0  # for the last answers to leave, after vLLM's process has died
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # that vLLM samples with
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would lack the threads of this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the container's cores, which are not all
    "VLLM_CPU_INT4_W4A8": "0",  # or it rounds the inputs of INT4 weights, which are in float
}
"""How vLLM is set up where the environment does not say otherwise."""


@contextmanager
def folder_for_sockets() -> Iterator[None]:
    """A folder for the sockets by which vLLM's processes find each other, to load a model in. vLLM
    leaves them behind; connections that have been made do without them."""
    with TemporaryDirectory(prefix="lathe-vllm-") as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        yield


def cpu_settings(model: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """vLLM's settings on CPUs: float32, in which exports are verified, where its kernels compute in
    it; no compilation, which would take minutes at every start.

    Args:
        model: a folder of compressed-tensors.
        cpuinfo: Linux's description of the CPU.

    Raises:
        UserError: vLLM has no kernel for its weights on CPUs.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    groups = config.get("quantization_config", {}).get("config_groups", {}).values()
    packed_bits = {x["weights"]["num_bits"] for x in groups if x["format"] == "pack-quantized"}
    if packed_bits - {4}:
        raise UserError(
            f"{model}: vLLM computes INT8 weights with a scale for each group, or without INT8 "
            "activations, on GPUs only",
            "serve it on a GPU, quantize to INT4 or to static INT8, or set "
            "Serving.runtime=onnxruntime",
            Code.UNSUPPORTED,
        )
    flags = x86_flags(cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "")
    if packed_bits and flags and "avx512f" not in flags:
        # Its build for AVX2 lacks the kernel, which it notices at the first request (0.32).
        raise UserError(
            f"{model}: vLLM computes INT4 weights on x86 CPUs with AVX-512 only, which this one "
            "does not have",
            "serve it on a GPU, quantize to static INT8, or set Serving.runtime=onnxruntime",
            Code.UNSUPPORTED,
        )
    # Its integer kernels take 16-bit inputs: others end the process at the first request.
    return {"dtype": "bfloat16" if groups else "float32", "enforce_eager": True}


class VLLMEngine(CheckedBackend):
    """One model in vLLM that serves many requests at once.

    Args:
        folder: an export with the format `compressed-tensors`.
        threads: of vLLM's build for CPUs; 0 means one per core.
        max_running, max_queue, watcher: see `Batcher`.
        prefix_bytes: 0 disables prefix caching. On CPUs, memory for keys and values beside that of
            `max_running` whole contexts, as far as half of what is free holds them; on GPUs vLLM
            takes the share that is its default.

    Raises:
        UserError: the export lacks the folder, vLLM is not installed, or cannot load the model.
    """

    def __init__(
        self,
        folder: Path,
        default_max_tokens: int,
        threads: int = 0,
        max_running: int = 8,
        max_queue: int = 64,
        prefix_bytes: int = 0,
        speculates: bool = False,
        watcher: Watcher | None = None,
        runtime: str = "vllm",
    ) -> None:
        if not (folder / VLLM_FORMAT / "config.json").is_file():
            raise UserError(
                f"{folder}: has no {VLLM_FORMAT}, which the runtime {runtime} loads",
                f"export the model again with Export.formats=[{VLLM_FORMAT}]",
                Code.INCOMPLETE,
            )
        if speculates:
            raise UserError(
                f"Serving.speculation is not supported by the runtime {runtime}",
                "set Serving.speculation=off, or Serving.runtime=onnxruntime",
                Code.UNSUPPORTED,
            )

        # Before vLLM is imported, which reads its settings from the environment.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if threads:
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # torch reads its own files in the locale's encoding; Triton's stub sets no locale.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        try:
            import vllm
        except ImportError as error:
            raise UserError(
                f"vLLM cannot be imported: {error}",
                "run `make vllm-env`, in a cluster add the component gpu-serving, or set "
                "Serving.runtime=onnxruntime",
                Code.NOT_INSTALLED,
            ) from None
        # Triton's stub is not the interpreter that its environment has first on PATH.
        if not Path(sys.executable or "").name.startswith("python"):
            multiprocessing.set_executable(shutil.which("python3") or "python3")
        metadata = read_export(folder)
        super().__init__(
            *(folder, default_max_tokens, metadata["n_positions"], metadata["vocab_size"]),
            *(end_ids(metadata), max_running, max_queue),
        )

        # vLLM's client belongs to one event loop, which runs on a thread of its own.
        self.runtime = f"vllm {vllm.__version__}: requested"
        self._max_queue, self._watcher = max_queue, watcher or Watcher()
        self._waiting: deque[_Group] = deque()
        self._running: dict[_Group, None] = {}  # in the order of their admission
        self._changed = threading.Lock()  # of these two; a request leaves them on the loop's thread
        self._is_open = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            loading = self._load(folder / VLLM_FORMAT, prefix_bytes)
            with folder_for_sockets():
                self.engine = asyncio.run_coroutine_threadsafe(loading, self._loop).result()
        except Exception as error:
            self._end_loop()
            super().close()
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{folder / VLLM_FORMAT}: vLLM cannot load it: {error}",
                "see the log above, or set Serving.runtime=onnxruntime",
                Code.UNSUPPORTED,
            ) from error
        # A `Receiver` does not report its cancellation, so all of them are polled.
        self._look = asyncio.run_coroutine_threadsafe(self._look_for_ends(), self._loop)

    async def _load(self, model: Path, prefix_bytes: int) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        settings: dict[str, Any] = {
            "model": str(model),
            "max_model_len": self.n_positions,
            "max_num_seqs": self.max_running,
            "enable_prefix_caching": prefix_bytes > 0,
            "structured_outputs_config": {"backend": "guidance"},
            "generation_config": "vllm",  # a request brings its own ends and sampling parameters
        }
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            try:  # vLLM warns that it has no kernels, and fails with another error
                ctypes.CDLL(NUMA_LIBRARY)
            except OSError:
                raise UserError(
                    f"vLLM's kernels for CPUs need the library {NUMA_LIBRARY}",
                    "`apt-get install libnuma1`, or set Serving.runtime=onnxruntime",
                    Code.NOT_INSTALLED,
                ) from None
            settings |= cpu_settings(model)
        else:  # as many as the container has been given
            settings["tensor_parallel_size"] = current_platform.device_count()
        config = AsyncEngineArgs(**settings).create_engine_config()
        if on_cpu:
            from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            shape, parallel = config.model_config, config.parallel_config
            sizes = CPUAttentionBackend.get_supported_head_sizes()
            if shape.get_head_size() not in sizes:  # else the first request would crash it
                raise ValueError(f"heads of {shape.get_head_size()} features, not one of {sizes}")
            heads = shape.get_num_layers(parallel) * shape.get_num_kv_heads(parallel)
            token_bytes = 2 * heads * shape.get_head_size() * shape.dtype.itemsize
            # A context takes whole blocks, and vLLM keeps a block for itself.
            block = config.cache_config.block_size
            tokens = self.max_running * math.ceil(self.n_positions / block) * block + block
            node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
            config.cache_config.kv_cache_memory_bytes = min(
                token_bytes * tokens + prefix_bytes, int(CACHE_SHARE * node.available_memory)
            )
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    def queue(
        self, ids: Sequence[int], max_tokens: int, params: Params, receiver: Receiver
    ) -> bool:
        """See `CheckedBackend.queue`."""
        is_hot = params.decode_strategy == "sampling" and params.temperature > HIGHEST_TEMPERATURE
        has_grammar = bool(params.structured_outputs)
        for is_refused, what, cure in (
            (params.decode_strategy == "beam_search", "beam_search", "give another method"),
            (
                is_hot,
                f"temperature {params.temperature:g}",
                f"give {HIGHEST_TEMPERATURE:g} or less",
            ),
            (has_grammar and params.ignore_eos, "structured output with ignore_eos", "give one"),
            (
                has_grammar and params.min_tokens > 1,
                "structured output with min_tokens",
                "give one",
            ),
            # For max_tokens 0.
            (len(ids) == self.n_positions, "a prompt that fills all positions", "shorten it"),
        ):
            if is_refused:
                raise InvalidRequest(
                    f"the runtime vllm does not support {what}",
                    f"{cure}, or set Serving.runtime=onnxruntime",
                    Code.UNSUPPORTED,
                )
        if params.structured_outputs:  # in a process with limits, which vLLM does not have
            self.grammars.start(params.structured_outputs, params.stop_token_ids)
        group = _Group(self, ids, max_tokens, params, receiver)
        # vLLM would queue any number of requests. They wait here for their slots, as with the other
        # runtimes, so that a full queue can be told at once.
        with self._changed:
            if not self._is_open or len(self._waiting) >= self._max_queue + self._free_slots():
                return False
            self._waiting.append(group)
        self._loop.call_soon_threadsafe(self.freed)
        return True

    def close(self) -> None:
        """See `TextBackend.close`."""
        super().close()
        with self._changed:
            self._is_open = False

        async def cancel_all() -> None:
            self._look.cancel()
            with self._changed:
                groups = [*self._running, *self._waiting]
                self._running, self._waiting = {}, deque()
            # Before `cancel`, which forgets them: vLLM must have aborted all before it ends.
            tasks = [task for group in groups for task in group.branches.values()]
            for group in groups:
                group.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result()
        self.engine.shutdown()
        self._end_loop()

    def freed(self) -> None:
        """Branches have ended: start the requests that there are slots for now."""
        with self._changed:
            self._running = {group: None for group in self._running if group.branches}
            while self._waiting and self._waiting[0].width <= self._free_slots():
                group = self._waiting.popleft()
                if group.keeps_running():
                    self._running[group] = None
                    group.start()
        self.tell_load()

    def tell_load(self) -> None:
        """Tell the watcher what the slots hold."""
        branches = sum(len(group.branches) for group in self._running)
        tokens = sum(group.n_tokens for group in self._running)
        size = self.engine.vllm_config.cache_config.kv_cache_size_tokens
        self.tell("holds", branches, len(self._waiting), tokens, tokens / size)

    def tell(self, event: str, *values: float) -> None:
        """Tell the watcher; its errors must not affect requests."""
        try:
            getattr(self._watcher, event)(*values)
        except Exception:
            log.exception("the watcher failed")

    def _free_slots(self) -> int:
        return self.max_running - sum(len(group.branches) for group in self._running)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _look_for_ends(self) -> None:
        """End the requests that are cancelled or have timed out."""
        while True:
            with self._changed:
                waiting = [group for group in self._waiting if group.keeps_running()]
                self._waiting = deque(waiting)
            ended = [group for group in self._running if not group.keeps_running()]
            if ended:
                self.freed()
            await asyncio.sleep(ASK_SECONDS)


class _Group:
    """A request and its branches, which are requests of vLLM's. Used on the loop's thread only.

    Attributes:
        width: its number of branches at the start.
        branches: those that run, by their sequence.
        n_tokens: those of the prompt and of all branches.
    """

    def __init__(
        self,
        backend: VLLMEngine,
        ids: Sequence[int],
        max_tokens: int,
        params: Params,
        receiver: Receiver,
    ) -> None:
        self.width, self.n_tokens = params.num_return_sequences, len(ids)
        self.branches: dict[int, asyncio.Task[None]] = {}
        self._backend, self._token_bytes = backend, backend.token_bytes
        self._ids, self._params, self._receiver = list(ids), params, receiver
        self._ends = {*backend.end_ids, *params.stop_token_ids}
        self._sampling = _sampling(params, max_tokens, backend.end_ids)
        self._only_reads = max_tokens == 0
        self._texts = [TextStream(backend.token_bytes, params.stop) for _ in range(self.width)]
        self._answered: set[int] = set()  # branches that have had an output
        self._arrived, self._cached_tokens = time.monotonic(), 0

    def start(self) -> None:
        """Hand it to vLLM."""
        self._backend.tell("admitted", time.monotonic() - self._arrived)
        for index in range(self.width):
            self.branches[index] = asyncio.create_task(self._run(index))

    def keeps_running(self) -> bool:
        """Whether to continue; ends it if it is cancelled or has timed out."""
        if self._receiver.cancelled():
            self.cancel()
            return False
        timeout = self._params.timeout_seconds
        if timeout is None or time.monotonic() - self._arrived < timeout:
            return True
        if self._answered:
            for index in self.branches:
                self._deliver(self._last(Chunk(self._texts[index].rest(), [], "timeout", index)))
        else:
            self._deliver(
                UserError(
                    f"no token within timeout_seconds {timeout:g}",
                    "try again in a moment, or raise timeout_seconds",
                    Code.TIMEOUT,
                )
            )
        self._abort()
        return False

    def cancel(self) -> None:
        """Deliver a cancellation, and abort what vLLM computes."""
        self._deliver(Chunk("", [], "cancelled"))
        self._abort()

    def _abort(self) -> None:
        for task in self.branches.values():
            if task is not asyncio.current_task():  # which is about to close its generator
                task.cancel()  # vLLM's generator then aborts its request
        self.branches = {}

    async def _run(self, index: int) -> None:
        """Deliver what one branch generates."""
        sampling = self._sampling.clone()  # a branch has its own seed
        if self._params.seed is not None:
            seeds = np.random.SeedSequence(self._params.seed).spawn(index + 1)
            sampling.seed = int(seeds[index].generate_state(1)[0])
        prompt = {"prompt_token_ids": self._ids}
        outputs = self._backend.engine.generate(prompt, sampling, uuid4().hex)
        try:
            async with aclosing(outputs):  # which aborts a request that has not ended
                async for output in outputs:
                    if self._take(index, output):
                        break
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if index in self.branches:  # else another branch has failed already
                self._deliver(error)
                self._abort()
            if self._backend.engine.errored:
                # vLLM's process has died. Whoever supervises this one starts both again.
                log.exception("vLLM has crashed, which ends this process, too")
                await asyncio.sleep(EXIT_SECONDS)
                os._exit(1)
        self.branches.pop(index, None)
        self._backend.freed()

    def _take(self, index: int, output: Any) -> bool:
        """Deliver an output of a branch; returns whether it is the last."""
        if self._receiver.cancelled():
            self.cancel()
            return True
        (completion,) = output.outputs
        text, reason = self._texts[index], completion.finish_reason
        if reason not in (None, "stop", "length"):
            raise RuntimeError(f"vLLM ended a request: {reason}")
        if not self._answered:
            self._cached_tokens = output.num_cached_tokens or 0
            seconds = time.monotonic() - self._arrived
            self._backend.tell("begun", len(self._ids), self._cached_tokens, seconds)
        if index not in self._answered:
            self._answered.add(index)
            if self._params.echo or self._only_reads:
                self._deliver(self._prompt(index, output.prompt_logprobs))
            if self._only_reads:
                return True
        self._backend.tell("stepped", len(completion.token_ids))
        self.n_tokens += len(completion.token_ids)
        pieces, tokens, lengths = list[str](), list[int](), list[int]()
        for token in completion.token_ids:
            if token in self._ends:  # vLLM's last one, which is not part of the text
                break
            before = text.length
            pieces.append(text.add(token))
            tokens.append(token)
            lengths.append(text.length - before)
            if text.stopped:
                reason = "stop"
                break
        if reason and not text.stopped:
            pieces.append(text.rest())
        chunk = Chunk("".join(pieces), tokens, reason or "", index)
        if self._params.logprobs:  # not strict: an end has scores, but is not among the tokens
            scores = zip(tokens, completion.logprobs, strict=False)
            chunk = self._scored(chunk, [self._score(*each) for each in scores], lengths)
        if reason:
            self._deliver(self._last(chunk))
        elif tokens:
            self._deliver(chunk)
        self._backend.tell_load()
        return bool(reason)

    def _prompt(self, index: int, scores: Any) -> Chunk:
        """The chunk with the echoed prompt."""
        tokens = self._ids if self._params.echo else []
        pieces = self._token_bytes.echo(tokens)
        chunk = Chunk("".join(pieces), tokens, "length" if self._only_reads else "", index)
        if self._params.echo and self._params.logprobs:
            others = [self._score(*each) for each in zip(tokens[1:], scores[1:], strict=True)]
            first: Score = (math.nan, {})
            chunk = self._scored(chunk, [first, *others], list(map(len, pieces)))
        return self._last(chunk) if self._only_reads else chunk

    def _score(self, token: int, entries: Mapping[int, Any]) -> Score:
        """See `sequence_group.score`; vLLM's entries are the most likely tokens and the token."""
        chances = {i: float(entry.logprob) for i, entry in entries.items()}
        top: dict[str, float] = {}
        if k := self._params.top_logprobs:
            likely = sorted(chances, key=lambda i: (-chances[i], i))[:k]
            top = {self._token_bytes.name(i): chances[i] for i in (*likely, token)}
        return chances[token], top

    def _scored(self, chunk: Chunk, scores: Sequence[Score], lengths: list[int]) -> Chunk:
        return replace(
            chunk,
            log_probabilities=[chance for chance, _ in scores],
            top=[top for _, top in scores],
            names=[self._token_bytes.name(token) for token in chunk.tokens],
            lengths=lengths,
        )

    def _last(self, chunk: Chunk) -> Chunk:
        return replace(chunk, prompt_tokens=len(self._ids), cached_tokens=self._cached_tokens)

    def _deliver(self, answer: Chunk | Exception) -> None:
        """Deliver a chunk or an error; a failing receiver must not affect any request."""
        try:
            self._receiver.deliver(answer)
        except Exception:
            log.exception("failed to deliver an answer")


def _sampling(params: Params, max_tokens: int, end_ids: Sequence[int]) -> Any:
    """The parameters in vLLM's form, whose sampler knows no end but those that it is given."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    bias, ends = dict(params.logit_bias), {*end_ids, *params.stop_token_ids}
    if params.ignore_eos:
        bias |= {i: -math.inf for i in end_ids if i not in params.stop_token_ids}
    structured = None
    if params.structured_outputs:
        kind, value = parse_constraint(params.structured_outputs)
        if kind == "json":
            schema: dict[str, Any] = value if isinstance(value, dict) else {"allOf": [value]}
            value = {**schema, "x-guidance": {**JSON_OPTIONS, **schema.get("x-guidance", {})}}
        structured = StructuredOutputsParams(**{kind: value})
    is_greedy = params.decode_strategy == "greedy_search"
    return SamplingParams(
        max_tokens=max(max_tokens, 1),  # at least one is generated after a prompt
        min_tokens=min(params.min_tokens, max_tokens),
        temperature=0.0 if is_greedy else max(params.temperature, LOWEST_TEMPERATURE),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        ignore_eos=True,
        stop_token_ids=sorted(ends),
        logit_bias=bias or None,
        structured_outputs=structured,
        logprobs=params.top_logprobs if params.logprobs else None,
        prompt_logprobs=params.top_logprobs if params.echo and params.logprobs else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
