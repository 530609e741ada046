"""A generation engine: continuous batching over a paged KV cache."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(__name__, {".engine": ["Engine"], ".scheduler": ["Request"], ".vllm": ["VLLMEngine"]})
