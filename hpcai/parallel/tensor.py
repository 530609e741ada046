"""Weights of linear layers and embeddings that are cut over processes, each of which computes with its part.

    cut_outputs(attention.qkv, axis, parts=(128, 32, 32))               # queries, keys, values: each rank has some heads
    cut_inputs(attention.out, axis)                                     # and the sum over ranks is whole again

Shoeybi et al., "Megatron-LM", 2019; with ``sequence``, Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022: between such a pair each rank has all tokens, and elsewhere, in norms and sums, a part of them. What all ranks have
whole they compute alike, so that the loss counts once and gradients there are alike; where tokens are cut, each rank has the
gradients of its own, and ``sum_over(model, axis)`` adds those of weights that are not cut.
Names and places of parameters stay. T tokens, C channels, V words, n the size of an axis.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dist.collect import Scattered, gather_shares, sum_in_place
from hpcai.dist.mesh import Axis
from hpcai.dynamo import disable_dynamo
from hpcai.errors import ConfigError, MeshError
from hpcai.nn.lm_head import LMHead, VocabShard
from hpcai.nn.matmul import FusedLinear, LocalResult, Pending, SequenceShard
from hpcai.nn.quantized import QuantizedLinear, WeightFormat
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.rows import cut


def cut_outputs(
    linear: nn.Linear, axis: Axis, parts: Sequence[int] = (), sequence: int | None = None, groups: tuple[Axis, Axis] | None = None
) -> None:
    """Leave of ``linear``, in place, this rank's outputs: [T, C] -> [T, C'/n].

    ``parts``: sizes of outputs that lie one behind another and are each cut by itself (queries, keys, values; gate, up).
    ``sequence``: the dim of the input along which it is cut; it is gathered before, and again in the backward pass, so that only
    [T/n, C] is kept. ``groups``: the axis as two, (between, within) of ``Mesh.split``;
    outputs are cut over the first, and those along the second have the same ones, each for work of its own: heads of keys that are
    fewer than the ranks. Raises ConfigError where the layer is of another kind or cannot be cut.
    """
    if axis.size == 1:
        return
    _check(linear, nn.Linear)
    over, within = groups or (axis, Axis("none"))
    for parameter in linear.parameters(recurse=False):
        cut(parameter, 0, over, parts)
    sum_over(linear, within)
    _turn(linear, CutOutputs, axis=axis.meet(), sequence=sequence)


def cut_inputs(linear: nn.Linear, axis: Axis, sequence: int | None = None, parts: Sequence[int] = ()) -> None:
    """Leave of ``linear``, in place, this rank's inputs: [T, C/n] -> [T, C'], the sum over the ranks, or with ``sequence`` a part
    of it along that dim. The bias is not cut, and is added to the sum. ``parts``: sizes of inputs that lie one behind another and
    are each cut by itself. Raises ConfigError where the layer is of another kind or cannot be cut."""
    if axis.size == 1:
        return
    _check(linear, nn.Linear)
    cut(linear.weight, 1, axis, parts)
    _turn(linear, CutInputs, axis=axis.meet(), sequence=sequence)


def cut_words(embedding: nn.Embedding, axis: Axis, sequence: int | None = None) -> None:
    """Leave of ``embedding``, in place, the vectors of this rank's words: [T] whole -> [T, C] whole, or with ``sequence`` a part of
    it along that dim. A number that is no word becomes NaN. Raises ConfigError where the layer is of another kind, or changes its
    weights or gradients in a way that needs all words."""
    if axis.size == 1:
        return
    _check(embedding, nn.Embedding)
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ConfigError("an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut along its words; leave these out")
    cut(embedding.weight, 0, axis)
    _turn(embedding, CutWords, axis=axis.meet(), sequence=sequence)


def cut_head(head: LMHead, axis: Axis, sequence: int | None = None) -> None:
    """Leave of ``head``, in place, this rank's words; its cross entropy is that of all words, and logits are never gathered.
    ``sequence``: the dim of the input along which it is cut, as in ``cut_outputs``."""
    if axis.size == 1:
        return
    cut(head.weight, 0, axis)
    head.vocab = _Words(axis.meet(), head.out_features, sequence)


def freeze(linear: nn.Linear, kind: WeightFormat) -> None:
    """Hold the weight of ``linear``, in place, in the bits of ``kind``, without gradients; one that was cut stays cut. Ranks that
    hold parts of its inputs call this together, or, where it has no numbers yet, ``materialize`` (``deferred_init``). Raises
    ConfigError where the layer is of another kind."""
    found = next((frozen for frozen, before in _FROZEN.items() if type(linear) is before), None)
    if found is None:
        raise ConfigError(f"a {type(linear).__name__} cannot be frozen in {kind}: expected an nn.Linear, whole or cut")
    for parameter in linear.parameters(recurse=False):
        parameter.requires_grad_(False)
    _turn(linear, found, bits=kind)
    linear.register_parameter("scale", None)
    if linear.weight.device.type != "meta":
        linear.post_materialize()  # type: ignore[operator]


def thaw(linear: QuantizedLinear, dtype: torch.dtype) -> None:
    """Make of ``linear``, in place, what it was before ``freeze``, with the weights that it has computed with."""
    linear.dequantize(dtype)
    linear.__class__ = _FROZEN[type(linear)]  # type: ignore[assignment]
    del linear.bits


def parts_with_tokens(model: nn.Module) -> list[Any]:
    """What of ``model`` says by ``sequence`` along which dim tokens are cut between its layers."""
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "sequence")]
    return parts + [part.vocab for part in model.modules() if isinstance(part, LMHead) and isinstance(part.vocab, _Words)]


class CutOutputs(FusedLinear):
    """``cut_outputs``: x [T, C] or, with a sequence that is cut, [T/n, C] -> [T, C'/n]"""

    communicates = True
    axis: Axis
    sequence: int | None

    @property
    def sequence_shard(self) -> SequenceShard:
        return _Tokens(self.axis, self.sequence)


class CutInputs(FusedLinear):
    """``cut_inputs``: x [T, C/n] -> [T, C'] or, with a sequence that is cut, [T/n, C']"""

    communicates = True
    axis: Axis
    sequence: int | None

    def finish(self, y: Tensor) -> Tensor:
        return super().finish(_Leave.apply(y, self.axis, self.sequence))


class FrozenOutputs(QuantizedLinear, CutOutputs):
    """``freeze`` after ``cut_outputs``"""


class FrozenInputs(QuantizedLinear, CutInputs):
    """``freeze`` after ``cut_inputs``: scales are those of all ranks' inputs"""

    def _amax(self, top: Tensor) -> Tensor:
        torch_dist.all_reduce(top, torch_dist.ReduceOp.MAX, group=self.axis.group)
        return top


_FROZEN: dict[type[QuantizedLinear], type[nn.Linear]] = {QuantizedLinear: nn.Linear, FrozenOutputs: CutOutputs,
                                                         FrozenInputs: CutInputs}  # fmt: skip


class CutWords(nn.Embedding):
    """``cut_words``"""

    axis: Axis
    sequence: int | None

    @disable_dynamo
    def forward(self, words: Tensor) -> Tensor:
        """words [T] -> [T, C] or, with a sequence that is cut, [T/n, C]"""
        first, end = _own(self.num_embeddings, self.axis)
        is_own, is_word = (words >= first) & (words < end), (words >= 0) & (words < self.num_embeddings)
        padding = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < end else None
        y = F.embedding((words - first).where(is_own, 0), self.weight, padding)
        nothing = torch.zeros((), dtype=y.dtype, device=y.device).where(is_word, torch.nan)
        return _Leave.apply(y.where(is_own[..., None], nothing[..., None].to(y.dtype)), self.axis, self.sequence)


class _Words(VocabShard):
    """Some of a head's words."""

    def __init__(self, axis: Axis, words: int, sequence: int | None) -> None:
        self.axis, self.sequence = axis, sequence
        self.start, _ = _own(words, axis)
        self._widths = [words * (rank + 1) // axis.size - words * rank // axis.size for rank in range(axis.size)]

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        return hidden if self.sequence is None else _Gathering(hidden, self.axis, self.sequence).wait()

    def all_reduce(self, logs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        top = logs.clone()
        torch_dist.all_reduce(top, torch_dist.ReduceOp.MAX, group=self.axis.group)
        total, target = sum_in_place(torch.stack(((logs - top).exp(), target)), self.axis)
        return total.log() + top, target

    def gather_logits(self, logits: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ConfigError("logits of words that are cut are joined without gradients alone; give targets, and train by entropy")
        alike = F.pad(logits, (0, max(self._widths) - logits.shape[-1]))[None]
        whole = _Gathering(alike, self.axis, 0).wait()
        return torch.cat([part[..., :n] for part, n in zip(whole, self._widths)], -1)

    def reduce_grad_input(self, gradient: Tensor) -> Tensor:
        return _Summing(gradient, self.axis, self.sequence).wait()


class _Gathering:
    """Equal parts of ``dim`` on their way; ``wait`` returns the whole.   [T/n, C] -> [T, C]"""

    def __init__(self, x: Tensor, axis: Axis, dim: int) -> None:
        self._dim, self._own = dim % x.ndim, x.contiguous()
        self._parts = x.new_empty((axis.size, *x.shape))
        self._work = gather_shares(self._parts.view(-1), self._own.view(-1), axis)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._parts.movedim(0, self._dim).flatten(self._dim, self._dim + 1)


class _Summing:
    """A sum over ``axis`` on its way, in place; with ``dim`` its part along that dim.   [T, C] -> [T, C] or [T/n, C]"""

    def __init__(self, value: Tensor, axis: Axis, dim: int | None) -> None:
        self._work: Any
        if dim is None:
            self._sum = value
            self._work = torch_dist.all_reduce(value, group=axis.group, async_op=True)
            return
        dim, n = dim % value.ndim, axis.size
        if value.shape[dim] % n:
            raise MeshError(
                f"{value.shape[dim]} tokens cannot be cut over mesh.{axis.name}={n} in equal parts; pad them to a multiple of {n}, "
                "or leave the sequence whole"
            )
        parts = value.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()
        self._sum = torch.empty_like(parts[0])
        self._work = Scattered(self._sum.view(-1), parts.view(-1), axis)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._sum


class _Tokens(SequenceShard):
    """Where outputs are cut, and tokens between layers with ``dim``."""

    def __init__(self, axis: Axis, dim: int | None) -> None:
        self._axis, self._dim = axis, dim

    def all_gather(self, x: Tensor) -> Pending:
        return LocalResult(x) if self._dim is None else _Gathering(x, self._axis, self._dim)

    def reduce_scatter(self, gradient: Tensor) -> Pending:
        return _Summing(gradient, self._axis, self._dim)


class _Leave(torch.autograd.Function):
    """The sum of all ranks' parts, or with ``dim`` a part of it along that dim. All ranks do the same with a whole sum, which
    counts once: the gradient of a rank is that of its own part."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis, dim: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        if dim is None:
            ctx.mark_dirty(y)
        return _Summing(y, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy if ctx.dim is None else _Gathering(dy, ctx.axis, ctx.dim).wait(), None, None


def _own(words: int, axis: Axis) -> tuple[int, int]:
    """The first and last + 1 of this rank's words, as ``rows.cut`` cuts them."""
    return words * axis.rank // axis.size, words * (axis.rank + 1) // axis.size


def _check(layer: nn.Module, kind: type[nn.Module]) -> None:
    if type(layer).forward is not kind.forward:
        raise ConfigError(f"a {type(layer).__name__} cannot be cut: expected an nn.{kind.__name__} that no one has cut")


def _turn(layer: nn.Module, kind: type[nn.Module], **words: Any) -> None:
    """Make ``layer`` one of ``kind`` where it stands, with its parameters, names and hooks."""
    layer.__class__ = kind
    vars(layer).update(words)
