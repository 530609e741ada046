"""Seeds of a model and of its dropout."""

from types import SimpleNamespace
from typing import Any

import torch

from hpcai import train


def drawn(copy: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh: Any = {"replicate": SimpleNamespace(rank=copy)}
    with train.seeds(7, mesh):
        weights = torch.rand(4)
    return weights, torch.rand(4)


def test_copies_begin_with_the_same_weights_and_draw_numbers_of_their_own() -> None:
    (weights, dropout), (again, other) = drawn(0), drawn(1)
    assert torch.equal(weights, again) and not torch.equal(dropout, other)
    assert torch.equal(dropout, drawn(0)[1]), "those of one copy are always the same"
