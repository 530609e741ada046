"""What cutting a protein over ``mesh.axial`` costs and gains:  hpcai bench openfold axial axial-step [mesh.axial=8 ...]"""

import time
from typing import Any

import torch

from hpcai import dist
from hpcai.cli.apps import find
from hpcai.cli.bench.timing import Row, alternate, doublings, on_ranks
from hpcai.dist import Mesh
from hpcai.dist.host import keep_memory
from hpcai.errors import ConfigError
from hpcai.models.openfold import OpenFoldConfig
from hpcai.parallel.axial import Move
from hpcai.parallel.halo import Traffic


def by_channels(cfg: OpenFoldConfig, sequences: int, residues: int, ranks: int) -> int:
    """Numbers that a rank sends for an Evoformer block, forward; backward it sends as many.

    For S sequences, N residues and p ranks (2 S N c_m + 2 N^2 c_z + 6 N^2 c_tri) (p - 1) / p^2 that move, alignment and pairs to
    columns and back, a and b of two products to channels and the results to rows; and ((h_m + 2 h_z) N^2 + c_outer S N) (p - 1) / p
    that are gathered, biases of heads and the second factor of the outer product. S / p and N / p are rounded up: parts are filled.
    """
    rows, columns = -(-sequences // ranks), -(-residues // ranks)
    moved = 2 * cfg.msa * rows * columns + 2 * cfg.pair * columns**2 + 6 * cfg.pairs.triangle // ranks * columns * residues
    return (ranks - 1) * (moved + _gathered(cfg, sequences, residues, columns))


def by_gathers(cfg: OpenFoldConfig, sequences: int, residues: int, ranks: int) -> int:
    """The same where products of triangles gather one factor, as in FastFold (Cheng et al. 2022) and in MLPerf's runs: 2 N^2 c_tri
    (p - 1) / p instead of the moves to channels and back, and pairs move four times, as incoming edges are multiplied by columns.
    """
    rows, columns = -(-sequences // ranks), -(-residues // ranks)
    moved = 2 * cfg.msa * rows * columns + 4 * cfg.pair * columns**2
    factors = 2 * cfg.pairs.triangle * columns * residues
    return (ranks - 1) * (moved + factors + _gathered(cfg, sequences, residues, columns))


def _gathered(cfg: OpenFoldConfig, sequences: int, residues: int, columns: int) -> int:
    return (cfg.rows.heads + 2 * cfg.pairs.heads) * columns * residues + cfg.rows.outer * sequences * columns


def axial(cfg: Any, repeats: int) -> list[Row]:
    """One Evoformer block, forward and backward, on 1, 2 and 4 processes of this machine (1, 2, ... ``mesh.axial`` where that is
    given), for an alignment of ``features.clusters`` rows and ``features.crop`` residues in float32.

    CPU seconds of the rank that needs most, transport included, and as a share of those of the whole block, which the same ranks
    compute in turns with it; bytes that a rank sends forward and backward, by the formula for each of the two, and as a share of
    those of the form that gathers; exchanges of a rank; and bytes that it keeps for the backward pass, weights left out, also as a
    share of those of one process.
    """
    found = []
    for row in _rows(cfg, repeats, _Block):
        size = cfg.features.clusters, cfg.features.crop, row["ranks"]
        formula, gathers = (4 * count(cfg.model, *size) for count in (by_channels, by_gathers))
        found.append({**row, "formula": formula, "of_gathers": round(formula / gathers, 3) if gathers else None})
    return found


def axial_step(cfg: Any, repeats: int) -> list[Row]:
    """The same of the whole network and its loss, without update, on one synthetic chain."""
    return _rows(cfg, repeats, _Network)


def _rows(cfg: Any, repeats: int, kind: "type[_Block]") -> list[Row]:
    if cfg.features.crop is None:
        raise ConfigError("features.crop is null, but what is measured has a number of residues; give one, such as 64")
    found = []
    for ranks in doublings(cfg.mesh.axial if cfg.mesh.axial > 1 else 4):
        every = on_ranks(ranks, _measure, (cfg, repeats, kind), {"replicate": 1, "axial": ranks})
        worst = {what: max(one[what] for one in every) for what in every[0]}
        found.append({
            "ranks": ranks, "cpu_s": round(worst["cpu"], 4), "cpu_share": round(worst["share"], 3), "forward": worst["forward"],
            "backward": worst["backward"], "messages": worst["messages"], "kept_mb": round(worst["kept"] / 1e6, 1),
            "kept_share": round(worst["of_whole"], 3),
        })  # fmt: skip
    return found


def _measure(mesh: Mesh, cfg: Any, repeats: int, kind: "type[_Block]") -> Row:
    keep_memory()
    whole, cut = kind(cfg, dist.alone(torch.device("cpu"))), kind(cfg, mesh)
    counted, kept = cut.counts()
    spent = alternate({"whole": whole.run, "cut": cut.run}, repeats, warm=1, clock=time.process_time)
    of_whole = kept / whole.counts()[1]
    return {"cpu": spent["cut"], "share": spent["cut"] / spent["whole"], **counted, "kept": kept, "of_whole": of_whole}


class _Block:
    """An Evoformer block with its parts of an alignment and of pairs, as a rank holds them amid a stack."""

    above: Any = None  # gradients of what comes out

    def __init__(self, cfg: Any, mesh: Mesh) -> None:
        sequences, residues = cfg.features.clusters, cfg.features.crop
        # The last block of a stack leaves the alignment cut by residues.
        few = cfg.model.model_copy(update={"blocks": 2, "extra": cfg.model.extra.model_copy(update={"blocks": 1})})
        model = self._built(cfg.model_copy(update={"model": few}), mesh)
        self.part = model.evoformer.blocks[0]
        self.masks = model.evoformer.masks(torch.ones(1, sequences, residues), model.own_rows(torch.ones(1, residues, residues)))
        m, z = torch.randn(1, sequences, residues, few.msa), torch.randn(1, residues, residues, few.pair)
        # Copies: a view would keep the whole, which no rank holds between blocks.
        self.given = [part.clone().requires_grad_() for part in (model.own_sequences(m), model.own_rows(z))]
        self.above = [torch.randn_like(part) for part in self.given]

    def _built(self, cfg: Any, mesh: Mesh) -> Any:
        trial: Any = find("openfold", "trial")  # which imports this module
        self.subject = trial.Trial()
        model: Any = self.subject.build(cfg, mesh, frozenset({"kernels"}))
        self.traffic = next((part.traffic for part in model.modules() if isinstance(part, Move)), Traffic())
        return model

    def forward(self) -> Any:
        return self.part(*self.given, self.masks)

    def run(self) -> None:
        self.backward(self.forward())

    def backward(self, found: Any) -> None:
        self.part.zero_grad()
        torch.autograd.backward(found, self.above)

    def counts(self) -> tuple[Row, int]:
        """What it sends each way, in how many exchanges, and the bytes kept in between."""
        kept: dict[int, int] = {}
        weights = {weight.untyped_storage().data_ptr() for weight in self.part.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        messages, sent = self.traffic.messages, [self.traffic.sent]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = self.forward()
        sent.append(self.traffic.sent)
        self.backward(found)
        exchanges = self.traffic.messages - messages
        count = {"forward": sent[1] - sent[0], "backward": self.traffic.sent - sent[1], "messages": exchanges}
        return count, sum(kept.values())


class _Network(_Block):
    """All of the network, and one chain, which every rank has."""

    def __init__(self, cfg: Any, mesh: Mesh) -> None:
        self.part = self._built(cfg, mesh)
        self.batch = self.subject.random_batch(cfg, [0], torch.device("cpu"))

    def forward(self) -> Any:
        return self.subject.loss(self.part, self.batch)["loss"]
