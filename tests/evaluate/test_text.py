"""Perplexity against a slow implementation with Megatron-LM's windows on transformers' GPT-2."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.evaluate import TorchScorer, evaluate
from lathe.evaluate.tasks import TEXT
from lathe.evaluate.tasks.cloze import read_cloze
from lathe.evaluate.tasks.text import (
    TokenizedText,
    detokenize,
    read_text,
    rolling_windows,
    split_blocks,
    token_losses,
    windows,
)
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe_base.config.settings import OfflineEvalSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises

Logits = Callable[[list[int]], torch.Tensor]


def slow_nll(compute_logits: Logits, tokens: list[int], seq_len: int, overlap: int) -> float:
    """Sum of the windows' losses, masked as in PaddleFleetX's LM_Eval_Dataset."""
    total, start = 0.0, 0
    while start == 0 or start + seq_len - overlap < len(tokens) - 1:
        window = tokens[start : start + seq_len + 1]
        mask = [1.0] * (len(window) - 1)
        if start:
            keep_from = seq_len - overlap
            mask = [float(i >= keep_from) for i in range(len(mask))]
        scores = torch.log_softmax(compute_logits(window[:-1]), dim=-1)
        total -= sum(m * float(scores[i, window[i + 1]]) for i, m in enumerate(mask))
        start += overlap
    return total


@pytest.mark.parametrize("overlap", [3, 16, 24])
@pytest.mark.parametrize("length", [3, 24, 25, 26, 100, 121])
def test_losses_equal_the_reference(
    scorer: TorchScorer, reference_logits: Logits, overlap: int, length: int
) -> None:
    tokens = np.random.default_rng(length).integers(0, 290, length).tolist()
    losses = token_losses(scorer, windows(tokens, 24, overlap), 24, token_budget=24 * 5)
    assert losses.shape == (length - 1,)
    expected = slow_nll(reference_logits, tokens, 24, overlap)
    assert losses.sum() == pytest.approx(expected, rel=1e-5)


def rolling_nll(compute_logits: Logits, tokens: list[int], prefix: int, length: int) -> list[float]:
    """Losses by lm-evaluation-harness 0.4's rule: `get_rolling_token_windows`, then
    `make_disjoint_window`."""
    first = min(length, len(tokens))
    pairs = [([prefix, *tokens[: first - 1]], tokens[:first])]
    predicted = first
    while predicted < len(tokens):
        count = min(len(tokens) - predicted, length)
        end = predicted + count
        pairs.append((tokens[end - length - 1 : end - 1], tokens[end - count : end]))
        predicted += count
    found = []
    for inputs, continuation in pairs:
        context = inputs[: len(inputs) - (len(continuation) - 1)]
        scores = torch.log_softmax(compute_logits((context + continuation)[:-1]), dim=-1)
        scored = scores[len(scores) - len(continuation) :]
        found += [-float(row[token]) for row, token in zip(scored, continuation, strict=True)]
    return found


@pytest.mark.parametrize("length", [1, 23, 24, 25, 48, 100])
def test_rolling_windows_are_those_of_lm_eval(
    scorer: TorchScorer, reference_logits: Logits, length: int
) -> None:
    tokens = np.random.default_rng(length).integers(0, 290, length).tolist()
    losses = token_losses(scorer, rolling_windows(tokens, 7, 24), 24, token_budget=100)
    assert losses.shape == (length,)
    expected = rolling_nll(reference_logits, tokens, 7, 24)
    np.testing.assert_allclose(losses, expected, atol=1e-4)


@pytest.mark.parametrize("puts_first", [False, True])
def test_the_stage_scores_the_first_token_as_lm_eval_does(
    model_folder: Path, reference_logits: Logits, prose: str, tmp_path: Path, puts_first: bool
) -> None:
    """The first token follows the tokenizer's prefix, or else the end-of-text token."""
    model, tokenizer = tmp_path / "model", load_tokenizer(model_folder)
    prose = prose.replace("@", "")  # otherwise it would be detokenized
    end, tokens = tokenizer.token_to_id("<|endoftext|>"), tokenizer.encode(prose).ids
    if puts_first:
        tokenizer.post_processor = TemplateProcessing(
            single="b $A", special_tokens=[("b", tokenizer.token_to_id("b"))]
        )
    checkpoint = load_checkpoint(model_folder)
    save_checkpoint(model, checkpoint.model, tokenizer, "pretrain", Recipe())
    (tmp_path / "text").write_text(prose)
    recipe = Recipe(Offline_Eval=OfflineEvalSettings(windows="lm_eval"))
    result = evaluate(recipe, model, tmp_path / "out", text=tmp_path / "text")
    prefix = tokenizer.token_to_id("b") if puts_first else end
    losses = rolling_nll(reference_logits, tokens, prefix, 32)
    assert result.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    words = len(prose.split(" "))
    assert result.adjusted_perplexity == pytest.approx(math.exp(sum(losses) / words), rel=1e-5)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["protocol"]["windows"] == "lm_eval"


def test_no_overlap_is_plain_chunks(scorer: TorchScorer, reference_logits: Logits) -> None:
    tokens = np.random.default_rng(0).integers(0, 290, 73).tolist()
    losses = token_losses(scorer, windows(tokens, 24, 24), 24, token_budget=48)
    expected = []
    for start in range(0, 72, 24):
        scores = torch.log_softmax(reference_logits(tokens[start : start + 24]), dim=-1)
        expected += [-float(scores[i, tokens[start + i + 1]]) for i in range(24)]
    np.testing.assert_allclose(losses, expected, atol=1e-4)


def test_summary_is_the_formula_of_the_reference() -> None:
    losses = np.linspace(1.0, 5.0, 400)
    text = TokenizedText(tokens=[0] * 401, words=301, detokenized=False)
    result = TEXT.summarize(split_blocks(losses, 20), text)
    assert result.perplexity == pytest.approx(math.exp(losses.sum() / 400))
    assert result.adjusted_perplexity == pytest.approx(math.exp(3.0 * 400 / 300))
    assert result.character_perplexity is None
    assert result.blocks == 20
    means = losses.reshape(20, 20).mean(1)
    assert result.loss_stderr == pytest.approx(means.std(ddof=1) / math.sqrt(20))
    assert result.perplexity_stderr == pytest.approx(result.perplexity * result.loss_stderr)


@pytest.mark.parametrize(
    "content",
    [
        "我们坐在河边看着船慢慢走远。" * 9,
        "word\nother\n" * 9,
        "吾輩は猫である。名前はまだ無い。 " * 9,
    ],
)
def test_text_without_spaces_is_adjusted_for_its_characters(
    tmp_path: Path, tokenizer: Tokenizer, content: str
) -> None:
    path = tmp_path / "text"
    path.write_text(content)
    text = read_text(path, tokenizer)
    losses = np.full(len(text.tokens) - 1, 0.5)
    result = TEXT.summarize(split_blocks(losses, 20), text)
    assert result.perplexity == pytest.approx(math.exp(0.5))
    assert result.adjusted_perplexity is None and result.adjusted_perplexity_stderr is None
    characters = len(content.strip()) - 1
    assert result.character_perplexity == pytest.approx(math.exp(losses.sum() / characters))
    assert result.character_perplexity_stderr == pytest.approx(0)


def test_perplexity_is_capped_as_the_reference_caps_it(caplog: pytest.LogCaptureFixture) -> None:
    text = TokenizedText(tokens=[0] * 101, words=11, detokenized=False)
    result = TEXT.summarize(split_blocks(np.linspace(29.0, 31.0, 100), 10), text)
    assert result.perplexity == result.adjusted_perplexity == math.exp(20)
    assert math.isnan(result.perplexity_stderr) and math.isnan(result.adjusted_perplexity_stderr)
    assert "perplexity: e^30, recorded as the cap e^20 = 4.852e+08" in caplog.text
    assert "adjusted perplexity: e^300, recorded as the cap" in caplog.text


def test_a_perplexity_below_the_cap_has_its_error(caplog: pytest.LogCaptureFixture) -> None:
    text = TokenizedText(tokens=[0] * 101, words=101, detokenized=False)
    result = TEXT.summarize(split_blocks(np.linspace(18.0, 21.9, 100), 10), text)
    assert result.perplexity < math.exp(20) and result.perplexity_stderr > 0
    assert "cap" not in caplog.text


@pytest.mark.parametrize("template", ["$A </s>", "<s> $A </s>"])
def test_an_end_token_that_the_tokenizer_appends_is_not_scored(
    tokenizer: Tokenizer, tmp_path: Path, template: str
) -> None:
    (tmp_path / "text").write_text("the keeper of the light climbed the stair")
    (tmp_path / "cloze.jsonl").write_text('{"text": "the keeper of the light"}\n')
    plain = tokenizer.encode("the keeper of the light climbed the stair").ids
    label = tokenizer.encode(" light").ids
    marked = Tokenizer.from_str(tokenizer.to_str())
    marked.add_special_tokens(["<s>", "</s>"])
    ends = [(name, marked.token_to_id(name)) for name in ("<s>", "</s>")]
    marked.post_processor = TemplateProcessing(
        single=template, special_tokens=[pair for pair in ends if pair[0] in template]
    )
    assert marked.encode("the").ids[-1] == ends[1][1]
    text = read_text(tmp_path / "text", marked)
    assert text.without_prefix == plain
    (example,) = read_cloze(tmp_path / "cloze.jsonl", marked)
    assert example.label == label


@pytest.mark.parametrize(("n", "size", "expected"), [(400, 20, 20), (95, 20, 10), (3, 20, 3)])
def test_blocks_cover_every_target_once(n: int, size: int, expected: int) -> None:
    losses = np.arange(n, dtype=float)
    blocks = split_blocks(losses, size)
    assert len(blocks) == expected
    for block in blocks:
        assert block.loss == losses[block.start : block.start + block.tokens].sum()
    ends = [block.start + block.tokens for block in blocks]
    assert [block.start for block in blocks] == [0, *ends[:-1]]
    assert ends[-1] == n


def test_detokenizer_undoes_wikitexts_marks() -> None:
    tokenized = (
        ' = Lobster = \n \n It grew to 1 @,@ 200 cm ( 24 in ) , a " bony @-@ crab " 4 @.@ 5 .\n'
    )
    assert detokenize(tokenized) == (
        '= Lobster =\n\nIt grew to 1,200 cm (24 in), a "bony-crab" 4.5 .\n'.replace(
            "= L", " = L", 1
        )
    )


def test_only_the_tokenized_form_is_detokenized(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "held out"
    path.write_text("He said : it is , I think , fine .")
    assert not read_text(path, tokenizer).detokenized
    path.write_text("It is 1 @,@ 200 miles , I think")
    text = read_text(path, tokenizer)
    assert text.detokenized
    assert text.words == 9
    assert text.tokens == tokenizer.encode("It is 1,200 miles, I think").ids


@pytest.mark.parametrize("content", ["", "word"])
def test_a_text_too_short_is_refused(tmp_path: Path, tokenizer: Tokenizer, content: str) -> None:
    path = tmp_path / "text"
    path.write_text(content)
    with raises(Code.TOO_LITTLE_DATA, path):
        read_text(path, tokenizer)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with raises(Code.NOT_FOUND, tmp_path / "absent"):
        read_text(tmp_path / "absent", tokenizer)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    with raises(Code.WRONG_KIND, tmp_path / "binary"):
        read_text(tmp_path / "binary", tokenizer)


def test_a_prefix_is_scored_the_same_whatever_follows(
    scorer: TorchScorer, tokenizer: Tokenizer, prose: str
) -> None:
    tokens = tokenizer.encode(prose).ids
    longer = token_losses(scorer, windows(tokens, 24, 8), 24, 240)
    shorter = token_losses(scorer, windows(tokens[:60], 24, 8), 24, 240)
    np.testing.assert_allclose(longer[:59], shorter, atol=1e-5)


@pytest.mark.slow
@pytest.mark.shared
def test_wikitext_103_counts_are_the_published_ones(shared: Path) -> None:
    text = read_text(shared / "wikitext/wiki103.valid.tokens", load_tokenizer(shared / "gpt2"))
    assert text.words == 217_642
    assert len(text.tokens) == 236_892
    assert (len(text.tokens) - 1) / (text.words - 1) == 1.0884484081583892
