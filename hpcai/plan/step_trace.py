"""Traces of a step: the kernels, communication and waits of one rank of a job of any size, recorded without executing them.

    with traced_job(2048) as tracer:
        mesh = Mesh({"replicate": 256, "axial": 8}, 2048)
        with deferred(0):
            model = parallelize(Net(cfg), mesh)
        with tracer.fake_tensors():
            model, batch = tracer.materialize(model), tracer.empty_like(batch)
            with tracer.record() as trace:
                loss(model, batch).backward()
    trace.events                      # Kernel, Communication and Wait, in program order

Tensors have no data (torch's FakeTensorMode), collectives complete at once, and Triton kernels are recorded, not launched: the code
that runs is that of a GPU, for all ranks of the job. It must not read values from the device, like code for CUDA graphs.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.attention.bias import CausalBias
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hpcai.errors import MeshError
from hpcai.kernels import triton_support
from hpcai.nn.moe import Experts

_NO_WORK = {"_unsafe_view", "device", "lift_fresh", "promote_types", "is_set_to"}  # in addition to views and empty tensors
_WRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"}  # do not read their first argument
# These read, or read and write, some elements of their first argument: those of the result, or of the last tensor.
_GATHERS = {"index_select", "embedding", "index", "gather", "_embedding_bag", "_embedding_bag_forward_only"}
_SCATTERS = {"index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_"}


def _conv_flops(x: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool, *_: Any,
               out_val: Any = None, out_shape: Any = None, **__: Any) -> int:  # fmt: skip
    out = out_shape if out_val is None else out_val.shape
    positions = x if transposed else out  # each multiplies every weight once
    return 2 * math.prod(weight) * positions[0] * math.prod(positions[2:])


def _conv_backward_flops(grad: Any, x: Any, weight: Any, _bias: Any, *rest: Any, **__: Any) -> int:
    # stride, padding, dilation, transposed, output padding, groups, output mask
    return sum(rest[-1][:2]) * _conv_flops(x, weight, None, None, None, None, rest[3], out_shape=grad)


def _addmm_flops(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _attention_flops(q: Any, k: Any, v: Any, _: float = 0.0, causal: bool = False, **__: Any) -> float:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1]) * _causal_fraction(q, k, causal)


def _attention_backward_flops(_: Any, q: Any, k: Any, v: Any, *rest: Any, **__: Any) -> float:
    # out, logsumexp, dropout, causal; recomputes the scores; gradients of scores, q, k and v
    return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1]) * _causal_fraction(q, k, rest[3])


def _packed_flops(is_backward: bool, *args: Any, **_: Any) -> float:
    """Return the FLOP of attention of flat tokens, as if each of the sequences that fit had the length of a row."""
    (q, _k, v), tokens = args[1:4] if is_backward else args[:3], args[8 if is_backward else 5]
    return 2 * math.prod(q[:-1]) * tokens * (3 * q[-1] + 2 * v[-1] if is_backward else q[-1] + v[-1])


def _varlen_flops(is_backward: bool, *args: Any, **_: Any) -> float:
    """Return the FLOP of causal attention within rows of one document each, in a sliding window (past, 0), if any."""
    (q, _k, v), tokens, window = (args[1:4], args[8], args[13:14]) if is_backward else (args[:3], args[5], args[9:10])
    past = window[0][0] if window and window[0] else -1
    attended = min(past + 1, tokens) if past >= 0 else tokens
    scores = math.prod(q[:-1]) * attended * (1 - 0.5 * attended / tokens)
    return 2 * scores * (3 * q[-1] + 2 * v[-1] if is_backward else q[-1] + v[-1])


def _causal_fraction(q: Any, k: Any, causal: bool) -> float:
    """Return the fraction of the scores that a causal kernel computes, if the queries are the last positions of the keys."""
    return 1 - 0.5 * q[-2] / k[-2] if causal else 1.0


FLOP_FORMULAS: dict[Any, Any] = {
    torch.ops.aten.addmm_: _addmm_flops, torch.ops.aten.baddbmm_: _addmm_flops, torch.ops.aten.convolution: _conv_flops,
    torch.ops.aten._convolution: _conv_flops, torch.ops.aten.convolution_backward: _conv_backward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    "_grouped_mm": partial(_addmm_flops, None),  # each row once: [R, I] x [E, I, O], or [I, R] x [R, O] -> [E, I, O]
    torch.ops.aten._flash_attention_forward: partial(_packed_flops, False),
    torch.ops.aten._flash_attention_backward: partial(_packed_flops, True),
    "_varlen_attn": partial(_varlen_flops, False),
    "_varlen_attn_backward": partial(_varlen_flops, True),
}  # fmt: skip
"""FLOP from the shapes of arguments, for operations that torch's counter lacks or overestimates: grouped convolutions, which it
counts with all channels, CPU attention, which stands for that of a GPU, and attention of packed rows, by name: as if each of the
documents that fit had the length of a row."""


class Kernel(NamedTuple):
    """A kernel: FLOP of matrix products, bytes read and written, and bytes of an element of the factors."""

    name: str
    flops: float
    bytes: int
    element_bytes: int


class Communication(NamedTuple):
    """The start of a communication among ``ranks``. ``bytes``: of a rank's tensor (all-gather, reduce-scatter: its shard)."""

    name: str
    bytes: int
    ranks: tuple[int, ...]
    number: int


class Wait(NamedTuple):
    """The wait for the communication ``number``."""

    number: int


Event = Kernel | Communication | Wait


@dataclass
class Trace:
    """The events of a rank in order, and the peak bytes of its tensors."""

    events: list[Event] = field(default_factory=list)
    peak: int = 0
    before: int = 0
    """bytes at the start"""
    once_per_step: set[int] = field(default_factory=set)
    """indices of events that occur once in a step, not in each micro-batch"""

    @property
    def repeated(self) -> list[Event]:
        """The events of each further micro-batch."""
        return [event for index, event in enumerate(self.events) if index not in self.once_per_step]


class StepTracer(TorchDispatchMode):
    """Records operations and communication within ``record``, and the memory of all tensors created within ``fake_tensors``.
    ``kernels``: Take the code paths of a GPU."""

    def __init__(self, kernels: bool) -> None:
        super().__init__()
        self._kernels = kernels
        self._trace, self._communications = Trace(), 0
        self._live: set[int] = set()
        self.bytes = 0  # of all live tensors

    @contextmanager
    def fake_tensors(self) -> Iterator[None]:
        """Context manager: new tensors are fake tensors, without data."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            if self._kernels:
                stack.enter_context(mock.patch.object(triton_support, "PLANNED", True))
                stack.enter_context(_record_triton(self))
            stack.enter_context(mock.patch.object(Experts, "read_counts", _balanced_counts))
            stack.enter_context(mock.patch.object(torch_dist, "all_gather_object", _all_gather_object))  # reads sizes
            stack.enter_context(mock.patch.object(torch_dist, "broadcast_object_list", lambda *_, **__: None))
            stack.enter_context(mock.patch.multiple(CausalBias, __new__=_new_causal_bias, _dispatch=_causal_attention))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(self)
            yield

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Context manager: return the trace of the block. An outer ``record`` does not contain it."""
        before, self._trace = self._trace, Trace(peak=self.bytes, before=self.bytes)
        try:
            yield self._trace
        finally:
            self._trace = before

    def once_per_step(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``function``: its events occur once in a step, not in each micro-batch."""

        def recorded() -> Any:
            first = len(self._trace.events)
            result = function()
            self._trace.once_per_step.update(range(first, len(self._trace.events)))
            return result

        return recorded

    def empty_like(self, batch: Any) -> Any:
        """Return empty tensors of the shapes of those in ``batch``."""
        return tree_map(lambda x: torch.empty_like(x, memory_format=torch.preserve_format) if isinstance(x, Tensor) else x, batch)

    def materialize(self, model: nn.Module) -> nn.Module:
        """Replace the meta parameters of ``model`` (``hpcai.nn.deferred_init``) by fake tensors with memory."""
        parameters: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter not in parameters:
                    size = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                    parameters[parameter] = nn.Parameter(size, parameter.requires_grad)
                    parameters[parameter].__dict__.update({key: x for key, x in vars(parameter).items() if key != "init_trace"})
                if parameter is not None:
                    module._parameters[name] = parameters[parameter]
        return model

    def add_kernel(self, name: str, bytes: int, flops: float = 0, element_bytes: int = 4) -> None:
        self._trace.events.append(Kernel(name, flops, bytes, element_bytes))

    def add_communication(self, name: str, tensors: Sequence[Tensor], ranks: tuple[int, ...]) -> "_Work":
        self._communications += 1
        self._trace.events.append(Communication(name, sum(map(_bytes, tensors)), ranks, self._communications))
        return _Work(self, self._communications)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # of each tensor that autograd handles: most calls, and the slowest way
            return args[0].fake_device
        result, kwargs = function(*args, **(kwargs or {})), kwargs or {}
        schema, name = function._schema, function.overloadpacket.__name__
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for tensor in written:
            self._track(tensor)
        view = schema.returns and all(x.alias_info and not x.alias_info.is_write for x in schema.returns)
        if view or name in _NO_WORK or "empty" in name or not written:
            return result
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        read = read[1:] if name in _WRITES else read
        flops = self._flops(function.overloadpacket, args, kwargs, result)
        widths = [x.element_size() for x in read or written if x.is_floating_point() or not flops]
        # In addition to the factors there may be wider sums: of attention, and addends of a product.
        touched = sum(map(_bytes, (*read, *written))) - _untouched_bytes(name, args, read, written[0])
        self.add_kernel(name, touched, flops, (min if flops else max)(widths))
        return result

    def _flops(self, operation: Any, args: Any, kwargs: Any, result: Any) -> float:
        flops: Any = FLOP_FORMULAS.get(operation) or FLOP_FORMULAS.get(operation.__name__)
        if flops:
            args = tree_map(lambda x: x.shape if isinstance(x, Tensor) else x, args)
            return flops(*args, **kwargs, out_val=result)
        formula: Any = flop_counter.flop_registry.get(operation)
        return formula(*args, **kwargs, out_val=result) if formula else 0

    def _track(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        if key in self._live:
            return
        self._live.add(key)
        self.bytes += size
        self._trace.peak = max(self._trace.peak, self.bytes)
        weakref.finalize(memory, self._untrack, key, size)

    def _untrack(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.bytes -= size


def _untouched_bytes(name: str, args: Any, read: Sequence[Tensor], result: Tensor) -> int:
    """Return the bytes that a gather or scatter leaves out of its first argument."""
    if name not in _GATHERS | _SCATTERS:
        return 0
    table, count = args[0], result.numel() if name in _GATHERS else read[-1].numel()
    if "bag" in name:
        count = args[1].numel() * table.shape[1]
    return max(_bytes(table) - count * table.element_size(), 0) * (1 + (name in _SCATTERS))


def _bytes(x: Tensor) -> int:
    """Return the bytes of memory that a tensor covers: an expanded tensor is read once."""
    return math.prod(n for n, step in zip(x.shape, x.stride()) if step) * x.element_size()


class _Work(torch_dist.Work):
    def __init__(self, tracer: StepTracer, number: int) -> None:
        super().__init__()
        self._tracer, self._number = tracer, number

    def wait(self, *_: Any) -> bool:
        self._tracer._trace.events.append(Wait(self._number))
        return True

    def is_completed(self) -> bool:
        return True


class _Group(torch_dist.ProcessGroup):
    """A process group with one real rank. All others contribute the same tensors."""

    tracer: StepTracer

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.ranks = tuple(ranks)

    def _record(self, name: str, tensors: Sequence[Tensor], *_: Any) -> _Work:
        return self.tracer.add_communication(name, tensors, self.ranks)

    allreduce: Any = partialmethod(_record, "all-reduce")
    broadcast: Any = partialmethod(_record, "broadcast")
    send: Any = partialmethod(_record, "send")
    recv: Any = partialmethod(_record, "receive")

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> _Work:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._record("all-gather", inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, *_: Any) -> _Work:
        return self._record("all-gather", [input])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *_: Any) -> _Work:
        return self._record("reduce-scatter", [output])

    def all_to_all_single(self, output: Tensor, input: Tensor, *_: Any) -> _Work:
        return self._record("all-to-all", [input])

    _allgather_base: Any = all_gather_single  # their names before torch 2.13
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single

    def barrier(self, *_: Any) -> _Work:
        return self._record("barrier", [])

    def getBackendName(self) -> str:  # noqa: N802
        return "traced"

    def _get_backend(self, device: torch.device) -> Any:
        return self  # torch 2.14 queries whether it coalesces tensors

    def getGroupName(self) -> str:  # noqa: N802
        return "traced " + " ".join(map(str, self.ranks))


def _create_group(options: Any, _: Any) -> _Group:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return _Group(options.group_rank, ranks)


def _new_causal_bias(kind: type[CausalBias], *_: Any) -> CausalBias:
    """Create a bias outside of FakeTensorMode, which does not support its class."""
    with unset_fake_temporarily():
        return Tensor._make_subclass(kind, torch.empty(0))


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: CausalBias, *_: Any, **__: Any) -> Tensor:
    """Attention of the last queries to all keys. CausalBias would read tensors to select a GPU kernel."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0]


def _balanced_counts(counts: Tensor, rows: int, experts: int) -> list[int]:
    """Return the counts of experts with equally many of the ``rows``, or one more."""
    return [rows * (n + 1) // experts - rows * n // experts for n in range(len(counts))]


def _all_gather_object(values: list[Any], value: Any, **_: Any) -> None:
    values[:] = [value] * len(values)


@contextmanager
def traced_job(world: int, kernels: bool = True, rank: int = 0) -> Iterator[StepTracer]:
    """Context manager: this process is ``rank`` of a traced job of ``world`` ranks. ``kernels``: Take the code paths of a GPU.
    Raises MeshError within another job."""
    if torch_dist.is_initialized():
        raise MeshError("a plan needs a process that belongs to no job; end the job first, or plan in another process")
    if "traced" not in torch_dist.Backend.backend_list:
        torch_dist.Backend.register_backend("traced", _create_group, extended_api=True, devices=["cpu", "cuda"])
    tracer = StepTracer(kernels)
    with mock.patch.object(_Group, "tracer", tracer, create=True):
        torch_dist.init_process_group("traced", rank=rank, world_size=world, store=torch_dist.HashStore())
        try:
            yield tracer
        finally:
            torch_dist.destroy_process_group()


@contextmanager
def _record_triton(tracer: StepTracer) -> Iterator[None]:
    """Context manager: record Triton kernels, which access each tensor argument once. Their ``work``, if any, is that of products:
    FLOPs, and bytes of an element."""
    if triton_support.MISSING is not None:
        yield
        return
    from triton.runtime.jit import JITFunction

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        work = kernel.work(*tensors) if hasattr(kernel, "work") else ()
        tracer.add_kernel(kernel.fn.__name__, sum(map(_bytes, tensors)), *work)

    with mock.patch.object(JITFunction, "__getitem__", lambda kernel, grid: partial(launch, kernel)):
        yield
