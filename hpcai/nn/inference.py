"""A network that is asked for an answer, in the midst of its training or without any."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def asked(model: nn.Module, weight: Tensor) -> Iterator[torch.dtype]:
    """Inside, ``model`` is in evaluation mode, without gradients, in bf16 if its ``weight`` is. Gives the dtype of its input."""
    narrow, training = weight.dtype == torch.bfloat16, model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(weight.device.type, torch.bfloat16, enabled=narrow):
            yield torch.float32 if narrow else weight.dtype
    finally:
        model.train(training)
