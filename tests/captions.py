"""A tokenizer with a vocabulary of nine words, for small text encoders."""

from pathlib import Path

WORDS = ["red", "green", "blue", "a", "cat", "dog", "on", "the", "moon"]


def save_tokenizer(folder: Path, bos: bool) -> None:
    """Save a word-level tokenizer with an EOS token and, with ``bos``, a BOS token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "?", *WORDS])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single = "<s> $A </s>" if bos else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="?")
    fast.save_pretrained(folder)
