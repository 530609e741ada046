"""``hpcai bench opencatalyst [PART ...]``: a training step of DimeNet++ on forces, against the form in which public codes have it.

    steps       forward, forces, loss, backward and AdamW of four slabs of 81 atoms, the network of MLPerf HPC, in turns: ours,
                which makes no triplets; the plain network, which lists them all; and PyTorch Geometric's modules, if installed
    wall        wall seconds of a step on all cores (detached), each in a process of its own: as a script runs it, and with freed
                memory kept, as every app of ours runs on a CPU
    memory      the peak of one step of each, in a process of its own
    build       seconds to construct the network
    neighbours  milliseconds for the neighbours of a slab: ASE's, ours, and ours of the four at once on the device
    balance     triplets of the copy that has most over their mean, of batches of 16 frames a copy, on average of an epoch: dealt as
                they come (none), equally many frames (frames), only triplets counted (triplets); of the first 64 batches at most

Times but those of ``wall`` are CPU seconds of one thread (wall seconds on a GPU), medians. Indices of edges and triplets, and our
tables of edges, are made before. ``--directory`` holds frames as ``data_prep.opencatalyst`` makes them: ``balance`` counts those.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcai.errors import DataError, MissingExtraError

PARTS = ("steps", "wall", "memory", "build", "neighbours", "balance")
_KINDS = ("plain", "ours", "pyg")
_ANGLES = ("detached", "conservative")
_COPIES, _FRAMES = (8, 64), 16  # a copy
_BATCHES = 64  # of an epoch, at most
_SYNTHETIC = 8 * 1024  # frames: 64 batches of 8 copies


def main(argv: Sequence[str]) -> int:
    from hpcai.cli.bench import _machine, finish, parser_of_parts

    parser = parser_of_parts("opencatalyst", __doc__, PARTS)
    parser.add_argument("--angles", choices=_ANGLES, nargs="+", default=list(_ANGLES), help="detached: those of MLPerf HPC")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each network")
    parser.add_argument("--directory", type=Path, help="frames for balance; synthetic counts without")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for a quick test
    parser.add_argument("--one", choices=_KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--clock", choices=("script", "app"), help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    if words.clock:  # the process that wall starts
        seconds = _clock(words.one, words.clock == "app", words.tiny)
        print(json.dumps({"s": seconds, "threads": torch.get_num_threads()}))
        return 0
    torch.set_num_threads(1)
    if words.one:  # the process that memory starts
        print(json.dumps({"mb": _peak(words.one, words.angles[0], words.tiny)}))
        return 0
    found: dict[str, Any] = {"bench": "opencatalyst", **_machine()}
    if "steps" in words.parts:
        found["steps"] = [_steps(angles, words.repeats, words.tiny) for angles in words.angles]
    if "wall" in words.parts:
        found["wall"] = _wall(words.repeats, words.tiny)
    if "memory" in words.parts:
        found["memory"] = [_memory(angles, words.tiny) for angles in words.angles]
    if "build" in words.parts:
        found["build"] = _build(words.repeats)
    if "neighbours" in words.parts:
        found["neighbours"] = _neighbours(words.repeats, words.tiny)
    if "balance" in words.parts:
        counts, source = _counts(words.directory)
        found["balance"] = [_balance(counts, copies, source) for copies in _COPIES]
    if "pyg" not in kinds() and {"steps", "wall", "memory", "build"} & set(words.parts):
        found["left_out"] = {"left out": "pyg: torch_geometric is not installed (pip install torch_geometric)"}
    return finish(found, (*PARTS, "left_out"), words.json)


def kinds() -> tuple[str, ...]:
    return _KINDS if find_spec("torch_geometric") else _KINDS[:2]


def slabs(tiny: bool = False) -> list[Any]:
    """An oxygen atom on four metals, each of five layers of 4 x 4 atoms, all moved by 0.05 angstrom."""
    import numpy as np

    try:
        from ase.build import add_adsorbate, fcc111
    except ImportError as problem:
        raise MissingExtraError("slabs need ASE: pip install 'hpcai-suite[opencatalyst]'") from problem
    draw, found = np.random.default_rng(0), []
    for metal in ("Cu", "Pt", "Ag", "Au")[: 2 if tiny else 4]:
        slab = fcc111(metal, (2, 2, 2) if tiny else (4, 4, 5), vacuum=10.0)
        add_adsorbate(slab, "O", 1.5, "fcc")
        slab.pbc = True
        slab.rattle(0.05, rng=draw)
        found.append(slab)
    return found


def settings(angles: str = "detached", tiny: bool = False) -> Any:
    from hpcai.models.dimenet import DimeNetConfig

    small = {"hidden": 16, "output": 12, "interaction": 8, "blocks": 1, "spherical": 3, "radial": 3, "cutoff": 4.0, "most": 20}
    return DimeNetConfig.model_validate({"angles": angles, **(small if tiny else {})})


def pyg_network(cfg: Any) -> Any:
    """PyTorch Geometric's, whose own ``forward`` knows no periodic images and needs a compiled extension."""
    return import_module("torch_geometric.nn.models").DimeNetPlusPlus(
        hidden_channels=cfg.hidden, out_channels=1, num_blocks=cfg.blocks, int_emb_size=cfg.interaction, basis_emb_size=cfg.basis,
        out_emb_channels=cfg.output, num_spherical=cfg.spherical, num_radial=cfg.radial, cutoff=cfg.cutoff,
        envelope_exponent=cfg.envelope, num_before_skip=cfg.before_skip, num_after_skip=cfg.after_skip,
        num_output_layers=cfg.output_layers,
    )  # fmt: skip


def graph_of(structures: Sequence[Any], cfg: Any) -> Any:
    from hpcai.models.dimenet import atoms, join

    return join([atoms(structure, cutoff=cfg.cutoff, most=cfg.most) for structure in structures])


def _setup(kind: str, angles: str, tiny: bool) -> Callable[[], Any]:
    """A training step of one network, which waits for the device; returns the loss."""
    from hpcai.models.dimenet import DimeNet
    from hpcai.models.dimenet.triplets import WithTriplets, edges_of, energy_and_forces

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg = settings(angles, tiny)
    graph = graph_of(slabs(tiny), cfg).to(device, torch.float32)
    torch.manual_seed(0)
    ours = DimeNet(cfg)
    for output in ours.output_blocks:
        nn.init.normal_(output.lin.weight, 0, 0.1)  # which is 0 at first, and so would be all gradients
    net: Any = {"ours": lambda cfg: ours, "plain": WithTriplets, "pyg": pyg_network}[kind](cfg)
    net.load_state_dict({name: values for name, values in ours.state_dict().items() if name in net.state_dict()})
    net.to(device)
    edges = None if kind == "ours" else edges_of(graph)
    n = int((graph.structure < len(graph.members) - 1).sum())
    positions, wanted = graph.positions[:n], torch.randn(n, 3, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def run() -> Any:
        optimizer.zero_grad()
        forces = energy_and_forces(net, positions, edges, angles == "detached")[1] if edges else net(graph).forces[:n]
        loss = (forces - wanted).abs().mean()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    return run


def _steps(angles: str, repeats: int, tiny: bool = False, of: Sequence[str] | None = None) -> dict[str, Any]:
    from hpcai.cli.bench import _alternate

    of = of or kinds()
    times = _alternate({kind: _setup(kind, angles, tiny) for kind in of}, repeats)
    clock = int(torch.cuda.is_available())
    spent = {kind: statistics.median(t[clock] for t in rows) for kind, rows in times.items()}
    from hpcai.models.dimenet.triplets import edges_of

    edges = edges_of(graph_of(slabs(tiny), settings(angles, tiny)))
    ratios = {f"{kind}_over_ours": round(spent[kind] / spent["ours"], 3) for kind in of if kind != "ours"}
    return {
        "angles": angles, "atoms": len(edges.numbers), "edges": len(edges.i), "triplets": len(edges.ji),
        **{f"{kind}_s": round(spent[kind], 4 if tiny or clock else 2) for kind in of}, **ratios,
    }  # fmt: skip


def _clock(kind: str, keep: bool, tiny: bool) -> float:
    """Of the third step: the first ones meet pages that no tensor had."""
    from hpcai.dist.host import keep_memory

    run = _setup(kind, "detached", tiny)
    if keep:
        keep_memory()
    for _ in range(3):
        began = time.perf_counter()
        run()
    return time.perf_counter() - began


def _wall(repeats: int, tiny: bool = False, of: Sequence[str] | None = None) -> dict[str, Any]:
    from hpcai.cli.bench import apart

    of = of or kinds()
    words = ["opencatalyst", *(["--tiny"] if tiny else [])]
    times: dict[str, list[float]] = {f"{kind}_{place}": [] for place in ("script", "app") for kind in of}
    for _ in range(repeats):  # in turns: what else the machine does falls on all
        for name, rows in times.items():
            kind, place = name.split("_")
            said = apart([*words, "--one", kind, "--clock", place])
            rows.append(float(said["s"]))
    spent = {name: statistics.median(rows) for name, rows in times.items()}
    ratios = {f"{kind}_over_ours": round(spent[f"{kind}_script"] / spent["ours_app"], 3) for kind in of if kind != "ours"}
    return {"threads": said["threads"], **{f"{name}_s": round(s, 4 if tiny else 2) for name, s in spent.items()}, **ratios}


def _peak(kind: str, angles: str, tiny: bool) -> int:
    from hpcai.cli.bench import high_water

    _setup(kind, angles, tiny)()
    return round(high_water())


def _memory(angles: str, tiny: bool = False, of: Sequence[str] | None = None) -> dict[str, Any]:
    from hpcai.cli.bench import peak_of

    of = of or kinds()
    words = ["opencatalyst", "--angles", angles, *(["--tiny"] if tiny else [])]
    peak = {kind: peak_of([*words, "--one", kind]) for kind in of}
    ratios = {f"ours_over_{kind}": round(peak["ours"] / peak[kind], 3) for kind in of if kind != "ours"}
    return {"angles": angles, **{f"{kind}_mb": round(peak[kind]) for kind in of}, **ratios}


def _build(repeats: int, of: Sequence[str] | None = None) -> dict[str, Any]:
    """CPU seconds; ours also finds the zeros of Bessel functions, which PyTorch Geometric leaves to sympy."""
    from hpcai.models.dimenet import DimeNet
    from hpcai.models.dimenet.basis import zeros

    cfg = settings()

    def ours() -> None:
        zeros.cache_clear()
        DimeNet(cfg)

    ours()  # imports
    found = {"ours_s": round(statistics.median(_seconds(ours) for _ in range(repeats)), 4)}
    if "pyg" in (of or kinds()):
        import_module("torch_geometric.nn.models")
        found["pyg_s"] = round(_seconds(lambda: pyg_network(cfg)), 3)
    return found


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _neighbours(repeats: int, tiny: bool = False) -> dict[str, Any]:
    """ASE's are all within the cutoff, ours the nearest of them in their order."""
    import numpy as np

    from hpcai.cli.bench import _alternate
    from hpcai.models.dimenet.periodic import neighbours
    from hpcai.models.dimenet.periodic_batch import neighbours_of_batch

    cfg, given = settings(tiny=tiny), slabs(tiny)
    from ase.neighborlist import neighbor_list

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = torch.tensor([len(slab) for slab in given])
    arrays = np.concatenate([s.positions for s in given]), np.stack([s.cell.array for s in given]), np.stack([s.pbc for s in given])
    index = torch.arange(len(given)).repeat_interleave(counts)
    positions, cells, pbc = (torch.from_numpy(array).to(device) for array in arrays)
    structure = index.to(device)
    runs: dict[str, Callable[[], Any]] = {
        "ase": lambda: [neighbor_list("ijS", slab, cfg.cutoff) for slab in given],
        "ours": lambda: [neighbours(slab.positions, slab.cell.array, slab.pbc, cfg.cutoff, cfg.most) for slab in given],
        "batch": lambda: neighbours_of_batch(positions, cells, pbc, structure, cfg.cutoff, cfg.most)[0].cpu(),
    }  # fmt: skip
    times = _alternate(runs, 3 * repeats)
    clock = int(device.type == "cuda")
    spent = {kind: 1e3 * statistics.median(t[clock] for t in rows) / len(given) for kind, rows in times.items()}
    return {
        "structures": len(given), "atoms": int(counts[0]), "edges_in_cutoff": len(runs["ase"]()[0][0]),
        "edges": len(runs["ours"]()[0].centre), **{f"{kind}_ms": round(value, 3) for kind, value in spent.items()},
    }  # fmt: skip


def _counts(directory: Path | None, synthetic: int = _SYNTHETIC) -> tuple[Any, str]:
    """Triplets of frames, and where they come from.   [N]"""
    import numpy as np

    if directory is None:
        draw = np.random.default_rng(0)
        atoms = np.empty(0)
        while len(atoms) < synthetic:
            more = draw.lognormal(math.log(73) - 0.4**2 / 2, 0.4, synthetic)
            atoms = np.concatenate([atoms, more[(more >= 20) & (more <= 220)].round()])[:synthetic]
        return atoms * 46 * 46, "synthetic: log-normal like OC20's"
    import h5py

    paths = sorted((directory / "train" if (directory / "train").is_dir() else directory).glob("*.h5"))
    if not paths:
        raise DataError(
            f"{directory}: no train/*.h5 with triplets; make them with: python -m data_prep.opencatalyst simulate {directory}"
        )
    columns = []
    for path in paths:
        with h5py.File(path, "r") as file:
            if "triplets" not in file:
                raise DataError(f"{path}: no dataset 'triplets'; remake it with: python -m data_prep.opencatalyst")
            columns.append(file["triplets"][:])
    return np.concatenate(columns), str(directory)


def _balance(counts: Any, copies: int, source: str = "") -> dict[str, Any]:
    from hpcai.data.sampler import Balanced, Sampler, Shuffled

    batch = _FRAMES * copies
    if len(counts) < batch:
        raise DataError(f"{source}: {len(counts)} frames, expected {batch} at least for {copies} copies; simulate more")
    samplers: dict[str, Sampler] = {
        "none": Shuffled(len(counts)), "frames": Balanced(counts, batch), "triplets": Balanced(counts, batch, equal=False),
    }  # fmt: skip
    found: dict[str, Any] = {"counts": source, "samples": len(counts), "triplets_each": round(counts.mean()), "copies": copies}
    for name, sampler in samplers.items():
        order, uneven = sampler.order(0), []
        for first in range(0, len(order) - batch + 1, batch)[:_BATCHES]:
            indices = order[first : first + batch]
            work = [counts[indices[sampler.deal(indices, rank, copies)]].sum() for rank in range(copies)]
            uneven.append(max(work) / statistics.fmean(work))
        found[name] = round(statistics.fmean(uneven), 4)
    return found
