"""Inference with a model, during training or without it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def inference_mode(model: nn.Module, weight: Tensor) -> Iterator[torch.dtype]:
    """Context manager: ``model`` is in evaluation mode, without gradients, and under bfloat16 autocast if ``weight`` is bfloat16.
    Yield the dtype of the input. The exit restores the mode of the model."""
    is_bf16, training = weight.dtype == torch.bfloat16, model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(weight.device.type, torch.bfloat16, enabled=is_bf16):
            yield torch.float32 if is_bf16 else weight.dtype
    finally:
        model.train(training)
