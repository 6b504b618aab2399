"""Verifies that an exported graph computes the same as its checkpoint: the whole graph's logits and
texts, and every quantized linear on the graph's own input."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lathe.export.fidelity import Fidelity, compare_with_float
from lathe.export.weight_formats import GROUPED, count_products, kernel_rounding
from lathe.model.architecture import HEAD
from lathe.model.checkpoint import by_projection
from lathe.model.fake_quant import (
    FakeQuantLinear,
    Observer,
    RoundGroups,
    activation_scales,
    without_quantization,
)
from lathe.model.generate import generate
from lathe.model.gpt import GPT
from lathe.model.integer_weights import split
from lathe_base.config.settings import GenerationSettings
from lathe_base.errors import Code, StageError
from lathe_base.progress import Bar, bar
from lathe_serving.runtime.exported_model import MODEL, pad
from lathe_serving.runtime.session import OnnxModel, open_session

log = logging.getLogger("lathe")

# Limits of the mean error; see `prove`. NOISE_FACTOR: in float32, correct graphs measure 1 to 2 and
# one with the wrong GELU 20; in float16, correct graphs measure 0.3 and one with positions that are
# 1 % off 3. QUANTIZATION_SHARE: two independent roundings of one model measure 1.4.
NOISE_FACTOR = {np.float32: 8, np.float16: 2}
QUANTIZATION_SHARE = 1.5
EMBEDDINGS = "embeddings"
# Relative to the largest output: error of a float32 sum. Observed: 6e-7.
ROUNDING = 1e-5
# In units of the scale: this close to the midpoint of two levels, the quotient's last bit decides
# to which of them it rounds.
EDGE = 1e-4


class ProofError(StageError):
    """The graph computes something else than the checkpoint."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.NOT_PROVED)


@dataclass(frozen=True)
class Tie:
    """A divergence of greedy texts at two tokens with nearly equal logits in torch."""

    prompt: int
    step: int
    torch_token: int
    onnx_token: int
    margin: float  # torch's logit of its own token minus that of the other


@dataclass(frozen=True)
class Proof:
    """Figures of a successful verification; errors are those of logits compared with torch.

    Attributes:
        mean_limit: limit of `mean_error`.
        argmax_agreement: share of positions where the most likely token is torch's.
        linear_error: largest error of a quantized linear against torch's on the same input; 1 is
            the most that rounding explains.
        fidelity: comparison with the float model.
        batch_error: largest difference between a ragged batch, or a mixed step, and each row alone.
        ties: rows whose greedy tokens differ within the error of the logits.
    """

    integer_kernels: int
    prompts: int
    new_tokens: int
    max_error: float
    mean_error: float
    mean_limit: float
    argmax_agreement: float
    linear_error: float
    logits_std: float
    batch_error: float
    ties: list[Tie]
    fidelity: Fidelity

    def to_json(self) -> dict[str, Any]:
        """The figures for `export.json`."""
        return asdict(self)


@torch.inference_mode()
def prove(
    model: GPT, folder: Path, prompts: Sequence[Sequence[int]], new_tokens: int, tolerance: float
) -> Proof:
    """Compare an exported folder with the (fake-quantized) model it was made from.

    - The graph passes onnx's checker, and shape inference gives every tensor a type.
    - onnxruntime, after its own optimizations, runs one integer kernel for each linear with a
      quantized input, and float kernels for the other linears only.
    - Logits at every position of every prompt. float32: the largest error of a position is at most
      `tolerance`, or, where the model is unstable, `NOISE_FACTOR` times the change of torch's own
      logits there when every linear's input moves by one unit in the last place. float32 and
      float16: the mean error is at most `NOISE_FACTOR` times the mean change by such noise, in
      that type. int8: the mean error is at most `QUANTIZATION_SHARE` times the change that
      quantization made. The limit is that wide because a different order of summation can move an
      activation on the edge between two levels by a whole level, and later layers then round
      differently: torch in float64 differs from torch in float32 as much as either does from the
      float model. int8 weights with float inputs have the limits of float32, because both sides
      multiply the same dequantized weights.
    - int8: every quantized linear, given the graph's own input, gives torch's output up to the
      error of a sum, and up to one level where an input lies on an edge; so do the embeddings.
    - A ragged batch gives each row the same logits as alone, and so does a step that decodes rows
      and reads a prompt; if inputs are rounded, up to the limit of the mean error.
    - Greedy continuations of `new_tokens` with the cache, in a batch and alone, are torch's. A row
      may diverge only at tokens whose logits differ in torch by at most the largest error found
      above, or where inputs are rounded, by the limit of the mean error; such rows are listed.
    - The KL divergence from the float model is at most `KL_SHARE` times that of torch's fake
      quantization, so that a kernel that rounds more coarsely than the plan is rejected. Positions
      at which greedy texts diverge from the float model's choices are listed.

    Raises:
        ProofError: one of these does not hold; names the figure, the prompt and the step.
    """
    kernels = count_kernels(model, folder / MODEL)
    onnx_model = OnnxModel(folder, threads=torch.get_num_threads())
    is_exact = not _rounds_inputs(model) and onnx_model.dtype == np.float32
    with bar("verify the export", 3 * len(prompts)) as progress:
        logits = _compare_logits(
            model, onnx_model, prompts, tolerance if is_exact else math.inf, progress
        )
        # Before the limits of the logits: it says which linear is wrong.
        errors = linear_errors(model, onnx_model, folder / MODEL, prompts)
        for name, error in errors.items():
            if not error <= 1:
                raise ProofError(
                    f"{name}: differs from torch's on the same input by {error:.3g} times what "
                    "rounding explains"
                )
        error, limit = logits.worst
        if not logits.mean_error <= logits.mean_limit or not error <= limit:
            raise ProofError(
                f"logits differ from torch's by {logits.mean_error:.3g} on average (limit "
                f"{logits.mean_limit:.3g}) and by {error:.3g} at the worst position (limit there "
                f"{f'{limit:.3g}' if limit < math.inf else 'none'})"
            )
        # Where inputs are rounded, rows and texts may differ by what rounding explains.
        rounds = _rounds_inputs(model)
        batch_limit = logits.max_limit if is_exact else max(logits.max_error, tolerance)
        judged = (np.mean, logits.mean_limit) if rounds else (np.max, batch_limit)
        batch_error = _require_batch(onnx_model, prompts, *judged)
        margin = max(logits.max_error, logits.mean_limit) if rounds else logits.max_error
        texts = onnx_model.greedy(prompts, new_tokens, stop_at_eos=False)
        ties = _require_greedy(model, onnx_model, prompts, texts, margin, progress)
        fidelity = _require_fidelity(model, onnx_model, prompts, texts)
    return Proof(
        integer_kernels=kernels,
        prompts=len(prompts),
        new_tokens=new_tokens,
        max_error=logits.max_error,
        mean_error=logits.mean_error,
        mean_limit=logits.mean_limit,
        argmax_agreement=logits.argmax_agreement,
        linear_error=max(errors.values(), default=0.0),
        logits_std=logits.std,
        batch_error=batch_error,
        ties=ties,
        fidelity=fidelity,
    )


def count_kernels(model: GPT, path: Path) -> int:
    """Check the file, and count the integer matrix products of the graph after optimization.

    Raises:
        ProofError: the file is not valid ONNX, or the count differs from the quantization plan's.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ProofError(f"{path}: not a valid ONNX graph: {error}") from error
    without_weights = onnx.load(path, load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(without_weights, strict_mode=True).graph
    typed = {value.name for value in (*graph.value_info, *graph.output)}
    untyped = [name for node in graph.node for name in node.output if name not in typed]
    if untyped:
        raise ProofError(f"{path}: shape inference fails for {', '.join(untyped[:3])}")
    with TemporaryDirectory() as scratch:
        optimized = Path(scratch) / MODEL
        open_session(path, optimized=optimized)
        optimized_graph = onnx.load(optimized, load_external_data=False).graph
        integer, in_float = count_products(optimized_graph.node)
    plan = model.config.quantization
    wanted = len(plan.integer_linears) if plan else 0  # a float input: a float product
    total = len(model.config.linear_names()) + 1  # and the head
    if (integer, in_float) != (wanted, total - wanted):
        raise ProofError(
            f"{path}: onnxruntime runs {integer} integer and {in_float} float matrix products, "
            f"but the quantization plan has {wanted} and {total - wanted}"
        )
    return integer


@dataclass(frozen=True)
class _Logits:
    """Errors of the graph's logits against torch's; see `Proof`. `std` is that of torch's.

    Attributes:
        worst: the largest error of the position where it is largest relative to its limit, and that
            limit.
        max_limit: the largest limit of a position.
    """

    max_error: float
    worst: tuple[float, float]
    max_limit: float
    mean_error: float
    mean_limit: float
    std: float
    argmax_agreement: float


def _compare_logits(
    model: GPT,
    onnx_model: OnnxModel,
    prompts: Sequence[Sequence[int]],
    tolerance: float,
    progress: Bar,
) -> _Logits:
    largest, error, change, variance, n, same = 0.0, 0.0, 0.0, 0.0, 0, 0
    worst, max_limit = (0.0, tolerance), tolerance
    is_int8, factor = _rounds_inputs(model), NOISE_FACTOR[onnx_model.dtype]
    changed_model = without_quantization(model) if is_int8 else model
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([list(prompt)])
        logits = model(tokens)  # (1, T, V)
        actual = torch.from_numpy(onnx_model.logits(tokens.numpy()))
        difference = (actual - logits).abs()
        same += int((actual.argmax(-1) == logits.argmax(-1)).sum())
        with nullcontext() if is_int8 else _rounded_otherwise(model, onnx_model.dtype, seed=i):
            changed = changed_model(tokens)
        moved = (changed - logits).abs()
        change += float(moved.sum(dtype=torch.float64))
        largest = max(largest, float(difference.max()))
        # At a token where a massive activation just forms, or does not, the last bit of an input
        # may move the logits by a hundred times the usual.
        limits = (factor * moved.amax(-1)).clamp_min(tolerance).flatten().tolist()
        for found, limit in zip(difference.amax(-1).flatten().tolist(), limits, strict=True):
            if not found / limit <= worst[0] / worst[1]:  # or is NaN
                worst = found, limit
        max_limit = max(max_limit, *limits)
        error += float(difference.sum(dtype=torch.float64))
        variance += float(logits.var(-1).sum()) * logits.shape[-1]
        n += logits.numel()
        progress.advance()
    return _Logits(
        max_error=largest,
        worst=worst,
        max_limit=max_limit,
        mean_error=error / n,
        mean_limit=(QUANTIZATION_SHARE if is_int8 else factor) * change / n,
        std=float(np.sqrt(variance / n)),
        argmax_agreement=same / sum(map(len, prompts)),
    )


def _require_fidelity(
    model: GPT,
    onnx_model: OnnxModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> Fidelity:
    """Compare with the float model; the KL divergence has to be within its limit."""
    plain = model if model.config.quantization is None else without_quantization(model)
    fidelity = compare_with_float(model, plain, onnx_model, prompts, texts)
    if onnx_model.dtype == np.float32 and not fidelity.kl <= fidelity.kl_limit:
        raise ProofError(
            f"the graph's KL divergence from the float model is {fidelity.kl:.3g} nats per "
            "token, and "
            f"that of torch's fake quantization {fidelity.torch_kl:.3g} (limit "
            f"{fidelity.kl_limit:.3g})"
        )
    return fidelity


def _rounds_inputs(model: GPT) -> bool:
    """Whether a linear has a quantized input, or attention quantized keys and values; int8 weights
    alone leave the arithmetic in float."""
    plan = model.config.quantization
    return plan is not None and bool(plan.integer_linears or plan.kv_cache_bits)


@contextmanager
def _rounded_otherwise(model: GPT, dtype: type[np.floating[Any]], seed: int) -> Iterator[None]:
    """Move the input of every linear and of the head, at random, up or down by one unit in the last
    place of `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def moved(x: Tensor) -> Tensor:
        sign = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return x * (1 + float(np.finfo(dtype).eps) * sign)

    hooks = [model.final_norm.register_forward_hook(lambda _module, _inputs, output: moved(output))]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            hook = module.register_forward_pre_hook(lambda _module, inputs: (moved(inputs[0]),))
            hooks.append(hook)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _require_batch(
    onnx_model: OnnxModel,
    prompts: Sequence[Sequence[int]],
    judge: Callable[[NDArray[np.float32]], Any],
    limit: float,
) -> float:
    """The largest difference of logits between a ragged batch, or a mixed step, and each row alone.
    `judge` reduces the differences of either to the number that `limit` bounds."""
    tokens, lengths = pad(prompts)
    cache = onnx_model.start(len(prompts), int(lengths.max()))
    together = onnx_model.step(cache, tokens, lengths)  # (B, V)
    alone = [onnx_model.logits(np.array([list(prompt)]))[0, -1] for prompt in prompts]
    batch = np.abs(together - np.stack(alone))
    # A mixed step decodes all prompts, with their last token repeated, and reads the second half of
    # the last prompt.
    n_rows, chunk, half = len(prompts), np.array(prompts[-1]), len(prompts[-1]) // 2
    cache = onnx_model.start(n_rows + 1, int(lengths.max()) + 1)
    rows = onnx_model.rows(cache, 0, n_rows)
    prompt = onnx_model.rows(cache, n_rows, n_rows + 1)
    onnx_model.step(rows, tokens, lengths)
    if half:
        onnx_model.step(prompt, chunk[None, :half])
    again = np.array([row[-1] for row in prompts])
    decoded, read = onnx_model.mix(onnx_model.pair(rows, prompt), again, chunk[half:], True)
    longer = [[*row, row[-1]] for row in prompts]
    alone = [onnx_model.logits(np.array([row]))[0, -1] for row in (*longer, prompts[-1])]
    mixed = np.abs(np.concatenate([decoded, read]) - np.stack(alone))  # (B + 1, V)
    for logits, where in ((batch, "a batch"), (mixed, "a mixed step")):
        if not (error := float(judge(logits))) <= limit:
            raise ProofError(f"a row's logits change by {error:.3g} in {where} (limit {limit:.3g})")
    return float(max(batch.max(), mixed.max()))


def _require_greedy(
    model: GPT,
    onnx_model: OnnxModel,
    prompts: Sequence[Sequence[int]],
    batched: Sequence[Sequence[int]],
    max_gap: float,
    progress: Bar,
) -> list[Tie]:
    """The ties of greedy decoding in a batch, and of each prompt alone."""
    new_tokens = len(batched[0])
    settings = GenerationSettings(decode_strategy="greedy_search", max_dec_len=new_tokens)
    expected = generate(model, prompts, settings)
    progress.advance(len(prompts))
    ties = _compare_greedy(model, prompts, expected, batched, max_gap)
    for i, prompt in enumerate(prompts):
        alone = onnx_model.greedy([prompt], new_tokens, stop_at_eos=False)
        if alone[0] != batched[i]:
            more = _compare_greedy(model, [prompt], [expected[i]], alone, max_gap, first=i)
            ties += [tie for tie in more if tie not in ties]
        progress.advance()
    return ties


def _compare_greedy(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    max_gap: float,
    first: int = 0,
) -> list[Tie]:
    """The rows that diverge from torch's at logits that differ by at most `max_gap`; `first` is the
    index of the first row."""
    ties = []
    for i, (prompt, theirs, ours) in enumerate(zip(prompts, expected, got, strict=True), first):
        if list(theirs) == list(ours):
            continue
        step = next(k for k, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        logits = model(torch.tensor([[*prompt, *theirs[:step]]]))[0, -1]
        margin = float(logits[theirs[step]] - logits[ours[step]])
        tie = Tie(i, step, theirs[step], ours[step], margin)
        if not margin <= max_gap:
            raise ProofError(
                f"greedy decoding of prompt {i} diverges at step {step}: torch chooses token "
                f"{tie.torch_token}, the graph {tie.onnx_token}, whose logit is lower by "
                f"{margin:.3g}; the limit for ties is {max_gap:.3g}"
            )
        log.info(
            "prompt %d, step %d: torch chooses token %d, the graph %d, with a logit %.3g lower",
            *(i, step, tie.torch_token, tie.onnx_token, margin),
        )
        ties.append(tie)
    return ties


def linear_errors(
    model: GPT, onnx_model: OnnxModel, path: Path, prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Error of each quantized linear, and of the sum of the embeddings, against torch's, by name; 1
    is what rounding can explain.

    Rounding explains the error of a float32 sum and, if inputs are rounded, one level for every
    input on the edge between two levels, and the error of the kernel's offsets.

    Args:
        model: fake-quantized, in evaluation mode.
        onnx_model: its export.
        path: the graph of the export; a copy gets the linears' inputs and outputs as additional
            outputs.

    Returns:
        Error by name; empty for a model that is not quantized.
    """
    plan = model.config.quantization
    if plan is None:
        return {}
    rounded, graph = plan.activation_scales, onnx.load(path, load_external_data=False)
    tensors_by_linear = {
        name: _input_and_output(graph, name, name in rounded) for name in plan.linears
    }
    # The sum of the embeddings is what the first norm reads, or else the first linear.
    family = model.config.architecture
    if family.block_norms:
        first_norm = f"{family.block(0)}.{family.block_norms[0]}"
        embedded = next(node.input[0] for node in graph.graph.node if node.name == first_norm)
    else:
        first_linear = f"{family.block(0)}.{family.column('heads').name}"
        embedded, _ = _input_and_output(graph, first_linear, first_linear in rounded)
    # The tensors in question become outputs of a copy of the graph.
    watched = sorted(
        {embedded, *(x for pair in tensors_by_linear.values() for x in pair)} - {"logits"}
    )
    graph.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in watched
    )
    threads = torch.get_num_threads()
    session = open_session(graph.SerializeToString(), threads, folder=path.parent)
    errors = dict.fromkeys([*plan.linears, EMBEDDINGS], 0.0)
    for prompt in prompts:
        tokens, length = np.array([list(prompt)]), len(prompt)
        feeds = onnx_model.feeds(tokens, np.array([length]), np.arange(length)[None])
        tensors = [*watched, "logits"]
        seen = dict(zip(tensors, session.run(tensors, feeds), strict=True))
        for name, (source, result) in tensors_by_linear.items():
            error = _error(model, name, seen[source], seen[result])
            errors[name] = float(np.maximum(errors[name], error))  # NaN if either is
        expected = model.embed(torch.from_numpy(tokens))
        error = _relative(
            torch.from_numpy(seen[embedded]), expected, ROUNDING * expected.abs().max()
        )
        errors[EMBEDDINGS] = float(np.maximum(errors[EMBEDDINGS], error))
    return errors


def _error(model: GPT, name: str, x: NDArray[np.float32], outputs: NDArray[np.float32]) -> float:
    inputs = torch.from_numpy(x)
    observer: nn.Module | None
    if name == HEAD:
        observer, weight = model.head_input, model.output.table()
        expected = model.head(inputs)
    else:
        linear = model.get_submodule(name)
        assert isinstance(linear, FakeQuantLinear)
        observer, weight = linear.observer, linear.quantized(linear.weight)
        expected = linear(inputs)
    allowed = ROUNDING * expected.abs().max()
    if observer is not None:
        # Every input on an edge between two levels may round the other way: outputs change by at
        # most its scale times the column's largest weight.
        assert isinstance(observer, Observer | RoundGroups)
        if isinstance(observer, Observer):
            scales = torch.full_like(inputs, observer.scale)
        else:
            size = observer.size or inputs.shape[-1]
            scales = activation_scales(split(inputs, size)).repeat_interleave(size, -1)
            scales = scales.flatten(-2)[..., : inputs.shape[-1]]  # without the last group's padding
        levels = inputs / scales
        edges = ((levels - levels.floor() - 0.5).abs() < EDGE).to(inputs.dtype)
        allowed = allowed + ((edges * scales) @ weight.abs().amax(0))[..., None]
    if isinstance(observer, RoundGroups) and observer.size:
        allowed = allowed + kernel_rounding(inputs, weight, observer.size)
    allowed = allowed.broadcast_to(expected.shape)
    if model.config.architecture.is_fused(name):  # the graph has one matrix after the other
        expected, allowed = (
            by_projection(part.movedim(-1, 0), model.config, name).movedim(0, -1)
            for part in (expected, allowed)
        )
    return _relative(torch.from_numpy(outputs), expected, allowed)


def _relative(actual: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """The largest error in units of the allowed one, which is 0 for a linear whose outputs are."""
    difference = (actual - expected).abs()
    return float(torch.where(difference == 0, 0.0, difference / allowed).max())


def _input_and_output(graph: onnx.ModelProto, linear: str, is_rounded: bool) -> tuple[str, str]:
    """Names of a linear's input before rounding, and of its output."""
    made_by = {output: node for node in graph.graph.node for output in node.output}
    result = "logits" if linear == HEAD else linear
    if made_by[result].op_type == GROUPED:
        return made_by[result].input[0], result
    if by_token := made_by.get(f"{linear}.magnitudes"):
        return by_token.input[0], result
    product = made_by.get(f"{linear}.matmul", made_by[result])  # the sum with a bias comes after
    if not is_rounded:
        return product.input[0], result
    rounded = made_by[product.input[0]]
    return made_by[rounded.input[0]].input[0], result
