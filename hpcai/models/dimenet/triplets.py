"""DimeNet++ with an explicit list of all triplets, as in the paper and all public codes: the reference for ``model``.

B structures, N atoms, E edges j -> i, T triplets k -> j -> i, L orders, R radial functions.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.models.dimenet import model as ours
from hpcai.models.dimenet.basis import SphericalBessel, radial_functions
from hpcai.models.dimenet.config import DimeNetConfig
from hpcai.models.dimenet.graph import Graph
from hpcai.models.dimenet.model import Prediction


class TripletGraph(NamedTuple):
    """The edges of a graph without its padding, and all pairs of consecutive edges."""

    numbers: Tensor  # [N]
    structure: Tensor  # [N]
    structures: int
    i: Tensor  # [E] ascending
    j: Tensor  # [E]
    shift: Tensor  # [E, 3]
    kj: Tensor  # [T] edge
    ji: Tensor  # [T] edge


def build_triplets(graph: Graph) -> TripletGraph:
    """List the triplets k -> j -> i with k other than the atom i itself. An image of i counts as another atom."""
    structures = len(graph.members) - 1
    real = graph.structure < structures
    n, e = int(real.sum()), int(real[graph.centre].sum())
    i, j, shift = graph.centre[:e], graph.neighbour[:e], graph.shift[:e]
    degree = torch.bincount(i, minlength=n)
    degrees = degree[j]
    ji = torch.repeat_interleave(torch.arange(e, device=i.device), degrees)
    position = torch.arange(len(ji), device=i.device) - (degrees.cumsum(0) - degrees)[ji]
    kj = (degree.cumsum(0) - degree)[j[ji]] + position
    returns = (j[kj] == i[ji]) & ((shift[kj] + shift[ji]).norm(dim=1) < 1e-4)
    return TripletGraph(graph.numbers[:n], graph.structure[:n], structures, i, j, shift, kj[~returns], ji[~returns])


def predict_by_triplets(net: Any, graph: Graph, edges: TripletGraph, detached: bool) -> Prediction:
    """Return energies and forces by ``TripletDimeNet``, or by PyTorch Geometric's modules."""
    i, j, kj, ji = edges.i, edges.j, edges.kj, edges.ji
    positions = graph.positions[: len(edges.numbers)].clone().requires_grad_()
    vector = positions[j] - positions[i] + edges.shift
    d = vector.square().sum(1).sqrt()
    directed = vector.detach() if detached else vector
    incoming, outgoing = directed[kj], directed[ji]
    angle = torch.atan2(torch.cross(outgoing, incoming, dim=1).norm(dim=1), (outgoing * incoming).sum(1))
    radial, spherical = net.rbf(d), net.sbf(d, angle, kj)
    m = net.emb(edges.numbers, radial, i, j)
    atoms = net.output_blocks[0](m, radial, i, num_nodes=len(positions))
    for interaction, output in zip(net.interaction_blocks, net.output_blocks[1:]):
        m = interaction(m, radial, spherical, kj, ji)
        atoms = atoms + output(m, radial, i, num_nodes=len(positions))
    energy = atoms.new_zeros(edges.structures).index_add(0, edges.structure, atoms[:, 0])
    gradient = torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
    return Prediction(energy, F.pad(-gradient, (0, 0, 0, len(graph.positions) - len(positions))))


class _Spherical(SphericalBessel):
    """Spherical basis from polynomials in the cosine: radial functions per edge, angular ones per triplet.   [E], [T] -> [T, L * R]
    """

    def forward(self, d: Tensor, angle: Tensor, kj: Tensor) -> Tensor:  # type: ignore[override]
        orders, cosine = len(self.z), torch.cos(angle)
        radial = radial_functions(d, self.z, self.norm, self.cutoff, self.exponent).unflatten(1, (orders, -1))
        legendre = [torch.ones_like(angle), cosine]
        for n in range(2, orders):
            legendre.append(((2 * n - 1) * cosine * legendre[n - 1] - (n - 1) * legendre[n - 2]) / n)
        harmonic = torch.stack([math.sqrt((2 * n + 1) / (4 * math.pi)) * legendre[n] for n in range(orders)], 1)
        return (radial[kj] * harmonic[..., None]).flatten(1)


class _Embedding(nn.Module):
    def forward(self: Any, numbers: Tensor, radial: Tensor, i: Tensor, j: Tensor) -> Tensor:
        h = self.emb(numbers)
        return F.silu(self.lin(torch.cat([h[i], h[j], F.silu(self.lin_rbf(radial))], 1)))


class _Residual(nn.Module):
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + F.silu(self.lin2(F.silu(self.lin1(x))))


class _Interaction(nn.Module):
    def forward(self: Any, m: Tensor, radial: Tensor, spherical: Tensor, kj: Tensor, ji: Tensor) -> Tensor:
        x = F.silu(self.lin_kj(m)) * self.lin_rbf2(self.lin_rbf1(radial))
        x = F.silu(self.lin_down(x))
        x = x[kj] * self.lin_sbf2(self.lin_sbf1(spherical))
        x = x.new_zeros(len(m), x.shape[1]).index_add(0, ji, x)
        x = F.silu(self.lin_ji(m)) + F.silu(self.lin_up(x))
        for layer in self.layers_before_skip:
            x = layer(x)
        x = F.silu(self.lin(x)) + m
        for layer in self.layers_after_skip:
            x = layer(x)
        return x


class _Output(nn.Module):
    def forward(self: Any, m: Tensor, radial: Tensor, i: Tensor, num_nodes: int) -> Tensor:
        x = self.lin_rbf(radial) * m
        x = self.lin_up(x.new_zeros(num_nodes, x.shape[1]).index_add(0, i, x))
        for layer in self.lins:
            x = F.silu(layer(x))
        return self.lin(x)


class TripletDimeNet(ours.DimeNet):
    """DimeNet with the same parameters under the same names, in a direct implementation of the layers."""

    def __init__(self, cfg: DimeNetConfig | None = None) -> None:
        super().__init__(cfg)
        classes = {
            SphericalBessel: _Spherical, ours.Embedding: _Embedding, ours.Residual: _Residual,
            ours.Interaction: _Interaction, ours.Output: _Output,
        }  # fmt: skip
        for layer in self.modules():
            layer.__class__ = classes.get(type(layer), type(layer))
        self.sbf = self.spherical
        del self.spherical

    def forward(self, graph: Graph) -> Prediction:
        with torch.enable_grad():
            return predict_by_triplets(self, graph, build_triplets(graph), self.cfg.angles == "detached")
