"""Settings of the corpus and its tokens, and of training: batch, loop, model and optimizer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lathe_base.config.settings.types import (
    Factor,
    LinearName,
    NonNegative,
    Positive,
    Probability,
    Processes,
    Recompute,
    Seed,
    Settings,
    Text,
    split_numbers,
)

# --- the corpus and its tokens ---


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
        # One data set is split into all parts.
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


# --- training ---


class GlobalSettings(Settings):
    """Device, seed and batch size. The group and its keys are PaddleFleetX's.

    `global_batch_size` = `local_batch_size` x data-parallel ranks (`dp_degree` x
    `sharding_degree`); you can leave one or both of the sizes empty.
    """

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device; `auto` uses a GPU if there is one."""
    seed: Seed = 1024
    """Random seed for initial weights, sample order, dropout and sampling."""
    global_batch_size: Positive | None = None
    """Sequences per update over all data-parallel ranks; null computes it from
    `local_batch_size`."""
    local_batch_size: Positive | None = None
    """Sequences per update on one data-parallel rank; null divides `global_batch_size` among the
    ranks, or, if that is null too, uses `accumulate_steps` micro-batches."""
    micro_batch_size: Positive = 1
    """Sequences per forward and backward pass; must divide the local batch. Calibration and
    sensitivity analysis also use this batch size."""


class MixPrecision(Settings):
    """Precision of the forward and backward pass; the optimizer keeps float32 weights.

    PaddleFleetX's group; its keys `enable` and `use_pure_fp16` are accepted too.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the forward and backward pass."""
    level: Literal["O1", "O2"] = "O1"
    """O1 casts operations where it is safe (autocast); O2 ("pure") computes everything in `dtype`,
    with float32 master weights. The Paddle engine always trains at O1."""
    fp8: bool = False
    """Whether to compute the matrix products of the blocks' linears in 8-bit floating point, with
    one scale for each tensor; for `bfloat16`, on Hopper and newer GPUs, with `Engine.compile`.
    Emulated on CPUs, which is slow. Not for tensor parallelism, LoRA and quantization-aware
    training. Lathe's own."""
    scale_loss: Annotated[float, Field(gt=0, le=2.0**40)] = 32768.0
    """Loss scale for float16, or its initial value with dynamic scaling; ignored for other
    types."""
    use_dynamic_loss_scaling: bool = True
    """Whether to halve the float16 loss scale after `hysteresis` overflows and double it after
    `loss_scale_window` updates without one."""
    loss_scale_window: Positive = 2000
    """Updates without overflow after which the dynamic float16 loss scale is doubled. DeepSpeed's
    name."""
    hysteresis: Positive = 1
    """Overflows before the dynamic float16 loss scale is halved. Once they have occurred, every
    further one halves it, until the scale is doubled again; as in DeepSpeed."""

    @property
    def is_pure(self) -> bool:
        """Whether everything is computed in `dtype`."""
        return self.level == "O2" and self.dtype != "float32"


class SaveLoad(Settings):
    """Training checkpoints. PaddleFleetX's group; `save_minutes`, `keep` and `keep_final` are
    Lathe's own."""

    output_dir: str | None = Field(default=None, exclude=True)
    """Output folder of `pretrain`, `prune` and `quantize`, and of `export` unless it is the
    model's own folder, for commands that are not given `--output`."""
    ckpt_dir: str | None = Field(default=None, exclude=True)
    """Model to evaluate, analyze, export or generate with, for commands that are not given one. A
    training resumes from its own output folder, and refuses another one here."""

    save_steps: Positive = 1000
    """Updates between checkpoints; one more is saved after the last update and when the run is
    stopped."""
    save_minutes: Annotated[float, Field(gt=0)] = 5.0
    """Maximum minutes between checkpoints: the most that a killed run loses."""
    keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted."""
    keep_final: bool = False
    """Whether to keep the last training state in the output, 12 bytes per parameter, so that the
    same command with a larger `max_steps` can extend the training."""


class EngineSettings(Settings):
    """The training loop. PaddleFleetX's group; `compile` and `deterministic` are Lathe's own."""

    max_steps: NonNegative = 500000
    """Number of updates; 0 prunes or quantizes without training. A larger number extends a run
    that was interrupted, or finished with `save_load.keep_final`; the learning rate decay may then
    become longer."""
    accumulate_steps: Positive | None = None
    """Micro-batches per update (gradient accumulation); null computes `local_batch_size` /
    `micro_batch_size`."""
    logging_freq: Positive = 1
    """Updates between log lines."""
    eval_freq: Positive = 500
    """Updates between validations; there is always one after the last update."""
    eval_iters: Positive = 10
    """Number of batches per validation, the same ones every time, of `global_batch_size` sequences
    each, regardless of the micro-batch size, as in Megatron-LM."""
    compile: bool = False
    """Whether to compile the Transformer blocks, the teacher's and the softmax of the loss with
    `torch.compile`; ignored by the Paddle engine."""
    deterministic: bool = True
    """Whether to use only deterministic kernels on a GPU, so that a resumed run ends with the same
    bits as an uninterrupted one; the CPU and the Paddle engine ignore it."""
    mix_precision: MixPrecision = MixPrecision()
    """Precision of the forward and backward pass."""
    save_load: SaveLoad = SaveLoad()
    """Training checkpoints, from which an interrupted run resumes."""


class ModelSettings(Settings):
    """Architecture of a model trained from scratch, and handling of activations.

    A stage that starts from a checkpoint takes the shape from the checkpoint, and from here only
    dropout, recomputation, `sequence_parallel` and `virtual_pp_degree`. PaddleFleetX's group;
    `scale_residual_init` is Lathe's own, and the keys for families other than GPT-2 are Hugging
    Face's.
    """

    architecture: Literal[
        "gpt2",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
        "gemma3_text",
        "phi3",
        "olmo2",
        "starcoder2",
        "gpt_neox",
        "opt",
    ] = "gpt2"
    """Model family, by Hugging Face's name. Most have rotary positions, RMSNorm and a gated
    feed-forward layer; `qwen2` has biases on queries, keys and values, `qwen3` query and key
    norms. See the guide to model families for the others."""
    pretrained: str | None = Field(default=None, exclude=True)
    """Model to start from, for `pretrain` without `--init`."""
    vocab_size: Positive | None = 50304
    """Rows of the token embedding; null means the data's vocabulary, padded to a multiple of
    128."""
    vocab_size_divisible_unit: Positive | None = None
    """Pad the vocabulary to a multiple of this number times `Distributed.mp_degree`; null pads
    only a vocabulary that `vocab_size` does not give."""
    hidden_size: Positive = 1024
    """Width of the residual stream; must be a multiple of `num_attention_heads` unless `head_dim`
    is given."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = 24
    """Number of Transformer blocks."""
    num_attention_heads: Positive = 16
    """Attention heads per block."""
    num_key_value_heads: Positive | None = None
    """Key-value heads per block, each shared by several attention heads (grouped-query attention);
    null gives every attention head its own. Not for `gpt2`."""
    head_dim: Positive | None = None
    """Size of an attention head; null means `hidden_size` / `num_attention_heads`. Not for
    `gpt2`."""
    ffn_hidden_size: Positive | None = None
    """Width of the feed-forward layer; null means 4 x `hidden_size`."""
    hidden_dropout_prob: Probability = 0.1
    """Dropout probability on the embeddings and the residual branches during training."""
    attention_probs_dropout_prob: Probability = 0.1
    """Dropout probability on the attention weights during training."""
    max_position_embeddings: Positive = 1024
    """Maximum sequence length, in tokens."""
    sliding_window: Positive | None = None
    """Attention window, in tokens, of the layers that have a sliding window; null means 4096 in
    `gemma3_text`, and no window in the others. Not for `gpt2`, `llama`, `olmo2`, `gpt_neox` and
    `opt`."""
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] | None = None
    """Base of the rotary frequencies; null means the family's default, 10000 in most. Not for
    `gpt2` and `opt`, whose positions are learned."""
    rope_scaling: dict[str, str | float] = Field(default={})
    """Scaling of the rotary frequencies for longer texts, in Hugging Face's format: `{rope_type:
    linear, factor: 2}`, or `llama3` with `factor`, `low_freq_factor`, `high_freq_factor` and
    `original_max_position_embeddings`. Not for `gpt2`."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a head's features that is rotated; null means all. Not for `gpt2`."""
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Epsilon of RMSNorm; null means 1e-6. Not for `gpt2`, which has LayerNorm with 1e-5."""
    tie_word_embeddings: bool | None = None
    """Whether the output layer shares the token embedding's weights; null means True for `gpt2`,
    where it is required, and False for the others."""
    initializer_range: Annotated[float, Field(gt=0, le=100)] = 0.02
    """Standard deviation of the initial weights (normal distribution)."""
    scale_residual_init: bool = False
    """Whether to divide that deviation by sqrt(2 x `num_layers`) for projections into the residual
    stream, as Megatron-LM and GPT-2 do."""
    use_recompute: bool = False
    """Whether to recompute activations in the backward pass instead of storing them, which saves
    memory and costs time."""
    recompute_granularity: Recompute | None = None
    """What to recompute: the whole block (`full`, also for null), its attention (`full_attn`), or
    only the scaled dot-product attention (`core_attn`)."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also split the activations between the linear layers along the
    sequence."""
    virtual_pp_degree: Processes = 1
    """Pipeline stages per rank (interleaved schedule); more than 1 requires `pp_degree` above 1."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "ModelSettings":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def recompute(self) -> Recompute | None:
        """What is recomputed in the backward pass, or None."""
        return (self.recompute_granularity or "full") if self.use_recompute else None


class LoraSettings(Settings):
    """Low-rank adapters (LoRA). The model's own weights are frozen; those of linears are kept in
    bfloat16 if that is the data type of the passes. Lathe's own group."""

    rank: Positive | None = None
    """Rank of the adapters; null trains all weights of the model."""
    alpha: Factor = 32.0
    """The adapters' output is multiplied by `alpha` / `rank`."""
    dropout: Probability = 0.0
    """Dropout probability on the adapters' input during training."""
    targets: Annotated[list[LinearName], Field(min_length=1)] = Field(
        default=["qkv", "out", "linear1", "linear2"]
    )
    """Linear layers of a block that get adapters."""


class FinetuneSettings(Settings):
    """Finetuning of a pretrained model by `lathe finetune`. Lathe's own group."""

    lora: LoraSettings = LoraSettings()
    """Low-rank adapters, which take far less memory than training all weights."""
    samples: NonNegative = 4
    """Number of validation conversations whose last answer is written by the model before and
    after finetuning, for the report."""
    sample_tokens: Positive = 64
    """Maximum length of such an answer, in tokens."""


class LearningRate(Settings):
    """Learning rate schedule: linear warm-up, cosine decay to `min_lr`, then constant.
    PaddleFleetX's group."""

    name: Literal["CosineAnnealingWithWarmupDecay"] = "CosineAnnealingWithWarmupDecay"
    """Name of the schedule; only this one is supported."""
    decay_steps: NonNegative = 360000
    """Update at which the learning rate reaches `min_lr`, including warm-up."""
    warmup_rate: Probability = 0.01
    """Warm-up length as a fraction of `decay_steps`."""
    max_lr: Annotated[float, Field(gt=0, le=1e38)] = 5.0e-5
    """Peak learning rate after warm-up."""
    min_lr: Annotated[float, Field(ge=0)] = 1.0e-5
    """Learning rate after the decay; at most `max_lr`."""

    @model_validator(mode="after")
    def _min_below_max(self) -> "LearningRate":
        if self.min_lr > self.max_lr:
            raise ValueError(f"min_lr {self.min_lr} is above max_lr {self.max_lr}: swapped?")
        return self

    @property
    def warmup_steps(self) -> float:
        """Update after which the rate falls."""
        return self.warmup_rate * self.decay_steps


class GradClip(Settings):
    """Gradient clipping. PaddleFleetX's group."""

    name: Literal["ClipGradByGlobalNorm"] = "ClipGradByGlobalNorm"
    """Name of the clipping method; only this one is supported."""
    clip_norm: Annotated[float, Field(ge=0, le=1e38)] = 1.0
    """Maximum L2 norm of all gradients together; larger gradients are scaled down to it. 0 disables
    clipping."""


class OptimizerSettings(Settings):
    """AdamW. PaddleFleetX's group; `adam_beta1` and its other key names are accepted too."""

    name: Literal["FusedAdamW", "AdamW"] = "FusedAdamW"
    """AdamW with weight decay on all parameters but biases and norms (`FusedAdamW`), or on every
    parameter (`AdamW`), as PaddleFleetX's optimizers of these names have it."""
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.01
    """Decoupled weight decay; never applied to PACT bounds."""
    beta1: Probability = 0.9
    """Exponential decay rate of the first moment."""
    beta2: Probability = 0.999
    """Exponential decay rate of the second moment."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1.0e-8
    """Constant added to the denominator for numerical stability."""
    lr: LearningRate = LearningRate()
    """Learning rate schedule."""
    grad_clip: GradClip = GradClip()
    """Gradient norm clipping."""
