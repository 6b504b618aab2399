"""Structured output: generated text conforms to the constraint for any logits."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from lathe_base.errors import Code
from lathe_base.parameters import Params
from lathe_serving.runtime.grammar import MAX_DIGITS, Grammar, Grammars
from lathe_serving.runtime.protocol import parse
from lathe_serving.runtime.sampling import next_token
from lathe_serving.runtime.text import TokenBytes
from lathe_serving.runtime.text_generator import TextGenerator
from tests.serve.runtime.test_batcher import GREEDY, Caller
from tests.support.constraints import GRAMMAR, REGEX, SCHEMA
from tests.support.errors import raises
from tests.support.tokenizers import metaspace_tokenizer


def constraint(**one: Any) -> str:
    return json.dumps(one)


@pytest.fixture(scope="module")
def grammars(byte_tokenizer: Tokenizer) -> Grammars:
    return Grammars(byte_tokenizer, 260, [256])  # some ids have no token


def written(grammar: Grammar, tokenizer: Tokenizer, seed: int, **changes: Any) -> str | None:
    """Generate text from random logits; None if it has not ended after 2,000 tokens."""
    rng, ids = np.random.default_rng(seed), list[int]()
    params = Params(top_k=0, top_p=1.0, min_tokens=0, **changes)
    seen = np.zeros(260, bool)
    while len(ids) < 2000:
        allowed = grammar.allowed()
        if allowed is None:
            return str(tokenizer.decode(ids))
        logits = rng.normal(0, 3, 260).astype(np.float32)
        token = next_token(logits, seen, len(ids), params, [256], rng, allowed=allowed)
        if token == 256:
            return str(tokenizer.decode(ids))
        grammar.add(token)
        ids.append(token)
    return None


@pytest.mark.parametrize("seed", range(20))
def test_a_model_of_random_weights_writes_what_the_schema_says(
    grammars: Grammars, byte_tokenizer: Tokenizer, seed: int
) -> None:
    text = written(grammars.start(constraint(json=SCHEMA), []), byte_tokenizer, seed)
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("seed", range(5))
def test_so_it_is_with_other_forms(
    grammars: Grammars, byte_tokenizer: Tokenizer, seed: int
) -> None:
    def text(**one: Any) -> str:
        found = written(grammars.start(constraint(**one), []), byte_tokenizer, seed)
        assert found is not None
        return found

    assert re.fullmatch(REGEX, text(regex=REGEX))
    assert re.fullmatch(r"(\(|\[)+x(\)|\])+", text(grammar=GRAMMAR))
    choices = ["yes", "yes, but", 'naïve 🙂 "\n']
    assert text(choice=choices) in choices
    assert isinstance(json.loads(text(json={"type": ["integer", "boolean"]})), int)


def test_a_complete_text_ends_despite_ignore_eos_and_bias(
    grammars: Grammars, byte_tokenizer: Tokenizer
) -> None:
    for changes in ({"ignore_eos": True}, {"logit_bias": {256: -100.0, 65: 100.0}}):
        grammar = grammars.start(constraint(choice=["ab", "abc"]), [])
        assert written(grammar, byte_tokenizer, 0, **changes) in ("ab", "abc")


def next_letters(grammar: Grammar, tokenizer: Tokenizer) -> set[str]:
    allowed = grammar.allowed()
    assert allowed is not None
    return {tokenizer.id_to_token(i) for i in np.flatnonzero(allowed).tolist()}


def test_a_stop_token_ends_only_what_is_complete(
    grammars: Grammars, byte_tokenizer: Tokenizer
) -> None:
    a, b, c = map(byte_tokenizer.token_to_id, "abc")
    grammar = grammars.start(constraint(regex="ab*"), [b, c])
    assert next_letters(grammar, byte_tokenizer) == {"a"}
    grammar.add(a)
    assert grammar.allowed() is None  # b is an end token too


def test_a_copy_continues_independently(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    one = grammars.start(constraint(regex="[ab]c"), [])
    other = one.copy()
    one.add(byte_tokenizer.token_to_id("a"))
    assert next_letters(one, byte_tokenizer) == {"c"}
    assert next_letters(other, byte_tokenizer) == {"a", "b"}


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    for token in [*tokenizer.encode(text).ids, 256]:
        allowed = grammar.allowed()
        if allowed is None:
            return token == 256
        if not allowed[token]:
            return False
        if token != 256:
            grammar.add(token)
    return True


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d+", "12", "1\u0663"),
        (r"[\d.]+", "1.", "\u0663"),
        (r"\w", "a", "é"),
        (r"\D", "é", "3"),
        (r"[^\W\d]", "a", "3"),
        (r"\\d", "\\d", "3"),
    ],
)
def test_classes_are_those_of_json_schema(
    grammars: Grammars, byte_tokenizer: Tokenizer, pattern: str, right: str, wrong: str
) -> None:
    for form, mark in ({"regex": pattern}, ""), ({"json": {"pattern": f"^{pattern}$"}}, '"'):
        if "\\\\" in pattern and mark:
            continue  # JSON escapes it
        for text, is_right in ((right, True), (wrong, False)):
            grammar = grammars.start(constraint(**form), [])
            assert accepts(grammar, byte_tokenizer, mark + text + mark) == is_right


def test_there_may_be_thousands_of_choices(grammars: Grammars, byte_tokenizer: Tokenizer) -> None:
    choices = [f"choice {i} of *many* (and more)\n" for i in range(5000)]
    given = constraint(choice=choices)
    assert accepts(grammars.start(given, []), byte_tokenizer, choices[4321])
    assert not accepts(grammars.start(given, []), byte_tokenizer, choices[4321] + ".")


@pytest.mark.parametrize("kind", ["json", "tool"])
@pytest.mark.parametrize("bounds", [{}, {"minimum": 0, "maximum": 10}, {"exclusiveMinimum": -3}])
def test_a_number_ends(
    grammars: Grammars, byte_tokenizer: Tokenizer, kind: str, bounds: dict[str, int]
) -> None:
    schema = {"type": "number", **bounds}
    tool = {"grammar": f"start: %json {json.dumps(schema)}"}
    grammar = grammars.start(constraint(**{"json": schema} if kind == "json" else tool), [])
    ids = list[int]()
    digits = [byte_tokenizer.token_to_id(digit) for digit in "9876543210."]
    while (allowed := grammar.allowed()) is not None and len(ids) < 2000:
        wanted = [i for i in digits if allowed[i]]  # a model that prefers digits
        if not wanted:
            break
        ids.append(wanted[0])
        grammar.add(ids[-1])
    text = byte_tokenizer.decode(ids)
    jsonschema.validate(json.loads(text), schema)
    assert MAX_DIGITS <= len(text) <= 2 * MAX_DIGITS + 1
    text = '"' + "7" * 300 + '"'
    assert accepts(grammars.start(constraint(json={"type": "string"}), []), byte_tokenizer, text)


def test_the_limit_of_digits_is_that_of_a_number(
    grammars: Grammars, byte_tokenizer: Tokenizer
) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    text = json.dumps([12] * MAX_DIGITS, separators=(",", ":"))
    assert accepts(grammars.start(constraint(json=schema), []), byte_tokenizer, text)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (constraint(json={"type": "array", "uniqueItems": True}), ("uniqueItems",)),
        (constraint(json={"not": {"type": "string"}}), ('"not"',)),
        (constraint(json={"type": "str"}), ("str",)),
        (constraint(json={"$ref": "http://localhost:1/x"}), ("localhost",)),
        (constraint(json={"minimum": 5, "maximum": 2, "type": "integer"}), ()),
        (constraint(json="{"), ()),
        (constraint(regex="(?=a)b"), ("look-around",)),
        (constraint(regex=5), ("regex",)),
        (constraint(choice=[1]), ("choice",)),
        (constraint(choice=[]), ("choice",)),
        (constraint(grammar="start: nothing"), ("nothing",)),
        (constraint(json={}, regex="a"), ("json, json_object",)),
        (constraint(whitespace_pattern="x", regex="a"), ("json, json_object",)),
        (constraint(), ("json, json_object",)),
        ("[1]", ("json, json_object",)),
        ("{", ()),
        ("[" * 50_000, ()),
    ],
)
def test_unsupported_constraints_are_rejected(
    grammars: Grammars, given: str, texts: tuple[str, ...]
) -> None:
    with raises(Code.INVALID_VALUE, "structured_outputs: ", *texts):
        grammars.start(given, [])


@pytest.mark.parametrize(
    "given",
    [
        constraint(
            grammar="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(6000)) + 'a6000: "x"'
        ),
        constraint(regex="a?" * 30_000 + "a" * 20_000),
        pytest.param(
            constraint(
                json={"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(10, 30)]}
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all of the stack", "gigabytes", "minutes"],
)
def test_constraints_that_would_crash_the_server_are_rejected(
    grammars: Grammars, given: str
) -> None:
    with raises(Code.TOO_LARGE, "structured_outputs"):
        grammars.start(given, [])


def test_constraints_that_exceed_the_work_limit_are_rejected(
    grammars: Grammars, byte_tokenizer: Tokenizer
) -> None:
    many = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}
    grammar = grammars.start(constraint(json=many), [])
    with raises(Code.TOO_LARGE, "items"):
        for token in byte_tokenizer.encode('{"k1').ids:
            grammar.add(token)
            grammar.allowed()


def test_a_form_has_a_limit() -> None:
    with raises(Code.INVALID_VALUE, "500,000"):
        parse({"structured_outputs": constraint(regex="a" * 500_000)}, Params())
    beams = {"decode_strategy": "beam_search", "structured_outputs": constraint(regex="a")}
    with raises(Code.CONFLICTING_OPTIONS, "structured_outputs", "beam_search"):
        parse(beams, Params())


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_a_token_has_the_same_bytes_for_both(byte_tokenizer: Tokenizer, kind: str) -> None:
    tokenizer = byte_tokenizer if kind == "byte-level" else metaspace_tokenizer()
    size = tokenizer.get_vocab_size()
    theirs = Grammars(tokenizer, size, [size - 1])._tokenizer
    ours = TokenBytes(tokenizer)
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    never = {i for i in range(size) if b"\xff" in ours[i]}  # not valid UTF-8
    for i in {*range(size)} - special - never:
        assert theirs.decode_bytes([i]) == ours[i], (i, tokenizer.id_to_token(i))


@pytest.mark.slow
def test_queued_compilations_are_limited_and_can_be_cancelled(folder: Path) -> None:
    generator = TextGenerator(folder, 40, 1, 4, 2)
    slow = parse({"structured_outputs": constraint(regex="a?" * 30_000 + "a" * 20_000)}, GREEDY)
    callers = [Caller(generator, "a", slow) for _ in range(5)]
    assert [caller.taken for caller in callers] == [True] * 4 + [False]
    callers[3].gone.set()
    with raises(Code.TOO_LARGE):
        callers[0].wait()
    generator.close()
    assert callers[3].wait() == [[]] and callers[3].chunks[-1].finish_reason == "cancelled"


def test_a_constraint_changes_nobody_elses_text_and_drafts_do_not_change_it(folder: Path) -> None:
    formed = parse(
        {"structured_outputs": constraint(json=SCHEMA), "num_return_sequences": 2, "seed": 1},
        Params(),
    )
    found = []
    for speculates in (False, True):
        generator = TextGenerator(folder, 40, 1, 4, 8, 0, speculates)
        alone = Caller(generator, "hello", GREEDY).wait()
        single = Caller(
            generator, "a", parse({"structured_outputs": constraint(regex="(ab){9}c")}, GREEDY)
        )
        assert single.wait() and single.text == "ab" * 9 + "c"
        callers = [
            Caller(generator, prompt, how) for prompt, how in (("x", formed), ("hello", GREEDY))
        ]
        found.append([caller.wait() for caller in callers])
        assert found[-1][1] == alone
        generator.close()
    assert found[0] == found[1]
