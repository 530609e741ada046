"""Shards of a step's training state on each rank, and the full tensors gathered from them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcai.train.step import Step

Shards = list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]


def local_shards(step: Step) -> Shards:
    """Return the local shards of weights, gradients, moments and averages: name, global shape, offsets, values."""
    shards: Shards = []
    step.reducer.wait()
    for state in step.optimizer.states:
        tensors = {"weight": state.weights, "gradient": state.flat_param.gradient(), "average": state.average, **state.moments}
        for part in state.flat_param.views:
            for kind, row in tensors.items():
                if row is not None:
                    name, size = f"{part.name} {kind}", part.spec.global_shape
                    shards += [(name, size, at, t.detach().double().numpy().copy()) for at, t in part.boxes(row)]
    return shards


def gather_full(ranks: Sequence[Shards]) -> dict[str, Any]:
    """Return the full tensors. Assert that replicated elements are bitwise equal, and that no element is missing."""
    tensors: dict[str, Any] = {}
    for name, size, at, value in (piece for rank in ranks for piece in rank):
        full = tensors.setdefault(name, np.full(size, np.nan, value.dtype))
        box = tuple(slice(o, o + n) for o, n in zip(at, value.shape))
        assert np.all(np.isnan(full[box]) | (full[box] == value)), name
        full[box] = value
    assert not any(np.isnan(tensor).any() for tensor in tensors.values())
    return tensors


def check_equal(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-11) -> None:
    """Assert that tensors agree within ``tolerance`` relative to their largest element."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=tolerance * max(1.0, np.abs(value).max()), err_msg=name)
