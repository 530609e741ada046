"""DimeNet++: energies and forces of atoms from distances and angles (Gasteiger et al., arXiv:2011.14115).

Network and parameter names are those of MLPerf HPC's OpenCatalyst. The message m of an edge j -> i aggregates the messages k -> j,
weighted by the angle at j. Triplets k -> j -> i are never materialised: the angular functions are Legendre polynomials of
u_ji . u_kj, which are sums over m of Y_lm(u_ji) Y_lm(u_kj). Each atom thus accumulates its moments once, and every outgoing message
reads them. The backtracking term, from i itself, is subtracted.
B structures, N atoms, E edges, K into an atom, L out of it, H hidden, I interaction, S orders, R radial functions.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError
from hpcai.models.dimenet.basis import SphericalBessel, angular_factor, envelope, spherical_harmonics
from hpcai.models.dimenet.config import DimeNetConfig
from hpcai.models.dimenet.graph import Graph, Structure, check_structure, collate
from hpcai.models.dimenet.neighbour_table import gather, index_select, reverse_edges, scatter, segment_sum
from hpcai.nn.double_backward import silu
from hpcai.nn.inference import inference_mode
from hpcai.nn.weights import PretrainedMixin


class Prediction(NamedTuple):
    """Energies and forces in units of the network: ``cfg.scale`` eV, and eV/angstrom."""

    energy: Tensor  # [B]
    forces: Tensor  # [N, 3]


class BasisFunctions(NamedTuple):
    """Basis functions of all edges, computed once and shared by all blocks."""

    radial: Tensor  # [E, R] Bessel functions of order 0, with learned frequencies
    spherical: Tensor  # [E, S * R]
    moments: Tensor  # [N, S * S * R, K] weights of incoming messages in the moments
    angular: Tensor  # [N, L, S * S] weights of the moments in outgoing messages


class Bessel(nn.Module):
    """sin(freq_n d/c) with the envelope.   d [E] -> [E, R]"""

    wide = True  # a frequency in bfloat16 is off by half a percent

    def __init__(self, cfg: DimeNetConfig) -> None:
        super().__init__()
        self.cutoff, self.exponent = cfg.cutoff, cfg.envelope
        self.freq = nn.Parameter(torch.arange(1, cfg.radial + 1) * math.pi)

    def forward(self, d: Tensor) -> Tensor:
        x = (d / self.cutoff)[:, None]
        return envelope(x, self.exponent) * torch.sin(self.freq.to(d.dtype) * x)


class Embedding(nn.Module):
    """Initial messages from the two elements and their distance.   numbers [N] -> [E, H]"""

    def __init__(self, cfg: DimeNetConfig) -> None:
        super().__init__()
        self.emb = nn.Embedding(cfg.elements, cfg.hidden)
        self.lin_rbf = nn.Linear(cfg.radial, cfg.hidden)
        self.lin = nn.Linear(3 * cfg.hidden, cfg.hidden)
        nn.init.uniform_(self.emb.weight, -math.sqrt(3), math.sqrt(3))

    def forward(self, graph: Graph, radial: Tensor) -> Tensor:
        h = self.emb(graph.numbers)
        # A matrix times a concatenation is three matrices; two of them act on atoms, which are fewer than edges.
        centre_weight, neighbour_weight, distance_weight = self.lin.weight.chunk(3, 1)
        x = nn.functional.linear(silu(self.lin_rbf(radial)), distance_weight, self.lin.bias)
        x = x + index_select(nn.functional.linear(h, centre_weight), graph.centre, graph.incoming)
        return silu(x + index_select(nn.functional.linear(h, neighbour_weight), graph.neighbour, graph.outgoing))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.lin2(silu(self.lin1(x))))


class Interaction(nn.Module):
    """[E, H] -> [E, H]"""

    def __init__(self, cfg: DimeNetConfig) -> None:
        super().__init__()
        width, small = cfg.hidden, cfg.interaction
        self.lin_rbf1 = nn.Linear(cfg.radial, cfg.basis, bias=False)
        self.lin_rbf2 = nn.Linear(cfg.basis, width, bias=False)
        self.lin_sbf1 = nn.Linear(cfg.spherical * cfg.radial, cfg.basis, bias=False)
        self.lin_sbf2 = nn.Linear(cfg.basis, small, bias=False)
        self.lin_kj, self.lin_ji = nn.Linear(width, width), nn.Linear(width, width)
        self.lin_down, self.lin_up = nn.Linear(width, small, bias=False), nn.Linear(small, width, bias=False)
        self.layers_before_skip = nn.ModuleList(Residual(width) for _ in range(cfg.before_skip))
        self.lin = nn.Linear(width, width)
        self.layers_after_skip = nn.ModuleList(Residual(width) for _ in range(cfg.after_skip))
        self.aggregate = AngularAggregation(cfg)

    def forward(self, m: Tensor, graph: Graph, functions: BasisFunctions) -> Tensor:
        x = silu(self.lin_kj(m)) * (functions.radial @ (self.lin_rbf2.weight @ self.lin_rbf1.weight).T)
        x = silu(self.lin_down(x))
        x = self.aggregate(x, graph, functions, self.lin_sbf2.weight @ self.lin_sbf1.weight)
        x = silu(self.lin_ji(m)) + silu(self.lin_up(x))
        for layer in self.layers_before_skip:
            x = layer(x)
        x = silu(self.lin(x)) + m
        for layer in self.layers_after_skip:
            x = layer(x)
        return x


class AngularAggregation(nn.Module):
    """For each message j -> i, the sum over messages k -> j, filtered by the angle at j and the distance of k.

    Shape: x [E, I], weight [I, S * R] -> [E, I]
    """

    order: Tensor  # [S]

    def __init__(self, cfg: DimeNetConfig) -> None:
        super().__init__()
        self.orders, self.radial = cfg.spherical, cfg.radial
        # A buffer, since a captured step copies nothing from the host. Integers are unaffected by casts of the
        # model.
        self.register_buffer("order", torch.arange(cfg.spherical), persistent=False)

    def forward(self, x: Tensor, graph: Graph, functions: BasisFunctions, weight: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # sums over fifty neighbours that cancel
            x = x.to(functions.spherical.dtype)
            order = self.order.to(x.dtype)[:, None]  # [S, 1]
            weight = weight.to(x.dtype).unflatten(1, (self.orders, self.radial)) * angular_factor(order)  # [I, S, R]
            incoming = scatter(x, graph.incoming, graph.incoming_slot)  # [N, K, I]
            gathered = (functions.moments @ incoming).unflatten(1, (-1, self.radial))  # [N, S * S, R, I]
            parts = weight.permute(1, 2, 0).split(1)  # order n has 2 n + 1 moments; indexing would sum gradients in any order
            weights = torch.cat([part.expand(2 * n + 1, -1, -1) for n, part in enumerate(parts)])  # [S * S, R, I]
            moments = (gathered * weights).sum(2)
            out = gather(functions.angular @ moments, graph.outgoing_slot, graph.outgoing)
            backtracking = x * (functions.spherical @ (weight * (1 - 2 * (order % 2))).flatten(1).T)  # P_l(-1) = (-1)^l
            return out - reverse_edges(backtracking, graph.reverse)


class Output(nn.Module):
    """The energy of each atom, from its incoming messages.   [E, H] -> [N, 1]"""

    def __init__(self, cfg: DimeNetConfig) -> None:
        super().__init__()
        self.lin_rbf = nn.Linear(cfg.radial, cfg.hidden, bias=False)
        self.lin_up = nn.Linear(cfg.hidden, cfg.output)
        self.lins = nn.ModuleList(nn.Linear(cfg.output, cfg.output) for _ in range(cfg.output_layers))
        self.lin = nn.Linear(cfg.output, 1, bias=False)

    def forward(self, m: Tensor, graph: Graph, functions: BasisFunctions) -> Tensor:
        messages = (self.lin_rbf(functions.radial) * m).to(functions.radial.dtype)  # sums of fifty terms
        x = self.lin_up(segment_sum(messages, graph.centre, graph.incoming))
        for layer in self.lins:
            x = silu(layer(x))
        with torch.autocast(x.device.type, enabled=False):  # small differences of large sums
            return nn.functional.linear(x.to(messages.dtype), self.lin.weight.to(messages.dtype))


class DimeNet(PretrainedMixin):
    """Maps a graph to the energies of its structures and the forces on its atoms."""

    package = __package__
    references: Tensor | None  # [elements, 1] eV

    def __init__(self, cfg: DimeNetConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or DimeNetConfig()
        self.rbf = Bessel(cfg)
        self.emb = Embedding(cfg)
        self.output_blocks = nn.ModuleList(Output(cfg) for _ in range(cfg.blocks + 1))
        self.interaction_blocks = nn.ModuleList(Interaction(cfg) for _ in range(cfg.blocks))
        self.spherical = SphericalBessel(cfg.spherical, cfg.radial, cfg.cutoff, cfg.envelope)
        self.scale, self.mean = cfg.scale or 1.0, cfg.mean or 0.0
        references = torch.tensor([cfg.references.get(number, 0.0) for number in range(cfg.elements)], dtype=torch.float64)
        # Not persistent, since it follows from the settings: the keys of a checkpoint are those of the benchmark.
        self.register_buffer("references", references[:, None] if cfg.references else None, persistent=False)
        # Orthogonal matrices of Glorot's variance; the last layer of each output block is zero.
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear) and not name.startswith("emb."):
                init = nn.init.orthogonal_(torch.empty(layer.weight.shape))  # new: the weight may be on the meta device
                with torch.no_grad():
                    layer.weight.copy_(init * math.sqrt(2.0 / (sum(init.shape) * init.var())))
                if layer.bias is not None and not name.endswith("lin_up"):
                    nn.init.zeros_(layer.bias)
        for output in self.output_blocks:
            nn.init.zeros_(output.lin.weight)  # type: ignore[union-attr,arg-type]

    def forward(self, graph: Graph) -> Prediction:
        if torch.compiler.is_exporting():
            raise ConfigError("torch.export cannot record forces, a derivative within the network; use torch.compile(model)")
        wide = torch.float64 if self.rbf.freq.dtype == torch.float64 else torch.float32
        graph = graph.to(graph.positions.device, wide)

        def energy(positions: Tensor) -> tuple[Tensor, Tensor]:
            energies = self.energy(positions, graph)
            return energies.sum(), energies

        # A pure function of the positions, so that only the second derivatives that the parameters need are computed.
        gradient, energies = torch.func.grad(energy, has_aux=True)(graph.positions)
        return Prediction(energies, -gradient)

    def offset(self, graph: Graph) -> Tensor | float:
        """Return the energy that is added to the output of the network, eV.   [B]"""
        if self.references is None:
            return self.mean
        return self.mean + segment_sum(self.references[graph.numbers], graph.structure, graph.members)[:-1, 0]

    def to_physical(self, graph: Graph, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Return energies [B] in eV and forces [N, 3] in eV/angstrom."""
        return prediction.energy.double() * self.scale + self.offset(graph), prediction.forces * self.scale

    def energy_and_forces(self, structures: Structure | Sequence[Structure]) -> Any:
        """Return energy (eV, a float) and forces (eV/angstrom, [N, 3]) of one structure (``build_structure``), or a list of such
        pairs.

        Raises DataError if the neighbours of a structure have another cutoff than the model, or an element has no embedding.
        """
        is_single = isinstance(structures, Structure)
        batch = [structures] if isinstance(structures, Structure) else list(structures)
        for structure in batch:
            check_structure(structure, self.cfg)
        if not batch:
            return []
        weight = self.emb.emb.weight
        with inference_mode(self, weight) as dtype:
            graph = collate(batch).to(weight.device, dtype)
            energy, forces = self.to_physical(graph, self(graph))
        sizes = [len(structure.positions) for structure in batch]
        parts = forces.double().cpu()[: sum(sizes)].split(sizes)
        results = [(e, f.numpy()) for e, f in zip(energy.tolist(), parts)]
        return results[0] if is_single else results

    def calculator(self) -> Any:
        """Return an ASE calculator: ``slab.calc = model.calculator()``. Raises ConfigError if forces are no gradient."""
        from hpcai.models.dimenet.calculator import DimeNetCalculator

        return DimeNetCalculator(self)

    def energy(self, positions: Tensor, graph: Graph) -> Tensor:
        """[N, 3] -> [B]"""
        functions = self.basis_functions(positions, graph)
        m = self.emb(graph, functions.radial)
        energies = self.output_blocks[0](m, graph, functions)
        for interaction, output in zip(self.interaction_blocks, self.output_blocks[1:]):
            m = interaction(m, graph, functions)
            energies = energies + output(m, graph, functions)
        return segment_sum(energies, graph.structure, graph.members)[:-1, 0]

    def basis_functions(self, positions: Tensor, graph: Graph) -> BasisFunctions:
        cfg = self.cfg
        with torch.autocast(positions.device.type, enabled=False):
            neighbours = index_select(positions, graph.neighbour, graph.outgoing)
            vector = neighbours - index_select(positions, graph.centre, graph.incoming) + graph.shift
            d = vector.square().sum(1).sqrt()
            directed = vector.detach() if cfg.angles == "detached" else vector
            u = directed / directed.square().sum(1, keepdim=True).sqrt()
            angular, spherical = spherical_harmonics(u, cfg.spherical), self.spherical(d)
            y = scatter(angular, graph.incoming, graph.incoming_slot)  # [N, K, S * S]
            r = scatter(spherical, graph.incoming, graph.incoming_slot).unflatten(2, (-1, cfg.radial))
            parts = [y[..., n * n : (n + 1) ** 2, None] * r[:, :, n, None] for n in range(cfg.spherical)]
            moments = torch.cat([part.flatten(2) for part in parts], 2).transpose(1, 2)  # [N, S * S * R, K]
            return BasisFunctions(self.rbf(d), spherical, moments, scatter(angular, graph.outgoing, graph.outgoing_slot))
