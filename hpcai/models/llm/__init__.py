"""Language models: text to tokens, decoders of tokens, tokens to text."""

from hpcai.lazy import attach
from hpcai.models.llm.config import LLMConfig, LoRAConfig, SamplingConfig

__getattr__, _names = attach(
    __name__,
    {
        ".generation": ["complete", "generate"],
        ".likelihood": ["likelihoods", "log_likelihoods"],
        ".load": ["load_weights", "load_later", "save_folder"],
        ".lora": ["adapt", "load_adapter", "merge", "save_adapter"],
        ".model": ["LLM"],
        ".objective": ["Batch", "entropies", "loss", "score"],
        ".parallel": ["parallelize", "stages"],
        ".speech": ["Text"],
        ".tokens": ["Stream", "Tokenizer"],
    },
)
__all__ = ["LLMConfig", "LoRAConfig", "SamplingConfig", *_names]
