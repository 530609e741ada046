"""Context parallelism: losses, gradients and updates equal those of one process; test_llm.py has its checkpoints."""

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
from tests.ranks.language_model import check_sharded_equals_full, with_shard
from tests.ranks.launch import on_ranks
from tests.ranks.training import Case


@pytest.mark.parametrize("axes", [{"context": 2}, {"context": 4}, {"replicate": 2, "context": 2}], ids=str)
def test_sharded_equals_unsharded(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"model": "tied"}, {"model": "gpt", "packed": True}, {"model": "llama", "adapted": True}]
    sharded = with_shard({"model": "llama", "packed": True}, "optimizer", "weights") if "replicate" in axes else []
    check_sharded_equals_full(axes, cases + sharded)


def to_numpy(tensor: Tensor) -> np.ndarray:
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

    def recording_gather(self: _GatheredKV) -> Tensor:
        full = gather(self)
        gathered.append(StorageWeakRef(full.untyped_storage()))
        return full

    with patch.object(_GatheredKV, "gather", recording_gather):
        out = ContextParallelAttention(mesh["context"], regather)(q, k, v, documents if packed else None)
        saved = any(not ref.expired() for ref in gathered)
        gradients = torch.autograd.grad(out, (q, k, v), gradient)
    assert not any(not ref.expired() for ref in gathered), "they are freed after the backward pass"
    return [to_numpy(tensor) for tensor in (out, *gradients)], len(gathered), saved


def reference(packed: bool) -> list[np.ndarray]:
    q, k, v, gradient, documents = example()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = torch.ones(24, 24, dtype=torch.bool).tril() & (not packed or documents[:, None, :, None] == documents[:, None, None, :])
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return [to_numpy(tensor) for tensor in (out, *torch.autograd.grad(out, (q, k, v), gradient))]


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_grouped_queries_and_packed_documents_are_sharded_too(ranks: int, packed: bool) -> None:
    for regather in (True, False):
        results = on_ranks({"context": ranks}, attend, regather, packed)
        for rank, (arrays, count, saved) in enumerate(results):
            assert count == (0 if ranks == 1 else 1 + regather)
            assert saved == (ranks > 1 and not regather), "only local keys and values are saved"
            blocks = (np.split(value, 2 * ranks, 2) for value in reference(packed))
            for value, full in zip(arrays, blocks):
                np.testing.assert_allclose(value, np.concatenate((full[rank], full[2 * ranks - 1 - rank]), 2), rtol=0, atol=1e-12)


def attend_bf16(mesh: Mesh) -> tuple[Any, np.ndarray]:
    """Return the dtype of the all-gather under autocast, and the output on this rank."""
    local = LocalChunk(mesh["context"], 2)
    q, k, v = (local(tensor).float() for tensor in example()[:3])
    patched = patch.object(_GatheredKV, "gather", autospec=True, side_effect=_GatheredKV.gather)
    with torch.autocast("cpu", torch.bfloat16), patched as spy:
        out = ContextParallelAttention(mesh["context"])(q, k, v)
    return str(spy.call_args.args[0].local.dtype), out.float().numpy().copy()


def test_under_autocast_keys_and_values_are_gathered_in_bfloat16() -> None:
    chunks = np.split(reference(packed=False)[0], 4, 2)
    for rank, (dtype, out) in enumerate(on_ranks({"context": 2}, attend_bf16)):
        assert dtype == "torch.bfloat16"
        np.testing.assert_allclose(out, np.concatenate((chunks[rank], chunks[3 - rank]), 2), rtol=0, atol=0.03)


def local_chunks(mesh: Mesh) -> tuple[list[int], str]:
    axis = mesh["context"]
    with pytest.raises(DataError) as problem:
        LocalChunk(axis, -1)(torch.arange(18))
    return LocalChunk(axis, -1)(torch.arange(24)).tolist(), str(problem.value)


def test_causal_attention_costs_each_rank_the_same_and_a_remainder_is_refused() -> None:
    results = on_ranks({"context": 4}, local_chunks)
    assert sorted(sum((tokens for tokens, _ in results), [])) == list(range(24))
    assert {sum(tokens) for tokens, _ in results} == {69}
    assert results[1][0] == [3, 4, 5, 18, 19, 20]
    assert "a sample of 18 tokens does not divide into 2 x 4 chunks (mesh.context)" in results[0][1]
