"""Language models: text to tokens, decoders of tokens, tokens to text."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["EngineConfig", "LLMConfig", "LoRAConfig", "SamplingConfig"],
        ".engine": ["Engine", "Request"],
        ".generation": ["complete", "generate"],
        ".likelihood": ["greedy_log_likelihoods", "likelihoods", "log_likelihoods"],
        ".load": ["load_weights", "load_deferred", "save_folder"],
        ".lora": ["adapt", "load_adapter", "merge", "save_adapter"],
        ".model": ["LLM"],
        ".objective": ["Batch", "entropies", "loss", "score"],
        ".parallel": ["build_pipeline", "parallelize"],
        ".text": ["Text"],
        ".tokenizer": ["DecodeStream", "Tokenizer"],
    },
)
