"""Neighbour lists of a batch of structures, on the device that holds it.   B structures, N atoms, E edges; lengths in angstrom

P pairs of atoms of one structure, C candidates: pairs with one of the offsets that could bring them together
"""

import torch
from torch import Tensor

from hpcai.models.dimenet.periodic import TIE

CANDIDATES = 2**22  # as many at a time take about 1 GB
SLACK = 1e-6  # share of a cell that makes up for rounded fractional coordinates


def neighbours_of_batch(
    positions: Tensor, cells: Tensor, pbc: Tensor, structure: Tensor, cutoff: float, most: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``neighbours`` of every structure, one after another: i [E], j [E] int64 in the batch, S [E, 3] int32, in the same order.

    positions [N, 3], cells [B, 3, 3], pbc [B, 3] bool, structure [N] ascending, of atoms that ``periodic.check`` has passed.
    All numbers are float64, whatever the dtype of positions and cells. Every pair of atoms of a structure is looked at, with
    just those offsets that may bring it within the cutoff along each lattice vector: right for any cell and for atoms outside of
    it, and meant for structures of up to some thousand atoms.

    The host waits for the device three times: for the number of pairs, the number of candidates and the number of edges; for the
    latter two again with each further 2^22 candidates.
    """
    if not len(positions):
        return structure.new_empty(0), structure.new_empty(0), structure.new_empty((0, 3), dtype=torch.int32)
    r, lattice = positions.detach().double(), cells.detach().double() * pbc[..., None]
    first = torch.searchsorted(structure, torch.arange(len(cells) + 1, device=r.device))
    partners = (first[1:] - first[:-1])[structure]
    end = partners.cumsum(0)
    dual = _dual(lattice, pbc)
    atoms = torch.cat([r, (r[:, None] @ dual[structure])[:, 0]], 1)  # [N, 6], from here on also in cells
    reach = cutoff * dual.norm(dim=1) + SLACK  # [B, 3] cells
    pairs, images = torch.stack([end[-1].double(), (2 * reach + 1).floor().prod(1).amax()]).tolist()
    step = max(1, int(CANDIDATES // images))

    degree = torch.zeros_like(partners)
    parts = []
    for begin in range(0, int(pairs), step):
        p = torch.arange(begin, min(begin + step, int(pairs)), device=r.device)
        i = torch.searchsorted(end, p, right=True)
        b = structure[i]
        j = first[b] + p - (end - partners)[i]
        apart = atoms.index_select(0, j) - atoms.index_select(0, i)
        pair, offset = _candidates(apart[:, 3:], reach.index_select(0, b))
        both = torch.cat([apart[:, :3], lattice.flatten(1).index_select(0, b)], 1).index_select(0, pair)  # [C, 12]
        s, t = offset.double().unbind(1), both.unbind(1)
        x, y, z = (t[k] + (s[0] * t[3 + k] + s[1] * t[6 + k] + s[2] * t[9 + k]) for k in range(3))
        distance = (x * x + y * y + z * z).sqrt()  # column by column: a sum over three takes six times as long
        # An atom is its own neighbour only in another cell.
        inside = (distance < cutoff) & ((i != j).index_select(0, pair) | (distance > 0))
        i, j = i.index_select(0, pair), j.index_select(0, pair)
        degree.index_add_(0, i, inside.long())
        edges, left = torch.stack([inside.sum(), (degree if most is None else degree.clamp(max=most)).sum()]).tolist()
        kept = _where(inside, edges)
        parts.append((i[kept], j[kept], offset.index_select(0, kept), distance[kept]))
    centre, other, offset, distance = (torch.cat(part) for part in zip(*parts))
    order = _order(centre, distance, cutoff)
    if most is not None:
        rank = torch.arange(len(order), device=r.device) - (degree.cumsum(0) - degree)[centre]
        order = order[_where(rank < most, left)]
    return centre[order], other[order], offset[order].int()


def _dual(lattice: Tensor, pbc: Tensor) -> Tensor:
    """The matrix that turns positions into cells along each lattice vector; 0 along directions that are not periodic, whose rows of
    the lattice are 0. The lengths of its columns are one over the heights of the cell.   [B, 3, 3]"""
    gram = lattice @ lattice.mT + torch.diag_embed((~pbc).double())
    return lattice.mT @ torch.linalg.inv_ex(gram)[0]  # inv would wait for the device


def _candidates(apart: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates of pairs so many cells apart [P, 3], each with all offsets that bring it within reach [P, 3]: its place [C], and
    S [C, 3].

    By pair, then offset.
    """
    low = (-reach - apart).ceil().long()
    count = (reach - apart).floor().long() - low + 1
    many = count.prod(1)
    end = many.cumsum(0)
    total = int(end[-1])
    pair = torch.repeat_interleave(torch.arange(len(many), device=many.device), many, output_size=total)
    k = torch.arange(total, device=many.device) - (end - many)[pair]
    last, middle = count[:, 2].index_select(0, pair), count[:, 1].index_select(0, pair)
    row = k // last
    return pair, torch.stack([row // middle, row % middle, k % last], 1) + low.index_select(0, pair)


def _order(centre: Tensor, distance: Tensor, cutoff: float) -> Tensor:
    """The order by centre and distance; edges that are equally long stand by the other atom, then offset.   [E]"""
    near = (centre * (2 * cutoff) + distance).argsort()  # rounded by far less than a tie
    ordered, i = distance[near], centre[near]
    new = (ordered.diff(prepend=ordered[:1]) > TIE) | (i.diff(prepend=i[:1]) > 0)
    return torch.empty_like(near).scatter_(0, near, new.cumsum(0)).argsort(stable=True)


def _where(mask: Tensor, size: int) -> Tensor:
    """The places of the ``size`` that are true, without the wait of ``nonzero`` for their number.   [size]"""
    place = torch.where(mask, mask.cumsum(0) - 1, size)
    found = place.new_empty(size + 1).scatter_(0, place, torch.arange(len(mask), device=mask.device))
    return found[:size]
