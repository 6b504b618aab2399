from lathe.data import prepare

FILLER = [
    "The harbour was quiet that evening and only a few lamps were burning along the wall.",
    "Marta had come down early with the letters that her brother had given her at about noon.",
    "Nobody spoke to her while she waited, for the boats were late and the men were tired.",
    "She counted the sails twice, then sat down on a coil of rope near the water.",
]


def cloze_passages(documents: list[str], limit: int) -> list[str]:
    return [passage.text for passage in prepare.cloze_passages(documents, limit)]


def passages(*sentences: str, limit: int = 10) -> list[str]:
    return cloze_passages([" ".join([*FILLER, *sentences])], limit)


def test_the_last_word_is_the_target() -> None:
    (passage,) = passages('At last somebody called out "the boat is here, Marta!"')
    assert passage.endswith("the boat is here, Marta")
    assert "down early" not in passages("We all saw Marta.")[0][:20]


def test_context_is_the_shortest_run_of_whole_sentences_with_50_words() -> None:
    (passage,) = passages("We all saw the water.")
    context = passage.removesuffix(" We all saw the water")
    assert context == " ".join(FILLER[1:])
    assert len(context.split()) >= 50
    assert len(" ".join(FILLER[2:]).split()) < 50


def test_invalid_targets() -> None:
    assert passages("We all saw the lighthouse.") == []  # does not occur earlier
    assert passages("It was given to her at ten to ten, so we saw a few in it.") == []  # 2 letters
    assert passages("That was the brother's.") == []  # not only letters
    assert passages("We all saw the water") == []  # no sentence end
    assert passages('We all saw the "water.') == []  # would include the quote
    assert (
        passages(
            "x = y[0] + 3 * { z : 1 } == 7 <- >>> 0 && 9 || @ # $ ! % ^ & * ( + ) = - 1 water."
        )
        == []
    )


def test_context_must_be_long_enough() -> None:
    assert cloze_passages([" ".join([*FILLER[:2], "We all saw Marta."])], 10) == []
    many = " ".join(["word"] * 200)
    assert cloze_passages([f"{many}. Then {many}. Not so {many}. This is the word."], 10) == []


def test_a_passage_comes_once() -> None:
    sentences = [*FILLER, "We all saw the water."]
    assert len(cloze_passages([" ".join(sentences)] * 3, 10)) == 1
    other = [s.replace("Marta", "Irene") for s in sentences]
    assert len(cloze_passages([" ".join(sentences), " ".join(other)], 10)) == 2


def test_a_target_sentence_is_context_of_the_next_passage() -> None:
    first, second = passages("We all saw the water.", "Then we heard Marta.")
    assert first.endswith("We all saw the water")
    assert second.endswith("We all saw the water. Then we heard Marta")
    assert second.startswith(FILLER[1])


def test_paragraphs_end_sentences_and_titles_do_not() -> None:
    text = "\n\n".join([" ".join(FILLER[:2]), "A Heading", *FILLER[2:], "Mrs. Gray saw the water."])
    (passage,) = cloze_passages([text], 10)
    assert passage.endswith("Mrs. Gray saw the water")
    assert "  " not in passage and "\n" not in passage


def test_tokenized_text() -> None:
    text = " ".join([*FILLER, "We all saw the water."]).replace(".", " .").replace(",", " ,")
    (passage,) = cloze_passages([text], 10)
    assert passage.endswith("near the water. We all saw the water")


def test_limit_takes_an_even_sample_in_document_order() -> None:
    names = [f"{a}{b}" for a in ("Anna", "Berta", "Clara") for b in ("bel", "dine", "lin", "mar")]
    texts = [" ".join(FILLER).replace("Marta", n) + f" We saw {n}." for n in names]
    every = cloze_passages(texts, 100)
    assert len(every) == len(names)
    some = cloze_passages(texts, 5)
    assert len(some) == 5 and some == [p for p in every if p in some]
    assert some == cloze_passages(texts, 5)
    assert some != every[:5]


def test_a_passage_reads_as_lambada_does() -> None:
    (passage,) = passages("We all saw the water.")
    last = passage.split()[-1]
    assert last == "water"
    assert passage[: passage.rfind(last)].strip().endswith("We all saw the")


def test_a_passage_says_which_document_it_is_from() -> None:
    texts = [" ".join([*FILLER, f"We all saw the water. Then number {i} came."]) for i in range(3)]
    other = " ".join([*FILLER[::-1], "Nobody ever saw the boats."])
    found = prepare.cloze_passages([texts[0], "Nothing.", other], 10)
    assert [passage.document for passage in found] == [0, 2]
