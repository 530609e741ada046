"""Sums of gradients over the copies of a model, in buckets, while the backward pass goes on.

Li et al., "PyTorch Distributed", VLDB 2020, section 3.2: buckets in the reverse order of the parameters, one asynchronous
sum per full bucket, and gradients that are views of their bucket, so that nothing is copied twice.
"""

import math
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.kernels import triton_support
from hpcai.parallel.rows import Part, Row, Share, alike, check_dense, loose, place_of, sum_axes

FEW = 4  # ranks whose gradients are added up in bfloat16: sums of 8 are off by 0.3 %, of 2,048 by a quarter
_ALIGN = 32  # elements: every gradient starts on a cache line and on a vector register
_BLOCK = 25_000_000  # bytes that are sent at a time


def sum_over(module: nn.Module, axis: Axis) -> None:
    """Record that the gradients of ``module`` are added over ``axis`` too, because each of its ranks sees a part of one sample.
    They are added once, however often it is said: modules share parameters, and lie within others."""
    for parameter in module.parameters() if axis.size > 1 else ():
        known = getattr(parameter, "sum_axes", ())
        parameter.sum_axes = known if axis in known else (*known, axis)  # type: ignore[attr-defined]


class Bucket:
    """Neighbouring parameters of one dtype whose gradients are summed over the same ``axes`` in one message, and which are the
    same along the same axes (``copies``).

    ``weights`` and ``flat`` (the gradients) are rows; the parameters become views of the first. ``pieces``: the number of equal
    shares that the rows can be cut into.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool, dtype: torch.dtype,
        copies: tuple[Axis, ...] = (), pieces: int = 1,
    ) -> None:  # fmt: skip
        self.parameters, self.axes, self.decays, self.copies = list(parameters.values()), axes, decays, copies
        self.parts: list[Part] = []
        size = 0
        for name, parameter in parameters.items():
            self.parts.append(Part(name, parameter, 0, parameter.numel(), size, place_of(parameter)))
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
        size = -(-size // (pieces * _ALIGN)) * pieces * _ALIGN
        first = self.parameters[0]
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.flat = torch.zeros(size, dtype=dtype, device=first.device)
        self.views = [part.whole(self.flat) for part in self.parts]
        self._places = [part.whole(self.weights) for part in self.parts]
        self.hold()
        self.missing = 0
        self.filled: set[int] = set()
        self.work: Any = None

    @torch.no_grad()
    def hold(self) -> None:
        """Make the parameters views of ``weights``, with their values, also where they were given other memory since."""
        for parameter, place in zip(self.parameters, self._places):
            if _memory(parameter) != _memory(place):
                place.copy_(parameter)
                parameter.data = place

    def row(self) -> Row:
        return Row(self.parts, self.weights, lambda: self.flat, self.decays, self.copies)

    def launch(self) -> None:
        if self.axes:
            self.work = torch_dist.all_reduce(self.flat, group=self.axes[0].group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
        for axis in self.axes[1:]:
            torch_dist.all_reduce(self.flat, group=axis.group)

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Add the gradient that autograd left at a parameter to its place in the bucket."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is None:
            return
        if index in self.filled:
            view.add_(parameter.grad)
        else:
            view.copy_(parameter.grad)
            self.filled.add(index)
        parameter.grad = None

    def show(self) -> None:
        """Leave the finished gradients at the parameters, as views."""
        for parameter, view in zip(self.parameters, self.views):
            if view.dtype == parameter.dtype:
                parameter.grad = view


class GradientSums:
    """Adds the gradients of ``model`` over ``replicate`` and over the axes that ``sum_over`` recorded.

    ``zero()`` comes before the backward passes of a step, ``last = True`` before its last one and ``finish()`` after it; then the
    ``rows`` are updated, and ``spread()`` follows. The first process along those axes gives the others its parameters, so that the
    copies start equal. ``decays`` names the parameters with weight decay; ``wide``: gradients are added up in float32, whatever the
    parameters are, as they are over more than a few ranks. On one CPU process gradients are left where autograd puts them, and each
    parameter is a row of its own, unless they must lie in the same memory in every step (``fixed``).
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, bucket_mb: float = 25.0, decays: Collection[str] = (), wide: bool = False,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.mesh, self.wide = model, mesh, wide
        self.last = True
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_dense(named)
        axes = {p: _axes(p, mesh) for p in named.values()}
        start_equal(model, mesh)
        alone = {n: p for n, p in named.items() if triton_support.on_cpu(p) and not (axes[p] or fixed)}
        free = {n for n, p in alone.items() if self._dtype(p, ()) == p.dtype}
        bound = {name: p for name, p in named.items() if name not in free}
        groups = _group(bound, axes, bucket_mb * 1e6, decays)
        self.buckets = [self._bucket({n: named[n] for n in group}, axes[named[group[0]]], group[0] in decays) for group in groups]
        self.rows = [bucket.row() for bucket in self.buckets]
        self.rows += [loose(name, named[name], name in decays, alike(named[name], mesh)) for name in sorted(free)]
        self._free = [named[name] for name in sorted(free)]
        self._launched = 0
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, index))

    def _dtype(self, parameter: nn.Parameter, axes: tuple[Axis, ...]) -> torch.dtype:
        narrow = parameter.dtype in (torch.bfloat16, torch.float16)
        wide = self.wide or math.prod(axis.size for axis in axes) > FEW
        return torch.float32 if wide and narrow else parameter.dtype

    def _bucket(self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool) -> Bucket:
        first = next(iter(parameters.values()))
        return Bucket(parameters, self._together(axes), decays, self._dtype(first, axes), alike(first, self.mesh))

    def _together(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """``axes`` as few, so that there are few messages."""
        whole = self.mesh.flatten(*(axis.name for axis in axes if not axis.parent))
        return (*((whole,) if whole.size > 1 else ()), *(axis for axis in axes if axis.parent))

    def zero(self) -> None:
        """Forget the gradients."""
        self._launched = 0
        for bucket in self.buckets:
            bucket.hold()
            bucket.missing = len(bucket.parameters)
            bucket.filled.clear()
            for parameter in bucket.parameters:
                parameter.grad = None
        for parameter in self._free:
            parameter.grad = None

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        ref = weakref.ref(self)  # Python's garbage collector does not see the cycle from a parameter to its hook and back

        def ready(parameter: Tensor) -> None:
            if (sums := ref()) is None:
                return
            sums.buckets[number].take(index)
            if sums.last:
                sums.buckets[number].missing -= 1
                sums._launch_in_order()

        return ready

    def _launch_in_order(self) -> None:
        # In the order of the buckets on every process, whatever the order in which autograd fills them: sums are matched by order.
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self.buckets[self._launched].launch()
            self._launched += 1

    def finish(self) -> None:
        """Wait until every gradient holds its sum; a parameter that the loss did not use counts as zero."""
        for bucket in self.buckets[self._launched :]:
            for index, view in enumerate(bucket.views):
                bucket.take(index)  # what a schedule has left there: backward passes for weights alone call no hook
                if index not in bucket.filled:
                    view.zero_()
            bucket.launch()
        self._launched = len(self.buckets)
        for bucket in self.buckets:
            bucket.wait()
            bucket.show()

    def spread(self) -> None:
        """Give every process the updated weights of the others' shares. Here there are none."""

    def settle(self) -> None:
        """Wait until the weights that ``spread()`` sends have come."""

    def idle(self) -> dict[str, Share]:
        """What this process has of divided weights that are not trained. Here none are divided."""
        return {}

    def alike(self) -> list[tuple[str, Tensor, tuple[Axis, ...]]]:
        """The parameters that the model computes with: name, numbers, and the axes along which all processes hold the same."""
        self.settle()
        return [(name, p.detach(), alike(p, self.mesh)) for name, p in self.model.named_parameters()]


def _axes(parameter: nn.Parameter, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes over which its gradients are added: not those along which each rank has a gradient of its own."""
    unlike = place_of(parameter).directions
    return tuple(axis for axis in (mesh["replicate"], *sum_axes(parameter)) if axis.size > 1 and axis.name not in unlike)


def _memory(tensor: Tensor) -> tuple[Any, Any]:
    """Where it begins; tensors on paper have no address."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _group(
    parameters: dict[str, nn.Parameter], axes: dict[nn.Parameter, tuple[Axis, ...]], size: float, decays: Collection[str],
) -> list[list[str]]:  # fmt: skip
    """Buckets of about ``size`` bytes in the order of the backward pass, of one dtype, one set of axes and one decay each."""
    open_groups: dict[tuple, list[str]] = {}
    filled: Counter[tuple] = Counter()
    closed: list[list[str]] = []
    for name, parameter in reversed(parameters.items()):
        place, dtype = place_of(parameter), parameter.dtype
        key = (dtype, parameter.device, axes[parameter], place.axes, place.apart, sum_axes(parameter), name in decays)
        open_groups.setdefault(key, []).append(name)
        filled[key] += parameter.nbytes
        if filled[key] >= size:
            closed.append(open_groups.pop(key))
            del filled[key]
    return closed + list(open_groups.values())


def start_equal(model: nn.Module, mesh: Mesh) -> None:
    """Give each parameter and buffer that has memory, on all ranks that hold the same of it, the values of the first: those of the
    same kind together, in messages of some size, for a message costs more than a small tensor."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and (axes := alike(tensor, mesh)):
            kinds.setdefault((axes, tensor.dtype, tensor.device), []).append(tensor.detach())
    for (axes, *_), tensors in kinds.items():
        for block in _blocks(tensors):
            raw = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in block])
            for axis in axes:
                torch_dist.broadcast(raw, group=axis.group, group_src=0)
            for tensor, part in zip(block, raw.split([tensor.nbytes for tensor in block])):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _blocks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors one behind another, in lists of at most ``_BLOCK`` bytes or of a single one."""
    ends, first = [0, *accumulate(tensor.nbytes for tensor in tensors)], 0
    while first < len(tensors):
        last = max(first + 1, bisect_right(ends, ends[first] + _BLOCK) - 1)
        yield tensors[first:last]
        first = last
