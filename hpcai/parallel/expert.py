"""Expert parallelism: the experts of a mixture are sharded over replicas, and an all-to-all brings each token to its experts; and
tensor parallelism: the inner channels of each expert are sharded.

    tensor_parallel_experts(layer, mesh["tensor"], sequence=1)
    expert_parallel(layer, mesh)                           # mesh.expert neighbouring replicas share the experts

Lepikhin et al., "GShard", 2021. Replicas that share experts compute them for the tokens of all: their gradients are complete, and
are summed over replicas with the same experts only. While tokens travel to their experts, the shared expert computes, in the
backward pass too. Routing is that of one process: with a balance loss or a bias, load is counted over all ranks.
R rows, E experts, n the ranks that share them, E' experts of a rank.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dist.mesh import Axis, Mesh
from hpcai.dynamo import UntransformedFunction
from hpcai.errors import MeshError
from hpcai.nn.moe import Experts, Gather, MoE, RowOrder
from hpcai.parallel.axial import AllToAll, AxisSeam, Work
from hpcai.parallel.batchnorm import AllReduce
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.sharding import shard_
from hpcai.parallel.tensor import ParallelSequence, ReduceOutput


def expert_parallel(moe: MoE, mesh: Mesh) -> None:
    """Shard the experts of ``moe``, in place, over ``mesh.expert`` neighbouring replicas, each with any number of experts >= 1.

    Call it for a size of 1 as well, if there are several replicas: it also lets the router count the load of all ranks. Ranks of a
    group call the layer equally often, also in an evaluation; with a capacity they have equal numbers of tokens. Raises MeshError
    for more ranks than experts.
    """
    size, total = mesh.sizes["expert"], len(moe.gate.counts)
    if size > total:
        raise MeshError(f"mesh.expert is {size}, but a layer has {total} experts; set it to {total} or less")
    if size > 1 and mesh.sizes["evaluate"]:
        raise MeshError(f"mesh.expert is {size}, but processes of mesh.evaluate have all experts; set one of them to its default")
    between, within = mesh.split("replicate", size, "mesh.expert")
    moe.gate.all_reduce = AllReduce(*(mesh[name] for name in ("replicate", "context") if mesh[name].size > 1))
    if within.size == 1:
        return
    for parameter in moe.experts.parameters():
        shard_(parameter, 0, within)
    sum_gradients_over(moe.experts, between)
    moe.exchange = _Exchange(within.init_group(), total)


def tensor_parallel_experts(moe: MoE, axis: Axis, sequence: int | None) -> None:
    """Shard the inner channels of the experts of ``moe`` in place. All tokens are routed on each rank, so that the gradients of the
    router are parts of a sum, as are those of the output biases. ``sequence``: The dim along which tokens are sharded outside the
    layer, as in ``column_parallel``. The shared expert gets its tokens as they are outside."""
    if axis.size == 1:
        return
    for name, parameter in moe.experts.named_parameters():
        if name != "down_proj_bias":
            shard_(parameter, 2 if name == "down_proj" else 1, axis)
    for part in (moe.experts, moe.gate):
        sum_gradients_over(part, axis)
    moe.experts.adds_output_bias, moe.gate.copies = axis.rank == 0, axis.size
    moe.tensor = _TensorSeam(axis.init_group(), sequence)


class _TensorSeam(AxisSeam):
    """Begin with the tokens of all ranks, whose gradients are summed; finish with the sum of partial outputs, or a shard of it."""

    def __init__(self, axis: Axis, sequence: int | None) -> None:
        super().__init__(axis)
        self.sequence = sequence

    def begin(self, x: Tensor, *sizes: int) -> Tensor:
        return _Enter.apply(x, ParallelSequence(self.axis, self.sequence))

    def finish(self, handle: Tensor) -> Tensor:
        return ReduceOutput.apply(handle, self.axis, self.sequence)


class _Enter(UntransformedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ParallelSequence) -> Tensor:
        ctx.shard = shard
        full = shard.all_gather(x).wait()
        return full.view_as(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.shard.reduce_scatter(grad.clone(memory_format=torch.contiguous_format)).wait(), None


class _Exchange(nn.Module):
    """An all-to-all of rows to the ranks of their experts, and of outputs back; what is computed between ``begin`` and ``finish``
    overlaps with the first."""

    def __init__(self, axis: Axis, experts: int) -> None:
        super().__init__()
        self.axis, self.send = axis, SendRows(axis, 0, 0)
        ends = [experts * rank // axis.size for rank in range(axis.size + 1)]  # as in ``shard_``
        self.sizes = [end - begin for begin, end in pairwise(ends)]

    def begin(self, rows: Tensor, order: RowOrder) -> Any:
        n, local = self.axis.size, self.sizes[self.axis.rank]
        if order.counts is None:  # equal numbers, of the capacity
            capacity = len(rows) // sum(self.sizes)
            sent, received = [capacity * size for size in self.sizes], [capacity * local] * n
            by_expert = torch.arange(n * local * capacity, device=rows.device).view(n, local, -1).transpose(0, 1).reshape(-1)
            counts = None
        else:
            by_rank = order.counts.new_empty(n * local)
            torch_dist.all_to_all_single(by_rank, order.counts, [local] * n, self.sizes, group=self.axis.group)
            counts = torch.cat((order.counts, by_rank))
            numbers = iter(Experts.read_counts(counts, len(rows), len(order.counts)))  # the host waits for the device here
            sent, received = ([sum(islice(numbers, size)) for size in sizes] for sizes in (self.sizes, [local] * n))
            experts = torch.arange(local, device=rows.device).repeat(n)
            by_expert = experts.repeat_interleave(by_rank, output_size=sum(received)).argsort(stable=True)
            counts = by_rank.view(n, local).sum(0)
        inverse = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=rows.device))
        return self.send.begin(rows, *sent, *received), RowOrder(by_expert, inverse[:, None], counts), (*received, *sent)

    def finish(self, pending: Any, experts: Experts) -> Tensor:
        rows, order, sizes = pending
        outputs = experts(Gather.apply(self.send.finish(rows), order), order.counts)
        by_rank = RowOrder(order.rows[:, 0], order.tokens[:, None], None)
        return self.send(Gather.apply(outputs, by_rank), *sizes)


class SendRows(AllToAll):
    """An all-to-all of unequal numbers of rows: ``sizes`` are those to each rank, and those from each.   [R, C] -> [R', C]"""

    def _collectives(self, x: Tensor, *sizes: int) -> Any:
        start, sent, received = partial(_start_all_to_all, self.axis), sizes[: self.axis.size], sizes[self.axis.size :]
        return partial(start, sent, received), partial(start, received, sent)


def _start_all_to_all(axis: Axis, sent: Sequence[int], received: Sequence[int], rows: Tensor) -> Work:
    rows = rows.contiguous()
    output = rows.new_empty(sum(received), rows.shape[1])
    work = torch_dist.all_to_all_single(output, rows, list(received), list(sent), group=axis.group, async_op=True)
    return Work(work, axis, rows, lambda: output)
