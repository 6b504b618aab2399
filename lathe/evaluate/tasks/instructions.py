"""Instruction following: whether the answer follows instructions that a program can check, such as
`answer in fewer than 50 words`.

The files are JSONL in IFEval's form, and the accuracies its four (Zhou et al.,
Instruction-following evaluation for large language models, 2023): of prompts, all of whose
instructions are followed, and of instructions, each by the strict and by the loose criterion.

The ids and arguments are those of IFEval's files, and the definitions those of its paper;
`startend:start_checker` is Lathe's own. Differences from its reference implementation: keywords are
texts, not patterns; sentences are those of sentencex, languages those of py3langid, and a word in
capital letters is a run of letters, where the reference has nltk's, langdetect's and the Penn
Treebank's.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lathe.data.cleaning import language
from lathe.data.sentences import SentenceSplitter
from lathe.evaluate.comparison import Accuracy
from lathe.evaluate.intervals import ratio_stderr
from lathe.evaluate.tasks.generative import Generative, Prompt, Row
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Relation = Literal["less than", "at least"]


class Instruction(BaseModel, ABC):
    """An instruction with its arguments; `id` is its name in files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: ClassVar[str]

    @abstractmethod
    def follows(self, text: str) -> bool:
        """Whether a text that is not only white space follows it."""


def is_followed(instruction: Instruction, text: str) -> bool:
    """Whether an answer follows an instruction, by the strict criterion."""
    return bool(text.strip()) and instruction.follows(text)


def is_followed_loosely(instruction: Instruction, text: str) -> bool:
    """Whether an answer follows an instruction, by the loose criterion: it does without its first
    line (`Sure, here it is:`), its last line, both, or the asterisks of Markdown."""
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    parts += [part.replace("*", "") for part in parts]
    return any(is_followed(instruction, part) for part in parts)


def _holds(count: int, relation: Relation, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


class Keywords(Instruction):
    """Include all the keywords."""

    id = "keywords:existence"
    keywords: Annotated[list[Text], Field(min_length=1)]

    def follows(self, text: str) -> bool:
        return all(word.lower() in text.lower() for word in self.keywords)


class KeywordFrequency(Instruction):
    """Use a keyword so many times."""

    id = "keywords:frequency"
    keyword: Text
    frequency: Count
    relation: Relation

    def follows(self, text: str) -> bool:
        count = text.lower().count(self.keyword.strip().lower())
        return _holds(count, self.relation, self.frequency)


class ForbiddenWords(Instruction):
    """Do not use these words."""

    id = "keywords:forbidden_words"
    forbidden_words: Annotated[list[Text], Field(min_length=1)]

    def follows(self, text: str) -> bool:
        return not any(
            re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)
            for word in self.forbidden_words
        )


class LetterFrequency(Instruction):
    """Use a letter so many times."""

    id = "keywords:letter_frequency"
    letter: Annotated[str, Field(min_length=1, max_length=1)]
    let_frequency: Count
    let_relation: Relation

    def follows(self, text: str) -> bool:
        count = text.lower().count(self.letter.lower())
        return _holds(count, self.let_relation, self.let_frequency)


class ResponseLanguage(Instruction):
    """Answer in this language only."""

    id = "language:response_language"
    language: Annotated[str, Field(pattern=r"^[a-z]{2}$")]

    def follows(self, text: str) -> bool:
        return language(text) == self.language


class NumberSentences(Instruction):
    """Answer in so many sentences."""

    id = "length_constraints:number_sentences"
    num_sentences: Count
    relation: Relation

    def follows(self, text: str) -> bool:
        sentences = SentenceSplitter("en")(text.strip())
        return _holds(len(sentences), self.relation, self.num_sentences)


class NumberParagraphs(Instruction):
    """Answer in exactly so many paragraphs, separated by `***`."""

    id = "length_constraints:number_paragraphs"
    num_paragraphs: Count

    def follows(self, text: str) -> bool:
        paragraphs = [part.strip() for part in text.split("***")]
        return all(paragraphs[1:-1]) and len([*filter(None, paragraphs)]) == self.num_paragraphs


class NumberWords(Instruction):
    """Answer in so many words."""

    id = "length_constraints:number_words"
    num_words: Count
    relation: Relation

    def follows(self, text: str) -> bool:
        return _holds(len(re.findall(r"\w+", text)), self.relation, self.num_words)


class ParagraphFirstWord(Instruction):
    """Write so many paragraphs, separated by two line breaks, one of which begins with a word."""

    id = "length_constraints:nth_paragraph_first_word"
    num_paragraphs: Count
    nth_paragraph: Annotated[int, Field(ge=1)]
    first_word: Text

    def follows(self, text: str) -> bool:
        paragraphs = [part.strip() for part in text.split("\n\n")]
        # As the reference: the number counts paragraphs with text, and the index counts all.
        count = len([*filter(None, paragraphs)])
        if self.nth_paragraph > count or not (paragraph := paragraphs[self.nth_paragraph - 1]):
            return False
        first = paragraph.split()[0].lstrip("'").lstrip('"')
        word = re.split(r"[.,?!'\"]", first, maxsplit=1)[0].lower()
        return count == self.num_paragraphs and word == self.first_word.lower()


class Placeholders(Instruction):
    """Include at least so many placeholders in square brackets, such as [name]."""

    id = "detectable_content:number_placeholders"
    num_placeholders: Count

    def follows(self, text: str) -> bool:
        return len(re.findall(r"\[.*?\]", text)) >= self.num_placeholders


class Postscript(Instruction):
    """End with a postscript after this marker."""

    id = "detectable_content:postscript"
    postscript_marker: Text

    def follows(self, text: str) -> bool:
        marker = self.postscript_marker.strip().lower()
        known = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
        return re.search(known.get(marker, re.escape(marker)), text.lower()) is not None


class BulletLists(Instruction):
    """Write exactly so many bullet points of Markdown, with `*` or `-`."""

    id = "detectable_format:number_bullet_lists"
    num_bullets: Count

    def follows(self, text: str) -> bool:
        # Two stars at the beginning of a line are bold text, not a bullet point.
        stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
        dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
        return len(stars) + len(dashes) == self.num_bullets


class ConstrainedResponse(Instruction):
    """Answer with one of three sentences."""

    id = "detectable_format:constrained_response"

    def follows(self, text: str) -> bool:
        return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


class Highlights(Instruction):
    """Highlight at least so many parts with `*` of Markdown."""

    id = "detectable_format:number_highlighted_sections"
    num_highlights: Count

    def follows(self, text: str) -> bool:
        # As the reference: bold text matches the first pattern too, but as empty pairs of stars.
        parts = re.findall(r"\*[^\n\*]*\*", text) + re.findall(r"\*\*[^\n\*]*\*\*", text)
        return sum(bool(part.strip("*").strip()) for part in parts) >= self.num_highlights


class Sections(Instruction):
    """Write at least so many sections, each of which begins with a word and its number."""

    id = "detectable_format:multiple_sections"
    section_spliter: Text
    num_sections: Count

    def follows(self, text: str) -> bool:
        heading = rf"\s?{re.escape(self.section_spliter.strip())}\s?\d+\s?"
        return len(re.split(heading, text)) - 1 >= self.num_sections


class JsonFormat(Instruction):
    """Answer in JSON only, which may be in a code fence of Markdown."""

    id = "detectable_format:json_format"

    def follows(self, text: str) -> bool:
        text = re.sub(r"^```(json|Json|JSON)?", "", text.strip()).removesuffix("```")
        try:
            json.loads(text.strip())
        except (ValueError, RecursionError):
            return False
        return True


class Title(Instruction):
    """Give a title in double angular brackets, such as <<poem of joy>>."""

    id = "detectable_format:title"

    def follows(self, text: str) -> bool:
        titles = re.findall(r"<<[^\n]+>>", text)
        return any(title.lstrip("<").rstrip(">").strip() for title in titles)


class TwoResponses(Instruction):
    """Give two different answers, separated by `******`."""

    id = "combination:two_responses"

    def follows(self, text: str) -> bool:
        # Only the first and the last part may be empty: a separator at either end is no third
        # answer.
        parts = [part.strip() for part in text.split("******")]
        answers = [*filter(None, parts)]
        return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


class RepeatPrompt(Instruction):
    """Repeat the request first, and then answer."""

    id = "combination:repeat_prompt"
    prompt_to_repeat: Text

    def follows(self, text: str) -> bool:
        return text.strip().lower().startswith(self.prompt_to_repeat.strip().lower())


class StartPhrase(Instruction):
    """Begin with exactly this phrase."""

    id = "startend:start_checker"
    start_phrase: Text

    def follows(self, text: str) -> bool:
        return text.strip().strip('"').lower().startswith(self.start_phrase.strip().lower())


class EndPhrase(Instruction):
    """End with exactly this phrase."""

    id = "startend:end_checker"
    end_phrase: Text

    def follows(self, text: str) -> bool:
        return text.strip().strip('"').lower().endswith(self.end_phrase.strip().lower())


class Quotation(Instruction):
    """Put the whole answer in double quotation marks."""

    id = "startend:quotation"

    def follows(self, text: str) -> bool:
        text = text.strip()
        return len(text) > 1 and text[0] == text[-1] == '"'


class CapitalWords(Instruction):
    """Use so many words in capital letters."""

    id = "change_case:capital_word_frequency"
    capital_frequency: Count
    capital_relation: Relation

    def follows(self, text: str) -> bool:
        words = re.findall(r"[^\W_]+(?:[-'.][^\W_]+)*", text)
        return _holds(
            sum(word.isupper() for word in words), self.capital_relation, self.capital_frequency
        )


class EnglishCapital(Instruction):
    """Answer in English, in capital letters only."""

    id = "change_case:english_capital"

    def follows(self, text: str) -> bool:
        return text.isupper() and language(text.lower()) == "en"


class EnglishLowercase(Instruction):
    """Answer in English, in lowercase letters only."""

    id = "change_case:english_lowercase"

    def follows(self, text: str) -> bool:
        return text.islower() and language(text) == "en"


class NoComma(Instruction):
    """Do not use commas."""

    id = "punctuation:no_comma"

    def follows(self, text: str) -> bool:
        return "," not in text


INSTRUCTIONS: dict[str, type[Instruction]] = {
    kind.id: kind for kind in Instruction.__subclasses__()
}


def parse_instruction(name: Any, arguments: Any, where: str) -> Instruction:
    """An instruction by its id and `kwargs`, of which those that are null are left out.

    Raises:
        UserError: an unknown id, or wrong arguments; names `where`.
    """
    if name not in INSTRUCTIONS:
        raise UserError(
            f"{where}: unknown instruction {name!r}",
            f"there are {', '.join(INSTRUCTIONS)}",
            Code.UNKNOWN_NAME,
        )
    if not isinstance(arguments, Mapping):
        raise UserError(
            f"{where}: {name}: kwargs is not an object", "write {} for no arguments", Code.MALFORMED
        )
    # The Hub's copy of IFEval has every argument on every line, null where it does not apply.
    present = {key: value for key, value in arguments.items() if value is not None}
    try:
        return INSTRUCTIONS[name].model_validate(present)
    except ValidationError as error:
        known = ", ".join(INSTRUCTIONS[name].model_fields) or "none"
        raise UserError(
            f"{where}: {name}: {first_mistake(error)}", f"its arguments: {known}", Code.MALFORMED
        ) from None


class Instructions(Generative[list[Instruction]]):
    """A JSONL file with the ids and arguments of every prompt's instructions."""

    name = "instructions"
    example = (
        '{"prompt": "...", "instruction_id_list": ["length_constraints:number_words"], '
        '"kwargs": [{"relation": "less than", "num_words": 50}]}'
    )
    measures = (
        Accuracy(
            key="strict",
            title="prompts followed",
            axis="% of prompts followed",
            column="strict",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
        Accuracy(
            key="loose",
            title="prompts followed, loosely",
            axis="% of prompts followed",
            column="loose",
            margin=lambda gate: gate.max_task_accuracy_drop,
        ),
    )
    extra = ("instructions_strict", "instructions_loose")

    def parse(self, row: Mapping[str, Any], where: str) -> list[Instruction]:
        names, arguments = row.get("instruction_id_list"), row.get("kwargs")
        if not isinstance(names, list) or not names:
            raise UserError(
                f"{where}: no instruction_id_list", f"a line is {self.example}", Code.MALFORMED
            )
        if not isinstance(arguments, list) or len(arguments) != len(names):
            raise UserError(
                f"{where}: kwargs is not a list of {len(names)}, as instruction_id_list",
                f"a line is {self.example}",
                Code.MALFORMED,
            )
        return [
            parse_instruction(name, kwargs, where)
            for name, kwargs in zip(names, arguments, strict=True)
        ]

    def judge(self, answer: str, expected: list[Instruction]) -> Row:
        strict = [is_followed(one, answer) for one in expected]
        loose = [is_followed_loosely(one, answer) for one in expected]
        return {
            "strict": all(strict),
            "loose": all(loose),
            "followed": strict,
            "followed_loosely": loose,
        }

    def show(self, expected: list[Instruction]) -> str:
        return "; ".join(
            ", ".join([one.id, *(f"{key} {value}" for key, value in one.model_dump().items())])
            for one in expected
        )

    def summarize(self, units: Sequence[Row], examples: list[Prompt[list[Instruction]]]) -> Row:
        figures = super().summarize(units, examples)
        for key, column in (
            ("instructions_strict", "followed"),
            ("instructions_loose", "followed_loosely"),
        ):
            followed = np.array([float(sum(unit[column])) for unit in units])
            counts = np.array([float(len(unit[column])) for unit in units])
            figures[key] = float(followed.sum() / counts.sum())
            figures[f"{key}_stderr"] = ratio_stderr(followed, counts)
        return figures
