"""Noise is a function of the seed, its use, the index of the sample, the epoch and the position only."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import philox
from hpcai.models.diffusion.noise import NOISE, SAMPLER_STEPS, TIMES, normals, uniforms
from tests.reference_data import load_arrays, load_json
from tests.unit.models.operation_checks import ForbidOps

SIZE = (3, 6, 5, 7)
INDEX, EPOCH = torch.tensor([5, 0, 2**40 - 1, 7, 5]), torch.tensor([0, 3, 2**23 - 1, 3, 1])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
DRAWS = pytest.mark.parametrize("draw", [normals, uniforms], ids=["normals", "uniforms"])


@pytest.mark.parametrize("case", load_json("diffusion/philox/normals"), ids=lambda case: f"seed {case['seed']}")
def test_normals_of_a_stream_equal_the_reference(case: dict[str, Any]) -> None:
    stored, i = load_arrays("diffusion/philox/normals"), case["index"]
    a, b, c, d = case["counter"]
    kwargs: dict[str, Any] = {"upper": c + (d << 32)}
    first, seed = 4 * (a + (b << 32)), case["seed"]
    assert np.array_equal(philox.bits(seed, first, 64, **kwargs).view(16, 4).numpy(), stored[f"words_{i}"])
    np.testing.assert_allclose(philox.normal(seed, first, 64, **kwargs).numpy(), stored[f"normal_{i}"], rtol=0, atol=3e-6)


@DTYPES
@DRAWS
def test_noise_does_not_depend_on_order_and_batch(draw: Callable[..., Tensor], dtype: torch.dtype) -> None:
    full = draw(11, NOISE, INDEX, EPOCH, SIZE, dtype=dtype)
    assert full.shape == (5, *SIZE) and full.dtype == dtype
    order = torch.tensor([3, 1, 4, 0, 2])
    for part in (*order.split(2), order):
        assert torch.equal(draw(11, NOISE, INDEX[part], EPOCH[part], SIZE, dtype=dtype), full[part])
    assert torch.equal(draw(11, NOISE, INDEX[1:2], 3, SIZE, dtype=dtype), full[1:2]), "a scalar epoch"
    scalars = draw(11, TIMES, INDEX, EPOCH, dtype=dtype)
    assert scalars.shape == (5,) and torch.equal(scalars, draw(11, TIMES, INDEX, EPOCH, SIZE, dtype=dtype)[:, 0, 0, 0, 0])


@DTYPES
def test_noise_of_a_box_is_a_slice_of_the_full_sample(dtype: torch.dtype) -> None:
    full = normals(11, NOISE, INDEX, EPOCH, SIZE, dtype=dtype)
    choices = [(slice(None), slice(a, a + 1 + n // 2), slice(n - 1, n), slice(1, 1)) for n, a in zip(SIZE, (1, 2, 1, 3))]
    for box in product(*choices):
        part = normals(11, NOISE, INDEX, EPOCH, SIZE, box=box, dtype=dtype)
        assert torch.equal(part, full[(slice(None), *box)]), box
    assert torch.equal(normals(11, NOISE, INDEX, EPOCH, SIZE, box=(slice(-1, None),), dtype=dtype), full[:, -1:])


def test_no_two_values_of_a_run_share_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare counters at the first and the last value of each component."""
    counters: list[tuple[int, ...]] = []
    original = philox._words

    def record(rows: list[Tensor], free: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
        counters.extend((*key, *counter) for counter in torch.stack([row.flatten() for row in rows], 1).tolist())
        return original(rows, free, key)

    monkeypatch.setattr(philox, "_words", record)
    index, last = torch.tensor([0, 1, 2**32, 2**40 - 1]), 2**44 - 4
    uses = NOISE, TIMES, SAMPLER_STEPS, 2**19 - 1
    for seed, use, epoch, start in product((0, 1, 2**63 - 1), uses, (0, 1, 2**23 - 1), (0, last)):
        normals(seed, use, index, epoch, (2**44,), box=(slice(start, start + 1),))
    assert len(set(counters)) == len(counters) == 3 * 4 * 3 * 2 * 4


def test_the_host_reads_nothing_and_copies_nothing_to_the_device() -> None:
    for batch in (5, 1):
        with ForbidOps():
            normals(11, NOISE, INDEX[:batch], EPOCH[:batch], SIZE, box=(slice(0, 2), slice(3, 5)))
            uniforms(11, TIMES, INDEX[:batch], EPOCH[:batch])


def test_values_out_of_bounds_are_errors() -> None:
    for change, text in (
        ({"seed": -1}, "seed is -1"),
        ({"use": 2**19}, "use 524288 in epoch 0; expected uses below 2"),
        ({"epoch": 2**23}, "use 0 in epoch 8388608"),
        ({"size": (2**23, 2**22)}, "has more than 2.44 elements"),
        ({"box": (slice(0, 4, 2),)}, "expected slices of step 1"),
    ):
        valid: dict[str, Any] = {"seed": 0, "use": NOISE, "index": torch.tensor([1, 2]), "epoch": 0, "size": (8,)}
        with pytest.raises(ConfigError, match=text):
            normals(**(valid | change))
