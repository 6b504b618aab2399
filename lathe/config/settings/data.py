"""Settings of the corpus and of token data sets."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.types import NonNegative, Positive, Text, split_numbers


class Dataset(Settings):
    """Documents and sequence length. The group and its keys are PaddleFleetX's."""

    split: Annotated[
        tuple[float, float, float], Field(strict=False), BeforeValidator(split_numbers)
    ] = (949.0, 50.0, 1.0)
    """Proportions of documents for training, validation and testing, as a list or as `949,50,1`.
    Eval inherits Train's value and must not differ."""
    max_seq_len: Positive = 1024
    """Sequence length, in tokens."""

    @model_validator(mode="after")
    def _split_is_a_proportion(self) -> "Dataset":
        if min(self.split) < 0 or sum(self.split) <= 0:
            raise ValueError(f"split {self.split} must be three non-negative numbers, not all zero")
        return self


class DataPart(Settings):
    """One part of the data. PaddleFleetX's group."""

    dataset: Dataset = Dataset()
    """Documents and sequences of this part."""


class DataSettings(Settings):
    """Training and validation data. PaddleFleetX's group.

    The data folder is an argument of every stage; `input_dir` is ignored.
    """

    Train: DataPart = DataPart()
    """Data for training."""
    Eval: DataPart = DataPart()
    """Data for validation."""
    reset_attention: bool = False
    """Whether no token attends to another document of its sequence, and the positions begin at 0 in
    every document, in training and validation. It is Megatron-LM's `--reset-attention-mask` with
    `--reset-position-ids`, at the data set's own boundaries, not at every end-of-text token."""

    @model_validator(mode="after")
    def _one_split(self) -> "DataSettings":
        if "split" not in self.Eval.dataset.model_fields_set:
            split = {"split": self.Train.dataset.split}
            self.Eval = DataPart(dataset=self.Eval.dataset.model_copy(update=split))
        if self.Train.dataset.split != self.Eval.dataset.split:
            raise ValueError(
                f"Train.dataset.split {self.Train.dataset.split} and Eval.dataset.split "
                f"{self.Eval.dataset.split} differ: validation would see training documents"
            )
        return self


class PrepareSettings(Settings):
    """Tokenization of a corpus by `lathe prepare`. The group is Lathe's own."""

    source: Text = "python"
    """The corpus: a file or folder of text, JSONL, CSV, Parquet, Arrow or WebDataset's tar files,
    an http(s):// or s3:// address, hf://NAME, a folder that Hugging Face's `datasets` has saved,
    the newest one of newest:PLACE, or `python`, the English prose that ships with Python."""
    license: str = ""
    """License of the corpus, recorded in the data set and its models' cards: an SPDX identifier
    such as CC-BY-4.0, or the license's name; empty if unknown."""
    text_key: Text = "text"
    """Key of a JSONL object, or column of a table, that holds the text; `a.b` is the key `b` of the
    object `a`. In a WebDataset it is the ending of the file with the text."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What a broken row does (no text under the key, not JSON, not UTF-8, too few fields): end the
    command with an error that names it, or be skipped, with a warning and a count."""
    min_characters: NonNegative = 0
    """Documents of fewer characters are left out."""
    max_characters: Positive | None = None
    """Documents of more characters are left out; null keeps all."""
    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]] = Field(default=[])
    """Languages to keep, as ISO 639-1 codes such as `[en, de]`, told by py3langid from the first
    2,000 characters of a document; an empty list keeps all."""
    duplicates: Literal["keep", "exact", "near"] = "keep"
    """Which repeated documents are left out but for the first: none; those of exactly the same
    text; or those that share most of their runs of five words too, by MinHash, which takes about
    2 KB of memory a document."""
    near_duplicate_similarity: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Jaccard similarity of the sets of runs of five words from which on documents are near
    duplicates."""
    tokenizer: Text = "train"
    """tokenizer.json, or a folder that contains it or GPT-2's tokenizer files; `train` trains one
    on the training documents."""
    vocab_size: Annotated[int, Field(ge=257, le=2**20)] = 4096
    """Vocabulary size of a trained tokenizer; ignored if a tokenizer is given."""
    special_tokens_in_text: bool = False
    """Whether to parse special tokens in documents, such as `<|endoftext|>` or `<|im_start|>`, for
    example in rendered chats; otherwise they are ordinary text."""
    fast_tokenizer: bool = True
    """Whether to encode with fastokens, tens of times faster than `tokenizers`, if both give the
    same ids, which is checked on sample texts and on a part of every batch."""
    format: Literal["megatron", "paddle"] = "megatron"
    """Format of the token files: Megatron-LM's .bin and .idx, or PaddleFleetX's .npy and .npz."""
    cloze_examples: Positive = 1000
    """Maximum number of passages in the cloze set, which is made from the test documents."""
    heldout_characters: Positive = 500_000
    """Largest size of the held-out text, in characters; every test document has the same share."""
    keep_heldout_apart: bool = True
    """Whether training documents are left out that are near copies of a validation or test
    document: at least half of the 8-grams of either are in the other."""
    ngram_index_megabytes: Annotated[int, Field(ge=0, le=512)] = 64
    """Largest size of the index of the training text's n-grams, by which `lathe evaluate` marks
    examples that a model was trained on; 0 makes none. In 64 MB, every run of 13 tokens of the
    training text is found for texts up to 240 million tokens; of larger ones, longer runs."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of tokenizer threads; 0 uses one per CPU core."""
