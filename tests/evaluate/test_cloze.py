"""Cloze scores against a slow implementation with transformers' GPT-2, one example at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.evaluate import TorchScorer
from lathe.evaluate.tasks import CLOZE
from lathe.evaluate.tasks.cloze import ClozeExample, read_cloze, score_cloze
from lathe_base.errors import Code
from tests.support.errors import raises

Logits = Callable[[list[int]], torch.Tensor]


def slow_scores(
    compute_logits: Logits, context: list[int], label: list[int], longest: int
) -> tuple[list[bool], float]:
    tokens = (context + label)[:-1][-longest:]
    predicted = torch.log_softmax(compute_logits(tokens), dim=-1)[-len(label) :]
    hits = [int(row.argmax()) == token for row, token in zip(predicted, label, strict=True)]
    return hits, sum(float(row[token]) for row, token in zip(predicted, label, strict=True))


@pytest.fixture(scope="module")
def examples(reference_logits: Logits, tokenizer: Tokenizer) -> list[ClozeExample]:
    """Ragged examples; a third of the labels are predicted, a third differ in one token."""
    rng = np.random.default_rng(3)
    made = []
    for i in range(48):
        context = rng.integers(1, tokenizer.get_vocab_size(), rng.integers(1, 27)).tolist()
        label: list[int] = []
        for _ in range(int(rng.integers(1, 5))):
            label.append(int(reference_logits(context + label)[-1].argmax()))
        if i % 3:
            wrong = int(rng.integers(len(label)))
            label[wrong] = (label[wrong] + 1) % tokenizer.get_vocab_size()
        made.append(ClozeExample(context, label))
    return made


def test_every_example_equals_the_reference(
    scorer: TorchScorer, examples: list[ClozeExample], reference_logits: Logits
) -> None:
    scores = score_cloze(scorer, examples, max_length=32, token_budget=100)
    assert [s.index for s in scores] == list(range(len(examples)))
    for score, example in zip(scores, examples, strict=True):
        hits, log_likelihood = slow_scores(reference_logits, example.context, example.label, 32)
        assert score.correct == all(hits)
        assert score.last_token_correct == hits[-1]
        assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)
        assert score.label_tokens == len(example.label)
    assert {s.correct for s in scores} == {True, False}
    assert any(s.last_token_correct and not s.correct for s in scores)


def test_batching_changes_nothing(scorer: TorchScorer, examples: list[ClozeExample]) -> None:
    together = score_cloze(scorer, examples, max_length=32, token_budget=10_000)
    for example, batched in zip(examples, together, strict=True):
        (single,) = score_cloze(scorer, [example], max_length=32, token_budget=1)
        assert single.correct == batched.correct
        assert single.log_likelihood == pytest.approx(batched.log_likelihood, abs=1e-5)


def test_long_examples_lose_their_left_end(
    scorer: TorchScorer, examples: list[ClozeExample], reference_logits: Logits
) -> None:
    scores = score_cloze(scorer, examples, max_length=9, token_budget=100)
    for score, example in zip(scores, examples, strict=True):
        hits, log_likelihood = slow_scores(reference_logits, example.context, example.label, 9)
        assert score.truncated == max(0, len(example.context) + len(example.label) - 1 - 9)
        assert score.correct == all(hits)
        assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)
    assert CLOZE.summarize(scores, []).truncated == sum(s.truncated > 0 for s in scores) > 0


def test_a_label_longer_than_the_model_is_refused(scorer: TorchScorer) -> None:
    with raises(Code.TOO_LONG, "example 0", "10 tokens", "limit is 9"):
        score_cloze(scorer, [ClozeExample([1], [2] * 10)], max_length=9, token_budget=100)


def test_summary_is_the_plain_arithmetic(scorer: TorchScorer, examples: list[ClozeExample]) -> None:
    scores = score_cloze(scorer, examples, max_length=32, token_budget=100)
    result = CLOZE.summarize(scores, [])
    correct = np.array([s.correct for s in scores], dtype=float)
    log_likelihoods = np.array([s.log_likelihood for s in scores])
    assert result.examples == 48
    assert result.accuracy == pytest.approx(correct.mean())
    assert result.accuracy_stderr == pytest.approx(correct.std(ddof=1) / 48**0.5)
    assert result.target_perplexity == pytest.approx(np.exp(-log_likelihoods.mean()))
    assert result.target_perplexity_stderr == pytest.approx(
        result.target_perplexity * log_likelihoods.std(ddof=1) / 48**0.5
    )


def test_reading_splits_at_the_last_word(tmp_path: Path, tokenizer: Tokenizer, prose: str) -> None:
    texts = [
        "the light, and every night the light",  # the last occurrence is removed
        'he counted\n\n"the steps  again"\n',
        "he counted the \n\nsteps",
        prose,
    ]
    path = tmp_path / "cloze.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n\n")
    expected = [
        ("the light, and every night the", " light"),
        ('he counted\n\n"the steps', '  again"'),
        ("he counted the", " \n\nsteps"),
        (prose.rsplit(" ", 1)[0], " " + prose.rsplit(" ", 1)[1]),
    ]
    examples = read_cloze(path, tokenizer)
    assert len(examples) == 4
    for example, (context, label) in zip(examples, expected, strict=True):
        assert example.context == tokenizer.encode(context).ids
        assert example.label == tokenizer.encode(label).ids


def test_a_target_is_given_where_no_space_separates_words(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    rows = [
        {"text": "\u4eca\u5929\u5929\u6c14\u5f88\u597d", "target": "\u5f88\u597d", "document": 3},
        {"text": "the light of the moon ", "target": "the moon"},
    ]
    path = tmp_path / "cloze.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    chinese, english = read_cloze(path, byte_tokenizer)
    assert byte_tokenizer.decode(chinese.context) == "\u4eca\u5929\u5929\u6c14"
    assert byte_tokenizer.decode(chinese.label) == "\u5f88\u597d" and chinese.document == 3
    assert byte_tokenizer.decode(english.label) == " the moon"


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ('{"text": "two words", "target": "word"}', Code.INVALID_VALUE, "'two words'"),
        ('{"text": "words", "target": "words"}', Code.INVALID_VALUE, "target 'words'"),
        ('{"text": "two words", "target": 3}', Code.MALFORMED, ""),
        ('{"text": "two words"', Code.MALFORMED, ""),
        ('{"passage": "two words"}', Code.MALFORMED, "text"),
        ('{"text": 7}', Code.MALFORMED, ""),
        ("[1, 2]", Code.MALFORMED, ""),
        ('{"text": " alone "}', Code.INVALID_VALUE, "'alone'"),
    ],
)
def test_broken_lines_are_named(
    tmp_path: Path, tokenizer: Tokenizer, line: str, code: Code, text: str
) -> None:
    path = tmp_path / "cloze.jsonl"
    path.write_text('{"text": "a fine line"}\n' + line + "\n")
    with raises(code, f"{path}:2: ", text):
        read_cloze(path, tokenizer)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with raises(Code.NOT_FOUND, tmp_path / "absent.jsonl"):
        read_cloze(tmp_path / "absent.jsonl", tokenizer)
    (tmp_path / "empty.jsonl").write_text("\n")
    with raises(Code.TOO_LITTLE_DATA, tmp_path / "empty.jsonl"):
        read_cloze(tmp_path / "empty.jsonl", tokenizer)


@pytest.mark.slow
@pytest.mark.shared
def test_lambada_labels_are_the_published_ones_but_for_line_breaks(shared: Path) -> None:
    path, tokenizer = shared / "lambada_test.jsonl", load_tokenizer(shared / "gpt2")
    words = [json.loads(line)["text"].split()[-1] for line in path.read_text().splitlines()]
    published = [tokenizer.encode(f" {word}").ids for word in words]
    lengths = [len(label) for label in published]
    assert [lengths.count(n) for n in range(1, 6)] == [4013, 913, 208, 16, 3]
    examples = read_cloze(path, tokenizer)
    differ = [e.label != label for e, label in zip(examples, published, strict=True)]
    assert sum(differ) == 7
    assert max(len(e.context) + len(e.label) for e in examples) == 224
