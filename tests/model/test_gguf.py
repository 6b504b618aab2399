"""Importing GGUF files, against the models that were written and transformers' import."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from lathe.data.gguf_tokenizer import SPLITS, tokenizer_from_gguf
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gguf import import_gguf
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code, UserError
from lathe_serving.runtime.text import encode_prompts
from tests.support.errors import raises
from tests.support.families import FAMILIES, LLAMA3, PATHS, make
from tests.support.gguf_files import real_gguf, vocabulary, write_gguf
from tests.support.tables import quick_only

TOKENS = torch.randint(280, (2, 40), generator=torch.Generator().manual_seed(3))
HOSTILE = [
    "",
    " ",
    "hello world",
    " It's  they'LL\t don't\r\n\r\n  x \n",
    "1 22 333 4444 1,000,000.5e-7 x2y \u0663\u0664 \u00bd",
    "na\u00efve caf\u00e9 \u6f22\u5b57 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u200b\u00a0",
    "\U0001f917\U0001f469\u200d\U0001f469\u200d\U0001f467 !!?!...///\\\\ #@ \x00\x01\x7f\ufeff",
    "a" * 70 + "B" * 9 + "camelCaseABCdef HTTPServer",
    "<|endoftext|> x<|endoftext|><|im_end|><think>y</think> <|endoftext|",
]
TEXTS = [*HOSTILE, "don't count 123 456 of the other things, they're all here", "the the the 11 12"]


def trained(pre: PreTokenizer) -> Tokenizer:
    """Train a byte-level BPE tokenizer with 296 tokens and this pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    added = ["<|endoftext|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=295,
        special_tokens=added,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(30 * TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained(ByteLevel(add_prefix_space=False))


def imported(path: Path) -> Path:
    import_gguf(Recipe(), path, path.parent / "made")
    return path.parent / "made"


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_positions": 96, "n_embd": 48, "n_layer": 3, "n_head": 4}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, 0.1)
    return model.eval()


def llama3_factors() -> NDArray[np.float32]:
    """Compute `rope_freqs.weight` from wavelengths as llama.cpp's converter does."""
    length = LLAMA3["original_max_position_embeddings"]
    low, high, factor = (LLAMA3[x] for x in ("low_freq_factor", "high_freq_factor", "factor"))
    waves = [2 * np.pi * LLAMA3["rope_theta"] ** (i / 12) for i in range(0, 12, 2)]
    shares = [min(max((length / wave - low) / (high - low), 0), 1) for wave in waves]
    return np.array([1 / ((1 - x) / factor + x) for x in shares], np.float32)


UNWRITTEN = {"window", "yarn", "dynamic", "longrope"}
WRITTEN = [
    *(
        case
        for case in FAMILIES
        if not case.startswith(("gpt-neox", "opt")) and not UNWRITTEN & set(case.split())
    ),
    "gpt2",
]
"""Cases that llama.cpp's converter supports: windows only for Gemma 3, Phi-3 and StarCoder2."""
AS_CONVERTED: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "gemma3": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 8},
}
"""Settings that llama.cpp's converter assumes."""


@pytest.mark.parametrize("case", quick_only(WRITTEN, [x for x in WRITTEN if x in (*PATHS, "gpt2")]))
def test_a_model_in_float32_computes_what_it_did_before_it_became_gguf(
    case: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = gpt2() if case == "gpt2" else make(case, **AS_CONVERTED.get(case, {}))
    metadata: dict[str, Any] = {}
    more = None
    if "linear" in case:
        metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    if "llama3" in case:
        metadata = {"llama.rope.scaling.original_context_length": 24}
        more = {"rope_freqs.weight": llama3_factors()}
    path = write_gguf(tmp_path / "m.gguf", theirs, tokenizer, metadata=metadata, more=more)
    ours = load_checkpoint(imported(path)).model
    with torch.inference_mode():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(ours(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert ours.config.n_params == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    "kind",
    quick_only(
        [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K],
        [Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K],
    ),
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("tied", quick_only((False, True), (True,)))
def test_quantized_tensors_are_those_that_transformers_reads(
    kind: Kind, tied: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = make("llama", tie_word_embeddings=tied, **sizes)
    # transformers requires two keys that are optional.
    path = write_gguf(
        tmp_path / "m.gguf", model, tokenizer, kind=kind,
        metadata={"llama.rope.dimension_count": 64, "llama.vocab_size": 300},
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    ours = AutoModelForCausalLM.from_pretrained(imported(path))
    assert type(theirs) is type(ours)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    changed = not torch.equal(
        found["model.layers.0.mlp.up_proj.weight"],
        model.state_dict()["model.layers.0.mlp.up_proj.weight"],
    )
    assert changed == (kind != Kind.F32)


def splitting(pre: str) -> PreTokenizer:
    """Pre-tokenizer as in `tokenizer.json` of the models that use it."""
    from tokenizers import Regex
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pattern := GGUF_PRE_TOKENIZER_SPLITS.get(pre):
        plain = ByteLevel(add_prefix_space=False, use_regex=False)
        return Sequence([Split(Regex(pattern), "isolated"), plain])
    level = ByteLevel(add_prefix_space=False)
    return Sequence([Digits(individual_digits=True), level]) if SPLITS[pre].digits else level


@pytest.mark.parametrize("pre", SPLITS)
def test_a_byte_level_tokenizer_gives_the_ids_of_the_one_that_was_written(
    pre: str, tmp_path: Path
) -> None:
    original = trained(splitting(pre))
    if SPLITS[pre].nfc:
        original.normalizer = normalizers.NFC()
    path = write_gguf(tmp_path / "m.gguf", make("llama"), original, pre)
    checkpoint = load_checkpoint(imported(path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in [*TEXTS, "cafe\u0301 \u212b", "x  1"]:
        ids = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text).ids, text
        if not SPLITS[pre].digits and "\u0301" not in text:
            # transformers neither splits digits for `smollm`, nor knows which names normalize.
            assert ids == theirs(text, add_special_tokens=False).input_ids, text
        decoded = checkpoint.tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == original.decode(ids, skip_special_tokens=False)
    assert checkpoint.end_ids == (original.token_to_id("<|endoftext|>"),)


def test_qwen_reads_composed_characters_as_qwens_own_tokenizer_does(tokenizer: Tokenizer) -> None:
    made = tokenizer_from_gguf(vocabulary(tokenizer, "qwen2"), "m.gguf")
    merges = [tuple(x.split(" ")) for x in vocabulary(tokenizer, "qwen2")["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=tokenizer.get_vocab(), merges=merges)
    for text in ("cafe\u0301 \u212b 12", "caf\u00e9"):
        assert made.encode(text).ids == theirs(text).input_ids


@pytest.mark.parametrize(("pre", "said", "puts"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False),
    ("gpt-2", True, True), ("tekken", None, True),
])  # fmt: skip
def test_a_prompt_begins_with_what_the_file_says(
    pre: str, said: bool | None, puts: bool, tokenizer: Tokenizer
) -> None:
    metadata = vocabulary(tokenizer, pre) | {"tokenizer.ggml.bos_token_id": 0}
    if said is not None:
        metadata["tokenizer.ggml.add_bos_token"] = said
    made = tokenizer_from_gguf(metadata, "m.gguf")
    plain = made.encode("a b", add_special_tokens=False).ids
    assert encode_prompts(made, ["a b"]) == [[0, *plain] if puts else plain]


def test_a_piece_that_is_a_token_is_taken_whole_where_llama_3_does_so() -> None:
    """Llama 3's vocabulary has tokens that no sequence of merges produces."""
    own = trained(splitting("llama-bpe"))
    metadata = vocabulary(own, "llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["\u0120zyx"]
    metadata["tokenizer.ggml.token_type"] += [1]
    for pre in SPLITS:
        made = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": pre}, "m.gguf")
        assert (made.encode(" zyx", add_special_tokens=False).ids == [296]) == (
            SPLITS[pre].whole_first
        )


PIECES = ["\u2581", *"abcd", "\u2581a", "ab", "bc", "abc", "bcd", "\u2581ab", "cd", "dd", "aa"]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES,
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *256 * [6], *len(PIECES) * [1]],
    "tokenizer.ggml.scores": [
        *259 * [0.0], *5 * [-99.0], -3.0, -1.0, -4.0, -7.0, -2.0, -5.0, -6.0, -8.0, -9.0,
    ],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip
"""A vocabulary whose best merges are not the longest ones."""


def sentencepiece_ids(text: str) -> list[int]:
    """Reference of SentencePiece's BPE, which repeatedly merges the best pair of neighbours."""
    tokens: list[str] = SENTENCEPIECE["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, SENTENCEPIECE["tokenizer.ggml.scores"], strict=True))
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(scores.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(pairwise(parts))]
        best, place = max(joined, default=(-np.inf, 0))
        if best == -np.inf:
            break
        parts[-place : 2 - place] = ["".join(parts[-place : 2 - place])]
    return [
        i
        for part in parts
        for i in ([tokens.index(part)] if part in tokens else [3 + x for x in part.encode()])
    ]


@given(st.text("abcd \u00e9\u6f22", max_size=24))
def test_a_sentencepiece_tokenizer_joins_the_best_neighbours_first(text: str) -> None:
    made = tokenizer_from_gguf(SENTENCEPIECE, "m.gguf")
    assert made.encode(text, add_special_tokens=False).ids == sentencepiece_ids(text)
    assert made.decode(made.encode(text).ids) == text


def test_a_sentencepiece_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make("llama"), Tokenizer(models.BPE()), "",
                      metadata=SENTENCEPIECE)  # fmt: skip
    checkpoint = load_checkpoint(imported(path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    # Leading spaces are kept, as by SentencePiece, but not by transformers.
    for text in ["abcd dd aab", "a  b", *(x.lstrip(" ") for x in HOSTILE[1:]), "</s> ab"]:
        found = encode_prompts(checkpoint.tokenizer, [text])[0]
        if text and "<" not in text:
            assert found == theirs(text).input_ids, text
    assert encode_prompts(checkpoint.tokenizer, ["a</s>"]) == [[1, *sentencepiece_ids("a"), 2]]
    assert checkpoint.end_ids == (2,)
    assert isinstance(theirs, LlamaTokenizer) or theirs.bos_token == "<s>"


def test_chat_template_and_end_ids_come_along(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = {"bos_token_id": 1, "eos_token_id": 1, "eot_token_id": 0}
    path = write_gguf(
        tmp_path / "m.gguf",
        make("qwen2"),
        tokenizer,
        "qwen2",
        metadata={"tokenizer.chat_template": template}
        | {f"tokenizer.ggml.{key}": value for key, value in ids.items()},
    )
    checkpoint = load_checkpoint(imported(path))
    assert checkpoint.model.config.chat_template == (
        '{% set bos_token = "<|im_end|>" %}' + template
    )
    assert checkpoint.end_ids == (0, 1)


def test_a_tied_head_may_be_a_copy_in_another_type_but_no_other_matrix(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = gpt2()
    table = model.transformer.wte.weight.detach().numpy()
    near = table + np.float32(1e-3)
    path = write_gguf(tmp_path / "m.gguf", model, tokenizer, more={"output.weight": near})
    assert torch.equal(
        load_checkpoint(imported(path)).model.wte.weight, model.transformer.wte.weight
    )
    write_gguf(path, model, tokenizer, more={"output.weight": table[::-1].copy()})
    with raises(Code.UNSUPPORTED, "output.weight", "GPT-2"):
        imported(path)


def without(name: str) -> Callable[[str, Any], Any]:
    return lambda other, array: None if other == name else array


def poisoned(name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    return array * np.float32("nan") if name == "output_norm.weight" else array


def shortened(name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    return array[:90] if name == "token_embd.weight" else array


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"metadata": {"llama.expert_count": 8}}, Code.UNSUPPORTED, "num_experts is 8"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, Code.UNSUPPORTED, "'yarn'"),
        ({"metadata": {"llama.attention.sliding_window": 9}}, Code.UNSUPPORTED, "sliding_window"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, Code.UNSUPPORTED, "count is 4"),
        ({"metadata": {"llama.block_count": 9}}, Code.INCOMPLETE, "tensor blk.3.attn_q"),
        ({"metadata": {"llama.block_count": 2}}, Code.UNSUPPORTED, "blk.2."),
        ({"metadata": {"llama.block_count": "x"}}, Code.MALFORMED, "num_hidden_layers"),
        ({"metadata": {"llama.feed_forward_length": 96}}, Code.MISMATCH, "config.json"),
        ({"metadata": {"split.count": 3}}, Code.INCOMPLETE, "one of 3 files"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, Code.UNSUPPORTED, "model is 'bert'"),
        ({"metadata": {"tokenizer.ggml.pre": "falcon"}}, Code.UNSUPPORTED, "pre is 'falcon'"),
        ({"metadata": {"tokenizer.ggml.pre": "default"}}, Code.UNSUPPORTED, "pre is 'default'"),
        ({"metadata": {"tokenizer.ggml.token_type": [1]}}, Code.MALFORMED, "token types"),
        ({"metadata": {"tokenizer.ggml.merges": ["a qqqq"]}}, Code.MALFORMED, "qqqq"),
        ({"metadata": {"tokenizer.ggml.merges": ["a"]}}, Code.MALFORMED, "two tokens"),
        ({"metadata": {"tokenizer.ggml.bos_token_id": 1000}}, Code.MALFORMED, "bos_token_id 1000"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 1000}}, Code.MALFORMED, "id 1000"),
        ({"metadata": {"tokenizer.chat_template": "{% if %}"}}, Code.MALFORMED, "chat template"),
        ({"metadata": {"tokenizer.chat_template": "{{ x|none }}"}}, Code.MALFORMED, "'none'"),
        ({"metadata": {"tokenizer.chat_template": "{{ 1 / 0 }}"}}, Code.MALFORMED, "by zero"),
        ({"change": without("blk.1.ffn_norm.weight")}, Code.INCOMPLETE, "blk.1.ffn_norm.weight"),
        ({"change": without("token_embd.weight")}, Code.MALFORMED, "vocab_size"),
        ({"change": shortened}, Code.WRONG_TOKENIZER, "has 296 ids"),
        ({"change": poisoned}, Code.NOT_FINITE, "m.gguf"),
        ({"more": {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), "f4")}}, Code.UNSUPPORTED, "gate"),
        ({"more": {"rope_freqs.weight": np.full(6, 3, "f4")}}, Code.UNSUPPORTED, "rope_freqs"),
    ],
)  # fmt: skip
def test_settings_computed_differently_are_rejected_by_name(
    changes: dict[str, Any], code: Code, text: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make("llama"), tokenizer, **changes)
    with raises(code, path, text):
        imported(path)
    assert not (tmp_path / "made").exists()


def test_an_unknown_architecture_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", make("llama"), tokenizer)
    path.write_bytes(path.read_bytes().replace(b"llama", b"bloom", 1))
    with raises(Code.UNSUPPORTED, "'bloom'", "gpt2, llama"):
        imported(path)


def test_a_broken_file_is_one_clear_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", make("llama", num_hidden_layers=1), tokenizer)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    cuts = [0, 1, 4, 8, 20, *rng.integers(24, len(data), 5), len(data) - 1]
    broken = [data[:cut] for cut in cuts] + [b"PK\x03\x04" + data[4:], b"GGUF\x63" + data[5:]]
    with raises(Code.NOT_FOUND, tmp_path / "absent.gguf"):
        imported(tmp_path / "absent.gguf")
    for content in broken:
        path.write_bytes(content)
        with raises(Code.MALFORMED, path):
            imported(path)
    for _ in range(20):  # a flipped byte may go unnoticed, or cause a proper error
        flipped = bytearray(data)
        flipped[rng.integers(len(data) // 8)] = rng.integers(256)
        path.write_bytes(flipped)
        try:
            imported(path)
        except UserError as error:
            assert str(path) in error.what


QUERY, KEY = "blk.0.attn_q.weight", "blk.0.attn_k.weight"


def set_offsets(path: Path, offsets: dict[str, int]) -> None:
    reader = GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name in offsets:
            tensor.field.parts[-1][0] = offsets[tensor.name]
    reader.data.flush()


@pytest.mark.parametrize("wrong", ["overlap", "unaligned", "out of order", "outside", "beyond 64"])
def test_tensors_at_wrong_offsets_are_refused_by_name(
    wrong: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = make("llama", num_key_value_heads=4, num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", model, tokenizer)
    reader = GGUFReader(path)
    places = {t.name: t.data_offset - reader.data_offset for t in reader.tensors}
    first, second = sorted((QUERY, KEY), key=places.__getitem__)
    offsets = {
        "overlap": {second: places[first]},
        "unaligned": {second: places[second] - 4},
        "out of order": {first: places[second], second: places[first]},
        "outside": {second: path.stat().st_size},
        "beyond 64": {second: 2**64 - 32},
    }[wrong]
    set_offsets(path, offsets)
    named = min(offsets, key=places.__getitem__)
    with raises(Code.MALFORMED, f"tensor {named} has offset {offsets[named]}"):
        imported(path)
    assert not (tmp_path / "made").exists()


def test_alignment_of_the_file_decides_where_tensors_begin(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = make("llama", num_hidden_layers=1)
    path = write_gguf(
        tmp_path / "m.gguf", model, tokenizer, metadata={"general.alignment": 128}
    )  # the writer, which was not told of it, pads to 32
    with raises(Code.MALFORMED, "tensor ", " has offset "):
        imported(path)


@pytest.mark.slow
def test_a_real_model_is_what_transformers_reads(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct with linears in Q4_1 and the embedding in Q8_0.

    transformers does not split digits, unlike the model's `tokenizer.json`.
    """
    path = real_gguf(tmp_path)
    (tmp_path / "m.gguf").symlink_to(path)
    checkpoint = load_checkpoint(imported(tmp_path / "m.gguf"))
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    theirs, tokenizer = (
        AutoModelForCausalLM.from_pretrained(**place),
        AutoTokenizer.from_pretrained(**place),
    )
    tokenizer.backend_tokenizer.pre_tokenizer = splitting("smollm")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert all(torch.equal(x, ours.state_dict()[name]) for name, x in theirs.state_dict().items())
    for text in HOSTILE:
        ids = checkpoint.tokenizer.encode(text).ids
        assert ids == tokenizer(text).input_ids, text
        assert checkpoint.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert checkpoint.end_ids == (0, 2)
    template = checkpoint.model.config.chat_template
    assert template is not None and "named SmolLM" in template
