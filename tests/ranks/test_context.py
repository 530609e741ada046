"""With tokens sharded over ranks, losses, gradients, updates and checkpoints equal those of one process."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.parallel.context import ContextParallelAttention, LocalChunk, _GatheredKV
from tests.ranks.language_model import check_reshard, check_sharded_equals_full, sharded
from tests.ranks.launch import on_ranks
from tests.ranks.training import Case


@pytest.mark.parametrize("axes", [{"context": 2}, {"context": 4}, {"replicate": 2, "context": 2}], ids=str)
def test_sharded_equals_unsharded(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"model": "tied"}, {"model": "gpt", "packed": True}, {"model": "llama", "adapted": True}]
    more = sharded({"model": "llama", "packed": True}, "optimizer", "weights") if "replicate" in axes else []
    check_sharded_equals_full(axes, cases + more)


def test_a_checkpoint_loads_on_every_mesh(tmp_path: Path) -> None:
    places = [({"context": 2}, "none"), ({}, "none"), ({"replicate": 2, "context": 2}, "optimizer"), ({"context": 4}, "none")]
    check_reshard([(axes, {"model": "llama", "shard": shard}) for axes, shard in places], tmp_path)


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


# ---- attention alone


def example() -> tuple[Tensor, ...]:
    """Return q, k, v of 4 and 2 heads, the gradient of the output, and documents of any length.   T is 24"""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return *(torch.randn(2, h, 24, 8, generator=generator).double() for h in heads), torch.arange(48).reshape(2, 24) // 7


def attend(mesh: Mesh, regather: bool, packed: bool) -> tuple[list[np.ndarray], int, bool]:
    """Return the output and gradients of q, k, v on this rank, the number of all-gathers, and whether full tensors were saved."""
    *tensors, documents = example()
    local = LocalChunk(mesh["context"], 2)
    q, k, v, gradient = (local(tensor).clone().requires_grad_() for tensor in tensors)
    gathered: list[StorageWeakRef] = []
    gather = _GatheredKV.gather

    def counted(self: _GatheredKV) -> Tensor:
        whole = gather(self)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    with patch.object(_GatheredKV, "gather", counted):
        out = ContextParallelAttention(mesh["context"], regather)(q, k, v, documents if packed else None)
        kept = any(not whole.expired() for whole in gathered)
        gradients = torch.autograd.grad(out, (q, k, v), gradient)
    assert not any(not whole.expired() for whole in gathered), "they are freed after the backward pass"
    return [numbers(tensor) for tensor in (out, *gradients)], len(gathered), kept


def reference(packed: bool) -> list[np.ndarray]:
    q, k, v, gradient, documents = example()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = torch.ones(24, 24, dtype=torch.bool).tril() & (not packed or documents[:, None, :, None] == documents[:, None, None, :])
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return [numbers(tensor) for tensor in (out, *torch.autograd.grad(out, (q, k, v), gradient))]


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_grouped_queries_and_packed_documents_are_sharded_too(ranks: int, packed: bool) -> None:
    for again in (True, False):
        found = on_ranks({"context": ranks}, attend, again, packed)
        for rank, (mine, count, kept) in enumerate(found):
            assert count == (0 if ranks == 1 else 1 + again)
            assert kept == (ranks > 1 and not again), "only local keys and values are saved"
            blocks = (np.split(value, 2 * ranks, 2) for value in reference(packed))
            for value, right in zip(mine, blocks):
                np.testing.assert_allclose(value, np.concatenate((right[rank], right[2 * ranks - 1 - rank]), 2), rtol=0, atol=1e-12)


def attend_bf16(mesh: Mesh) -> tuple[Any, np.ndarray]:
    """Return the dtype of the all-gather under autocast, and the output on this rank."""
    own = LocalChunk(mesh["context"], 2)
    q, k, v = (own(tensor).float() for tensor in example()[:3])
    spied = patch.object(_GatheredKV, "gather", autospec=True, side_effect=_GatheredKV.gather)
    with torch.autocast("cpu", torch.bfloat16), spied as spy:
        out = ContextParallelAttention(mesh["context"])(q, k, v)
    return str(spy.call_args.args[0].local.dtype), out.float().numpy().copy()


def test_under_autocast_16_bits_are_gathered() -> None:
    right = np.split(reference(packed=False)[0], 4, 2)
    for rank, (kind, out) in enumerate(on_ranks({"context": 2}, attend_bf16)):
        assert kind == "torch.bfloat16"
        np.testing.assert_allclose(out, np.concatenate((right[rank], right[3 - rank]), 2), rtol=0, atol=0.03)


def chunks(mesh: Mesh) -> tuple[list[int], str]:
    axis = mesh["context"]
    with pytest.raises(DataError) as problem:
        LocalChunk(axis, -1)(torch.arange(18))
    return LocalChunk(axis, -1)(torch.arange(24)).tolist(), str(problem.value)


def test_causal_attention_costs_each_rank_the_same_and_a_remainder_is_refused() -> None:
    found = on_ranks({"context": 4}, chunks)
    assert sorted(sum((tokens for tokens, _ in found), [])) == list(range(24))
    assert {sum(tokens) for tokens, _ in found} == {69}
    assert found[1][0] == [3, 4, 5, 18, 19, 20]
    assert "a sample of 18 tokens does not divide into 2 x 4 chunks (mesh.context)" in found[0][1]
