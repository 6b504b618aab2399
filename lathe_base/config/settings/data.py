"""Settings of the corpus and of token data sets."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lathe_base.config.settings.base import Settings
from lathe_base.config.settings.types import NonNegative, Positive, Text, split_numbers


class Dataset(Settings):
    """Documents and sequence length. The group and its keys are PaddleFleetX's."""

    input_dir: str | None = Field(default=None, exclude=True)
    """Folder of the token data set, for commands that are not given `--data`. One folder has the
    documents of all parts, so that Eval must not name another."""

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
    """Training and validation data. PaddleFleetX's group."""

    Train: DataPart = DataPart()
    """Data for training."""
    Eval: DataPart = DataPart()
    """Data for validation."""
    reset_attention: bool = False
    """Whether to restrict attention to the token's own document and restart positions at 0 in every
    document, in training and validation; where documents are split into sentences, in every
    sentence. Same as Megatron-LM's `--reset-attention-mask` and `--reset-position-ids`, but at
    document boundaries rather than at end-of-text tokens."""

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
        train, evaluation = self.Train.dataset.input_dir, self.Eval.dataset.input_dir
        if train and evaluation and train != evaluation:
            raise ValueError(
                f"Train.dataset.input_dir {train} and Eval.dataset.input_dir {evaluation} differ: "
                "one data set is split into both"
            )
        return self


class PrepareSettings(Settings):
    """Tokenization of a corpus by `lathe prepare`. The group is Lathe's own."""

    source: Text = "python"
    """Corpus: a file or folder of text, JSONL, CSV, Parquet, Arrow or tar files (of JSONL, or a
    WebDataset); an http(s):// or s3:// address; hf://NAME; a folder saved by Hugging Face's
    `datasets`; newest:PLACE for the newest corpus in a folder or below a prefix; or `python`, the
    English prose that ships with Python. Of a data set repository, the split `train` is read, or
    the one named in FOLDER::SPLIT or FOLDER:CONFIG:SPLIT (of an address: FOLDER/:CONFIG:SPLIT),
    where `all` means every split."""
    license: str = ""
    """License of the corpus, recorded in the data set and in model cards: an SPDX identifier such
    as CC-BY-4.0, or the license's name; empty if unknown."""
    text_key: Text = "text"
    """JSONL key or table column that contains the text; `a.b` is the key `b` of the object `a`. In
    a WebDataset, the file extension of the text."""
    chat: bool = False
    """Whether the corpus consists of conversations: rows with `messages` in OpenAI's form,
    ShareGPT's `conversations`, or `prompt` and `completion`. The chat template beside the tokenizer
    renders them, and training on them counts the loss of the assistant's tokens only."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What to do with a bad row (no text under the key, invalid JSON or UTF-8, too few fields):
    `fail` stops with an error that names it, `skip` skips it and reports how many were skipped."""
    min_characters: NonNegative = 0
    """Minimum length of a document, in characters; shorter ones are dropped."""
    max_characters: Positive | None = None
    """Maximum length of a document, in characters; longer ones are dropped. null means no limit."""
    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]] = Field(default=[])
    """Languages to keep, as ISO 639-1 codes such as `[en, de]`, detected by py3langid from a
    document's first 2,000 characters; an empty list keeps all."""
    duplicates: Literal["keep", "exact", "near"] = "keep"
    """Deduplication, which keeps the first of several duplicates: `keep` disables it, `exact` drops
    documents with identical text, `near` also drops near duplicates (MinHash over 5-word shingles,
    about 2 KB of memory per document)."""
    near_duplicate_similarity: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Minimum Jaccard similarity of the 5-word shingles of two near duplicates."""
    tokenizer: Text = "train"
    """Tokenizer: a tokenizer.json, or a folder with it or with GPT-2's tokenizer files; `train`
    trains one on the training documents."""
    vocab_size: Annotated[int, Field(ge=257, le=2**20)] = 4096
    """Vocabulary size of a trained tokenizer; ignored if a tokenizer is given."""
    special_tokens_in_text: bool = False
    """Whether to parse special tokens in documents, such as `<|endoftext|>` or `<|im_start|>`, for
    example in rendered chats; otherwise they are ordinary text."""
    split_sentences: bool = False
    """Whether to write every sentence of a document as a sequence of its own, as Megatron-LM's
    `preprocess_data.py --split-sentences` does. Sentences are shuffled in training; held-out parts
    still consist of whole documents."""
    sentence_language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] = "en"
    """Language whose rules find the sentences, as an ISO 639 code; languages unknown to sentencex
    are split like a related one, or like English. Ignored without `split_sentences`."""
    fast_tokenizer: bool = True
    """Whether to encode with fastokens, which is tens of times faster than `tokenizers`. Used only
    if both produce the same ids, which is checked on sample texts and on part of every batch."""
    format: Literal["megatron", "paddle"] = "megatron"
    """Format of the token files: Megatron-LM's .bin and .idx, or PaddleFleetX's .npy and .npz."""
    cloze_examples: Positive = 1000
    """Maximum number of passages in the cloze set, which is made from the test documents."""
    heldout_characters: Positive = 500_000
    """Maximum size of the held-out text, in characters, divided equally among the test
    documents."""
    keep_heldout_apart: bool = True
    """Whether to drop training documents that overlap with a validation or test document: at least
    half of the 8-grams of one occur in the other."""
    ngram_index_megabytes: Annotated[int, Field(ge=0, le=512)] = 64
    """Maximum size, in MB, of the n-gram index of the training text, with which `lathe evaluate`
    finds contaminated examples; 0 disables it. 64 MB are enough to find 13-token overlaps with up
    to 240 million training tokens; with more, only longer overlaps are found."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of tokenizer threads; 0 uses one per CPU core."""
