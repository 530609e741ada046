"""A tokenizer with a vocabulary of nine words, and small text encoders of pipelines."""

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


def save_text_encoders(folder: Path, kind: str) -> None:
    """Save random text encoders of a pipeline: ``flux``, ``sdxl``, ``sd3``, or ``sd3 without T5``."""
    import transformers

    for suffix, hidden, projected in (("", 12, 10), ("_2", 16, 6))[: 1 if kind == "flux" else 2]:
        clip = transformers.CLIPTextConfig(
            vocab_size=20, hidden_size=hidden, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
            max_position_embeddings=9, eos_token_id=2, bos_token_id=1, pad_token_id=0, projection_dim=projected,
        )  # fmt: skip
        is_projected = suffix or kind.startswith("sd3")
        cls = transformers.CLIPTextModelWithProjection if is_projected else transformers.CLIPTextModel
        cls(clip).save_pretrained(folder / f"text_encoder{suffix}")
        save_tokenizer(folder / f"tokenizer{suffix}", True)
    if (t5 := {"flux": (8, "_2"), "sd3": (30, "_3")}.get(kind)) is not None:
        cfg = transformers.T5Config(vocab_size=20, d_model=t5[0], d_kv=4, d_ff=16, num_layers=2, num_heads=2)
        transformers.T5EncoderModel(cfg).save_pretrained(folder / f"text_encoder{t5[1]}")
        save_tokenizer(folder / f"tokenizer{t5[1]}", False)
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text('{"joint_attention_dim": 40}')
