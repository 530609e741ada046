"""Philox: the known answers of its authors, elements that do not depend on the call, and the distributions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.kernels import philox

KNOWN = {  # counter, key, answer: kat_vectors of Random123
    ((0, 0, 0, 0), 0): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ((0xFFFFFFFF,) * 4, 2**64 - 1): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822): "d16cfe09 94fdcceb 5001e420 24126ea1",
}
STREAMS: list[tuple[Callable[..., Tensor], dict[str, Any]]] = [
    (philox.bits, {}),
    *((make, {"dtype": dtype}) for make in (philox.uniform, philox.normal) for dtype in (torch.float32, torch.float64)),
]
streams = pytest.mark.parametrize(
    ("make", "kwargs"), STREAMS, ids=lambda x: str(x.get("dtype", "")) if isinstance(x, dict) else x.__name__
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "_BLOCK", 1 << 9)


def words(counter: tuple[int, ...], key: int) -> list[int]:
    rows, buffers = torch.tensor(counter)[:, None].unbind(), (torch.empty(1, dtype=torch.int64) for _ in range(2))
    return [int(word) for word in philox._words(list(rows), list(buffers), philox._halves(key))]


@pytest.mark.parametrize(("counter_and_key", "answer"), KNOWN.items(), ids=["zeros", "ones", "pi"])
def test_known_answers_of_the_authors(counter_and_key: tuple[tuple[int, ...], int], answer: str) -> None:
    counter, key = counter_and_key
    assert " ".join(f"{word:08x}" for word in words(counter, key)) == answer
    if not any(counter):
        assert [f"{int(word):08x}" for word in philox.bits(key, 0, 4)] == answer.split(), "counter 0 gives elements 0 to 3"


def test_counters_and_keys_have_more_than_32_bits() -> None:
    assert philox.bits((7 << 32) + 9, 4 * ((3 << 32) + 5), 4).tolist() == words((5, 3, 0, 0), (7 << 32) + 9)
    assert torch.equal(philox.bits(-1, 0, 9), philox.bits(2**64 - 1, 0, 9)), "a key is 64 bits, signed or not"


@streams
def test_an_element_does_not_depend_on_the_call_that_draws_it(make: Any, kwargs: dict[str, Any]) -> None:
    full = make(7, 0, 40_003, **kwargs)
    for first, count in ((0, 1), (1, 3), (2, 40_001), (8191, 17), (12_345, 20_000), (40_002, 1)):
        assert torch.equal(make(7, first, count, **kwargs), full[first : first + count]), (first, count)
    indices = torch.randint(0, 40_003, (37, 41))
    assert torch.equal(make(7, indices, **kwargs), full[indices])
    starts = torch.randint(0, 30_000, (5, 3))
    for count in (1, 2, 9, 10_000):
        assert torch.equal(make(7, starts, count, **kwargs), full[starts[..., None] + torch.arange(count)]), count
    out = torch.empty(40_003, dtype=full.dtype)
    assert make(torch.tensor(7), 0, 40_003, out=out, **kwargs) is out and torch.equal(out, full)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(make(7, 0, 40_003, **kwargs), full)
    finally:
        torch.set_num_threads(threads)


@streams
def test_each_element_may_have_its_own_key(make: Any, kwargs: dict[str, Any]) -> None:
    keys, starts = torch.randint(-(2**63), 2**63 - 1, (6, 1)), torch.randint(0, 2**40, (6, 4))
    elements, rows = make(keys, starts, **kwargs), make(keys, starts, 11, **kwargs)
    for i, j in ((0, 0), (3, 2), (5, 3)):
        expected = make(int(keys[i]), int(starts[i, j]), 11, **kwargs)
        assert torch.equal(rows[i, j], expected) and elements[i, j] == expected[0]


@streams
def test_keys_and_neighbours_are_uncorrelated(make: Any, kwargs: dict[str, Any]) -> None:
    first, second = (make(key, 0, 100_000, **kwargs).double() for key in (1, 2))
    pairs = [(first, second), *((first[:-lag], first[lag:]) for lag in (1, 2, 3, 4, 64))]
    for x, y in pairs:
        assert abs(torch.corrcoef(torch.stack((x, y)))[0, 1]) < 0.015


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype: torch.dtype) -> None:
    n = 1 << 20
    u, z = philox.uniform(3, 0, n, dtype=dtype).double(), philox.normal(3, 0, n, dtype=dtype).double()
    for x, cdf in ((u, lambda x: x), (z, torch.special.ndtr)):
        largest = (cdf(x.sort().values) - torch.arange(n) / n).abs().max().item()
        assert largest < 1.95 / math.sqrt(n), "Kolmogorov-Smirnov: 1 of 1000 samples would exceed this"
    assert u.min() >= 0 and u.max() < 1 and (u * 2 ** (24 if dtype == torch.float32 else 53)).frac().eq(0).all()
    moments = [z.mean(), z.square().mean() - 1, z.pow(3).mean(), z.pow(4).mean() - 3]
    assert all(abs(x) < 5 * scale / math.sqrt(n) for x, scale in zip(moments, (1, 2**0.5, 15**0.5, 96**0.5)))
    assert z.abs().max() > 4.5
