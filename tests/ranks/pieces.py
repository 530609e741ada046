"""What ranks hold of a step, put together to what one process would hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcai.train.step import Step

Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]


def pieces(step: Step) -> Pieces:
    """What this rank holds of weights, gradients, moments and averages: name, size of the whole, offsets there, numbers."""
    found: Pieces = []
    step.reducer.wait()
    for state in step.optimizer.states:
        rows = {"weight": state.weights, "gradient": state.flat_param.gradient(), "average": state.average, **state.moments}
        for part in state.flat_param.views:
            for what, row in rows.items():
                if row is not None:
                    name, size = f"{part.name} {what}", part.spec.global_shape
                    found += [(name, size, at, t.detach().double().numpy().copy()) for at, t in part.boxes(row)]
    return found


def joined(ranks: Sequence[Pieces]) -> dict[str, Any]:
    """The wholes; what several ranks hold is the same, bit for bit."""
    found: dict[str, Any] = {}
    for name, size, at, value in (piece for rank in ranks for piece in rank):
        whole = found.setdefault(name, np.full(size, np.nan, value.dtype))
        box = tuple(slice(o, o + n) for o, n in zip(at, value.shape))
        assert np.all(np.isnan(whole[box]) | (whole[box] == value)), name
        whole[box] = value
    assert not any(np.isnan(whole).any() for whole in found.values())
    return found


def same(found: dict[str, Any], right: dict[str, Any], close: float = 1e-11) -> None:
    """With ``close`` 0, bit for bit."""
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=close * max(1.0, np.abs(value).max()), err_msg=name)
