"""Settings of the corpus and of token data sets."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lathe.config.settings.base import Settings
from lathe.config.settings.types import Positive, Text, split_numbers


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
    """Corpus: a file or folder of text or JSONL, an http(s):// or s3:// address, hf://NAME,
    newest:PLACE for the newest one there, or `python`, the English prose that ships with Python."""
    license: str = ""
    """License of the corpus, recorded in the data set and its models' cards: an SPDX identifier
    such as CC-BY-4.0, or the license's name; empty if unknown."""
    text_key: Text = "text"
    """JSONL key, or column of a Hugging Face dataset, that contains the text."""
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
    """Maximum size of the held-out text, in characters, taken equally from all test documents."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of tokenizer threads; 0 uses one per CPU core."""
