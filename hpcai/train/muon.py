"""Muon: the momentum of each matrix is orthogonalized (Jordan et al. 2024), at the scale of AdamW's updates (Liu et al., "Muon is
Scalable for LLM Training", 2025), so that both have one learning rate and one weight decay."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcai.dist.collectives import ReduceScatter, all_gather, all_reduce_
from hpcai.kernels.triton_support import on_cpu
from hpcai.parallel.sharding import ALONE, FlatParameter, FlatView

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of a polynomial of degree 5 that is steep at 0 (Jordan et al.)
_ITERATIONS = 5
_RMS = 0.2  # of AdamW's updates, about (Liu et al.)


def orthogonalize(x: Tensor) -> Tensor:
    """Return U V^T, about, of the singular value decomposition U S V^T of each matrix: singular values become 0.7 to 1.2.

    Shape: [B, n, m] -> the same
    """
    a, b, c = _COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    y = x.mT if is_tall else x
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if is_tall else y


class MatrixGroup:
    """Matrices that are orthogonalized together, in flat parameters that are sharded over the same axes.

    Shards are exact: each matrix is gathered on one rank along the last axis, its owner, by a reduce-scatter of buffers that are
    zero outside the own shard, and all-gathered after it. Ranks along that axis so divide the work and send as many bytes as for an
    all-reduce. Products are in bfloat16 on GPUs, unless the weights are float64.
    """

    def __init__(self, flat_params: Sequence[FlatParameter]) -> None:
        *self._axes, self._owners = flat_params[0].sharded_axes or (ALONE,)
        views = [(index, view) for index, row in enumerate(flat_params) for view in row.views]
        filled = [0] * self._owners.size
        self._places: list[tuple[int, FlatView, int, int]] = []  # index of the flat parameter, view, owner, first element there
        for index, view in sorted(views, key=lambda pair: -math.prod(pair[1].spec.global_shape)):
            owner = filled.index(min(filled))
            self._places.append((index, view, owner, filled[owner]))
            filled[owner] += math.prod(view.spec.global_shape)
        self._size = max(filled)

    @torch.no_grad()
    def orthogonalize_(self, momenta: Sequence[Tensor]) -> None:
        """Replace the momentum of each matrix by its update, in the layouts of the flat parameters."""
        like, ranks = momenta[0], self._owners.size
        dtype = torch.bfloat16 if like.dtype == torch.float32 and not on_cpu(like) else like.dtype
        full = torch.zeros(ranks * self._size, dtype=dtype, device=like.device)
        boxes: list[tuple[Tensor, Tensor]] = []  # shards of the momenta, and their places in the full matrices
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, view, owner, first in self._places:
            shape = view.spec.global_shape
            matrix = full[owner * self._size + first :][: math.prod(shape)].view(shape)
            for offsets, piece in view.boxes(momenta[index]):
                boxes.append((piece, matrix[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape))]))
            if owner == self._owners.rank:
                by_shape[shape].append(first)
        for piece, place in boxes:
            place.copy_(piece)
        all_reduce_(full, *self._axes)
        local = full
        if ranks > 1:
            local = torch.empty_like(full[: self._size])
            ReduceScatter(local, full, self._owners).wait()
        for (*stack, n, m), starts in by_shape.items():
            matrices = [local[first:][: math.prod((*stack, n, m))].view(-1, n, m) for first in starts]
            updates = orthogonalize(torch.cat(matrices)).mul_(_RMS * math.sqrt(max(n, m)))
            for matrix, update in zip(matrices, updates.split(len(matrices[0]))):
                matrix.copy_(update)
        if ranks > 1:
            all_gather(full, local, self._owners).wait()
        for piece, place in boxes:
            piece.copy_(place)
