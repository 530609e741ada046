"""Arrays and the boxes that are asked of them."""

from typing import Any

import numpy as np
from hypothesis import strategies as st


@st.composite
def boxes(draw: Any, dtypes: list[str]) -> tuple[np.ndarray, tuple[int, ...] | None, list[slice | int]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.integers(0, 4)) == 0:
        shape = (2, 30, 40, 9)
    array = np.arange(np.prod(shape)).astype(draw(st.sampled_from(dtypes))).reshape(shape)
    chunks = tuple(draw(st.integers(1, n)) for n in shape) if draw(st.booleans()) else None
    where: list[slice | int] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size - 1))
        where.append(draw(st.sampled_from([start, start - size, slice(start, draw(st.integers(start, size))), slice(None)])))
    return array, chunks, where
