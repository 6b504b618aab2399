"""Tokenizers built without training."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def byte_tokenizer() -> Tokenizer:
    """Byte-level tokenizer with 257 ids: one per byte, then <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"<|endoftext|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def metaspace_tokenizer(puts_bos: bool = False) -> Tokenizer:
    """BPE tokenizer in the style of SentencePiece: U+2581 for spaces, with byte fallback.

    Args:
        puts_bos: whether it prepends `<s>` to every text.
    """
    letters = ["\u2581", *"abcdeflo"]
    merges = [("l", "o"), ("\u2581", "a"), ("\u2581", "lo")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if puts_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer
