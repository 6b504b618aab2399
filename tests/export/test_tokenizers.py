"""Tokenizers in every format: each engine gives prose, code and chats the checkpoint's ids, or the
export is refused by the name of what the format cannot hold."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split

from lathe.data.gguf_metadata import gguf_metadata
from lathe.data.gguf_tokenizer import GPT4O, LLAMA3, QWEN2, TEKKEN, tokenizer_from_gguf
from lathe.data.tokenizer import save_tokenizer
from lathe.export.engines import Engine, LlamaCpp, OpenVINOGenAI, Transformers
from lathe.export.export import write as write_graph
from lathe.export.formats import write_formats
from lathe.export.prove import require_tokens
from lathe.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lathe_base.config.settings import ExportSettings, Recipe
from lathe_base.errors import Code, StageError, UserError
from tests.support.errors import raises
from tests.support.families import make, save

END = "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CORPUS = [
    "the strokes of the tool, and the other things; they're all here, don't count 123 456",
    "def f(x):\n    return {'a': [1, 2]}\n\n\nclass A(B):\n\tpass\n        if x != y:\r\n",
    "We'll see I'M we'Ve 1,000,000 22 333 4444 if x2y == 3 and (a or b)",
    "caf\u00e9 na\u00efve \u6f22\u5b57 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f917 !!",
]
CODE = ["f(x);\n\treturn(y);\n\n", "if(x){\n\tg(y);\n}\n"]
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
Made = Callable[[], Tokenizer]


def byte_level(*first: Any, use_regex: bool = True, whole: bool = False, **more: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=whole))
    last = ByteLevel(add_prefix_space=more.pop("add_prefix_space", False), use_regex=use_regex)
    made.pre_tokenizer = Sequence([*first, last]) if first else last
    made.decoder = decoders.ByteLevel()
    if "normalizer" in more:
        made.normalizer = more.pop("normalizer")
    corpus = more.pop("corpus", CORPUS)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(20 * corpus, trainer)
    return chatting(made)


def pattern(regex: str, **more: Any) -> Tokenizer:
    split = Split(Regex(regex), more.pop("behavior", "isolated"), invert=more.pop("invert", False))
    return byte_level(split, use_regex=False, **more)


def sentencepiece(
    normalizer: Any = None, pre_tokenizer: Any = None, without: tuple[str, str] | None = None
) -> Tokenizer:
    """BPE with byte fallback, whose merges are all that its tokens allow, as Llama 2's."""
    pieces = ["\u2581", *"abcdefghilnorstuwyx()=:,.1", "th", "he", "the", "\u2581the", "\u2581a"]
    pieces += ["in", "ing", "er", "re", "on", "\u2581t", "\u2581s", "st", "or", "\u2581th", "of"]
    if not isinstance(pre_tokenizer, Metaspace) or not pre_tokenizer.split:
        pieces += ["\u2581\u2581", "\u2581\u2581\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:i], token[i:])
        for token in pieces
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids and (token[:i], token[i:]) != without
    ]
    made = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken(x, normalized=False) for x in tokens[:3]])
    return chatting(made)


def unigram(
    normalizer: Any, pre_tokenizer: Any = None, byte_fallback: bool = False, score: float = -4.5
) -> Tokenizer:
    """SentencePiece's Unigram; `score` is that of a piece of two characters."""
    letters = "\u2581abcdefghijklmnopqrstuvwxyzTIWABN0123456789()=:,.'\n\t"
    pieces = {letter: -5 - i / 8 for i, letter in enumerate(letters)}
    pieces |= {"th": score, "\u2581t": -4.25, "he": -4.75, "\u2581\u2581": -4.0}
    if pre_tokenizer is None or not pre_tokenizer.split:
        pieces |= {"the": -6.0, "\u2581the": -6.25, "ing": -7.0, "e\u2581t": -6.5}
    special = ["<unk>", "<s>", "</s>"]
    extra = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    scores = [*((x, 0.0) for x in (*special, *extra)), *pieces.items()]
    made = Tokenizer(models.Unigram(scores, 0, byte_fallback))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    made.add_special_tokens([AddedToken(x, normalized=False) for x in special])
    return chatting(made)


def chatting(made: Tokenizer, **flags: bool) -> Tokenizer:
    made.add_special_tokens([AddedToken(x, normalized=False, **flags) for x in ROLES])
    return made


def replaced() -> normalizers.Normalizer:
    return normalizers.Replace(" ", "\u2581")


def prepended() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("\u2581"), replaced()])


def adding(made: Tokenizer, token: str, **flags: bool) -> Tokenizer:
    made.add_tokens([AddedToken(token, **flags)])
    return made


def as_phi3(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken("</s>", normalized=False, rstrip=True)])
    made.add_special_tokens([AddedToken(END, normalized=False)])
    return chatting(made, rstrip=True)


def word(made: Made, **flags: bool) -> Made:
    return lambda: adding(made(), "<tool>", **flags)


GPT2: Made = byte_level
PREPENDED: Made = lambda: sentencepiece(prepended())  # noqa: E731
TOKENIZERS: dict[str, tuple[Made, dict[str, tuple[Code, str]]]] = {
    "gpt-2": (GPT2, {}),
    "digits, gpt-2": (lambda: byte_level(Digits(individual_digits=True)), {}),
    "gpt-4": (lambda: pattern(GPT4), {}),
    "gpt-4, removed": (lambda: pattern(LLAMA3, behavior="removed", invert=True), {}),
    "llama 3": (lambda: pattern(LLAMA3, whole=True), {}),
    "qwen": (lambda: pattern(QWEN2, normalizer=normalizers.NFC()), {}),
    "qwen, not normalized": (lambda: pattern(QWEN2), {}),
    "gpt-4, of code": (lambda: pattern(GPT4, corpus=CODE), {}),
    "llama 3, of code": (lambda: pattern(LLAMA3, whole=True, corpus=CODE), {}),
    "qwen, of code": (lambda: pattern(QWEN2, normalizer=normalizers.NFC(), corpus=CODE), {}),
    "tekken": (lambda: pattern(TEKKEN, whole=True), {}),
    "gpt-4o": (lambda: pattern(GPT4O), {}),
    "gpt-4o, of code": (lambda: pattern(GPT4O, corpus=CODE), {}),
    "gpt-4o, possessive": (
        lambda: pattern(GPT4O.replace("*[", "*+[")),
        {"gguf": (Code.UNSUPPORTED, "split pattern")},
    ),
    "another split": (
        lambda: pattern(r"\p{L}+|\p{N}{1,2}|[^\s\p{L}\p{N}]+|\s+"),
        {"gguf": (Code.UNSUPPORTED, "split pattern")},
    ),
    "replace": (
        lambda: byte_level(normalizer=normalizers.Replace("e.g.", "eg")),
        {"gguf": (Code.UNSUPPORTED, 'normalizer {"type": "Replace"')},
    ),
    "add_prefix_space": (
        lambda: byte_level(add_prefix_space=True),
        {
            "gguf": (Code.UNSUPPORTED, "add_prefix_space"),
            "openvino": (Code.NOT_PROVED, "added token '<|endoftext|>' in 'one"),
        },
    ),
    "gpt-2, a word": (word(GPT2), {}),
    "gpt-2, lstrip": (word(GPT2, lstrip=True), {"gguf": (Code.UNSUPPORTED, "'<tool>' has lstrip")}),
    "gpt-2, rstrip": (word(GPT2, rstrip=True), {"gguf": (Code.UNSUPPORTED, "'<tool>' has rstrip")}),
    "gpt-2, single_word": (
        word(GPT2, single_word=True),
        {
            "gguf": (Code.UNSUPPORTED, "'<tool>' has single_word"),
            "openvino": (Code.UNSUPPORTED, "'<tool>' has single_word"),
        },
    ),
    "prepend": (PREPENDED, {}),
    "prepend, a word": (word(PREPENDED, normalized=False), {}),
    "prepend, normalized": (
        word(PREPENDED, normalized=True),
        {
            "gguf": (Code.UNSUPPORTED, "'<tool>' has normalized, which makes it '\u2581<tool>'"),
            "openvino": (Code.NOT_PROVED, "added token '<tool>' in 'one<tool>two"),
        },
    ),
    "prepend, phi-3": (lambda: as_phi3(PREPENDED()), {}),
    "prepend, a merge is missing": (
        lambda: sentencepiece(prepended(), without=("th", "e")),
        {"gguf": (Code.UNSUPPORTED, "'the' by other merges")},
    ),
    "prepend, rstrip": (
        word(PREPENDED, normalized=False, rstrip=True),
        {"gguf": (Code.UNSUPPORTED, "'<tool>' has rstrip")},
    ),
    "gemma": (
        lambda: sentencepiece(replaced(), Split(" ", "merged_with_previous")),
        {},
    ),
    "gemma, normalized": (word(lambda: sentencepiece(replaced()), normalized=True), {}),
    "metaspace, never": (
        lambda: sentencepiece(None, Metaspace(prepend_scheme="never", split=False)),
        {},
    ),
    "metaspace, never, split": (
        lambda: sentencepiece(None, Metaspace(prepend_scheme="never", split=True)),
        {"openvino": (Code.NOT_PROVED, "'def f(x)")},
    ),
    "metaspace, first": (
        lambda: sentencepiece(None, Metaspace(prepend_scheme="first", split=False)),
        {"gguf": (Code.UNSUPPORTED, "prepend_scheme=first")},
    ),
    "metaspace, always": (
        lambda: sentencepiece(None, Metaspace(prepend_scheme="always", split=False)),
        {"gguf": (Code.UNSUPPORTED, "prepend_scheme=always")},
    ),
    "unigram": (lambda: unigram(replaced()), {}),
    "unigram, metaspace, never": (
        lambda: unigram(None, Metaspace(prepend_scheme="never", split=False)),
        {},
    ),
    "unigram, a word": (word(lambda: unigram(replaced()), normalized=False), {}),
    "unigram, byte_fallback": (
        lambda: unigram(replaced(), byte_fallback=True),
        {
            "gguf": (Code.UNSUPPORTED, "byte_fallback"),
            "openvino": (Code.UNSUPPORTED, "byte_fallback"),
        },
    ),
    "unigram, prepend": (
        lambda: unigram(prepended()),
        {"gguf": (Code.UNSUPPORTED, "prepends a space")},
    ),
    "unigram, trained": (
        lambda: unigram(replaced(), score=-1 / 3),
        {"gguf": (Code.UNSUPPORTED, "score of 'th'")},
    ),
}
"""Tokenizer, and the errors of the formats that refuse it."""
ENGINES: dict[str, tuple[Callable[[Path], Engine], str]] = {
    "gguf": (LlamaCpp, "llama_cpp"),
    "compressed-tensors": (Transformers, "compressed_tensors"),
    "openvino": (OpenVINOGenAI, "openvino_genai"),
}


@cache
def model() -> Checkpoint:
    """A model of 432 tokens with a chat template, without its folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    with TemporaryDirectory() as folder:
        save(make("llama", vocab_size=432, **sizes), Path(folder, "hf"), byte_level())
        found = load_checkpoint(Path(folder, "hf")).model
        found.config = found.config.with_chat_template(CHAT)
        save_checkpoint(Path(folder, "made"), found, byte_level(), "pretrain", Recipe())
        loaded = load_checkpoint(Path(folder, "made"))
        assert loaded.digest  # of its files, which are read once
        return loaded


def checkpoint(tokenizer: Tokenizer) -> Checkpoint:
    return replace(model(), tokenizer=tokenizer)


IN_OPENVINO = ("tekken", "prepend, phi-3", "unigram", "metaspace, never, split")
"""A tokenizer of each kind, and one that a proof refuses; the others take as long."""


def is_slow(name: str, format_name: str) -> bool:
    """Whether a graph is made for a tokenizer like another."""
    code, _ = TOKENIZERS[name][1].get(format_name, (None, ""))
    is_made = format_name == "openvino" and code is not Code.UNSUPPORTED
    return is_made and name not in IN_OPENVINO


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        pytest.param(name, x, marks=pytest.mark.slow if is_slow(name, x) else ())
        for name in TOKENIZERS
        for x in ENGINES
    ],
)
def test_prose_code_and_chats_have_the_same_ids_or_are_refused(
    name: str, format_name: str, tmp_path: Path
) -> None:
    made, refused = TOKENIZERS[name]
    found = checkpoint(made())
    settings = ExportSettings.model_validate({"formats": [format_name]})
    if format_name == "openvino":  # which is made from the graph
        write_graph(found, tmp_path, settings)
    code, text = refused.get(format_name, (None, ""))
    kind = StageError if code is Code.NOT_PROVED else UserError
    with raises(code, text, kind=kind) if code else nullcontext():
        write_formats(found, tmp_path, settings)
        engine, module = ENGINES[format_name]
        pytest.importorskip(module, reason=f"{module} is not installed")
        save_tokenizer(found.tokenizer, tmp_path / "tokenizer.json")
        require_tokens(engine(tmp_path), found, [], tmp_path)


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("gpt-4", None),
        ("llama 3", None),
        ("unigram", None),
        ("qwen", "does not normalize texts to NFC"),
        ("tekken", "ends words at combining marks"),
        ("gpt-4o", "ends words at combining marks"),
    ],
)
def test_what_llama_cpp_is_known_to_read_differently_is_a_warning(
    name: str, differs: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = TOKENIZERS[name]
    gguf_metadata(made(), 432, "the model")
    assert ([*caplog.messages] == []) if differs is None else (differs in caplog.text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("precompiled_charsmap", [4, 0, 0, 0, 1]),
        ("remove_extra_whitespaces", True),
        ("add_space_prefix", True),
    ],
)
def test_a_unigram_in_gguf_whose_texts_are_normalized_is_refused(key: str, value: Any) -> None:
    metadata = gguf_metadata(unigram(replaced()), 432, "the model")
    assert tokenizer_from_gguf(metadata, "m.gguf").encode("the  tool", add_special_tokens=False).ids
    with raises(Code.UNSUPPORTED, "m.gguf: ", f"tokenizer.ggml.{key}"):
        tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{key}": value}, "m.gguf")


class Deaf(Engine):
    """An engine that reads a token's name as plain text."""

    version = "deaf 1.0"

    def __init__(self, tokenizer: Tokenizer, token: str) -> None:
        self.own, self.token = tokenizer, token

    def encode(self, text: str) -> list[int]:
        parts = text.split(self.token) if self.token else [text]
        name = [i for x in self.token for i in self.own.encode(x).ids]
        ids = [self.own.encode(part, add_special_tokens=False).ids for part in parts]
        return [*ids[0], *(i for part in ids[1:] for i in (*name, *part))]


@pytest.mark.parametrize(
    ("token", "texts"),
    [
        ("<tool>", ("'<tool>' in '<tool>'", "from token 0 on")),
        (END, ("'<|endoftext|>'",)),
        ("You are a helpful", ("a chat of three turns",)),
    ],
)
def test_an_engine_that_reads_a_token_or_a_chat_differently_is_refused(
    token: str, texts: tuple[str, ...], tmp_path: Path
) -> None:
    made = word(byte_level)()
    found = checkpoint(made)
    require_tokens(Deaf(made, ""), found, [[65, 66]], tmp_path)
    with raises(Code.NOT_PROVED, "deaf 1.0", *texts, kind=StageError):
        require_tokens(Deaf(made, token), found, [[65, 66]], tmp_path)


def test_a_chat_template_that_renders_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checkpoint(byte_level())
    broken = found.model.config.with_chat_template("{{ raise_exception('no') }}")
    monkeypatch.setattr(found.model, "config", broken)
    with raises(Code.MALFORMED, "no"):
        require_tokens(Deaf(found.tokenizer, ""), found, [], tmp_path)
