"""What samples are asked to be.   B samples"""

from typing import NamedTuple

from torch import Tensor


class Condition(NamedTuple):
    """None is what a network has no use for. Networks are called as ``network(x, time, condition)``, where ``x`` is [B, C, ...] and
    ``time`` [B] in the network's own unit."""

    classes: Tensor | None = None
    """numbers of classes [B]; as many as there are classes: none of them"""
    parameters: Tensor | None = None
    """physical parameters [B, P], of about unit size"""
    tokens: Tensor | None = None
    """[B, N, J]"""
    pooled: Tensor | None = None
    """of a whole text [B, J']"""
    field: Tensor | None = None
    """on the places of ``x``, or on fewer of them [B, C', ...]"""
    guidance: Tensor | None = None
    """what a network that was distilled is told [B]"""


UNCONDITIONAL = Condition()
