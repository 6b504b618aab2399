"""Instructions that a program can check, by the strict and the loose criterion."""

import random
from typing import Any

import pytest

from lathe.evaluate.tasks.instructions import (
    INSTRUCTIONS,
    Instructions,
    is_followed,
    is_followed_loosely,
    parse_instruction,
)

LESS, AT_LEAST = {"relation": "less than"}, {"relation": "at least"}
ENGLISH = "the keeper of the light climbed the stairs every night and counted all of the steps"
GERMAN = "der Leuchtturmw\u00e4rter stieg jede Nacht die Treppe hinauf und z\u00e4hlte die Stufen"
SENTENCES = "length_constraints:number_sentences"
TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Sea", "c++"]}, "the seaside in C++", "the sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2} | AT_LEAST, "Sea, sea", "sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2} | LESS, "sea", "Sea, sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "seaside", "the Sea."),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 2, "let_relation": "at least"},
        "Eel",
        "elf",
    ),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    (SENTENCES, {"num_sentences": 2} | AT_LEAST, "One. Two.", "One, 2."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2} | LESS,
        "At 3.5 p.m.",
        "One? Two!",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "***a***", "a***  ***b"),
    ("length_constraints:number_words", {"num_words": 3} | LESS, "it's", "it's not"),
    ("length_constraints:number_words", {"num_words": 3} | AT_LEAST, "one two, three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Two"},
        "one\n\n'two', it is",
        "one\n\nanother",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a] b"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP. S. b", "PS b"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "a p.p.s b", "a P.S. b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and ** **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1 a Part 2 b",
        "Part 1 a Part b",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<a b>>\nc", "<< >>"),
    ("combination:two_responses", {}, "a******b", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "say it. Yes", "Yes, say it"),
    ("startend:start_checker", {"start_phrase": "Dear"}, '"dear me"', "my dear"),
    ("startend:end_checker", {"end_phrase": "the end."}, 'It is The End." ', "the end. no"),
    ("startend:quotation", {}, ' "a" ', '"a'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A BIG dog",
        "A big Dog",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, GERMAN.lower()),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), TABLE)
def test_instructions(name: str, kwargs: dict[str, Any], right: str, wrong: str) -> None:
    instruction = parse_instruction(name, kwargs | {"unused": None}, "here")
    assert is_followed(instruction, right) and is_followed_loosely(instruction, right)
    assert not is_followed(instruction, wrong)
    assert not is_followed(instruction, " \n")


def test_every_instruction_is_in_the_table() -> None:
    assert {name for name, *_ in TABLE} == INSTRUCTIONS.keys()


def test_the_loose_criterion_does_without_an_introduction() -> None:
    row = {
        "instruction_id_list": ["startend:quotation", "punctuation:no_comma"],
        "kwargs": [{}, {}],
    }
    task = Instructions()
    expected = task.parse(row, "here")
    found = task.judge('Sure, here it is:\n"a b"\nDone, really.', expected)
    assert found == {
        "strict": False,
        "loose": True,
        "followed": [False, False],
        "followed_loosely": [True, True],
    }
    units = [
        {"tokens": 3, "cut": False, "truncated": 0} | one
        for one in (found, task.judge('"a, b"', expected))
    ]
    figures = task.summarize(units, [])
    assert (figures["strict"], figures["loose"]) == (0, 0.5)
    assert (figures["instructions_strict"], figures["instructions_loose"]) == (0.25, 0.75)
    assert task.show(expected) == "startend:quotation; punctuation:no_comma"


PIECES = (
    *("the sea ", "Sea, sea. ", "\n", "\n\n", "***", "******", "* a\n", "- b\n", "[x] ", "P.S. b"),
    *('"', "<<a>>", "*b* ", "**c** ", "Part 1 ", "Part 2 ", "My answer is yes.", "```json\n"),
    *('{"a": 1}', "```", "EEL ", "Say it ", "The end.", "two, ", "'two' "),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_verdicts_equal_those_of_lm_eval() -> None:
    """On random texts, except where the reference needs nltk's or langdetect's models."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    nltk = pytest.importorskip("nltk", reason="nltk is not installed")
    pytest.importorskip("langdetect", reason="langdetect is not installed")
    nltk.download = lambda *args, **kwargs: True  # the tasks below need no models of it
    nltk.data.find = lambda *args, **kwargs: True
    from lm_eval.tasks.ifeval import instructions_registry, utils  # type: ignore[import-not-found]

    models = ("language:", "change_case:", "number_sentences", "start_checker")
    draw = random.Random(0)
    counts = {True: 0, False: 0}
    for name, kwargs, *_ in TABLE:
        if any(part in name for part in models) or "c++" in kwargs.get("keywords", ()):
            continue
        assert name in instructions_registry.INSTRUCTION_DICT
        ours = parse_instruction(name, kwargs, "here")
        for _ in range(300):
            text = "".join(draw.choices(PIECES, k=draw.randint(1, 8)))
            example = utils.InputExample(0, [name], "Say it", [kwargs])
            theirs = utils.test_instruction_following_strict(example, text)
            loose = utils.test_instruction_following_loose(example, text)
            assert is_followed(ours, text) == theirs.follow_all_instructions, (name, text)
            assert is_followed_loosely(ours, text) == loose.follow_all_instructions, (name, text)
            counts[theirs.follow_all_instructions] += 1
    assert min(counts.values()) > 300
