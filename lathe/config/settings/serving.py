"""From a checkpoint to production: generation, export, the server and its releases."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.types import (
    Factor,
    KubernetesLabel,
    KubernetesName,
    Milliseconds,
    NonNegative,
    PlainName,
    Port,
    Positive,
    Seconds,
)

ExportFormat = Literal["gguf", "compressed-tensors", "openvino"]
Requirement = Literal[
    "signature",
    "chain",
    "gate",
    "proof",
    "proof:gguf",
    "proof:compressed-tensors",
    "proof:openvino",
    "audit",
]


class GenerationSettings(Settings):
    """How text is generated, here and, as defaults of a request, by the server. The group and its
    keys are PaddleFleetX's."""

    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = "sampling"
    """How the next token is chosen: drawn at random, always the likeliest, or by beam search."""
    temperature: Factor = 1.0
    """Divisor of the logits before sampling; below 1 makes likely tokens likelier."""
    top_k: NonNegative = 50
    """Number of likeliest tokens to sample from; 0 sets no limit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Sampling keeps the fewest likeliest tokens whose probabilities add up to this; 1 keeps
    all."""
    repetition_penalty: Factor = 1.0
    """Factor by which the scores of tokens seen before are lowered; 1 changes nothing."""
    min_dec_len: NonNegative = 1
    """Fewest new tokens, before which end-of-text is not allowed."""
    max_dec_len: Positive = 200
    """Most new tokens."""
    num_return_sequences: Positive = 1
    """Continuations of each prompt; `greedy_search` has one only, `beam_search` at most
    `num_beams`."""
    num_beams: Annotated[int, Field(ge=2)] = 4
    """Beams of `beam_search`."""
    length_penalty: Annotated[float, Field(ge=-20, le=20)] = 1.0
    """Exponent of the length by which `beam_search` divides a log-probability; above 0 it favours
    longer texts."""


class ExportSettings(Settings):
    """The ONNX graph, and how it is proven equal to its checkpoint. The group is Lathe's own."""

    opset: Annotated[int, Field(ge=20, le=22)] = 21
    """Version of ONNX's operator set."""
    dtype: Literal["float32", "float16"] = "float32"
    """Data type of the graph's float weights; an INT8 checkpoint needs float32."""
    formats: list[ExportFormat] = Field(default=[])
    """Further formats to write beside the ONNX graph: `gguf` for llama.cpp, Ollama and LM Studio,
    `compressed-tensors` for vLLM, SGLang and transformers, `openvino` for OpenVINO GenAI and
    OpenVINO Model Server. Each is proven in its engine, if that is installed."""
    prompts: Positive = 64
    """Held-out prompts that the graph and the checkpoint are compared on."""
    new_tokens: Positive = 24
    """Tokens that each prompt is continued by in that comparison, and in the server's; at most half
    of the model's positions are used."""
    tolerance: Annotated[float, Field(gt=0, le=1e6)] = 1e-3
    """Largest difference between a logit of the graph and of the checkpoint, in float32."""


class ServingSettings(Settings):
    """The Triton server. The group is Lathe's own.

    The four ports must differ; a port 0 is any free one.
    """

    model_name: PlainName = "gpt"
    """Name of the model on the server, and of its releases in the store."""
    aliases: list[Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]] = Field(default=[])
    """Further names of the model in OpenAI's interface, such as `gpt-4o-mini` for clients that ask
    for it."""
    http_port: Port = 8000
    """Port of the HTTP endpoint, KServe's interface and OpenAI's; 0 takes a free one."""
    grpc_port: Port = 8001
    """Port of the gRPC endpoint; 0 takes a free one."""
    metrics_port: Port = 8002
    """Port of the Prometheus metrics; 0 takes a free one."""
    gateway_port: Port = 9000
    """Second port of the HTTP endpoint, where clients of OpenAI's interface look for it; 0 takes a
    free one."""
    max_running: Positive = 8
    """Sequences that are generated at the same time; each beam, or sequence of
    a request, counts as one."""
    max_queue: Positive = 64
    """Requests that may wait; further ones are refused at once."""
    prefix_cache_mib: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Memory for keys and values of prompts, which those that begin alike need not read again, in
    MiB; 0 reads every prompt whole."""
    speculation: Literal["off", "prompt_lookup"] = "off"
    """How several tokens of a single stream are decoded in one step: `prompt_lookup` tries what
    came after the last tokens when they came before; `off` decodes one after another."""
    runtime: Literal["auto", "onnxruntime", "onnxruntime_single_stream", "openvino"] = "onnxruntime"
    """Library that computes. `onnxruntime` is what the export was proven with.
    `onnxruntime_single_stream` has a second copy of INT8 weights in memory, from which a sequence
    that runs alone is decoded 1.4 times as fast; dynamic INT8 needs none. `openvino` is faster for
    INT4 and for many sequences on CPUs with VNNI or AMX. With these two, the server does not start
    unless logits are onnxruntime's up to the limit of the proof. `auto` measures all on the machine
    that serves, when the server starts, and takes the fastest that agrees."""
    max_wait_seconds: Seconds | None = None
    """Longest time, in seconds, that a request to OpenAI's interface may be expected to wait for a
    slot; those that would wait for longer are refused at once. null is half the time that a prompt
    has taken recently. Batch jobs want more."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """Threads that compute; 0 uses one for each CPU core."""

    @model_validator(mode="after")
    def _ports_differ(self) -> "ServingSettings":
        names = ("http_port", "grpc_port", "metrics_port", "gateway_port")
        ports = [port for name in names if (port := getattr(self, name))]
        if len(set(ports)) < len(ports):
            given = ", ".join(f"{name} {getattr(self, name)}" for name in names)
            raise ValueError(f"{given}: they must differ, unless 0")
        return self


class ProductionSettings(Settings):
    """Where models go live, and the acceptance test that a release has to pass before. The group
    is Lathe's own."""

    releases: str | None = None
    """Address of the releases in an object store, `s3://bucket/prefix` or `file:///folder`; null
    has none, so that nothing can be published."""
    burst_seconds: Seconds = 10.0
    """Length of the load test, in seconds."""
    burst_clients: Annotated[int, Field(gt=0, le=2**16)] = 8
    """Clients of the load test, each of which asks again as soon as it has its answer."""
    p99_first_token_ms: Milliseconds = 2000.0
    """Largest 99th percentile, in milliseconds, of the time to the first token under load."""
    p99_between_tokens_ms: Milliseconds = 500.0
    """Largest 99th percentile, in milliseconds, of the time between two tokens under load."""
    namespace: KubernetesLabel | None = None
    """Kubernetes namespace of the Deployment; null is that of the step that rolls it, or of the
    kube context, or `lathe` if that names none."""
    deployment: KubernetesName | None = "lathe-serve"
    """Kubernetes Deployment to roll to a new release; null rolls none."""
    require: list[Requirement] = Field(default=[])
    """What a release must show before it is published, rolled back to, or served. `signature`: its
    files are those that were signed. `chain`: every step since the corpus is attested and signed.
    `gate`: the gate let its model pass. `proof`: its graph computes what the checkpoint does.
    `proof:gguf` and so on: so does the export's file of that format, in the format's own engine.
    `audit`: the bill of materials of its environment has no known vulnerability, before it is
    published or rolled back to."""
    vex: list[str] = Field(default=[])
    """Files of OpenVEX statements: known vulnerabilities that `audit` excuses, beside those that
    Lathe excuses itself."""
    keys: list[str] = Field(default=[])
    """Files of the public keys that signatures and attestations are verified with; any of them may
    have signed. On a cluster, leave it empty: steps read the ConfigMap `lathe-verification-keys`.
    """
    rollout_seconds: Seconds = 900.0
    """Longest time for a rollout, in seconds, after which the previous release is restored."""
