"""A tokenizer of nine words, for encoders that are as small."""

from pathlib import Path

WORDS = ["red", "green", "blue", "a", "cat", "dog", "on", "the", "moon"]


def tokenizer(folder: Path, begins: bool) -> None:
    """One that knows words, with an end, and perhaps a beginning."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "?", *WORDS])}, "?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    single = "<s> $A </s>" if begins else "$A </s>"
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="?")
    fast.save_pretrained(folder)
