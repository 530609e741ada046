"""Tensor and sequence parallelism: linear layers and embeddings with weights sharded over ranks.

    column_parallel(attention.qkv, axis, sizes=(128, 32, 32))           # queries, keys, values: each rank has some heads
    row_parallel(attention.out, axis)                                   # and the outputs are summed over ranks

Shoeybi et al., "Megatron-LM", 2019; with ``sequence``, Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022: between such a pair each rank has all tokens, and elsewhere, in norms and residual sums, a shard of them. Replicated
activations are computed redundantly: their gradients are equal on all ranks, and the loss counts once. With sharded tokens each
rank has gradients of its tokens, and ``sum_gradients_over(model, axis)`` sums those of unsharded weights. Names of parameters are
kept. T tokens, C channels, n the size of an axis.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Axis
from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.errors import ConfigError, MeshError
from hpcai.nn.lm_head import LMHead, VocabShard
from hpcai.nn.matmul import FusedLinear, LocalResult, Pending, SequenceShard
from hpcai.nn.quantized import QuantizedLinear, WeightFormat
from hpcai.parallel.axial import Work, start_all_gather, start_reduce_scatter
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.sharding import shard_


def column_parallel(
    linear: nn.Linear, axis: Axis, sizes: Sequence[int] = (), sequence: int | None = None, groups: tuple[Axis, Axis] | None = None
) -> None:
    """Shard the outputs of ``linear`` in place: x [T, C] -> [T, C'/n].

    ``sizes``: Sizes of concatenated outputs that are sharded separately (queries, keys, values; gate, up). ``sequence``: The dim of
    the input along which tokens are sharded; it is all-gathered, and again in the backward pass, so that only [T/n, C] is saved.
    ``groups``: The axis split into (between, within) by ``Mesh.split``. Outputs are sharded over the first and replicated over the
    second, for fewer key heads than ranks; each rank uses them for its own queries. Raises ConfigError for another type of layer,
    or one that cannot be sharded.
    """
    if axis.size == 1:
        return
    _check(linear, nn.Linear)
    over, within = groups or (axis, Axis("none"))
    for parameter in linear.parameters(recurse=False):
        shard_(parameter, 0, over, sizes)
    sum_gradients_over(linear, within)
    _convert(linear, ColumnParallelLinear, axis=axis.init_group(), sequence=sequence)


def row_parallel(linear: nn.Linear, axis: Axis, sequence: int | None = None, sizes: Sequence[int] = ()) -> None:
    """Shard the inputs of ``linear`` in place: x [T, C/n] -> [T, C'] by an all-reduce, or [T/n, C'] by a reduce-scatter along dim
    ``sequence``. The bias is not sharded, and added once. ``sizes``: Sizes of concatenated inputs that are sharded separately.
    Raises ConfigError for another type of layer, or one that cannot be sharded."""
    if axis.size == 1:
        return
    _check(linear, nn.Linear)
    shard_(linear.weight, 1, axis, sizes)
    _convert(linear, RowParallelLinear, axis=axis.init_group(), sequence=sequence)


def vocab_parallel_embedding(embedding: nn.Embedding, axis: Axis, sequence: int | None = None) -> None:
    """Shard the vocabulary of ``embedding`` in place: tokens [T] -> [T, C] by an all-reduce, or [T/n, C] by a reduce-scatter along
    dim ``sequence``. A token out of range becomes NaN. Raises ConfigError for another type of layer, or options that need the full
    vocabulary."""
    if axis.size == 1:
        return
    _check(embedding, nn.Embedding)
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ConfigError("an embedding with max_norm, scale_grad_by_freq or sparse cannot be vocabulary-parallel; leave these out")
    shard_(embedding.weight, 0, axis)
    _convert(embedding, VocabParallelEmbedding, axis=axis.init_group(), sequence=sequence)


def vocab_parallel_head(head: LMHead, axis: Axis, sequence: int | None = None) -> None:
    """Shard the vocabulary of ``head`` in place. The cross entropy is over the full vocabulary, without gathering logits.
    ``sequence``: The dim of the input along which tokens are sharded, as in ``column_parallel``."""
    if axis.size == 1:
        return
    for parameter in head.parameters(recurse=False):
        shard_(parameter, 0, axis)
    head.vocab = _ParallelVocab(axis.init_group(), head.out_features, sequence)


def quantize(linear: nn.Linear, kind: WeightFormat) -> None:
    """Quantize the weight of ``linear`` in place, without gradients; a sharded layer stays sharded. It is collective for a layer
    with sharded inputs; for a deferred one, materializing it is (``deferred_init``). Raises ConfigError for another type of
    layer."""
    quantized_class = next((quantized for quantized, unquantized in _QUANTIZED.items() if type(linear) is unquantized), None)
    if quantized_class is None:
        raise ConfigError(f"a {type(linear).__name__} cannot be quantized to {kind}: expected an nn.Linear, sharded or not")
    for parameter in linear.parameters(recurse=False):
        parameter.requires_grad_(False)
    _convert(linear, quantized_class, bits=kind)
    linear.register_parameter("scale", None)
    if linear.weight.device.type != "meta":
        linear.post_materialize()  # type: ignore[operator]


def dequantize(linear: QuantizedLinear, dtype: torch.dtype) -> None:
    """Undo ``quantize`` in place; the layer keeps the rounded weights."""
    linear.dequantize(dtype)
    linear.__class__ = _QUANTIZED[type(linear)]  # type: ignore[assignment]
    del linear.bits


def sequence_parallel(model: nn.Module) -> list[Any]:
    """Return the objects in ``model`` whose attribute ``sequence`` is the dim along which tokens are sharded between layers."""
    modules: list[Any] = [part for part in model.modules() if hasattr(part, "sequence")]
    return modules + [part.vocab for part in model.modules() if isinstance(part, LMHead) and isinstance(part.vocab, _ParallelVocab)]


class ColumnParallelLinear(FusedLinear):
    """A linear layer with sharded outputs: x [T, C], or [T/n, C] with sequence parallelism -> [T, C'/n]"""

    communicates = True
    axis: Axis
    sequence: int | None

    @property
    def sequence_shard(self) -> SequenceShard:
        return ParallelSequence(self.axis, self.sequence)


class RowParallelLinear(FusedLinear):
    """A linear layer with sharded inputs: x [T, C/n] -> [T, C'], or [T/n, C'] with sequence parallelism"""

    communicates = True
    axis: Axis
    sequence: int | None

    def finish(self, y: Tensor) -> Tensor:
        return super().finish(ReduceOutput.apply(y, self.axis, self.sequence))


class QuantizedColumnParallelLinear(QuantizedLinear, ColumnParallelLinear):
    """A quantized ``ColumnParallelLinear``."""


class QuantizedRowParallelLinear(QuantizedLinear, RowParallelLinear):
    """A quantized ``RowParallelLinear``, with scales over the inputs of all ranks."""

    def _amax(self, top: Tensor) -> Tensor:
        torch_dist.all_reduce(top, torch_dist.ReduceOp.MAX, group=self.axis.group)
        return top


_QUANTIZED: dict[type[QuantizedLinear], type[nn.Linear]] = {
    QuantizedLinear: nn.Linear, QuantizedColumnParallelLinear: ColumnParallelLinear, QuantizedRowParallelLinear: RowParallelLinear,
}  # fmt: skip


class VocabParallelEmbedding(nn.Embedding):
    """An embedding with a sharded vocabulary."""

    axis: Axis
    sequence: int | None

    @disable_dynamo
    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] -> [T, C], or [T/n, C] with sequence parallelism"""
        first, end = (self.num_embeddings * rank // self.axis.size for rank in (self.axis.rank, self.axis.rank + 1))  # as in shard_
        is_local, is_valid = (tokens >= first) & (tokens < end), (tokens >= 0) & (tokens < self.num_embeddings)
        padding = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < end else None
        y = F.embedding((tokens - first).where(is_local, 0), self.weight, padding)
        fill = torch.zeros((), dtype=y.dtype, device=y.device).where(is_valid, torch.nan)
        return ReduceOutput.apply(y.where(is_local[..., None], fill[..., None].to(y.dtype)), self.axis, self.sequence)


class _ParallelVocab(VocabShard):
    """The vocabulary entries of a head that this rank holds."""

    def __init__(self, axis: Axis, vocab_size: int, sequence: int | None) -> None:
        self.axis, self.sequence, self.ranks = axis, sequence, axis.size
        self.start = vocab_size * axis.rank // axis.size
        self._shard_sizes = [vocab_size * (rank + 1) // axis.size - vocab_size * rank // axis.size for rank in range(axis.size)]

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        return hidden if self.sequence is None else _start_all_gather(hidden, self.axis, self.sequence).wait()

    def all_reduce(self, logs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        top = logs.clone()
        torch_dist.all_reduce(top, torch_dist.ReduceOp.MAX, group=self.axis.group)
        total, target = all_reduce_(torch.stack(((logs - top).exp(), target)), self.axis)
        return total.log() + top, target

    def gather_logits(self, logits: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ConfigError("logits of a sharded vocabulary are gathered without gradients only; pass targets to train")
        padded = F.pad(logits, (0, max(self._shard_sizes) - logits.shape[-1]))[None]
        gathered = _start_all_gather(padded, self.axis, 0).wait()
        return torch.cat([part[..., :n] for part, n in zip(gathered, self._shard_sizes)], -1)

    def reduce_grad_input(self, gradient: Tensor) -> Tensor:
        return _start_reduce(gradient, self.axis, self.sequence).wait()


def _start_all_gather(x: Tensor, axis: Axis, dim: int) -> Work:
    """Start to gather equal shards of ``dim``.   [T/n, C] -> [T, C]"""
    return start_all_gather(axis, dim % x.ndim, x.shape[dim] * axis.size, x)


def _start_reduce(value: Tensor, axis: Axis, dim: int | None) -> Work:
    """Start an all-reduce in place, or a reduce-scatter along ``dim``.   [T, C] -> [T, C] or [T/n, C]"""
    if dim is None:
        return Work(torch_dist.all_reduce(value, group=axis.group, async_op=True), axis, value, lambda: value)
    tokens, n = value.shape[dim], axis.size
    if tokens % n:
        raise MeshError(f"{tokens} tokens cannot be sharded equally over mesh.{axis.name}={n}; pad them to a multiple of {n}")
    return start_reduce_scatter(axis, dim % value.ndim, tokens // n, value)


class ParallelSequence(SequenceShard):
    """Sharded outputs, and with ``dim`` sharded tokens between layers."""

    def __init__(self, axis: Axis, dim: int | None) -> None:
        self._axis, self._dim = axis, dim

    def all_gather(self, x: Tensor) -> Pending:
        return LocalResult(x) if self._dim is None else _start_all_gather(x, self._axis, self._dim)

    def reduce_scatter(self, gradient: Tensor) -> Pending:
        return _start_reduce(gradient, self._axis, self._dim)


class ReduceOutput(UntransformedFunction):
    """All-reduce partial outputs, or with ``dim`` reduce-scatter them along it. All ranks use the full sum in the same way, so that
    it counts once: the backward pass is the identity, or an all-gather along ``dim``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis, dim: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        if dim is None:
            ctx.mark_dirty(y)
        return _start_reduce(y, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy if ctx.dim is None else _start_all_gather(dy, ctx.axis, ctx.dim).wait(), None, None


def _check(layer: nn.Module, expected: type[nn.Module]) -> None:
    if type(layer).forward is not expected.forward:
        raise ConfigError(f"a {type(layer).__name__} cannot be sharded: expected an unsharded nn.{expected.__name__}")


def _convert(layer: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Change the class of ``layer`` in place; parameters, names and hooks are kept."""
    layer.__class__ = cls
    vars(layer).update(attributes)
