"""Measures a checkpoint with Paddle on the evaluation tasks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle

from lathe.backends.paddle_support import require_supported
from lathe.data.tokenizer import eos_id
from lathe.evaluate.measure_model import EvalResult, EvaluatedModel, TaskOption, measure
from lathe.evaluate.scoring import Scores, Targets
from lathe_base.config.settings import GenerationSettings, Recipe
from lathe_base.parameters import Params
from lathe_paddle import fake_quant
from lathe_paddle.checkpoint import load_checkpoint
from lathe_paddle.gpt import GPT
from lathe_paddle.workers import choose_device
from lathe_serving.runtime.sampling import next_token

LOGIT_ROWS = 1024  # positions whose (rows, V) logits are held at a time


def evaluate(
    recipe: Recipe,
    model: Path,
    output: Path,
    data: Path | None = None,
    cloze: Path | None = None,
    text: Path | None = None,
    tasks: Sequence[TaskOption] = (),
) -> EvalResult:
    """See `lathe.evaluate.evaluate.evaluate`; a quantized checkpoint is computed with PaddleSlim's
    fake quantization."""
    require_supported("evaluate", recipe)
    device = choose_device(recipe)
    paddle.set_device(device)
    checkpoint = load_checkpoint(model)
    net, plan = checkpoint.model, checkpoint.model.config.quantization
    if plan is not None:
        fake_quant.insert(net, plan)
        net.eval()
    subject = EvaluatedModel(
        folder=checkpoint.source.path,
        scorer=PaddleScorer(net),
        config=net.config,
        tokenizer=checkpoint.tokenizer,
        stage=checkpoint.source.meta.get("stage"),
        n_bytes=checkpoint.source.n_bytes,
        digest=checkpoint.digest,
        on_cpu=device == "cpu",
        generate=lambda prompts, how: generate(
            net, prompts, how, eos_id(checkpoint.tokenizer), recipe.Global.seed
        ),
        engine="paddle",
    )
    return measure(recipe, subject, output, data, cloze, text, tasks)


@paddle.no_grad()
def generate(
    net: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    eos: int,
    seed: int,
) -> list[list[int]]:
    """One continuation per prompt, with a full forward pass for each token; greedy search replaces
    beam search."""
    params = Params(
        min_tokens=settings.min_dec_len,
        decode_strategy="sampling" if settings.decode_strategy == "sampling" else "greedy_search",
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
    )
    rng, texts = np.random.default_rng(seed), []
    for prompt in prompts:
        ids, seen = list(prompt), np.zeros(net.config.vocab_size, bool)
        seen[ids] = True
        for n in range(settings.max_dec_len):
            hidden = net.hidden(paddle.to_tensor([ids]))  # (1, T, C)
            token = next_token(net.head(hidden[0, -1:]).numpy()[0], seen, n, params, [eos], rng)
            if token == eos:
                break
            ids.append(token)
            seen[token] = True
        texts.append(ids[len(prompt) :])
    return texts


class PaddleScorer:
    """See `lathe.evaluate.scoring.Scorer`."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    @paddle.no_grad()
    def score(self, targets: Targets) -> Scores:
        hidden = self.model.hidden(paddle.to_tensor(targets.tokens))  # (B, T, C)
        where = paddle.to_tensor(np.stack([targets.rows, targets.columns], axis=1))
        chosen = paddle.gather_nd(hidden, where)  # (n, C)
        likelihoods, greedy = [], []
        for i in range(0, len(targets.ids), LOGIT_ROWS):
            logits = self.model.head(chosen[i : i + LOGIT_ROWS])  # (n, V)
            wanted = paddle.to_tensor(targets.ids[i : i + LOGIT_ROWS])
            scores = paddle.take_along_axis(logits, wanted.unsqueeze(1), 1).squeeze(1)
            scores = scores.astype("float64") - paddle.logsumexp(logits, 1).astype("float64")
            likelihoods.append(scores.numpy())
            greedy.append((logits.argmax(1) == wanted).numpy())
        return np.concatenate(likelihoods), np.concatenate(greedy)
