"""Graphs of papers for R-GAT: simulate citations or materials, or convert IGB-Heterogeneous.

    python -m data_prep.igb simulate OUT        papers, authors, institutes, fields of study and venues, or --kind materials
    python -m data_prep.igb convert SOURCE OUT  IGBH, any size: SOURCE/processed/TYPE/node_feat.npy, paper/node_label_{19,2K}.npy,
                                                SRC__REL__DST/edge_index.npy [E, 2]
    python -m data_prep.igb check OUT           all edges; counts, degrees and homophily

OUT has the form of hpcai.data.graph. Each relation has its reverse, rev_REL; cites has each self-loop and then all pairs in both
directions (MLPerf). Of a simulation truth.npz has the year of each paper, its community and a second one with its share.

N nodes, E edges, F features"""

import argparse
import json
import operator
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
LABELLED = {(269_346_174, 2983): 157_675_969, (269_346_174, 19): 227_130_858}     # the first papers of IGBH-Full; all of others


# ---- files


def write_array(path: Path, shape: tuple[int, ...], dtype: Any, fill: Callable[[Array], None] | Array) -> None:
    """Write a raw file atomically: an array, or what ``fill`` sets in the mapped file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.write_bytes(b"")
    if all(shape):
        out = np.memmap(unfinished, dtype, "w+", shape=shape)
        fill(out) if callable(fill) else np.copyto(out, fill)
        out.flush()
    commit_file(unfinished, path)


def write_relation(path: Path, counts: tuple[int, int], edges: Edges) -> None:
    """Write a relation of so many sources and destinations, compressed by destination: a counting sort in two passes, with memory
    for a chunk and two numbers of each destination."""
    indptr = np.zeros(counts[1] + 1, np.int64)
    for ends in edges():
        for values, count, end in zip(ends, counts, ("source", "destination")):
            if values.size and not 0 <= values.min() <= values.max() < count:
                text = f"{end}s {values.min():,} to {values.max():,}, but there are {count:,}"
                raise DataError(f"{path.parent.name}: {text}; fetch its edge_index.npy again")
        np.add.at(indptr, ends[1] + 1, 1)
    free = np.cumsum(indptr, out=indptr)[:-1].copy()

    def place(out: Array) -> None:
        for source, destination in edges():
            order = np.argsort(destination, kind="stable")
            ordered = destination[order]
            leads = np.flatnonzero(np.diff(ordered, prepend=-1))
            sizes = np.diff(leads, append=len(ordered))
            out[free[ordered] + np.arange(len(ordered)) - np.repeat(leads, sizes)] = source[order]
            free[ordered[leads]] += sizes

    write_array(path.with_name("indices.bin"), (int(indptr[-1]),), "<i4" if counts[0] < 1 << 31 else "<i8", place)
    write_array(path, indptr.shape, "<i8", indptr)      # last: it marks a finished relation


def write_features(path: Path, dtype: str, features: Callable[[], Array]) -> None:
    rows = features()

    def fill(out: Array) -> None:
        for first in range(0, len(rows), step := max(CHUNK // rows.shape[1], 1)):
            with np.errstate(over="ignore"):
                out[first : first + step] = part = rows[first : first + step].astype(dtype)
            if (wrong := np.argwhere(~np.isfinite(part))).size:
                raise DataError(f"{path.stem}: row {first + int(wrong[0, 0]):,} of features is not finite as {dtype}; see --dtype")

    write_array(path, rows.shape, dtype, fill)


def with_reverse(name: str, edges: Edges, nodes: Mapping[str, int]) -> dict[str, Edges]:
    """Return a relation and its reverse, or between nodes of one type the symmetric relation, as MLPerf has them."""
    source, relation, destination = name.split(SEPARATOR)
    if source == destination:
        return {name: partial(directed, edges, (True, False), nodes[source])}
    return {name: edges, SEPARATOR.join((destination, f"rev_{relation}", source)): partial(directed, edges, (True,))}


def directed(edges: Edges, flips: tuple[bool, ...], loops: int = 0) -> Iterator[tuple[Array, Array]]:
    """Yield edges for each of ``flips``, reversed or not. ``loops`` self-loops replace those that are there, each time."""
    for flip in flips:
        for ends in edges():
            keep = (ends[0] != ends[1]) | (not loops)
            yield ends[flip][keep], ends[not flip][keep]
        for first in range(0, loops, CHUNK):
            yield (ids := np.arange(first, min(first + CHUNK, loops))), ids


def write_graph(
    options: argparse.Namespace, nodes: dict[str, int], relations: Mapping[str, Edges], features: Mapping[str, Callable[[], Array]],
    width: int, dtype: str, labels: Array, classes: int, splits: Mapping[str, Array], names: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the missing files, each by a worker of one rank. Rank 0 writes graph.json last, and prints what it holds."""
    out, (rank, size) = options.out, store.rank_and_size()
    jobs: dict[Path, Callable[[], None]] = {}
    for name, edges in relations.items():
        path, (source, _, destination) = out / f"edges/{name}/indptr.bin", name.split(SEPARATOR)
        jobs[path] = partial(write_relation, path, (nodes[source], nodes[destination]), edges)
    for kind, rows in features.items():
        path = out / f"features/{kind}.bin"
        jobs[path] = partial(write_features, path, dtype, rows)
    mine = [job for path, job in [*jobs.items()][rank::size] if not path.is_file()]
    store.run_parallel(mine, operator.call, options.workers, options.command)
    if rank:
        return
    store.wait_for(list(jobs), Path.is_file, str)
    write_array(out / "labels.bin", labels.shape, "<i4", labels.astype(np.int32))
    for name, ids in splits.items():
        write_array(out / f"splits/{name}.bin", ids.shape, "<i8", ids)
    counts = {name: int(np.memmap(out / f"edges/{name}/indptr.bin", "<i8", "r")[-1]) for name in relations}
    write_json(out / "graph.json", {
        "nodes": nodes, "edges": counts, "target": next(iter(nodes)), "features": width, "dtype": dtype, "classes": classes,
        "splits": {name: len(ids) for name, ids in splits.items()}, "names": list(names),
    })  # fmt: skip
    describe(out, getattr(options, "check", False))
    print(f"next: {command_of_app('rgat', 'small' if 'check' in options else 'node')} data.directory={out}", flush=True)


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    classes: int = option(2983, "of papers", type=int, choices=[19, 2983])
    dtype: str = option("float16", "of features", choices=["float16", "float32"])
    width: int = option(1024, "features in files without a header", type=command.positive)
    seed: int = option(42, "of the split: 60 %% and 0.5 %% of the papers with labels", type=command.natural)


def open_array(path: Path, width: int) -> Array:
    """Map a file of numpy, or the float32 values of one without a header, as those of the large sizes are.   [N, width]"""
    try:
        with path.open("rb") as file:
            has_header = file.read(6) == b"\x93NUMPY"
        if has_header:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return array if array.ndim == 2 else array.reshape(-1, width)
        return np.memmap(path, "<f4", "r").reshape(-1, width)
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read as rows of {width} ({problem}); fetch it again") from problem


def read_edges(path: Path) -> Iterator[tuple[Array, Array]]:
    array = open_array(path, 2)
    if array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: is {array.dtype} {array.shape}, expected integers [E, 2]; fetch it again")
    for first in range(0, len(array), CHUNK):
        source, destination = np.asarray(array[first : first + CHUNK], np.int64).T
        yield source, destination


def convert(options: argparse.Namespace) -> None:
    import torch  # whose permutation is that of MLPerf

    source, root = Source.from_options(options), options.source
    root = root / "processed" if (root / "processed").is_dir() else root
    paths = {path.parent.name: path for path in sorted(root.glob("*__*__*/edge_index.npy"))}
    if "paper__cites__paper" not in paths:
        raise ConfigError(f"{root}: holds no paper__cites__paper/edge_index.npy; give the folder of one size of IGBH")
    kinds = list(dict.fromkeys(["paper", *(kind for name in paths for kind in name.split("__")[::2])]))
    features = {kind: partial(open_array, root / kind / "node_feat.npy", source.width) for kind in kinds}
    shapes = {kind: rows().shape for kind, rows in features.items()}
    nodes, width = {kind: shape[0] for kind, shape in shapes.items()}, shapes["paper"][1]
    if wrong := [kind for kind, shape in shapes.items() if shape[1] != width]:
        raise DataError(f"{root / wrong[0]}: features {shapes[wrong[0]]}, expected [N, {width}] as those of papers")
    relations: dict[str, Edges] = {}
    for name, path in paths.items():
        relations |= with_reverse(name.replace("__", SEPARATOR), partial(read_edges, path), nodes)
    known = LABELLED.get((nodes["paper"], source.classes), nodes["paper"])
    labels = open_array(path := root / f"paper/node_label_{'2K' if source.classes > 19 else 19}.npy", 1)[:, 0]
    if len(labels) != nodes["paper"]:
        raise DataError(f"{path}: has {len(labels):,} labels, but there are {nodes['paper']:,} papers; fetch it again")
    labels = np.where(np.arange(len(labels)) < known, np.nan_to_num(labels, nan=-1), -1).astype(np.int32)
    order = torch.randperm(known, generator=torch.Generator().manual_seed(source.seed)).numpy()
    train = int(known * 0.6)
    splits = {"train": order[:train], "validation": order[train : train + int(known * 0.005)]}
    store.claim_folder(options.out, {"kind": "convert", **source.json_dict, "nodes": nodes})
    write_graph(options, nodes, relations, features, width, source.dtype, labels, source.classes, splits)


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    kind: str = option("citations", "what", choices=["citations", "materials"])
    seed: int = command.seed()
    communities: int = option(12, "classes of papers", type=command.within(2, 1000, int))
    years: int = option(12, "years of papers, of which the last two are for validation", type=command.within(4, 100, int))
    features: int = option(32, "width of the features", type=command.within(8, 4096, int))
    noise: float = option(4.0, "standard deviation of the features of a paper", type=command.within(0, 100))
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
    affinity = rng.gamma(0.4, 1, (groups, groups)) * (1 - np.eye(groups))  # most cross into few others, and more of them each year
    affinity /= affinity.sum(1, keepdims=True)
    second = (rng.random((count, 1)) > affinity.cumsum(1)[community, :-1]).sum(1)
    share = np.where(rng.random(count) < 0.1 + 0.3 * year / years, rng.uniform(0.2, 0.5, count), 0)
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

    sizes = {"author": max(count, groups), "institute": max(count // 100, groups), "fos": 10 * groups, "venue": 4 * groups}
    home = {kind: np.append(np.arange(groups), rng.integers(0, groups, size - groups)) for kind, size in sizes.items()}
    edges = {
        "paper___cites___paper": linked(rng.poisson(6, count), community, 0.85, recent=True),
        "paper___written_by___author": linked(1 + rng.poisson(1.5, count), home["author"], 0.92),
        "paper___topic___fos": linked(rng.integers(2, 5, count), home["fos"], 0.55),
        "paper___published___venue": linked(np.ones(count, int), home["venue"], 0.6),
        "author___affiliated_to___institute": (np.arange(sizes["author"]), pick(home["author"], home["institute"])),
    }
    mixed = centre[year, community] * (1 - share)[:, None] + centre[year, second] * share[:, None]
    features = {"paper": mixed + rng.normal(0, recipe.noise, mixed.shape) * np.sqrt(1 / width)}
    for kind, noise in (("author", 1.5), ("institute", 1.5), ("fos", 0.7), ("venue", 0.7)):
        features[kind] = static[home[kind]] + rng.normal(0, noise, (sizes[kind], width)) / np.sqrt(width)
    truth = {"year": year, "community": community, "second": second, "share": share}
    return {"edges": edges, "features": features, "labels": community, "held": year >= years - 2, "truth": truth, "classes": groups,
            "names": [f"community {group}" for group in range(groups)]}  # fmt: skip


def simulate_materials(recipe: Recipe, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return nodes, edges, features and labels of binary crystals. The class follows from the difference of electronegativities
    (up to 0.7, up to 1.7, above: ionic) and the coordination of the prototype (4, 6, more); a crystal's own features are its cell,
    with noise."""
    tables = json.loads(Path(__file__).with_suffix(".json").read_text())
    elements, prototypes = (np.array([*tables[name].values()]) for name in ("elements", "prototypes"))
    groups, group_of = np.unique(prototypes[:, 1], return_inverse=True)
    pair = rng.permuted(np.tile(np.arange(len(elements)), (count, 1)), axis=1)[:, :2]
    prototype, rows = rng.integers(0, len(prototypes), count), np.arange(count)
    difference = np.abs(np.diff(elements[pair, 0]))[:, 0]
    cell = elements[pair, 1].sum(1) * 2 + rng.normal(0, 0.1 * recipe.noise, count)
    known = {"crystal": np.stack((cell, cell**3 / 50), 1), "element": elements, "prototype": prototypes[:, :1] / 12,
             "spacegroup": groups[:, None] / 230}  # fmt: skip
    features = {kind: rng.normal(0, 0.1, (len(values), recipe.features)) for kind, values in known.items()}
    for kind, values in known.items():
        features[kind][:, : values.shape[1]] += values
    edges = {"crystal___has___element": (np.repeat(rows, 2), pair.reshape(-1)), "crystal___is___prototype": (rows, prototype),
             "prototype___in___spacegroup": (np.arange(len(prototypes)), group_of)}  # fmt: skip
    labels = 3 * np.digitize(difference, (0.7, 1.7)) + np.digitize(prototypes[prototype, 0], (5, 7))
    return {"edges": edges, "features": features, "labels": labels, "held": rng.random(count) < 0.2, "classes": 9,
            "names": [f"{bond}, {number}" for bond in ("metallic", "polar", "ionic") for number in ("4", "6", "7 or more")],
            "truth": {"class": labels, "difference": difference}}  # fmt: skip


def simulate(options: argparse.Namespace) -> None:
    recipe, generators = Recipe.from_options(options), {"citations": simulate_citations, "materials": simulate_materials}
    rng = recipe.generator(1, 0)
    content = generators[recipe.kind](recipe, options.papers, rng)
    nodes, relations = {kind: len(rows) for kind, rows in content["features"].items()}, dict[str, Edges]()
    for name, ends in content["edges"].items():
        relations |= with_reverse(name, partial(iter, [ends]), nodes)
    labels = np.where(rng.random(options.papers) < recipe.unknown, -1, content["labels"])
    splits = {name: np.flatnonzero((labels >= 0) & (content["held"] == held)) for name, held in (("train", 0), ("validation", 1))}
    if not all(map(len, splits.values())):
        raise ConfigError(f"--papers {options.papers}: a split has none with a label; ask for more")
    rows = {kind: partial(np.asarray, values) for kind, values in content["features"].items()}
    store.claim_folder(options.out, {**recipe.json_dict, "papers": options.papers})
    if store.rank_and_size()[0] == 0:
        np.savez(options.out / "truth.npz", **content["truth"])
    write_graph(options, nodes, relations, rows, recipe.features, "float16", labels, content["classes"], splits, content["names"])


# ---- check


def describe(folder: Path, check: bool) -> None:
    """Print counts, degrees, and homophily: the fraction of edges between other nodes of known classes that join equal ones.
    ``check``: all edges; raises DataError."""
    graph = Graph(folder)
    if check:
        graph.check()
    print(f"nodes: {', '.join(f'{name} {count:,}' for name, count in graph.nodes.items())}; features {graph.width} {graph.dtype}")
    for name, ends in graph.relations.items():
        degree, same = np.diff(graph.indptr[name]), ""
        if check and {*ends} == {graph.target}:
            pairs = np.stack((graph.indices[name], np.repeat(np.arange(len(degree)), degree)))
            classes = graph.labels[pairs[:, pairs[0] != pairs[1]]]
            equal = np.equal(*classes[:, (classes >= 0).all(0)])
            same = f", homophily {equal.sum() / max(len(equal), 1):.2f}"
        print(f"  {name}: {degree.sum():,} edges, degree {degree.mean():.1f}, at most {degree.max():,}, "
              f"none for {(degree == 0).mean():.1%}{same}")  # fmt: skip
    splits = ", ".join(f"{len(ids):,} for {name}" for name, ids in graph.splits.items())
    print(f"classes: {graph.classes}; {graph.target}s: {splits}; {(graph.labels < 0).mean():.1%} without label", flush=True)


BUILDER = command.DatasetBuilder(
    "igb", "Graphs of papers for R-GAT.", "rgat",
    command.Check("All edges; counts, degrees, homophily.", lambda *_: iter(()), None, None, describe),
    (command.Simulate("Papers in communities, or crystals.", Recipe, ("papers", 20_000), simulate, count_help="or crystals"),
     command.Convert("IGB-Heterogeneous to our files.", Source, convert, "one size of IGBH")),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
