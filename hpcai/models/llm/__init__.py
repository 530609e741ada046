"""Language models: text to tokens, decoders of tokens, tokens to text."""

from hpcai.lazy import lazy
from hpcai.models.llm.config import LLMConfig, LoRAConfig

__getattr__, _names = lazy(
    __name__,
    {
        ".generation": ["SamplingConfig", "complete", "generate"],
        ".load": ["load_weights", "load_later", "save_folder"],
        ".lora": ["adapt", "load_adapter", "merge", "save_adapter"],
        ".model": ["LLM"],
        ".objective": ["Batch", "entropies", "likelihoods", "loss", "score"],
        ".parallel": ["parallelize", "stages"],
        ".tokens": ["Stream", "Tokenizer"],
    },
)
__all__ = ["LLMConfig", "LoRAConfig", *_names]
