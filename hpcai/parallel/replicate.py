"""Sums of gradients over the copies of a model, in buckets, while the backward pass goes on.

Li et al., "PyTorch Distributed", VLDB 2020, section 3.2: buckets in the reverse order of the parameters, one asynchronous
sum per full bucket, gradients as views of their bucket so that nothing is copied.
"""

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.mesh import Axis, Mesh

_ALIGN = 32  # elements: every gradient starts on a cache line and on a vector register


def sum_over(module: nn.Module, axis: Axis) -> None:
    """Record that the gradients of ``module`` are added over ``axis`` too: its ranks each see a part of one sample there."""
    if axis.size > 1:
        for parameter in module.parameters():
            parameter.sum_axes = (*getattr(parameter, "sum_axes", ()), axis)  # type: ignore[attr-defined]


class _Bucket:
    """Neighbouring gradients of one dtype that are summed over the same axes in one message."""

    def __init__(self, parameters: list[nn.Parameter], axes: tuple[Axis, ...]) -> None:
        self.parameters, self.axes = parameters, axes
        starts, size = [], 0
        for parameter in parameters:
            starts.append(size)
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
        self.flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        # The strides of the parameter, so that a channels-last weight keeps a channels-last gradient.
        self.views = [torch.as_strided(self.flat, p.size(), p.stride(), start) for p, start in zip(parameters, starts)]
        self.missing = 0
        self.work: torch_dist.Work | None = None

    def launch(self) -> None:
        self.work = torch_dist.all_reduce(self.flat, group=self.axes[0].group, async_op=True)

    def wait(self) -> None:
        if self.work is None:
            raise RuntimeError("a gradient bucket was waited for before its sum was started")
        self.work.wait()
        self.work = None
        for axis in self.axes[1:]:
            torch_dist.all_reduce(self.flat, group=axis.group)


class GradientSums:
    """Adds the gradients of ``model`` over ``replicate`` and over the axes that ``sum_over`` recorded.

    ``zero()`` before the backward passes of a step, ``last = True`` before its last one, ``finish()`` after it. The first
    process along those axes gives the others its parameters, so that the copies start equal. Over axes of size 1
    there is nothing to add: gradients are then left to autograd, which keeps no buckets and no zeros.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, bucket_mb: float = 25.0) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.last = True
        axes = {p: self._axes(p, mesh) for p in self.parameters}
        for parameter in model.parameters():
            _start_equal(parameter, self._axes(parameter, mesh))
        for buffer in model.buffers():
            _start_equal(buffer, (mesh["replicate"],))
        self.buckets = [_Bucket(group, axes[group[0]]) for group in _group(self.parameters, axes, bucket_mb * 1e6)]
        self._launched = 0
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, view))

    @staticmethod
    def _axes(parameter: nn.Parameter, mesh: Mesh) -> tuple[Axis, ...]:
        axes = (mesh["replicate"], *getattr(parameter, "sum_axes", ()))
        return tuple(axis for axis in axes if axis.size > 1)

    def zero(self) -> None:
        """Clear the gradients; those of a bucket stay views of it."""
        self._launched = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views):
                parameter.grad = view
        if not self.buckets:
            for parameter in self.parameters:
                parameter.grad = None

    def _hook(self, bucket: _Bucket, view: Tensor):  # type: ignore[no-untyped-def]
        def ready(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
                parameter.grad = view
            if self.last:
                bucket.missing -= 1
                self._launch_in_order()

        return ready

    def _launch_in_order(self) -> None:
        # In the order of the buckets on every process, whatever the order in which autograd fills them: sums are matched by order.
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self.buckets[self._launched].launch()
            self._launched += 1

    def finish(self) -> None:
        """Wait until every gradient holds its sum; a parameter that the loss did not use counts as zero."""
        for bucket in self.buckets[self._launched :]:
            bucket.launch()
        self._launched = len(self.buckets)
        for bucket in self.buckets:
            bucket.wait()


def _group(parameters: list[nn.Parameter], axes: dict[nn.Parameter, tuple[Axis, ...]], size: float) -> list[list[nn.Parameter]]:
    """Buckets of about ``size`` bytes in the order of the backward pass, one dtype and one set of axes each."""
    open_groups: dict[tuple, list[nn.Parameter]] = {}
    closed: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        if not axes[parameter]:
            continue
        key = (parameter.dtype, parameter.device, tuple(axis.name for axis in axes[parameter]))
        group = open_groups.setdefault(key, [])
        group.append(parameter)
        if sum(p.numel() * p.element_size() for p in group) >= size:
            closed.append(open_groups.pop(key))
    return closed + list(open_groups.values())


def _start_equal(tensor: Tensor, axes: tuple[Axis, ...]) -> None:
    for axis in axes:
        if axis.size > 1:
            torch_dist.broadcast(tensor.detach(), group=axis.group, group_src=0)
