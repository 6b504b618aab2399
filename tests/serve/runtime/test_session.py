import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lathe_base.errors import Code
from lathe_serving.runtime.exported_model import ExportedModel, pad
from lathe_serving.runtime.openvino_model import OpenVINOModel
from lathe_serving.runtime.session import PLAIN_ATTENTION, OnnxModel, saturates
from tests.support.errors import raises
from tests.support.small_export import PRUNED, make_model, random_tokens, write_unproven

LENGTHS = (3, 11, 1, 7)
PROMPTS = [random_tokens(n, seed=n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=["fp32", "int8", "fp32 in OpenVINO"])
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Tokenizer,
) -> ExportedModel:
    folder = tmp_path_factory.mktemp("exported")
    model = write_unproven(make_model(PRUNED, request.param == "int8"), byte_tokenizer, folder)
    return OpenVINOModel(folder, threads=1) if "OpenVINO" in request.param else model


def test_ragged_batch_gives_each_row_what_it_gets_alone(exported: ExportedModel) -> None:
    tokens, lengths = pad(PROMPTS)
    together = exported.logits(tokens, lengths)
    for row, prompt in enumerate(PROMPTS):
        alone = exported.logits(np.array([prompt]))[0]
        np.testing.assert_allclose(together[row, : len(prompt)], alone, atol=1e-5)


def test_steps_with_the_cache_are_the_forward_pass_without(exported: ExportedModel) -> None:
    tokens, lengths = pad(PROMPTS)
    cache = exported.start(len(PROMPTS), capacity=20)
    logits = exported.step(cache, tokens, lengths)
    rows = [list(prompt) for prompt in PROMPTS]
    for step in range(6):
        for row, ids in enumerate(rows):
            alone = exported.logits(np.array([ids]))[0, -1]
            np.testing.assert_allclose(logits[row], alone, atol=1e-5)
        more = random_tokens(len(rows), 1, seed=step)
        logits = exported.step(cache, more.numpy())
        for ids, token in zip(rows, more[:, 0].tolist(), strict=True):
            ids.append(token)
    assert cache.lengths.tolist() == [n + 6 for n in LENGTHS]


def test_a_single_row_takes_its_prompt_in_pieces(exported: ExportedModel) -> None:
    tokens = random_tokens(1, 12).numpy()
    cache = exported.start(1)
    exported.step(cache, tokens[:, :5])
    logits = exported.step(cache, tokens[:, 5:])
    np.testing.assert_allclose(logits, exported.logits(tokens)[:, -1], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_a_mixed_step_is_a_chunk_and_a_token_of_each_row(
    exported: ExportedModel, chunk: int
) -> None:
    prompt, n_rows = random_tokens(1, 12, seed=5).numpy(), len(PROMPTS)
    tokens, lengths = pad(PROMPTS)
    cache = exported.start(n_rows + 1, capacity=24)
    rows, last = exported.rows(cache, 0, n_rows), exported.rows(cache, n_rows, n_rows + 1)
    exported.step(rows, tokens, lengths)
    texts, pair = [list(text) for text in PROMPTS], exported.pair(rows, last)
    for first in range(0, 12, chunk):
        more = random_tokens(n_rows, 1, seed=first)[:, 0].numpy()
        texts = [[*text, token] for text, token in zip(texts, more.tolist(), strict=True)]
        part, is_last = prompt[0, first : first + chunk], first + chunk == 12
        logits, read = exported.mix(pair, more, part, is_last)
        for text, row in zip(texts, logits, strict=True):
            np.testing.assert_allclose(row, exported.logits(np.array([text]))[0, -1], atol=1e-5)
    np.testing.assert_allclose(read, exported.logits(prompt)[:, -1], atol=1e-5)
    steps = 12 // chunk
    assert cache.lengths.tolist() == [*(n + steps for n in LENGTHS), 12]
    with pytest.raises(ValueError, match="exceeds the cache's 24 tokens"):
        exported.mix(pair, more, np.tile(prompt[0], 2), True)
    assert cache.lengths.tolist() == [*(n + steps for n in LENGTHS), 12]


def test_a_step_that_fits_nowhere_changes_nothing(exported: ExportedModel) -> None:
    cache = exported.start(2, capacity=8)
    exported.step(cache, random_tokens(2, 6).numpy(), np.array([2, 6]))
    with pytest.raises(ValueError, match="empty cache"):
        exported.step(cache, random_tokens(2, 2).numpy())
    for _ in range(2):
        exported.step(cache, random_tokens(2, 1).numpy())
    with pytest.raises(ValueError, match="9 tokens exceed the cache's 8"):
        exported.step(cache, random_tokens(2, 1).numpy())
    assert cache.lengths.tolist() == [4, 8]
    with pytest.raises(ValueError, match="lengths"):
        exported.step(exported.start(2), random_tokens(2, 3).numpy(), np.array([0, 3]))
    with pytest.raises(ValueError, match="capacity"):
        exported.start(1, capacity=65)


def test_greedy_is_the_argmax_of_every_step(exported: ExportedModel) -> None:
    new = exported.greedy(PROMPTS, 5, stop_at_eos=False)
    for prompt, tokens in zip(PROMPTS, new, strict=True):
        logits = exported.logits(np.array([prompt + tokens]))[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist()
        assert exported.greedy([prompt], 5, stop_at_eos=False) == [tokens]


def test_greedy_ends_at_the_end_of_text(exported: ExportedModel) -> None:
    new = exported.greedy(PROMPTS, 5, stop_at_eos=False)
    exported.eos_id, eos_id = new[0][2], exported.eos_id
    try:
        stopped = exported.greedy(PROMPTS, 5)
    finally:
        end, exported.eos_id = exported.eos_id, eos_id
    assert stopped == [ids[: ids.index(end)] if end in ids else ids for ids in new]


def test_greedy_ends_where_positions_do(exported: ExportedModel) -> None:
    long, short = random_tokens(62).tolist(), PROMPTS[0]
    new = exported.greedy([long, short], 10, stop_at_eos=False)
    # The last token needs no position, since nothing follows it.
    assert [len(tokens) for tokens in new] == [3, 10]
    assert new == [exported.greedy([p], 10, stop_at_eos=False)[0] for p in (long, short)]


def test_damaged_folders(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    with raises(Code.WRONG_KIND, tmp_path, "export.json"):
        OnnxModel(tmp_path)
    write_unproven(make_model(PRUNED), byte_tokenizer, tmp_path)
    file = tmp_path / "model.onnx"
    file.write_bytes(file.read_bytes()[:-1000])
    with raises(Code.CORRUPT, file):
        OnnxModel(tmp_path)
    (tmp_path / "export.json").write_text("{")
    with raises(Code.MALFORMED, tmp_path / "export.json"):
        OnnxModel(tmp_path)


def test_old_cpus_get_the_exact_kernels() -> None:
    assert saturates("processor : 0\nflags\t\t: fpu sse2 avx2 fma\n")
    assert not saturates("processor : 0\nflags\t\t: fpu avx512f avx512_vnni\n")
    assert not saturates("processor : 0\nflags\t\t: fpu avx2 avx_vnni\n")
    assert not saturates("processor : 0\nFeatures : fp asimd\n")  # not x86


def test_a_session_uses_the_plain_attention_by_default(
    exported: ExportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAIN_ATTENTION, "0")
    OnnxModel(exported.folder)
    assert os.environ[PLAIN_ATTENTION] == "0"
    monkeypatch.delenv(PLAIN_ATTENTION)
    code = f"import os, lathe_serving.runtime.session; assert {PLAIN_ATTENTION!r} not in os.environ"
    subprocess.run([sys.executable, "-c", code], check=True)
    OnnxModel(exported.folder)
    assert os.environ[PLAIN_ATTENTION] == "1"


def test_the_servers_environment_can_import_it() -> None:
    heavy = "{'torch', 'onnx', 'pydantic'}"
    code = f"import sys, lathe_serving.runtime.session; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
