"""Embedding tables with their own update equal torch's EmbeddingBag with torch's Adagrad. Wrong bags are refused."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels import embedding_update
from hpcai.kernels.fused_optimizer import adagrad_
from hpcai.nn.embedding_bag import EmbeddingBags, check_ids, pad_bags


@given(seed=st.integers(0, 10**6), rows=st.lists(st.integers(1, 40), min_size=1, max_size=4), dim=st.sampled_from([1, 8, 24]),
       samples=st.integers(1, 9), chunk=st.sampled_from([1, 60, 1 << 17]))  # fmt: skip
def test_tables_equal_those_of_torch(seed: int, rows: list[int], dim: int, samples: int, chunk: int) -> None:
    """Two micro-batches a step, whose bags are ragged."""
    generator = torch.Generator().manual_seed(seed)
    hotness = [1 + n % 3 for n in rows]
    bags = EmbeddingBags(rows, dim, hotness, eps=1e-6).double()
    theirs = [nn.EmbeddingBag(n, dim, mode="sum", include_last_offset=True).double() for n in rows]
    parameters = [table.weight for table in theirs]
    for weight, table in zip(parameters, bags.tables):
        weight.data.copy_(table.weight)
    optimizer = torch.optim.Adagrad(parameters, lr=0.1, eps=1e-6)
    lr, scale, skip = (torch.tensor(x, dtype=torch.float64) for x in (0.1, 0.5, 0.0))
    for _ in range(2):
        for _ in range(2):
            lengths = [torch.randint(0, h + 1, (samples,), generator=generator) for h in hotness]
            offsets = [nn.functional.pad(x.cumsum(0), (1, 0)) for x in lengths]
            ids = [torch.randint(0, n, (int(x.sum()),), generator=generator) for n, x in zip(rows, lengths)]
            expected = torch.stack([table(*pair) for table, *pair in zip(theirs, ids, offsets)], 1)
            pooled, weights = bags(pad_bags(ids, offsets, rows, hotness)), torch.randn(samples, len(rows), dim, generator=generator)
            torch.testing.assert_close(pooled, expected)
            for x, factor in ((pooled, 1.0), (expected, 0.5)):
                (x * weights * factor).sum().backward()
        with patch.object(embedding_update, "_CHUNK", chunk):
            bags.update_(lr, scale, skip)
        optimizer.step()
        optimizer.zero_grad()
    for table, weight in zip(bags.tables, parameters):
        torch.testing.assert_close(table.weight, weight, rtol=1e-9, atol=1e-9)


@given(n=st.sampled_from([1, 1000, 262_145]), weight_decay=st.sampled_from([0.0, 0.1]), wide=st.booleans())
def test_adagrad_equals_torch(n: int, weight_decay: float, wide: bool) -> None:
    draws = torch.randn(4, n, generator=torch.Generator().manual_seed(n)).to(torch.float64 if wide else torch.float32)
    parameter, weights, state = nn.Parameter(draws[0].clone()), draws[0].clone(), torch.zeros_like(draws[0])
    options: dict[str, Any] = {"eps": 1e-6, "weight_decay": weight_decay}
    optimizer, lr, scale = torch.optim.Adagrad([parameter], lr=0.125, **options), torch.tensor(0.125), torch.tensor(1.0)
    for number, gradient in enumerate((draws[1], draws[2], draws[3] * torch.nan)):
        adagrad_(weights, gradient, state, lr=lr, scale=scale, found_inf=torch.tensor(float(number == 2)), **options)
        if number < 2:
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(weights, parameter.detach())
    torch.testing.assert_close(state, optimizer.state[parameter]["sum"])


@pytest.mark.parametrize(("change", "message"), [
    ({"ids": [0, 7]}, "table 0: sample 1 has the id 7, expected 0 to 6"), ({"ids": [0, -2]}, "table 0: the id -2 is negative"),
    ({"offsets": [0, 2, 1]}, r"offsets are 0 to 1, but bag 1 is \[2, 1\]; expected ascending ones from 0 to 2"),
    ({"offsets": [0, 1, 1]}, "offsets are 0 to 1; expected"), ({"hotness": [1], "offsets": [0, 2, 2]}, "at most 1 ids in a bag"),
])  # fmt: skip
def test_wrong_bags_are_refused(change: dict[str, Any], message: str) -> None:
    bags = {"ids": [0, 1], "offsets": [0, 1, 2], "hotness": [2], **change}
    tensors: list[list[Tensor]] = [[torch.tensor(bags[name])] for name in ("ids", "offsets")]
    with pytest.raises(DataError, match=message):
        pad_bags(*tensors, [7], bags["hotness"])  # type: ignore[arg-type]


def test_wrong_ids_are_refused_before_a_lookup() -> None:
    with pytest.raises(DataError, match=r"ids are \[3, 2\], expected \[samples, 3\]"):
        EmbeddingBags([7, 2], 4, [2, 1])(torch.zeros(3, 2, dtype=torch.int32))
    with pytest.raises(DataError, match="table 1: sample 2 has the id -2, expected 0 to 1"):
        check_ids(torch.tensor([[0, 1, 1], [1, 6, -1], [0, 0, -2]]), [7, 2], [2, 1])
