"""Graphs of papers for R-GAT: simulate citations or materials, or convert IGB-Heterogeneous.

    python -m data_prep.igb simulate OUT            papers, authors, institutes, fields of study and venues, or --kind materials
    python -m data_prep.igb convert SOURCE OUT      IGBH, any size: SOURCE/processed/TYPE/node_feat.npy, SOURCE/processed/SRC__REL__DST/
                                                    edge_index.npy [E, 2], SOURCE/processed/paper/node_label_{19,2K}.npy
    python -m data_prep.igb check OUT               all edges; counts, degrees and homophily

OUT has the form of hpcai.data.graph. Each relation has its reverse, named rev_REL; cites has self-loops, and then all pairs in both
directions (MLPerf). Of a simulation truth.npz has the year of each paper, its community and a second one with its share.

N nodes, E edges, F features"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import command, store
from data_prep.command import option
from hpcai.data.graph import SEPARATOR, Graph
from hpcai.durable import commit_file, write_json
from hpcai.errors import ConfigError, DataError
from hpcai.programs import command_of_app

Array = NDArray[Any]
Edges = Callable[[], Iterator[tuple[Array, Array]]]     # chunks of (sources, destinations), the same in each call
CHUNK = 1 << 24                                 # edges, or values of features, at a time


# ---- files


def write_file(path: Path, dtype: Any, shape: Any, fill: Callable[[Array], None]) -> None:
    """Write a raw file atomically. ``fill`` sets its elements, which are mapped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.partial")
    if not np.prod(shape):
        partial_path.write_bytes(b"")
    else:
        fill(mapped := np.memmap(partial_path, dtype, "w+", shape=shape))
        mapped.flush()
    commit_file(partial_path, path)


def write_array(path: Path, values: Array) -> None:
    write_file(path, values.dtype, values.shape, lambda out: np.copyto(out, values))


def write_relation(folder: Path, counts: tuple[int, int], edges: Edges) -> None:
    """Write a relation of so many sources and destinations, compressed by destination, by a counting sort in two passes. The memory
    is that of a chunk and of 16 bytes per destination."""
    sources, destinations = counts
    indptr = np.zeros(destinations + 1, np.int64)
    for number, ends in enumerate(edges()):
        for values, count, what in zip(ends, counts, ("source", "destination")):
            if values.size and not 0 <= values.min() <= values.max() < count:
                raise DataError(f"{folder.name}: chunk {number} has {what} {values.min()} or {values.max()}; there are {count:,} nodes")
        np.add.at(indptr, ends[1] + 1, 1)
    np.cumsum(indptr, out=indptr)

    def place(out: Array) -> None:
        free = indptr[:-1].copy()
        for source, destination in edges():
            order = np.argsort(destination, kind="stable")
            ordered = destination[order]
            leads = np.flatnonzero(np.diff(ordered, prepend=-1))
            sizes = np.diff(leads, append=len(ordered))
            out[free[ordered] + np.arange(len(ordered)) - np.repeat(leads, sizes)] = source[order]
            free[ordered[leads]] += sizes

    write_file(folder / "indices.bin", "<i4" if sources < 1 << 31 else "<i8", int(indptr[-1]), place)
    write_array(folder / "indptr.bin", indptr)      # last: it marks a finished relation


def write_features(path: Path, shape: tuple[int, int], dtype: str, rows: Callable[[int, int], Array]) -> None:
    def fill(out: Array) -> None:
        for first in range(0, shape[0], step := max(CHUNK // shape[1], 1)):
            with np.errstate(over="ignore"):
                out[first : first + step] = part = rows(first, first + step).astype(dtype)
            if not np.isfinite(part).all():
                raise DataError(f"{path.name}: row {first + int(np.argwhere(~np.isfinite(part))[0, 0]):,} is not finite as {dtype}")

    write_file(path, dtype, shape, fill)


def write_degrees(out: Path, kind: str, count: int, relations: Sequence[str]) -> None:
    degrees = np.zeros(count, np.int32)
    for name in relations:
        path = out / "edges" / name / "indices.bin"
        dtype = "<i4" if count < 1 << 31 else "<i8"
        indices = np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
        for first in range(0, len(indices), CHUNK):
            np.add.at(degrees, indices[first : first + CHUNK], 1)
    write_array(out / f"degrees/{kind}.bin", degrees)


def with_reverse(name: str, edges: Edges, nodes: Mapping[str, int]) -> dict[str, Edges]:
    """Return the relations of MLPerf that one has: itself and its reverse, or between nodes of one type a symmetric one."""
    source, relation, destination = name.split(SEPARATOR)
    if source != destination:
        return {name: edges, SEPARATOR.join((destination, f"rev_{relation}", source)): partial(_chunks, edges, 0, (True,))}
    return {name: partial(_chunks, edges, nodes[source], (False, True))}


def _chunks(edges: Edges, loops: int, flips: tuple[bool, ...]) -> Iterator[tuple[Array, Array]]:
    """Yield edges, for each of ``flips`` once, reversed or not; with ``loops``, these replace all self-loops."""
    for flip in flips:
        for source, destination in edges():
            keep = (source != destination) | (not loops)
            yield (destination[keep], source[keep]) if flip else (source[keep], destination[keep])
        for first in range(0, loops, CHUNK):
            yield (ids := np.arange(first, min(first + CHUNK, loops))), ids


def write_graph(
    options: argparse.Namespace, recipe: dict[str, Any], nodes: dict[str, int], relations: Mapping[str, Edges],
    features: Mapping[str, Callable[[int, int], Array]], shape: tuple[int, str], labels: Callable[[], Array], classes: int,
    splits: Mapping[str, Array],
) -> None:  # fmt: skip
    """Write the files that are missing, each by one worker of one rank, and last graph.json."""
    out, (rank, size) = options.out, store.rank_and_size()
    store.claim_folder(out, recipe)
    ends = {name: tuple(nodes[kind] for kind in name.split(SEPARATOR)[::2]) for name in relations}
    jobs = {out / f"edges/{name}/indptr.bin": partial(write_relation, out / f"edges/{name}", ends[name], edges)
            for name, edges in relations.items()}  # fmt: skip
    for kind, count in nodes.items():
        path = out / f"features/{kind}.bin"
        jobs[path] = partial(write_features, path, (count, shape[0]), shape[1], features[kind])
    later = {out / f"degrees/{kind}.bin": partial(write_degrees, out, kind, count, [n for n in relations if n.startswith(kind + SEPARATOR)])
             for kind, count in nodes.items()}  # fmt: skip
    for group in (jobs, later):
        mine = [job for path, job in [*group.items()][rank::size] if not path.is_file()]
        store.run_parallel(mine, _call, options.workers if options.command == "convert" else 1, options.command)
        store.wait_for(list(group), Path.is_file, str)
    if rank:
        return
    values = labels().astype(np.int32)
    write_array(out / "labels.bin", values)
    for name, ids in splits.items():
        write_array(out / f"splits/{name}.bin", ids.astype(np.int64))
    edges = {name: (out / f"edges/{name}/indices.bin").stat().st_size // (4 if ends[name][0] < 1 << 31 else 8) for name in relations}
    write_json(out / "graph.json", {
        "nodes": nodes, "edges": edges, "target": "paper" if "paper" in nodes else next(iter(nodes)), "features": shape[0],
        "dtype": shape[1], "classes": classes, "splits": {name: len(ids) for name, ids in splits.items()},
    })  # fmt: skip


def _call(job: Callable[[], None]) -> None:
    job()


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    classes: int = option(2983, "19 or 2983", type=int, choices=[19, 2983])
    dtype: str = option("float16", "of features", choices=["float16", "float32"])
    width: int = option(1024, "features of files without a header", type=command.positive)
    seed: int = option(42, "of the split: 60 percent and 0.5 percent of the papers with labels", type=command.natural)


LABELLED = {(269_346_174, 2983): 157_675_969, (269_346_174, 19): 227_130_858}     # the first papers of IGBH-Full; all of others


def open_array(path: Path, width: int | None) -> Array:
    """Map a file of numpy, or the float32 values of one without a header, such as those of the large sizes."""
    try:
        with path.open("rb") as file:
            has_header = file.read(6) == b"\x93NUMPY"
        if has_header:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        return np.memmap(path, "<f4", "r").reshape(-1, *([width] if width else []))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read ({problem}); fetch it again") from problem


def read_edges(path: Path) -> Iterator[tuple[Array, Array]]:
    array = open_array(path, 2)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: is {array.dtype} {array.shape}, expected integers [E, 2]")
    for first in range(0, len(array), CHUNK):
        yield tuple(np.asarray(array[first : first + CHUNK], np.int64).T)  # type: ignore[misc]


def read_features(path: Path, width: int, first: int, end: int) -> Array:
    return np.asarray(open_array(path, width)[first:end])


def convert(options: argparse.Namespace) -> None:
    source, root = Source.from_options(options), options.source
    root = root / "processed" if (root / "processed").is_dir() else root
    names = sorted(path.parent.name for path in root.glob("*__*__*/edge_index.npy"))
    if not any(name.startswith("paper__cites__") for name in names):
        raise ConfigError(f"{root}: holds no paper__cites__paper/edge_index.npy; give the folder of one size of IGBH")
    kinds = list(dict.fromkeys(["paper", *(kind for name in names for kind in name.split("__")[::2])]))
    arrays = {kind: open_array(root / kind / "node_feat.npy", source.width) for kind in kinds}
    nodes, width = {kind: len(array) for kind, array in arrays.items()}, arrays["paper"].shape[1]
    if wrong := [kind for kind, array in arrays.items() if array.shape[1:] != (width,)]:
        raise DataError(f"{root / wrong[0]}: features {arrays[wrong[0]].shape}, expected [N, {width}] as those of papers")
    relations: dict[str, Edges] = {}
    for name in names:
        relations |= with_reverse(name.replace("__", SEPARATOR), partial(read_edges, root / name / "edge_index.npy"), nodes)
    known = LABELLED.get((nodes["paper"], source.classes), nodes["paper"])
    stored = open_array(root / f"paper/node_label_{'2K' if source.classes == 2983 else 19}.npy", None).reshape(-1)
    import torch  # whose permutation is that of MLPerf

    order = torch.randperm(known, generator=torch.Generator().manual_seed(source.seed)).numpy()
    train, held = int(known * 0.6), int(known * 0.005)
    recipe = {"kind": "convert", **source.json_dict, "nodes": nodes}
    write_graph(
        options, recipe, nodes, relations,
        {kind: partial(read_features, root / kind / "node_feat.npy", source.width) for kind in kinds}, (width, source.dtype),
        lambda: np.where(np.arange(len(stored)) < known, np.nan_to_num(stored, nan=-1), -1), source.classes,
        {"train": order[:train], "validation": order[train : train + held]},
    )  # fmt: skip
    finish(options, "node")


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    kind: str = option("citations", "what", choices=["citations", "materials"])
    seed: int = command.seed()
    communities: int = option(12, "classes of papers", type=command.within(2, 1000, int))
    years: int = option(12, "years of papers, of which the last two are for validation", type=command.within(4, 100, int))
    features: int = option(32, "width of the features", type=command.within(8, 4096, int))
    noise: float = option(4.0, "standard deviation of the features of a paper, in distances of communities", type=command.within(0, 100))
    unknown: float = option(0.2, "fraction of papers without label", type=command.within(0, 0.9))
    validation: float = 0.0
    test: float = 0.0


def simulate_citations(recipe: Recipe, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return nodes, edges, features, labels and truth of papers in a degree-corrected block model (Karrer and Newman, 2011) whose
    communities grow, shrink and move in feature space from year to year."""
    groups, years, width = recipe.communities, recipe.years, recipe.features
    year = np.sort((years * rng.random(count) ** 0.7).astype(int))
    popularity = rng.normal(0, 0.25, (years, groups)).cumsum(0)
    chance = np.exp(popularity) / np.exp(popularity).sum(1, keepdims=True)
    community = (rng.random((count, 1)) > chance.cumsum(1)[year, :-1]).sum(1)
    second = (community + rng.integers(1, groups, count)) % groups
    share = np.where(rng.random(count) < 0.2, rng.uniform(0.2, 0.5, count), 0)
    static = rng.normal(0, 1, (groups, width)) / np.sqrt(width)
    centre = static + rng.normal(0, 0.4, (years, groups, width)).cumsum(0) / np.sqrt(width)

    def drawn_group(papers: Array, loyal: float) -> Array:
        own = np.where(rng.random(len(papers)) < share[papers], second[papers], community[papers])
        return np.where(rng.random(len(papers)) < loyal, own, rng.integers(0, groups, len(papers)))

    def pick(group: Array, of: Array, limit: Array | None = None, first: Array | None = None) -> Array:
        """Return a node of each group, by a heavy-tailed weight, with a number from ``first`` to ``limit``; -1: there is none."""
        order = np.argsort(of, kind="stable")
        total, begin = np.append(0, np.cumsum(rng.pareto(2.5, len(of))[order] + 0.1)), np.searchsorted(of[order], np.arange(groups))
        key = of[order] * (len(of) + 1) + order
        low = begin[group] if first is None else np.searchsorted(key, group * (len(of) + 1) + first)
        high = np.searchsorted(key, group * (len(of) + 1) + (len(of) if limit is None else limit))
        place = np.searchsorted(total, total[low] + rng.random(len(group)) * (total[high] - total[low]), "right") - 1
        return np.where(high > low, order[np.clip(place, low, np.maximum(high - 1, low)).clip(0, len(of) - 1)], -1)

    def linked(counts: Array, of: Array, loyal: float, recent: bool = False) -> tuple[Array, Array]:
        papers = np.repeat(np.arange(count), counts)
        window = {"limit": papers, "first": np.searchsorted(year, year[papers] - 3)} if recent else {}
        other = pick(drawn_group(papers, loyal), of, **window)
        return papers[other >= 0], other[other >= 0]

    sizes = {"author": count, "institute": max(count // 100, groups), "fos": 10 * groups, "venue": 4 * groups}
    home = {kind: np.append(np.arange(groups), rng.integers(0, groups, size - groups)) for kind, size in sizes.items()}
    edges = {
        "paper___cites___paper": linked(rng.poisson(6, count), community, 0.85, recent=True),
        "paper___written_by___author": linked(1 + rng.poisson(1.5, count), home["author"], 0.92),
        "paper___topic___fos": linked(rng.integers(2, 5, count), home["fos"], 0.55),
        "paper___published___venue": linked(np.ones(count, int), home["venue"], 0.6),
        "author___affiliated_to___institute": (np.arange(count), pick(home["author"], home["institute"])),
    }
    mixed = centre[year, community] * (1 - share)[:, None] + centre[year, second] * share[:, None]
    features = {"paper": mixed + rng.normal(0, recipe.noise, mixed.shape) * np.sqrt(1 / width)}
    for kind, noise in (("author", 1.5), ("institute", 1.5), ("fos", 0.7), ("venue", 0.7)):
        features[kind] = static[home[kind]] + rng.normal(0, noise, (sizes[kind], width)) / np.sqrt(width)
    labels = np.where(rng.random(count) < recipe.unknown, -1, community)
    held = year >= years - 2
    truth = {"year": year, "community": community, "second": second, "share": share}
    return {"nodes": {"paper": count, **sizes}, "edges": edges, "features": features, "labels": labels, "held": held, "truth": truth,
            "classes": groups}  # fmt: skip


ELEMENTS = {  # Pauling's electronegativity, ionic radius in angstrom
    "Li": (0.98, 0.76), "Na": (0.93, 1.02), "K": (0.82, 1.38), "Rb": (0.82, 1.52), "Cs": (0.79, 1.67), "Mg": (1.31, 0.72),
    "Ca": (1.00, 1.00), "Sr": (0.95, 1.18), "Ba": (0.89, 1.35), "Al": (1.61, 0.54), "Ga": (1.81, 0.62), "In": (1.78, 0.80),
    "Ti": (1.54, 0.61), "Mn": (1.55, 0.83), "Fe": (1.83, 0.78), "Ni": (1.91, 0.69), "Cu": (1.90, 0.77), "Zn": (1.65, 0.74),
    "Ag": (1.93, 1.15), "Cd": (1.69, 0.95), "Pb": (2.33, 1.19), "F": (3.98, 1.33), "Cl": (3.16, 1.81), "Br": (2.96, 1.96),
    "I": (2.66, 2.20), "O": (3.44, 1.40), "S": (2.58, 1.84), "Se": (2.55, 1.98), "Te": (2.10, 2.21), "N": (3.04, 1.46),
    "P": (2.19, 2.12), "As": (2.18, 2.22),
}  # fmt: skip
PROTOTYPES = {"NaCl": (6, 225), "CsCl": (8, 221), "ZnS": (4, 216), "ZnO": (4, 186), "NiAs": (6, 194), "CuAu": (12, 123), "FeB": (7, 62)}
"""coordination number of the cation, and space group"""


def simulate_materials(recipe: Recipe, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return nodes, edges, features and labels of binary crystals. The class follows from the difference of electronegativities
    (below 0.7, up to 1.7, above: ionic) and the coordination of the prototype (up to 4, up to 6, more); a crystal's own features
    are its cell, with noise."""
    table, kinds = np.array([*ELEMENTS.values()]), np.array([*PROTOTYPES.values()])
    groups, group_of = np.unique(kinds[:, 1], return_inverse=True)
    pair = np.stack((rng.integers(0, 21, count), rng.integers(0, len(table) - 1, count)))
    pair[1] += pair[1] >= pair[0]
    prototype = rng.integers(0, len(kinds), count)
    difference = np.abs(np.diff(table[pair, 0], axis=0))[0]
    labels = 3 * np.digitize(difference, (0.7, 1.7)) + np.digitize(kinds[prototype, 0], (5, 7))
    cell = table[pair, 1].sum(0) * 2 + rng.normal(0, 0.1 * recipe.noise, count)
    known = {"crystal": np.stack((cell, cell**3 / 50), 1), "element": table, "prototype": kinds[:, :1] / 12, "spacegroup": groups[:, None] / 230}
    features = {kind: rng.normal(0, 0.1, (len(x), recipe.features)) for kind, x in known.items()}
    for kind, values in known.items():
        features[kind][:, : values.shape[1]] += values
    rows = np.arange(count)
    edges = {"crystal___has___element": (np.tile(rows, 2), pair.reshape(-1)), "crystal___is___prototype": (rows, prototype),
             "prototype___in___spacegroup": (np.arange(len(kinds)), group_of)}  # fmt: skip
    labels_known = np.where(rng.random(count) < recipe.unknown, -1, labels)
    return {"nodes": {kind: len(x) for kind, x in features.items()}, "edges": edges, "features": features, "labels": labels_known,
            "held": rng.random(count) < 0.2, "truth": {"class": labels, "difference": difference}, "classes": 9}  # fmt: skip


def simulate(options: argparse.Namespace) -> None:
    recipe = Recipe.from_options(options)
    kind = simulate_citations if recipe.kind == "citations" else simulate_materials
    made = kind(recipe, options.papers, recipe.generator(1, 0))
    relations: dict[str, Edges] = {}
    for name, ends in made["edges"].items():
        relations |= with_reverse(name, partial(_one_chunk, *ends), made["nodes"])
    known = made["labels"] >= 0
    splits = {"train": np.flatnonzero(known & ~made["held"]), "validation": np.flatnonzero(known & made["held"])}
    if not all(map(len, splits.values())):
        raise ConfigError(f"--papers {options.papers}: a split has none with a label; ask for more")
    rows = {name: partial(_rows, values) for name, values in made["features"].items()}
    write_graph(
        options, {"kind": "simulate", **recipe.json_dict, "papers": options.papers}, made["nodes"], relations, rows,
        (recipe.features, "float16"), lambda: made["labels"], made["classes"], splits,
    )  # fmt: skip
    np.savez(options.out / "truth.npz", **made["truth"])
    finish(options, "small")


def _one_chunk(source: Array, destination: Array) -> Iterator[tuple[Array, Array]]:
    yield source, destination


def _rows(values: Array, first: int, end: int) -> Array:
    return values[first:end]


# ---- check


def finish(options: argparse.Namespace, config: str) -> None:
    if store.rank_and_size()[0] == 0:
        if getattr(options, "check", False):
            describe(options.out)
        print(f"next: {command_of_app('rgat', config)} data.directory={options.out}", flush=True)


def homophily(graph: Graph, name: str) -> float:
    """Return the fraction of edges between different nodes of known classes that join equal classes."""
    ends = np.repeat(np.arange(len(graph.indptr[name]) - 1), np.diff(graph.indptr[name]))
    pairs = graph.labels[np.stack((graph.indices[name], ends))]
    pairs = pairs[:, (graph.indices[name] != ends) & (pairs >= 0).all(0)]
    return float((pairs[0] == pairs[1]).mean()) if pairs.size else float("nan")


def describe(folder: Path) -> None:
    """Check all edges of a graph, and print counts, degrees and homophily. Raises DataError."""
    graph = Graph(folder)
    graph.check()
    print(f"nodes: {', '.join(f'{name} {count:,}' for name, count in graph.nodes.items())}; features {graph.width} {graph.dtype}")
    for name, (source, destination) in graph.relations.items():
        degree = np.diff(graph.indptr[name])
        same = f", homophily {homophily(graph, name):.2f}" if source == destination == graph.target else ""
        print(f"  {name}: {graph.edge_counts[name]:,} edges, degree {degree.mean():.1f}, at most {degree.max():,}, "
              f"none for {(degree == 0).mean():.1%}{same}")  # fmt: skip
    splits = ", ".join(f"{len(ids):,} for {name}" for name, ids in graph.splits.items())
    print(f"classes: {graph.classes}; {graph.target}s: {splits}; {(graph.labels < 0).mean():.1%} without label")


class GraphBuilder(command.DatasetBuilder):
    def run_check(self, options: argparse.Namespace) -> int:
        describe(options.out)
        return 0


def add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of one size of IGBH, with processed")


BUILDER = GraphBuilder(
    "igb", "Graphs of papers for R-GAT.", "rgat",
    command.Check("All edges; counts, degrees, homophily.", lambda prepared, options: iter(()), None, None),
    (command.Simulate("Papers with communities that drift, or crystals.", Recipe, ("papers", 20_000, "papers, or crystals"), simulate),
     command.Convert("IGB-Heterogeneous to our files.", Source, convert, add_source_options)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
