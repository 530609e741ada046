"""Language models: text to tokens."""

from hpcai.lazy import lazy

__getattr__, _names = lazy(
    __name__,
    {
        ".tokens": ["Stream", "Tokenizer"],
    },
)
__all__ = [*_names]
