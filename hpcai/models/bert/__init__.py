"""BERT: masked language models of text, proteins and molecules."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["BertConfig"],
        ".model": ["Bert", "BertClassifier"],
        ".objective": ["Batch", "attention_maps", "counted", "loss", "score"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights", "save_folder"],
    },
)
