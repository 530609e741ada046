"""A traced step has the operations, communication and memory of an executed step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hpcai.dist.collectives import ReduceScatter, all_gather, all_gather_object, all_reduce_, all_to_all, broadcast_object
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.kernels import triton_support
from hpcai.kernels.packed_attention import Packing, packed_attention
from hpcai.kernels.varlen_attention import varlen_attention
from hpcai.models.openfold import OpenFold, OpenFoldConfig, device_cache, parallelize
from hpcai.models.openfold.evoformer import Masks
from hpcai.nn.deferred_init import deferred
from hpcai.nn.moe import Experts, MoE, Router
from hpcai.parallel.expert import expert_parallel
from hpcai.plan.machines import find_machine
from hpcai.plan.step_trace import FLOP_FORMULAS, Communication, Kernel, StepTracer, Wait, traced_job


@contextmanager
def fake_tracer() -> Iterator[StepTracer]:
    with traced_job(1, kernels=False) as tracer, tracer.fake_tensors():
        yield tracer


def test_operations_have_flop_and_bytes() -> None:
    with fake_tracer() as tracer:
        a, b = torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(6, 8, dtype=torch.bfloat16)
        with tracer.record() as trace:
            c = a @ b
            c.t().contiguous()
            c.fill_(1)
            c.add_(torch.empty(1, dtype=torch.bfloat16).expand(4, 8))
    copy, fill = Kernel("clone", 0, 4 * 32, 2), Kernel("fill_", 0, 2 * 32, 2)
    mm, add = Kernel("mm", 2 * 4 * 6 * 8, 2 * (24 + 48 + 32), 2), Kernel("add_", 0, 2 * (32 + 1 + 32), 2)
    assert trace.events == [mm, copy, fill, add]


def test_a_gather_or_scatter_touches_no_more_rows_of_a_table_than_there_are_ids() -> None:
    with fake_tracer() as tracer:
        table, few, all_ids = torch.empty(1000, 8), torch.zeros(3, 4, dtype=torch.int64), torch.zeros(5000, dtype=torch.int64)
        with tracer.record() as trace:
            table.index_select(0, few[0])
            table.index_select(0, all_ids)
            torch.nn.functional.embedding_bag(few, table, mode="sum")
            table.index_add_(0, few[0], torch.empty(4, 8))
    moved = [event.bytes for event in trace.events if isinstance(event, Kernel) and ("index" in event.name or "bag" in event.name)]
    row = 4 * 8
    assert moved[:2] == [4 * (row + 8 + row), 1000 * row + 5000 * (8 + row)]
    assert 12 * (row + 8) + 3 * row <= moved[2] < 1000 * row and moved[3] == 4 * (8 + 3 * row)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 16, 3, stride=2), nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, stride=2)],
    ids=["strided", "depthwise", "transposed"],
)
def test_the_flop_of_a_convolution_are_those_of_its_weights(layer: Any) -> None:
    x = torch.randn(2, 8, 9, 9)
    y = layer(x)
    positions = 81 if isinstance(layer, nn.ConvTranspose2d) else y.shape[2] * y.shape[3]
    counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    with counter:
        layer(x).sum().backward()  # the input has no gradient
    assert counter.get_total_flops() == 2 * 2 * layer.weight.numel() * 2 * positions


@pytest.mark.parametrize("causal", [False, True])
def test_the_flop_of_attention_are_those_of_the_unmasked_scores(causal: bool) -> None:
    q, k = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 2, 16, 8, requires_grad=True)
    counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    with counter:
        nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True).sum().backward()
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert counter.get_total_flops() == (2 + 5) * product / (2 if causal else 1)


def test_peak_memory_is_that_of_live_tensors() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()  # saves its input
        return x

    with fake_tracer() as tracer:
        x = torch.empty(1000, requires_grad=True)
        peaks = []
        for run in (step, lambda x: checkpoint(step, x, use_reentrant=False)):
            with tracer.record() as trace:
                y: Any = run(x)
            peaks.append(trace.peak)
            del y
        with tracer.record() as trace, torch.no_grad():
            step(x)
        peaks.append(trace.peak)
    assert peaks == [4000 * 9, 4000 * 3, 4000 * 3]  # all results; x, and input and result of one operation


def test_communication_of_any_job() -> None:
    with traced_job(2048) as tracer:
        mesh = Mesh({"replicate": -1, "axial": 8}, 2048)
        axis = mesh["axial"].init_group()
        with tracer.fake_tensors(), tracer.record() as trace:
            full, shard = torch.empty(32), torch.empty(4)
            work = all_gather(full, shard, axis)
            all_to_all(torch.empty(32), full, axis).wait()
            work.wait()
            ReduceScatter(shard, full, axis).wait()
            all_reduce_(full, mesh.peers)
        assert (broadcast_object("word", mesh.peers), all_gather_object(3, axis)) == ("word", [3] * 8)
    (first, *_), ranks = [event.number for event in trace.events if isinstance(event, Communication)], tuple(range(8))
    assert [event for event in trace.events if not isinstance(event, Kernel)] == [
        Communication("all-gather", 16, ranks, first), Communication("all-to-all", 128, ranks, first + 1),
        Wait(first + 1), Wait(first),
        Communication("reduce-scatter", 16, ranks, first + 2), Wait(first + 2),
        Communication("all-reduce", 128, tuple(range(2048)), first + 3), Wait(first + 3),
    ]  # fmt: skip


def count_sent_elements(cfg: OpenFoldConfig, sequences: int, residues: int, ranks: int) -> int:
    """Return the elements sent by a rank in the forward pass of an Evoformer block (docs/performance.md), or in the backward."""
    rows, columns = -(-sequences // ranks), -(-residues // ranks)
    moved = 2 * cfg.msa * rows * columns + 2 * cfg.pair * columns**2 + 6 * cfg.pairs.triangle // ranks * columns * residues
    gathered = (cfg.rows.heads + 2 * cfg.pairs.heads) * columns * residues + cfg.rows.outer * sequences * columns
    return (ranks - 1) * (moved + gathered)


def test_the_formula_gives_the_table_of_the_published_network() -> None:
    megabytes = [2 * count_sent_elements(OpenFoldConfig(), 128, 256, ranks) / 1e6 for ranks in (2, 4, 8)]
    assert megabytes == pytest.approx([44.0, 34.6, 22.0], abs=0.05), "MB in bfloat16, as in docs/performance.md"


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_traced_block_sends_the_bytes_of_the_formula(ranks: int) -> None:
    sequences, residues = 16, 32
    cfg = OpenFoldConfig.preset("tiny", template=None, blocks=2)
    with traced_job(ranks) as tracer:
        mesh = Mesh({"axial": ranks}, ranks)
        with deferred(0):
            model = parallelize(OpenFold(cfg), mesh)
        with tracer.fake_tensors():
            block = tracer.materialize(model).evoformer.blocks[0]
            s, r = sequences // ranks, residues // ranks
            m, z = (torch.empty(size, requires_grad=True) for size in ((1, s, residues, cfg.msa), (1, r, residues, cfg.pair)))
            rows, columns, pairs = torch.empty(1, s, residues), torch.empty(1, sequences, r), torch.empty(1, r, residues)
            with tracer.record() as trace:
                torch.autograd.backward(block(m, z, Masks(rows, columns, pairs, pairs, (sequences, residues))), (m, z))
    machine, events = find_machine("h100"), [event for event in trace.events if isinstance(event, Communication)]
    sent = [machine.communication_time(event.name, event.bytes, event.ranks)[1] for event in events]
    assert len(sent) == 24 and sum(sent) == 2 * 4 * count_sent_elements(cfg, sequences, residues, ranks)


def test_experts_compute_their_rows_and_send_them() -> None:
    ranks, tokens, width, inner, experts, top_k = 4, 32, 64, 128, 8, 2
    with traced_job(8) as tracer:
        mesh = Mesh({"replicate": 8, "expert": ranks}, 8)
        with deferred(0):
            layer = MoE(Router(width, experts, top_k), Experts(width, inner, experts))
        expert_parallel(layer, mesh)
        with tracer.fake_tensors(), torch.autocast("cpu", torch.bfloat16):
            x, layer = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True), tracer.materialize(layer)
            with tracer.record() as trace:
                layer(x).sum().backward()
    rows = tokens * top_k  # of a balanced load
    products = [event.flops for event in trace.events if isinstance(event, Kernel) and event.name == "_grouped_mm"]
    assert products == [2 * rows * width * inner] * 3 * 3
    sent = [(event.bytes, event.ranks) for event in trace.events if isinstance(event, Communication)]
    assert sent == [(8 * experts, (0, 1, 2, 3))] + [(2 * rows * width, (0, 1, 2, 3))] * 4


@pytest.mark.parametrize(("window", "attended"), [(None, 16), (4, 4)])
def test_the_flop_of_packed_attention_are_those_of_its_window(window: int | None, attended: int) -> None:
    with traced_job(1) as tracer, tracer.fake_tensors():
        q, k, documents = torch.empty(2, 4, 16, 8), torch.empty(2, 2, 16, 8), torch.zeros(2, 16, dtype=torch.int64)
        q, k = (x.bfloat16().requires_grad_() for x in (q, k))
        with tracer.record() as trace:
            varlen_attention(q, k, k, documents, window).sum().backward()
    scores = 2 * 4 * attended * (16 - attended / 2)
    assert sum(event.flops for event in trace.events if isinstance(event, Kernel)) == (2 + 5) * 2 * 8 * scores


def test_the_flop_of_packed_rows_are_those_of_full_ones() -> None:
    with traced_job(1) as tracer, tracer.fake_tensors():
        q, lengths = torch.empty(32, 4, 8, dtype=torch.bfloat16, requires_grad=True), torch.empty(2, 3, dtype=torch.int64)
        with tracer.record() as trace:
            packed_attention(q, q, q, Packing.of(lengths, 16, padded=True), 0.1).sum().backward()
    names = {event.name: event.flops for event in trace.events if isinstance(event, Kernel) and event.flops}
    assert names == {f"_flash_attention_{part}": n * 2 * 8 * 32 * 4 * 16 for part, n in (("forward", 2), ("backward", 5))}


def test_a_trace_leaves_no_state() -> None:
    with pytest.raises(ZeroDivisionError), traced_job(4) as tracer, tracer.fake_tensors():
        _ = 1 / 0
    assert not torch_dist.is_initialized() and not triton_support.PLANNED and torch.ones(2).sum().item() == 2
    array = np.arange(3)
    with fake_tracer():
        assert isinstance(device_cache.to_device(array, torch.empty(1)), FakeTensor)
    assert device_cache.to_device(array, torch.empty(1)).tolist() == [0, 1, 2]


def test_a_plan_within_a_job_is_refused() -> None:
    with traced_job(2), pytest.raises(MeshError, match="belongs to no job"), traced_job(2):
        pass
