"""Data parallelism: gradients are all-reduced over replicas in buckets, overlapped with the backward pass.

Li et al., "PyTorch Distributed", VLDB 2020, section 3.2: buckets in the reverse order of the parameters, one asynchronous
all-reduce per full bucket, and gradients that are views of their bucket, so that nothing is copied twice.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.kernels import triton_support
from hpcai.parallel.sharding import (
    FlatParameter,
    FlatShard,
    FlatView,
    as_flat_parameter,
    check_dense,
    replica_axes,
    shard_spec,
    sum_axes,
)

MAX_BF16_RANKS = 4  # whose gradients are summed in bfloat16: sums of 8 are off by 0.3 %, of 2,048 by a quarter
_ALIGN = 32  # elements: every gradient starts at a cache line and a vector register
_BROADCAST_BYTES = 25_000_000  # bytes of one broadcast, about


def sum_gradients_over(module: nn.Module, axis: Axis) -> None:
    """Record that gradients of ``module`` are also summed over ``axis``, whose ranks see parts of one sample. Repeated calls have
    no effect, since modules share parameters and are nested."""
    for parameter in module.parameters() if axis.size > 1 else ():
        axes = getattr(parameter, "sum_axes", ())
        parameter.sum_axes = axes if axis in axes else (*axes, axis)  # type: ignore[attr-defined]


class Bucket:
    """Neighbouring parameters of one dtype, whose gradients are reduced together over ``axes``, and that are equal along the same
    ``replica_axes``.

    ``weights`` and ``gradients`` are flat; the parameters become views of the weights. ``shards``: The size is padded to a multiple
    of so many equal shards.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool, dtype: torch.dtype,
        replica_axes: tuple[Axis, ...] = (), shards: int = 1,
    ) -> None:  # fmt: skip
        self.parameters, self.axes, self.decays, self.replica_axes = list(parameters.values()), axes, decays, replica_axes
        self.flat_views: list[FlatView] = []
        size = 0
        for name, parameter in parameters.items():
            self.flat_views.append(FlatView(name, parameter, 0, parameter.numel(), size, shard_spec(parameter)))
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
        size = -(-size // (shards * _ALIGN)) * shards * _ALIGN
        first = self.parameters[0]
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(size, dtype=dtype, device=first.device)
        self.gradient_views = [part.full(self.gradients) for part in self.flat_views]
        self._weight_views = [part.full(self.weights) for part in self.flat_views]
        self.bind_parameters()
        self.pending = 0
        self.filled: set[int] = set()
        self.work: Any = None

    @torch.no_grad()
    def bind_parameters(self) -> None:
        """Make the parameters views of ``weights`` with their current values, also after their memory was replaced."""
        for parameter, view in zip(self.parameters, self._weight_views):
            if _address(parameter) != _address(view):
                view.copy_(parameter)
                parameter.data = view

    def flat_parameter(self) -> FlatParameter:
        return FlatParameter(self.flat_views, self.weights, lambda: self.gradients, self.decays, self.replica_axes)

    def launch(self) -> None:
        if self.axes:
            self.work = torch_dist.all_reduce(self.gradients, group=self.axes[0].group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
        for axis in self.axes[1:]:
            torch_dist.all_reduce(self.gradients, group=axis.group)

    @torch.no_grad()
    def accumulate(self, index: int) -> None:
        """Move the gradient that autograd left at a parameter into the bucket, and accumulate it there."""
        parameter, view = self.parameters[index], self.gradient_views[index]
        if parameter.grad is None:
            return
        if index in self.filled:
            view.add_(parameter.grad)
        else:
            view.copy_(parameter.grad)
            self.filled.add(index)
        parameter.grad = None

    def assign_gradients(self) -> None:
        """Set the gradients of the parameters to views of the reduced bucket."""
        for parameter, view in zip(self.parameters, self.gradient_views):
            if view.dtype == parameter.dtype:
                parameter.grad = view


class GradientReducer:
    """Sums the gradients of ``model`` over ``replicate`` and over the axes of ``sum_gradients_over``.

    A step calls ``zero_grad()``, sets ``is_last_backward`` before its last backward pass, calls ``reduce()``, updates the
    ``flat_parameters``, and calls ``all_gather_parameters()``. Parameters are broadcast at construction, so that replicas start
    equal. ``decays``: Names of parameters with weight decay. ``matrices``: Names of those that Muon updates, which share no bucket
    with others. ``float32_sums``: Sum 16-bit gradients in float32, as over more than ``MAX_BF16_RANKS`` ranks. On one CPU process
    gradients stay where autograd puts them, and each parameter is its own flat parameter, unless they need the same memory in every
    step (``fixed``).
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, bucket_mb: float = 25.0, decays: Collection[str] = (), float32_sums: bool = False,
        fixed: bool = False, matrices: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.model, self.mesh, self.float32_sums = model, mesh, float32_sums
        self.is_last_backward = True
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_dense(named)
        # Over which gradients are summed: no axis along which ranks hold different elements.
        axes = {p: tuple(axis for axis in (mesh["replicate"], *sum_axes(p))
                         if axis.size > 1 and axis.name not in shard_spec(p).axis_names) for p in named.values()}  # fmt: skip
        broadcast_parameters(model, mesh)
        local = {n: p for n, p in named.items() if triton_support.on_cpu(p) and not (axes[p] or fixed)}
        in_place = {n for n, p in local.items() if self._sum_dtype(p, ()) == p.dtype}
        bucketed = {name: p for name, p in named.items() if name not in in_place}
        groups = _assign_buckets(bucketed, axes, bucket_mb * 1e6, decays, matrices)
        self.buckets = [self._bucket({n: named[n] for n in group}, axes[named[group[0]]], group[0] in decays) for group in groups]
        self.flat_parameters = [bucket.flat_parameter() for bucket in self.buckets]
        names = sorted(in_place)
        self.flat_parameters += [as_flat_parameter(n, named[n], n in decays, replica_axes(named[n], mesh)) for n in names]
        self._in_place = [named[name] for name in names]
        self._launched = 0
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, index))

    def _sum_dtype(self, parameter: nn.Parameter, axes: tuple[Axis, ...]) -> torch.dtype:
        is_narrow = parameter.dtype in (torch.bfloat16, torch.float16)
        use_float32 = self.float32_sums or math.prod(axis.size for axis in axes) > MAX_BF16_RANKS
        return torch.float32 if use_float32 and is_narrow else parameter.dtype

    def _bucket(self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool) -> Bucket:
        first = next(iter(parameters.values()))
        return Bucket(parameters, self._merge_axes(axes), decays, self._sum_dtype(first, axes), replica_axes(first, self.mesh))

    def _merge_axes(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Merge ``axes`` into as few as possible, for few collectives."""
        merged = self.mesh.flatten(*(axis.name for axis in axes if not axis.parent))
        return (*((merged,) if merged.size > 1 else ()), *(axis for axis in axes if axis.parent))

    def zero_grad(self) -> None:
        self._launched = 0
        for bucket in self.buckets:
            bucket.bind_parameters()
            bucket.pending = len(bucket.parameters)
            bucket.filled.clear()
            for parameter in bucket.parameters:
                parameter.grad = None
        for parameter in self._in_place:
            parameter.grad = None

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        ref = weakref.ref(self)  # Python's garbage collector does not see the cycle of a parameter and its hook

        def ready(parameter: Tensor) -> None:
            if (reducer := ref()) is None:
                return
            reducer.buckets[number].accumulate(index)
            if reducer.is_last_backward:
                reducer.buckets[number].pending -= 1
                # In the order of the buckets, whatever the order in which autograd fills them: ranks match collectives by order.
                while reducer._launched < len(reducer.buckets) and reducer.buckets[reducer._launched].pending == 0:
                    reducer.buckets[reducer._launched].launch()
                    reducer._launched += 1

        return ready

    def reduce(self) -> None:
        """Reduce the remaining buckets, and wait for all; the gradient of an unused parameter is zero."""
        for bucket in self.buckets[self._launched :]:
            for index, view in enumerate(bucket.gradient_views):
                bucket.accumulate(index)  # left by a pipeline schedule: backward passes for weights alone call no hook
                if index not in bucket.filled:
                    view.zero_()
            bucket.launch()
        self._launched = len(self.buckets)
        for bucket in self.buckets:
            bucket.wait()
            bucket.assign_gradients()

    def all_gather_parameters(self) -> None:
        """Start to all-gather the updated weights. Without shards this does nothing."""

    def wait(self) -> None:
        """Wait for the weights of ``all_gather_parameters``."""

    def frozen_shards(self) -> dict[str, FlatShard]:
        """Return this rank's shards of weights that are not trained. Without shards there are none."""
        return {}

    def replicated_tensors(self) -> list[tuple[str, Tensor, tuple[Axis, ...]]]:
        """Return (name, tensor, axes along which all ranks hold the same) of each parameter that the model computes with."""
        self.wait()
        return [(name, p.detach(), replica_axes(p, self.mesh)) for name, p in self.model.named_parameters()]


def _address(tensor: Tensor) -> tuple[Any, Any]:
    """Return storage and offset, since fake tensors have no address."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _assign_buckets(
    parameters: dict[str, nn.Parameter], axes: dict[nn.Parameter, tuple[Axis, ...]], size: float, decays: Collection[str],
    matrices: Collection[str],
) -> list[list[str]]:  # fmt: skip
    """Group parameters of one dtype, set of axes, decay and optimizer into buckets of about ``size`` bytes, in backward order."""
    open_groups: dict[tuple, list[str]] = {}
    filled: Counter[tuple] = Counter()
    closed: list[list[str]] = []
    for name, parameter in reversed(parameters.items()):
        spec, dtype = shard_spec(parameter), parameter.dtype
        key = (dtype, parameter.device, axes[parameter], spec.axes, spec.exclusive_axes, sum_axes(parameter), name in decays,
               name in matrices)  # fmt: skip
        open_groups.setdefault(key, []).append(name)
        filled[key] += parameter.nbytes
        if filled[key] >= size:
            closed.append(open_groups.pop(key))
            del filled[key]
    return closed + list(open_groups.values())


def broadcast_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast each parameter and buffer that has memory from the first of the ranks that hold the same elements, concatenated by
    axes and dtype, since many small broadcasts are slow."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and (axes := replica_axes(tensor, mesh)):
            groups.setdefault((axes, tensor.dtype, tensor.device), []).append(tensor.detach())
    for (axes, *_), tensors in groups.items():
        for _, some in groupby(zip(tensors, accumulate(t.nbytes for t in tensors)), lambda pair: pair[1] // _BROADCAST_BYTES):
            block = [tensor for tensor, _ in some]
            buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in block])
            for axis in axes:
                torch_dist.broadcast(buffer, group=axis.group, group_src=0)
            for tensor, piece in zip(block, buffer.split([tensor.nbytes for tensor in block])):
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
