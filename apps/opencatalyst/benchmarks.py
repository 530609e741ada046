"""Benchmark of DimeNet++:  hpcai bench opencatalyst | hpcai ablate opencatalyst [data.batch=4 ...]

The plain form lists all triplets, in functions of torch that are differentiated twice. The list of a batch's triplets is built
once, like neighbour tables of the optimized form. Frames are slabs of five layers of 4 x 4 metal atoms, slightly displaced, with an
oxygen atom on top.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from apps.opencatalyst.data import FIELDS, Frames, collate_frames, open_rows, parse_frame
from apps.opencatalyst.settings import Config
from hpcai.cli.benchmarks import Enabled, Implementation, Peer, Switch, Workload
from hpcai.data.splits import make_loader
from hpcai.dist import Mesh
from hpcai.models.dimenet import Batch, DimeNet, Sizes, counted, loss, parallelize, pyg_kwargs, score
from hpcai.models.dimenet.model import Prediction
from hpcai.models.dimenet.triplets import TripletDimeNet, build_triplets, predict_by_triplets

_SLAB = (4, 4, 5)  # atoms along each side
_SPACING = 2.5  # angstrom


class SlabConfig(Config):
    """An OpenCatalyst run. ``padded``: pad random batches to the maximum number of neighbours, and so to one shape."""

    padded: bool = False


class Benchmark(Workload):
    settings, fields, unit = SlabConfig, tuple(FIELDS), "frames"
    loss, counts, metric = staticmethod(loss), staticmethod(counted), staticmethod(score)
    ragged = frozenset(name for name, (_, shape) in FIELDS.items() if shape[:1] == ("atoms",))

    def switches(self, cfg: SlabConfig, mesh: Mesh) -> list[Switch]:
        return [Switch("no triplets", "moments of each atom's messages, and functions with fast second derivatives")]

    def build(self, cfg: SlabConfig, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize((DimeNet if "no triplets" in enabled else TripletDimeNet)(cfg.model), mesh)
        torch.manual_seed(cfg.train.seed)
        for output in model.output_blocks:  # their last weights start at 0, and so would all gradients
            torch.nn.init.normal_(output.lin.weight, std=0.1)
        return model

    def implementations(self, cfg: SlabConfig, batch: Any, mesh: Mesh) -> dict[str, Callable[[], Implementation]]:
        def plain() -> Implementation:
            network: Any = self.build(cfg, mesh, frozenset())
            return Implementation(_TripletModel(network, network, batch), loss)

        return {"plain": plain}

    def random_sample(self, cfg: SlabConfig, random: np.random.Generator) -> tuple[Any, ...]:
        atoms = np.stack(np.meshgrid(*map(np.arange, _SLAB), indexing="ij"), -1).reshape(-1, 3)
        count, sides = len(atoms) + 1, np.array(_SLAB) * _SPACING + [0, 0, 12.0]
        positions = np.concatenate([atoms * _SPACING, [[0.5 * _SPACING, 0.5 * _SPACING, _SLAB[2] * _SPACING - 0.7]]])
        values = {
            "atoms": np.int32(count), "triplets": np.int64(0), "edges": np.int32(0), "energy": np.float64(random.normal()),
            "cell": np.diag(sides), "pbc": np.ones(3, np.uint8), "numbers": np.append(random.integers(20, 80, count - 1), 8),
            "positions": (positions + random.normal(0, 0.05, (count, 3))).astype(np.float32),
            "forces": random.normal(size=(count, 3)).astype(np.float32), "fixed": (positions[:, 2] < 2 * _SPACING),
        }  # fmt: skip
        return tuple(np.asarray(values[name], FIELDS[name][0]) for name in FIELDS)

    def collate(self, cfg: SlabConfig, samples: list[tuple[Any, ...]]) -> Any:
        frames = [parse_frame(dict(zip(FIELDS, values)), cfg.model, "a random slab") for values in samples]
        return collate_frames(frames, cfg.step.accumulate, _size_bucket(cfg, len(frames)) if cfg.padded else None)

    def loader(self, cfg: SlabConfig, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        bucket = _size_bucket(cfg, cfg.data.batch // mesh["replicate"].size)
        source = Frames(open_rows(cfg, split, mesh), cfg.model, cfg.step.accumulate, bucket)
        return make_loader(source, cfg.data.batch, cfg.data, mesh, **kwargs)


def _size_bucket(cfg: SlabConfig, frames: int) -> Sizes | None:
    """Return sizes of the maximum number of neighbours, so that all batches of so many frames have one shape."""
    each, most = int(np.prod(_SLAB)) + 1, cfg.model.most
    count = each * frames
    return Sizes(count + 1, count * most + 1, most, 2 * most, each) if most else None


class _TripletModel(nn.Module):
    """A network with triplets, which are those of one batch, listed once, and the units of a network of ours."""

    def __init__(self, net: nn.Module, ours: DimeNet, batch: Batch) -> None:
        super().__init__()
        self.net, self.detached, self.edges = net, ours.cfg.angles == "detached", build_triplets(batch.graph)
        self.scale, self.offset = ours.scale, ours.offset

    def forward(self, graph: Any) -> Prediction:
        return predict_by_triplets(self.net, graph, self.edges, self.detached)


def _pyg(cfg: SlabConfig, batch: Batch) -> Implementation:
    """Call the modules of PyTorch Geometric: its ``forward`` has no periodic images and needs a compiled extension."""
    network = import_module("torch_geometric.nn.models").DimeNetPlusPlus(**pyg_kwargs(cfg.model))
    return Implementation(_TripletModel(network, DimeNet(cfg.model).to(batch.forces.device), batch), loss)


Benchmark.peers = {"pyg": Peer("torch_geometric", _pyg)}
