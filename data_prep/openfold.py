"""Protein chains with their alignments (OpenFold): simulate families of them, check them, or convert mmCIF and A3M files.

    python -m data_prep.openfold simulate OUT       chains folded and evolved here (data_prep.proteins): like nature, not of it
    python -m data_prep.openfold check OUT          files against their index, some chains looked at and drawn as text, a picture
    python -m data_prep.openfold convert --structures DIR --alignments DIR OUT

    OUT/{train,validation}/*.h5, R chains of A residues and L letters of alignments in all
        "residues" int32 [R]   "letters" int32 [R]    rows of the alignment times residues     "name" S24 [R]   "5zyh_A"
        "resolution" float32 [R] angstrom, 0 unknown   "release" int32 [R]   days since 1970, -1 unknown
        "cluster" int32 [R]   of similar sequences, -1 in none   "cluster_size" int32 [R]   chains of it that the split has room for
        "hits" int32 [R]   templates of the chain, H in all     "places" int32 [R]   hits times residues, P in all
        "aatype" int8 [A]   "positions" float32 [A, 37, 3] angstrom   "mask" uint8 [A, 37]     residues without coordinates too
        "msa" int8 [L]   the query first   "deletions" uint8 [L]   255 at most
        "hit_row" int32 [H]   of OUT/templates, counted over its files in the order of their index; the best template first
        "hit_sum_probs" float32 [H]   how sure the search is, 0 to the number of aligned residues
        "hit_places" int16 [P]   hit after hit: the residue of the template for each residue of the chain, -1 none
    OUT/templates/*.h5  the structures that "hit_row" names, each once, with "residues", "name", "resolution", "release", "aatype",
        "positions" and "mask" as above; not there where no chain has a template
    OUT/skipped.json    every chain and file that convert left out, with the reason
    OUT/.convert        what convert found in the structures and hits and left out; a run that goes on needs it, nothing else does

What is [A], [L], [H] or [P] holds chain after chain; "residues", "letters", "hits" and "places" tell how much each has.

convert takes a folder of .cif and .cif.gz at any depth, and a folder of alignments with one folder for each chain: the a3m folder
of OpenProteinSet in it, or .a3m and .sto files. Letters of entries may differ in case (5zyh_A, 5ZYH_A), those of chains may not.
A chain without a folder uses that of a twin (--duplicates), otherwise its own sequence is all of its alignment. Chains whose
alignment cannot be read, or is of another sequence, are left out and listed. The filters are those of MLPerf HPC. Clusters are the
lines of --clusters; without it each distinct sequence is a cluster, which makes close relatives count more than they should. Space
on the disk is 2 bytes for each letter and 482 for each residue; --most bounds the first.

Templates are the hits of .hhr files: of the hhr folder of OpenProteinSet, or beside the .a3m files. The chains of --structures can
be templates, whatever filters say of them as samples. Which hits count hpcai.models.openfold.templates says: none of the chain's
own entry, no copy of it, and only what was released 60 days before it (a chain without a day takes all). Hits that cannot be read,
or are of another sequence, cost the chain its templates only, and are listed.

A simulated chain is a pure function of (seed, family, member) and the recipe; a converted one of its files and the options. Ranks,
processes and stops change nothing in either.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import chains, command, proteins, store
from data_prep.chains import CONTENTS, NO_HITS, TEMPLATES, UNKNOWN_DAY, Hits, days
from hpcai.errors import ConfigError, DataError
from hpcai.models.openfold.alignments import read_alignments, read_hhr
from hpcai.models.openfold.residues import GAP, LETTERS
from hpcai.models.openfold.structures import Chain, Entry, read_mmcif
from hpcai.models.openfold.templates import Match, few_atoms, match, unusable

PICTURE, SKIPPED, WORK = "chains.png", "skipped.json", ".convert"
MADE = "simulated: folded by data_prep.proteins, not nature"
FAMILIES = 1_000_000                            # that one seed can have
SCANNED = 64                                    # structure files of one part of the scan
TOLD = 10                                       # reasons that are printed; all are in SKIPPED
SCAN, FOUND_HITS = store.Contents("residues"), store.Contents("hits")
SCANNED_CHAINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "source": ("int32", ()), "name": (f"S{chains.NAME}", ()), "residues": ("int32", ()), "resolved": ("int32", ()),
    "resolution": ("float32", ()), "release": ("int32", ()), "usable": ("int32", ()), "entity": ("S8", ()),
    "sequence": ("uint8", ("residues",)), "atoms": ("uint8", ("residues",)),
}  # fmt: skip
HITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hits": ("int32", ()), "places": ("int32", ()), "name": (f"S{chains.NAME}", ("hits",)), "sum_probs": ("float32", ("hits",)),
    "hit_places": ("int16", ("places",)),
}  # fmt: skip


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Settings):
    """All that decides the content of a simulated family, besides its number, and where it lies."""

    seed: int
    members: int
    length: tuple[int, int]
    depth: int                                  # rows of an alignment
    each: int                                   # families in a file
    validation: float
    test: float
    templates: int = 0

    def mistakes(self) -> Iterator[str]:
        least, most = self.length
        if not proteins.SHORTEST <= least <= most:
            yield f"--length {least} {most}: expected the least and the most, {proteins.SHORTEST} at least"
        if self.templates >= max(self.members, 1):
            yield f"--templates {self.templates}: a family has {self.members} members, expected fewer than that"

    def family(self, number: int) -> list[dict[str, Any]]:
        length = int(self.generator(1, number).integers(*self.length, endpoint=True))
        made = proteins.family(self.seed * FAMILIES + number, self.members, length, self.depth)
        hits = [self.hits(number, member, [chain for chain, _ in made]) for member in range(self.members)]
        return [chains.sample(chain, alignment, number, self.members, None, each) for (chain, alignment), each in zip(made, hits)]

    def hits(self, number: int, member: int, relatives: Sequence[Chain]) -> Hits:
        """The chains of the family that are most alike, residue on residue: they share the fold and its length."""
        own = relatives[member].aatype
        alike = np.array([(one.aatype == own).sum() for one in relatives])
        others = np.array([other for other in np.argsort(-alike, kind="stable") if other != member][: self.templates], int)
        places = np.tile(np.arange(len(own)), (len(others), 1))
        return Hits(number * self.members + others, alike[others], places)


def write_families(recipe: Recipe, number: int, path: Path) -> None:
    made = [one for n in range(number * recipe.each, (number + 1) * recipe.each) for one in recipe.family(n)]
    chains.write(path, made, {"kind": "simulated", "label": MADE, "seed": recipe.seed, "recipe": recipe.text})


def write_relatives(families: Path, path: Path) -> None:
    """A file of templates: the chains of a file of families, as that has them."""
    with h5py.File(families, "r") as file:
        rows = list(store.read_rows(file, chains.TEMPLATE_LAYOUTS))
    store.write_rows(path, chains.TEMPLATE_LAYOUTS, rows, {"kind": "simulated", "label": MADE})


def simulate(options: argparse.Namespace) -> int:
    if options.families > FAMILIES or options.families % options.each or options.chains % options.families:
        raise ConfigError(f"--chains {options.chains} --families {options.families} --each {options.each}: expected a multiple of "
                          f"--families for chains and of --each for families, {FAMILIES:,} families at most")  # fmt: skip
    recipe = Recipe(options.seed, options.chains // options.families, tuple(options.length), options.rows, options.each,
                    options.validation, options.test, options.templates)  # fmt: skip
    splits = [recipe.split(file) for file in range(options.families // options.each)]
    command.refuse_empty(splits, options, f"--families {options.families} in files of {options.each}")
    rows = recipe.each * recipe.members
    jobs = [store.Job(options.out / split / f"families_{file:06d}.h5", partial(write_families, recipe, file), CONTENTS, rows)
            for file, split in enumerate(splits)]  # fmt: skip
    beside = [store.Job(options.out / TEMPLATES / job.path.name, partial(write_relatives, job.path), chains.TEMPLATE_CONTENTS, rows)
              for job in jobs if recipe.templates]  # fmt: skip
    command.print_once(f"{options.families} families of {recipe.members} chains in {options.out}; {MADE}")
    look = partial(inspect, some=3, picture=True)
    return command.simulate("openfold", options, recipe, jobs, chains.header(MADE), "families", look, beside)


# ---- convert: what the structures hold


@dataclass(frozen=True, slots=True)
class Found:
    """A chain of a structure."""

    source: Path
    name: str
    key: str                                    # 5zyh_A
    sequence: bytes
    resolved: int
    resolution: float
    release: int
    entity: str                                 # 5zyh_1

    def share(self) -> float:
        """The share of the most frequent residue."""
        return max(Counter(self.sequence).values()) / len(self.sequence)


def key(name: str) -> str:
    """The name with its entry in small letters, so that 5zyh_A and 5ZYH_A are one chain."""
    entry, _, chain = name.rpartition("_")
    return f"{entry.lower()}_{chain}"


def scan(sources: Sequence[Path], entities: bool, path: Path) -> None:
    """Looks at a part of the structures; ``entities``: clusters name these, not chains."""
    rows: list[dict[str, Any]] = []
    skipped = {}
    for number, source in enumerate(sources):
        try:
            entry = read_mmcif(source)
            named = _entities(source) if entities else {}
        except DataError as problem:
            skipped[str(source)] = str(problem)
            continue
        for author, chain in entry.chains.items():
            if len(chain.name.encode()) > chains.NAME or not chain.name.isascii():
                skipped[chain.name] = f"{source}: the name of the chain is longer than {chains.NAME} letters; rename the file"
                continue
            rows.append({
                "source": number, "name": chain.name.encode(), "residues": len(chain.sequence),
                "resolved": int(chain.mask[:, chains.CA].sum()), "resolution": chain.resolution or 0,
                "release": days(chain.release), "usable": unusable(chain) is None, "entity": named.get(author, "").encode(),
                "sequence": np.frombuffer(chain.sequence.encode(), np.uint8), "atoms": (chain.mask > 0).sum(1),
            })  # fmt: skip
    store.write_rows(path, SCANNED_CHAINS, rows, {})
    store.write_json(path.with_suffix(".json"), skipped)


def _entities(path: Path) -> dict[str, str]:
    """The number of the entity of each chain, by the authors' name."""
    import gemmi

    rows = gemmi.cif.read(str(path))[0].find("_entity_poly.", ["entity_id", "pdbx_strand_id"])
    return {author: row.str(0) for row in rows for author in "".join(row.str(1).split()).split(",")}


def _scanned(path: Path) -> list[dict[str, Any]]:
    """The chains of one part of the scan."""
    with h5py.File(path, "r") as file:
        return list(store.read_rows(file, SCANNED_CHAINS))


def _found(sources: Sequence[Path], path: Path) -> Iterator[Found]:
    for one in _scanned(path):
        name = one["name"].decode()
        entry, number = key(name).rpartition("_")[0], one["entity"].decode()
        yield Found(sources[one["source"]], name, key(name), one["sequence"].tobytes(), int(one["resolved"]),
                    float(one["resolution"]), int(one["release"]), f"{entry}_{number}")  # fmt: skip


def _noted(paths: Iterable[Path]) -> dict[str, str]:
    return {name: text for path in paths for name, text in store.read_json(path).items()}


def _structures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"--structures {folder}: no such folder")
    paths = sorted(path for path in folder.rglob("*.cif*") if re.search(r"\.cif(\.gz)?$", path.name) and path.is_file())
    if not paths:
        raise ConfigError(f"--structures {folder}: holds no .cif or .cif.gz; name the folder of the mmCIF files")
    named: dict[str, Path] = {}
    for path in paths:
        twin = named.setdefault(path.name.removesuffix(".gz").lower(), path)
        if twin is not path:
            raise DataError(f"{path}: an entry of this name is also in {twin}; take one of them out of --structures")
    return paths


# ---- convert: which of them are templates


@dataclass(frozen=True)
class Pick:
    """A chain that goes into a file."""

    source: Path
    name: str
    folder: Path | None                         # holds its alignments
    cluster: int
    cluster_size: int


@dataclass(frozen=True, slots=True)
class Known:
    """What must be known of a chain that may be a template."""

    sequence: str
    release: date | None
    usable: bool
    atoms: bytes


@lru_cache(1)
def _known(work: Path) -> dict[str, Known]:
    """All chains of the scan, by key; once in a process."""
    return {key(one["name"].decode()): Known(one["sequence"].tobytes().decode(), _date(one["release"]), bool(one["usable"]),
                                             one["atoms"].tobytes())
            for path in sorted(work.glob("structures_*.h5")) for one in _scanned(path)}  # fmt: skip


def _date(day: int) -> date | None:
    return None if day == UNKNOWN_DAY else date(1970, 1, 1) + timedelta(int(day))


def search(work: Path, picks: Sequence[Pick], most: int, path: Path) -> None:
    """The hits of some chains, matched with what was found in the structures, which is in the folder ``work``."""
    everyone, skipped = _known(work), dict[str, str]()

    def known(name: str) -> Known | None:
        return one if (one := everyone.get(name)) and one.usable else None

    def refuse(one: Match) -> str | None:
        return few_atoms(np.frombuffer(everyone[one.name].atoms, np.uint8), one.places)

    rows: list[dict[str, Any]] = []
    for pick in picks:
        own, entry, found = everyone[key(pick.name)], key(pick.name).rpartition("_")[0], list[Match]()
        limits: dict[str, Any] = {"entry": entry, "before": own.release, "most": most, "refuse": refuse}
        for file in _hit_files(pick.folder):
            try:
                found += match(read_hhr(file), own.sequence, known, **limits)[0]
            except DataError as problem:
                skipped[str(file)] = str(problem)
        found = sorted(found, key=lambda one: -one.sum_probs)[:most]
        rows.append({
            "hits": len(found), "places": len(found) * len(own.sequence), "name": np.array([one.name for one in found], "S"),
            "sum_probs": np.array([one.sum_probs for one in found]), "hit_places": np.array([one.places for one in found]),
        })  # fmt: skip
    store.write_json(path.with_suffix(".json"), skipped)
    store.write_rows(path, HITS, rows, {})


def _hit_files(folder: Path | None) -> list[Path]:
    """The files of hits in the chain's hhr folder, then those beside its alignments."""
    if folder is None:
        return []
    root = folder.parent if folder.name == "a3m" else folder
    paths = [path for place in dict.fromkeys((root / "hhr", root, folder)) for path in sorted(place.glob("*.hhr*"))]
    return [path for path in paths if re.search(r"\.hhr(\.gz)?$", path.name)]


# ---- convert: what is made of them


@dataclass(frozen=True)
class Share:
    """One file to be made."""

    path: Path
    skipped: Path                               # where it tells what it leaves out
    picks: tuple[Pick, ...]
    most: int | None
    hits: Path | None = None                    # what a search for these chains found
    hit_rows: tuple[int, ...] = ()              # templates of all chains, one after the other


def convert_structures(picks: Sequence[Found], path: Path) -> None:
    entry = lru_cache(1)(read_mmcif)
    rows = [chains.template(_chain(entry(one.source), one.name)) for one in picks]
    store.write_rows(path, chains.TEMPLATE_LAYOUTS, rows, {"kind": "converted"})


def _chain(entry: Entry, name: str) -> Chain:
    return entry.chains[name.rpartition("_")[2]]


def _hits(share: Share) -> list[Hits]:
    """The hits of each of its chains."""
    if share.hits is None:
        return [NO_HITS] * len(share.picks)
    with h5py.File(share.hits, "r") as file:
        found, rows = store.read_rows(file, HITS), iter(share.hit_rows)
    return [Hits(np.fromiter(islice(rows, one["hits"]), np.int32), one["sum_probs"], one["hit_places"]) for one in found]


def convert_share(share: Share, path: Path) -> None:
    taken, skipped, entry = [], {}, lru_cache(1)(read_mmcif)
    for pick, hits in zip(share.picks, _hits(share)):
        try:
            chain = _chain(entry(pick.source), pick.name)
            alignment = None if pick.folder is None else read_alignments(pick.folder, chain.sequence)
            taken.append(chains.sample(chain, alignment, pick.cluster, pick.cluster_size, share.most, hits))
        except DataError as problem:
            skipped[pick.name] = str(problem)
    if not taken:
        first = next(iter(skipped.values()))
        raise DataError(f"{path}: none of its {len(skipped)} chains can be used, the first because {first}")
    store.write_json(share.skipped, skipped)
    chains.write(path, taken, {"kind": "converted", "skipped": len(skipped)})


def _templates(
    options: argparse.Namespace, shares: Sequence[Share], found: Sequence[Found]
) -> tuple[list[Share], list[store.Job], dict[str, str]]:
    """The shares with the hits of their chains, the files of the structures that these name, and what cannot be read."""
    work, jobs = options.out / WORK, []
    for share in shares:
        # Filters may still change, and with them what a share is of.
        about = [str(options.templates), *(f"{one.name} {one.folder and one.folder.relative_to(options.alignments)}"
                                           for one in share.picks)]  # fmt: skip
        look = partial(search, work, share.picks, options.templates)
        jobs.append(store.Job(work / f"hits_{command.digest(about)}.h5", look, FOUND_HITS))
    store.make_share(jobs, options.workers, "hits")
    _known.cache_clear()
    store.wait_for(jobs)
    names, counts = [], list[int]()
    for job in jobs:
        with h5py.File(job.path, "r") as file:
            names.append([name.decode() for name in file["name"][...].tolist()])
            counts += file["hits"][...].tolist()
    named, some = {name for each in names for name in each}, sum(count > 0 for count in counts)
    middle = f"{np.median(counts):g} at the median"
    command.print_once(f"templates: {some} of {len(counts)} chains have some, {middle}; {len(named)} structures")
    picks = [one for one in found if one.key in named]
    rows = {one.key: row for row, one in enumerate(picks)}
    beside = [store.Job(options.out / TEMPLATES / f"templates_{number:06d}.h5", partial(convert_structures, picks[begin:end]),
                        chains.TEMPLATE_CONTENTS, end - begin)
              for number, (begin, end) in enumerate(_even(len(picks), options.each))]  # fmt: skip
    full = [replace(share, hits=job.path, hit_rows=tuple(rows[name] for name in each))
            for share, job, each in zip(shares, jobs, names)]  # fmt: skip
    return full, beside, _noted(job.path.with_suffix(".json") for job in jobs)


def convert(options: argparse.Namespace) -> int:
    structures, folders = _structures(options.structures), _folders(options.alignments)
    for source in (options.structures, options.alignments):
        command.refuse_same(source, options.out)
    if options.validation is None and options.validation_from <= options.released_until:
        raise ConfigError(f"--validation-from {options.validation_from}: expected after --released-until {options.released_until}")
    clusters, twins, wanted = (_lines(path) for path in (options.clusters, options.duplicates, options.validation))
    members = [name for line in clusters for name in line]
    entities = sum(bool(re.search(r"_\d+$", name)) for name in members) > len(members) / 2
    if entities:
        command.print_once(f"warning: {options.clusters}: names entities (5ZYH_1), not chains; the structures tell whose they are")
    asked = ("released_until", "validation_from", "validation_until", "validation_length", "resolution", "single", "apart", "most",
             "each", "templates")  # fmt: skip
    lists = {name: store.digest(path)[:16] if (path := getattr(options, name)) else None
             for name in ("clusters", "duplicates", "validation")}  # fmt: skip
    recipe = {
        "kind": "convert", **{name: getattr(options, name) for name in asked}, **lists,
        "structures": _told(options.structures, structures), "alignments": _told(options.alignments, folders.values()),
    }  # fmt: skip
    recipe = dict(json.loads(json.dumps(recipe, default=str)))
    if (options.out / "recipe.json").is_file():
        store.claim(options.out, recipe)        # refused before hours of looking at structures
    about = {"format": 2, "structures": recipe["structures"], "entities": entities}
    store.claim(options.out / WORK, about)      # filters may still change
    found, skipped = _look(options, structures, entities)
    of = {name.lower() if entities else key(name): number for number, line in enumerate(clusters) for name in line}
    plan, filtered = _plan(options, found, of, [key(name) for line in wanted for name in line])
    shares = _shares(options, plan, folders, [[key(name) for name in line] for line in twins])
    there = {one.key for one in found}
    missing = [name for line in wanted for name in line if key(name) not in there]
    if missing:
        command.print_once(f"{len(missing)} chains named in {options.validation}, such as {missing[0]}, are in no structure")
    filtered |= dict.fromkeys(missing, f"named in {options.validation}, in no structure")
    beside: list[store.Job] = []
    if options.templates:
        shares, beside, unread = _templates(options, shares, found)
        skipped |= unread
    label = "converted: clusters " + (f"of {options.clusters.name}" if clusters else "are equal sequences")
    jobs = [store.Job(share.path, partial(convert_share, share), CONTENTS) for share in shares]
    command.work(options, jobs, recipe, chains.header(label), beside=beside)
    if store.launched()[0] == 0:
        unusable = skipped | _noted(share.skipped for share in shares)
        store.write_json(options.out / SKIPPED, {"unusable": unusable, "filtered": filtered})
        _tell(options.out)
        _tell_skipped(options.out, unusable)
    return command.conclude("openfold", options)


def _folders(root: Path) -> dict[str, Path]:
    """The alignments of each chain."""
    if not root.is_dir():
        raise ConfigError(f"--alignments {root}: no such folder")
    return {key(path.name): path / "a3m" if (path / "a3m").is_dir() else path for path in sorted(root.iterdir()) if path.is_dir()}


def _lines(path: Path | None) -> list[list[str]]:
    """The words of each line of a file, which may be none."""
    try:
        lines = [line.split() for line in path.read_text("ascii").splitlines()] if path else []
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read ({problem}); expected lines of names such as 5zyh_A") from problem
    if path and not any(lines):
        raise ConfigError(f"{path}: holds nothing, expected lines of names such as 5zyh_A")
    return lines


def _told(root: Path, paths: Iterable[Path]) -> str:
    names = [path.relative_to(root).as_posix() for path in paths]
    return f"{len(names)}, names {command.digest(names)}"


def _look(options: argparse.Namespace, structures: Sequence[Path], entities: bool) -> tuple[list[Found], dict[str, str]]:
    """The chains of all structures by name, and what cannot be read."""
    parts = list(command.parts_of(structures, SCANNED))
    jobs = [store.Job(options.out / WORK / f"structures_{number:06d}.h5", partial(scan, part, entities), SCAN)
            for number, part in enumerate(parts)]  # fmt: skip
    store.make_share(jobs, options.workers, "scan")
    store.wait_for(jobs)
    found = sorted((one for part, job in zip(parts, jobs) for one in _found(part, job.path)), key=lambda one: one.key)
    skipped = _noted(job.path.with_suffix(".json") for job in jobs)
    command.print_once(f"{len(structures)} structures with {len(found)} chains; cannot be used: {len(skipped)}")
    if not found:
        raise DataError(f"{options.structures}: none of its {len(structures)} files can be used, the first because "
                        f"{next(iter(skipped.values()))}")  # fmt: skip
    return found, skipped


Plan = dict[str, list[tuple[Found, int, int]]]  # each with its cluster and the size of that


def _plan(
    options: argparse.Namespace, found: Sequence[Found], of: Mapping[str, int], wanted: Sequence[str],
) -> tuple[Plan, dict[str, str]]:  # fmt: skip
    """The chains of each split, and why the others are in none."""
    held, sequences = set(wanted), dict[bytes, int]()
    filtered: dict[str, str] = {}
    parts: dict[str, list[tuple[Found, int]]] = {"train": [], "validation": []}
    for one in found:
        cluster = of.get(one.key, of.get(one.entity, -1)) if of else sequences.setdefault(one.sequence, len(sequences))
        split = _split(one, cluster, options, held)
        if split in parts:
            parts[split].append((one, cluster))
        else:
            filtered[one.name] = split
    near = {cluster for _, cluster in parts["validation"]} - {-1}
    kin = [one for one, cluster in parts["train"] if cluster in near]
    if kin:
        verdict = "left out of training" if options.apart else "kept in training; --apart leaves them out"
        command.print_once(f"{len(kin)} chains, such as {kin[0].name}, are in a cluster with one of validation: {verdict}")
    if options.apart:
        parts["train"] = [(one, cluster) for one, cluster in parts["train"] if cluster not in near]
        filtered |= {one.name: "in a cluster with a chain of validation, --apart" for one in kin}
    for split, those in parts.items():
        if not those:
            some = next(iter(filtered.items()), ("", ""))
            advice = "change the filters" if split == "train" else "name some in a file: --validation FILE"
            raise ConfigError(f"none of {len(found)} chains is left for {split}, {some[0]} because: {some[1]}; {advice}")
    undated = sum(one.release == UNKNOWN_DAY for one, _ in parts["train"])
    if undated:
        command.print_once(f"{undated} chains without a release date are taken for training")
    plan = {}
    for split, those in parts.items():
        sizes = Counter(cluster for _, cluster in those)
        plan[split] = [(one, cluster, sizes[cluster] if cluster >= 0 else 1) for one, cluster in those]
    return plan, filtered


def _split(one: Found, cluster: int, options: argparse.Namespace, held: set[str]) -> str:
    """Where a chain goes, or why nowhere. Validation has no bounds of quality, as in MLPerf HPC."""
    until, first, last = (days(getattr(options, name)) for name in ("released_until", "validation_from", "validation_until"))
    if not one.resolved:
        return "no residue has a CA"
    if held:
        if one.key in held:
            return "validation"
    elif one.release != UNKNOWN_DAY and first <= one.release <= last:
        most = options.validation_length
        return "validation" if len(one.sequence) <= most else f"{len(one.sequence)} residues, --validation-length {most}"
    if one.release > until:
        return f"released {_date(one.release)}, --released-until {options.released_until}"
    if one.resolution >= options.resolution:
        return f"{one.resolution:g} angstrom, --resolution {options.resolution:g}"
    if one.share() > options.single:
        return f"{one.share():.0%} of the residues are the same, --single {options.single:g}"
    return "train" if cluster >= 0 else f"in no cluster of {options.clusters}"


def _shares(options: argparse.Namespace, plan: Plan, folders: Mapping[str, Path], twins: Sequence[Sequence[str]]) -> list[Share]:
    """Files of nearly equal numbers of chains, so that none is left with a single one."""
    other = {name: line for line in twins for name in line}
    shares: list[Share] = []
    has: Counter[str] = Counter()
    for split, those in plan.items():
        picks = []
        for one, cluster, size in those:
            name = next((name for name in (one.key, *other.get(one.key, ())) if name in folders), None)
            has["their own" if name == one.key else "a twin's" if name else "none"] += 1
            picks.append(Pick(one.source, one.name, folders[name] if name else None, cluster, size))
        for number, (begin, end) in enumerate(_even(len(picks), options.each)):
            name = f"chains_{number:06d}"
            paths = options.out / split / f"{name}.h5", options.out / WORK / f"{split}_{name}.json"
            shares.append(Share(*paths, tuple(picks[begin:end]), options.most))
    if has["none"] == has.total():
        example = plan["train"][0][0].name
        raise ConfigError(f"--alignments {options.alignments}: holds a folder for none of {has.total()} chains, such as {example}; "
                          "name the folder that has them, of OpenProteinSet: pdb")  # fmt: skip
    command.print_once("alignments: " + ", ".join(f"{number} chains have {kind}" for kind, number in has.items()))
    return shares


def _even(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Begin and end of parts of nearly equal size, ``most`` at most."""
    parts = -(-count // most)
    return pairwise(count * number // parts for number in range(parts + 1)) if parts else iter(())


def _tell_skipped(out: Path, unusable: Mapping[str, str]) -> None:
    if unusable:
        print(f"cannot be used: {len(unusable)}")
        for name, text in [*unusable.items()][:TOLD]:
            print(f"  {name}: {text}")
    print(f"left out, with reasons: {out / SKIPPED}")


# ---- check


def inspect(out: Path, some: int, picture: bool) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    beside = list(store.indexed(out, (TEMPLATES,))) if (out / TEMPLATES).is_dir() else []
    wrong += [f"{path}: {text}" for path, entry, index in beside for text in store.mistakes(path, entry, index)]
    places = command.places_of(files)
    _tell(out)
    if not wrong:
        lengths = [length for path, _, _ in beside for length in _lengths(path)]
        wrong += [text for path in sorted(path for path, _, _ in files) for text in _odd(path, lengths)]
        for path, row in places[:: max(1, len(places) // some)][:some] if some else []:
            _show(path, row)
    if picture and not wrong:
        chains.draw(out / PICTURE, places, files[0][2]["label"])
    return command.told(wrong)


def _tell(out: Path) -> None:
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        residues, depth, resolution = part["residues"], part["depth"], part["resolution"]
        known = f"{resolution['median']:.2f} angstrom" if resolution["known"] else "unknown"
        print(f"{split}: {part['chains']} chains of {part['clusters']} clusters; {residues['minimum']:.0f} to "
              f"{residues['maximum']:.0f} residues, {residues['with CA'] / residues['total']:.1%} with a CA")  # fmt: skip
        templates = part["templates"]
        print(f"  alignments of {depth['median']:.0f} rows (median; deepest {depth['maximum']:.0f}), {depth['query alone']} of the "
              f"query alone; resolution {known} (median of {resolution['known']}), {part['undated']} without a date")  # fmt: skip
        if templates["hits"]:
            share = 1 - templates["chains with none"] / part["chains"]
            print(f"  {share:.1%} of the chains have templates, {templates['median']:g} at the median")


def _lengths(path: Path) -> list[int]:
    with h5py.File(path, "r") as file:
        return list(file["residues"][...].tolist())


def _odd(path: Path, lengths: Sequence[int]) -> Iterator[str]:
    """What is in a file that no chain can have. ``lengths``: residues of each template."""
    again = "delete the file and make it again"
    with h5py.File(path, "r") as file:
        for row in range(file["residues"].shape[0]):
            found = chains.read(file, row)
            where = f"{path}: row {row} ({found['name'].decode()})"
            query, types = found["msa"][0], found["aatype"]
            unlike = int(((query != types) & (query < 20) & (types < 20)).sum())
            if unlike or (query == GAP).any():
                yield f"{where}: the first row of the alignment differs from the chain at {unlike} residues; {again}"
            for name, (low, high) in ((name, chains.RANGES[name]) for name in ("aatype", "mask", "msa")):
                if found[name].min() < low or (high is not None and found[name].max() > high):
                    at = f"{found[name].min()} to {found[name].max()}"
                    yield f"{where}: '{name}' goes from {at}, expected {low} to {high}; {again}"
            seen = found["mask"] > 0
            if not seen[:, chains.CA].any():
                yield f"{where}: no residue has a CA; {again}"
            if not np.isfinite(found["positions"]).all() or found["positions"][~seen].any():
                yield f"{where}: positions are not finite, or not 0 where 'mask' is; {again}"
            for hit, (at, residues) in enumerate(zip(found["hit_row"].tolist(), found["hit_places"]), 1):
                if not 0 <= at < len(lengths):
                    yield f"{where}: hit {hit} is row {at} of {TEMPLATES}, which holds {len(lengths)}; {again}"
                elif residues.min() < -1 or residues.max() >= lengths[at]:
                    text = f"is aligned to residues {residues.min()} to {residues.max()} of a template of {lengths[at]}"
                    yield f"{where}: hit {hit} {text}, expected -1 to {lengths[at] - 1}; {again}"


def _show(path: Path, row: int) -> None:
    """A chain in three lines: what it is, its letters, small where there is no CA, and how many rows cover them."""
    with h5py.File(path, "r") as file:
        found = chains.read(file, row)
    msa, seen, wide = found["msa"], found["mask"][:, chains.CA] > 0, 100
    letters = [(LETTERS + "X")[kind] for kind in found["aatype"][:wide]]
    text = "".join(letter if there else letter.lower() for letter, there in zip(letters, seen))
    bars = "".join(" .:-=+*#%@"[int(9 * covered)] for covered in (msa != GAP).mean(0)[:wide])
    resolution = f"{found['resolution']:.2f} angstrom" if found["resolution"] else "resolution unknown"
    print(f"{path.parent.name} {found['name'].decode()}: {len(seen)} residues, {seen.sum()} with a CA, {len(msa)} rows, "
          f"{resolution}, cluster {found['cluster']} of {found['cluster_size']} chains")  # fmt: skip
    print(f"  {text}{'...' if len(seen) > wide else ''}\n  {bars}")


# ---- command line


day = command.taking("day such as 2021-09-16", date.fromisoformat)
share = command.taking("number above 0, 1 at most", float, lambda value: 0 < value <= 1)
above_zero = command.taking("number above 0", float, lambda value: value > 0)


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("openfold", "Protein chains with their alignments: simulate families, check them, or convert files.")
    one = add("simulate", "Families of chains that share a fold, with alignments that evolved.", simulate)
    command.add_out(one)
    one.add_argument("--chains", metavar="N", type=command.positive, default=256, help="of all families")
    one.add_argument("--families", metavar="N", type=command.positive, default=64, help="a later run may ask for more")
    one.add_argument("--each", metavar="N", type=command.positive, default=4, help="families of a file")
    one.add_argument("--length", metavar=("LEAST", "MOST"), nargs=2, type=command.positive, default=(48, 96), help="residues")
    one.add_argument("--rows", metavar="N", type=command.positive, default=256, help="of an alignment")
    one.add_argument("--templates", metavar="N", type=command.natural, default=0, help="of a chain: others of its family")
    command.add_fractions(one, 0.125, 0.0, "the families")
    command.add_making(one)

    command.add_check(add, "Files against index.json, every chain looked at, some shown", inspect, PICTURE, "--chains", 6,
                      "how many are shown")  # fmt: skip

    three = add("convert", "mmCIF, A3M and Stockholm files to ours.", convert)
    three.add_argument("--structures", type=Path, metavar="DIR", required=True, help=".cif and .cif.gz, at any depth")
    three.add_argument("--alignments", type=Path, metavar="DIR", required=True, help="a folder for each chain")
    command.add_out(three)
    three.add_argument("--clusters", type=Path, metavar="FILE", help="a line of chains (or entities) for each cluster")
    three.add_argument("--duplicates", type=Path, metavar="FILE", help="a line for chains that share an alignment")
    three.add_argument("--most", metavar="ROWS", type=command.positive, help="of an alignment, the first; without it all")
    three.add_argument("--templates", metavar="N", type=command.natural, default=20, help="of a chain, at most; 0: none")
    three.add_argument("--each", metavar="N", type=command.positive, default=64, help="chains of a file, at most")
    three.add_argument("--resolution", metavar="A", type=above_zero, default=9.0, help="angstrom, of training below it or unknown")
    three.add_argument("--released-until", metavar="DAY", type=day, default=date(2021, 9, 16), help="training")
    three.add_argument("--single", metavar="F", type=share, default=0.8, help="share of one amino acid in training, at most")
    three.add_argument("--validation", type=Path, metavar="FILE", help="chains of validation, instead of those between two days")
    three.add_argument("--validation-from", metavar="DAY", type=day, default=date(2021, 9, 17), help="validation")
    three.add_argument("--validation-until", metavar="DAY", type=day, default=date(2021, 12, 11), help="validation")
    three.add_argument("--validation-length", metavar="N", type=command.positive, default=700, help="residues, at most")
    three.add_argument("--apart", action="store_true", help="leave out of training what is in a cluster with a chain of validation")
    command.add_workers(three)
    return top


main = partial(command.main, parser)

if __name__ == "__main__":
    sys.exit(main())
