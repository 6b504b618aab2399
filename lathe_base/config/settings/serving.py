"""Settings of generation, export, the server and its releases."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lathe_base.config.settings.types import (
    Factor,
    KubernetesLabel,
    KubernetesName,
    Milliseconds,
    NonNegative,
    PlainName,
    Port,
    Positive,
    Seconds,
    Settings,
    generation_bounds,
    generation_default,
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
    "proof:vllm",
    "audit",
]


class GenerationSettings(Settings):
    """Text generation; also the server's default request parameters. On the server, sampling
    parameters that a recipe leaves out are those of the model's `generation_config.json`, if it has
    them. The group and its keys are PaddleFleetX's."""

    # A request may have values that are out of range here; see `lathe_base.parameters`.
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = generation_default(
        "decode_strategy"
    )
    temperature: Factor = generation_default("temperature")
    top_k: NonNegative = generation_default("top_k")
    top_p: Annotated[float, generation_bounds("top_p")] = generation_default("top_p")
    repetition_penalty: Factor = generation_default("repetition_penalty")
    min_dec_len: NonNegative = generation_default("min_tokens")
    max_dec_len: Positive = 200
    """Maximum number of new tokens."""
    num_return_sequences: Positive = generation_default("num_return_sequences")
    num_beams: Annotated[int, Field(ge=2)] = generation_default("num_beams")
    length_penalty: Annotated[float, Field(ge=-20, le=20)] = generation_default("length_penalty")


class ExportSettings(Settings):
    """ONNX export, and its verification against the checkpoint. The group is Lathe's own."""

    opset: Annotated[int, Field(ge=20, le=22)] = 21
    """ONNX operator set version."""
    dtype: Literal["float32", "float16"] = "float32"
    """Data type of float weights in the graph; an INT8 checkpoint requires float32."""
    formats: list[ExportFormat] = Field(default=[])
    """Additional formats to write: `gguf` for llama.cpp, Ollama and LM Studio,
    `compressed-tensors` for vLLM, SGLang and transformers, `openvino` for OpenVINO GenAI and
    OpenVINO Model Server. Each is verified in its engine, if that is installed."""
    prompts: Positive = 64
    """Number of held-out prompts to compare the graph with the checkpoint."""
    new_tokens: Positive = 24
    """Number of tokens to generate per prompt in that comparison, and in the server's; at most
    half of the model's positions are used."""
    tolerance: Annotated[float, Field(gt=0, le=1e6)] = 1e-3
    """Maximum difference between the graph's and the checkpoint's logits, in float32. At tokens
    where rounding noise moves the checkpoint's own logits it is at least eight times as much."""


class ServingSettings(Settings):
    """The Triton server. The group is Lathe's own.

    The four ports must differ; 0 picks a free port.
    """

    model_name: PlainName = "gpt"
    """Name of the model on the server, and of its releases in the store."""
    aliases: list[Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]] = Field(default=[])
    """Additional names of the model in the OpenAI API, such as `gpt-4o-mini` for clients with a
    fixed name."""
    http_port: Port = 8000
    """Port of the HTTP endpoint (KServe and OpenAI APIs); 0 picks a free port."""
    grpc_port: Port = 8001
    """Port of the gRPC endpoint; 0 picks a free port."""
    metrics_port: Port = 8002
    """Port of the Prometheus metrics; 0 picks a free port."""
    gateway_port: Port = 9000
    """Second port of the HTTP endpoint, for OpenAI clients; 0 picks a free port."""
    max_running: Positive = 8
    """Maximum number of sequences generated concurrently; each beam, or sequence of a request,
    counts as one."""
    max_queue: Positive = 64
    """Maximum number of waiting requests; further ones are rejected at once."""
    prefix_cache_mib: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Size of the prefix cache, in MiB: keys and values of prompts, reused by prompts with the
    same prefix; 0 disables it."""
    speculation: Literal["off", "prompt_lookup"] = "off"
    """Speculative decoding of a single stream: `prompt_lookup` drafts the tokens that followed the
    last occurrence of the most recent tokens; `off` decodes one token per step."""
    runtime: Literal["auto", "onnxruntime", "onnxruntime_single_stream", "openvino", "vllm"] = (
        "onnxruntime"
    )
    """Inference runtime. `onnxruntime` is what the export was verified with.
    `onnxruntime_single_stream` keeps a second copy of INT8 weights in memory, which decodes a
    sequence that runs alone 1.4 times as fast; dynamic INT8 does not need it. `openvino` is faster
    for INT4 and for many sequences on CPUs with VNNI or AMX. With these two, the server starts
    only if their logits match onnxruntime's within the export's limit. `auto` benchmarks all on
    the serving machine when the server starts, and picks the fastest that matches. `vllm` is for
    GPUs: it serves the export's `compressed-tensors` (see `Export.formats`), from an environment
    of its own (`make vllm-env`)."""
    max_wait_seconds: Seconds | None = None
    """Maximum expected time, in seconds, that a request to the OpenAI API may wait for a slot;
    requests that would wait longer are rejected at once. null means half the recent time per
    prompt. Increase it for batch jobs."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of compute threads; 0 uses one per CPU core."""

    @model_validator(mode="after")
    def _ports_differ(self) -> "ServingSettings":
        names = ("http_port", "grpc_port", "metrics_port", "gateway_port")
        ports = [port for name in names if (port := getattr(self, name))]
        if len(set(ports)) < len(ports):
            listed = ", ".join(f"{name} {getattr(self, name)}" for name in names)
            raise ValueError(f"{listed}: ports must differ, unless 0")
        return self


class InferenceSettings(Settings):
    """Exported models. The group and its key are PaddleFleetX's."""

    model_dir: str | None = None
    """Export to deploy, for `lathe deploy` without one."""


class ProductionSettings(Settings):
    """Releases, and the acceptance test that a release must pass. The group is Lathe's own."""

    releases: str | None = None
    """Address of the releases in an object store, `s3://bucket/prefix` or `file:///folder`; null
    disables publishing."""
    burst_seconds: Seconds = 10.0
    """Duration of the load test, in seconds."""
    burst_clients: Annotated[int, Field(gt=0, le=2**16)] = 8
    """Number of concurrent clients in the load test; each sends its next request as soon as it has
    its answer."""
    p99_first_token_ms: Milliseconds = 2000.0
    """Maximum 99th percentile of the time to first token under load, in milliseconds."""
    p99_between_tokens_ms: Milliseconds = 500.0
    """Maximum 99th percentile of the time between tokens under load, in milliseconds."""
    namespace: KubernetesLabel | None = None
    """Kubernetes namespace of the Deployment; null means that of the release step, or of the kube
    context, or `lathe` if the context has none."""
    deployment: KubernetesName | None = "lathe-serve"
    """Kubernetes Deployment to roll to a new release; null disables it."""
    require: list[Requirement] = Field(default=[])
    """Checks that a release must pass before it is published, rolled back to, or served.
    `signature`: its files are the signed ones. `chain`: every step since the corpus is attested
    and signed. `gate`: the gate passed its model. `proof`: its graph was verified against the
    checkpoint. `proof:gguf` and so on: so was the export's file in that format, in the format's
    own engine. `proof:vllm`: so was `compressed-tensors` in vLLM, which `lathe export` does only if
    this is required. `audit`: the bill of materials of its environment
    has no known vulnerability, checked before publishing and rolling back."""
    vex: list[str] = Field(default=[])
    """Files of OpenVEX statements with vulnerabilities that `audit` ignores, in addition to
    Lathe's own."""
    keys: list[str] = Field(default=[])
    """Files of trusted public keys for signatures and attestations; any of them may have signed.
    On a cluster, leave it empty: steps read the ConfigMap `lathe-verification-keys`."""
    rollout_seconds: Seconds = 900.0
    """Maximum duration of a rollout, in seconds, after which the previous release is restored."""
