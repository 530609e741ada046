"""Settings of BERT. Does not import torch."""

from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveFloat, PositiveInt, Rate, Settings


class BertConfig(Settings):
    """An encoder of tokens (Devlin et al. 2018), by default BERT-large of MLPerf: 336,226,108 parameters."""

    vocabulary: PositiveInt = 30_522
    """number of tokens, with padding to a multiple of 8"""
    width: PositiveInt = 1024
    """channels of a token"""
    layers: NonNegativeInt = 24
    heads: PositiveInt = 16
    inner: PositiveInt = 4096
    """channels within the feed-forward layers"""
    positions: PositiveInt = 512
    """tokens of a sequence, at most"""
    types: PositiveInt = 2
    """types of tokens: first and second sentence"""
    nsp: bool = True
    """next-sentence prediction, with the pooler; without it, as for proteins, the network predicts masked tokens only"""
    activation: Literal["gelu", "gelu_pytorch_tanh"] = "gelu"
    """GELU by the error function (transformers), or its tanh approximation (MLPerf, in TensorFlow and by NVIDIA)"""
    dropout: Rate = 0.1
    """of embeddings and of the outputs of attention and feed-forward layers"""
    attention_dropout: Rate = 0.1
    """of attention probabilities"""
    eps: PositiveFloat = 1e-12
    """of layer norms"""
    deviation: PositiveFloat = 0.02
    """standard deviation of initial weights"""
    recompute: Literal["none", "selective", "layers"] = "none"
    """activation checkpointing: of cheap operations, or of layers as a whole"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}, which {self.heads} heads do not divide; take a multiple of them")
        return self
