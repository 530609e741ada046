"""Conditions of samples.   B samples, N tokens"""

from typing import NamedTuple

from torch import Tensor


class Condition(NamedTuple):
    """All conditions of a network, None for those that it does not take. Networks are called as ``network(x, time, condition)``
    with x [B, C, ...] and time [B] in the unit of the network."""

    classes: Tensor | None = None
    """[B] class indices; the number of classes: no class"""
    parameters: Tensor | None = None
    """[B, P] physical parameters, normalized to about unit size"""
    tokens: Tensor | None = None
    """[B, N, J] text embeddings"""
    pooled: Tensor | None = None
    """[B, J'] pooled text embedding"""
    field: Tensor | None = None
    """[B, C', ...] on the grid of x, or a coarser one"""
    guidance: Tensor | None = None
    """[B] guidance strength, for guidance-distilled networks"""
    fine: Tensor | None = None
    """[B, C'', ...] on the grid of x, such as the state that a forecast starts from; static fields are added by ``Diffusion``"""
    sizes: Tensor | None = None
    """[B, 6] original height and width, crop top and left, target height and width of an image, in pixels"""


UNCONDITIONAL = Condition()
