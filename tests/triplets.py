"""DimeNet++ in the form of its paper: every triplet k -> j -> i by itself, its angle by arctan2. Slow, and easy to believe."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def triplets(graph: Any) -> tuple[Tensor, Tensor]:
    """Pairs of edges k -> j and j -> i, but for those whose k is the very atom i.   [T] twice"""
    real = [e for e in range(len(graph.centre)) if graph.incoming.flatten()[graph.into[e]] == e and e < len(graph.centre) - 1]
    by_centre: dict[int, list[int]] = {}
    for e in real:
        by_centre.setdefault(int(graph.centre[e]), []).append(e)
    found = [(k, e) for e in real for k in by_centre.get(int(graph.other[e]), []) if k != int(graph.reverse[e])]
    return torch.tensor([k for k, _ in found], dtype=torch.int64), torch.tensor([e for _, e in found], dtype=torch.int64)


def energy(model: Any, positions: Tensor, graph: Any) -> Tensor:
    """Of each structure.   [B]"""
    cfg = model.cfg
    n = len(positions)
    d_vector = positions[graph.other] - positions[graph.centre] + graph.shift
    d = d_vector.norm(dim=1)
    radial, table = model.rbf(d), model.spherical(d)
    first, second = triplets(graph)
    one, two = (d_vector.detach() if cfg.angles == "detached" else d_vector)[torch.stack((first, second))]
    angle = torch.atan2(torch.linalg.cross(two, one).norm(dim=1), (two * one).sum(1))
    x = torch.cos(angle)
    legendre = [torch.ones_like(x), x]
    for k in range(2, cfg.spherical):
        legendre.append(((2 * k - 1) * x * legendre[-1] - (k - 1) * legendre[-2]) / k)
    y = torch.stack([math.sqrt((2 * k + 1) / (4 * math.pi)) * p for k, p in enumerate(legendre[: cfg.spherical])], 1)
    basis = (table[first].unflatten(1, (cfg.spherical, cfg.radial)) * y[:, :, None]).flatten(1)
    emb = model.emb
    h = emb.emb(graph.numbers)
    m = F.silu(emb.lin(torch.cat([h[graph.centre], h[graph.other], F.silu(emb.lin_rbf(radial))], 1)))

    def said(block: Any, m: Tensor) -> Tensor:
        x = block.lin_up(h.new_zeros(n, m.shape[1]).index_add(0, graph.centre, block.lin_rbf(radial) * m))
        for layer in block.lins:
            x = F.silu(layer(x))
        return block.lin(x)

    def residual(layer: Any, x: Tensor) -> Tensor:
        return x + F.silu(layer.lin2(F.silu(layer.lin1(x))))

    total = said(model.output_blocks[0], m)
    for block, output in zip(model.interaction_blocks, model.output_blocks[1:]):
        x = F.silu(block.lin_kj(m)) * block.lin_rbf2(block.lin_rbf1(radial))
        x = F.silu(block.lin_down(x))
        met = x[first] * block.lin_sbf2(block.lin_sbf1(basis))
        x = F.silu(block.lin_up(torch.zeros_like(x).index_add(0, second, met))) + F.silu(block.lin_ji(m))
        for layer in block.layers_before_skip:
            x = residual(layer, x)
        x = F.silu(block.lin(x)) + m
        for layer in block.layers_after_skip:
            x = residual(layer, x)
        m = x
        total = total + said(output, m)
    structures = len(graph.members)
    return total.new_zeros(structures, 1).index_add(0, graph.structure, total)[:-1, 0]


def energy_and_forces(model: Any, graph: Any) -> tuple[Tensor, Tensor]:
    positions = graph.positions.clone().requires_grad_()
    each = energy(model, positions, graph)
    return each, -torch.autograd.grad(each.sum(), positions, create_graph=True)[0]
