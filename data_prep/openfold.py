"""Protein chains with their alignments (OpenFold): simulate families of them, check them, or convert mmCIF and A3M files.

    python -m data_prep.openfold simulate OUT       chains folded and evolved here (data_prep.proteins): like nature, not of it
    python -m data_prep.openfold check OUT          files against their index, every chain looked at, a picture
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
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import chains, command, proteins, store
from data_prep.chains import CONTENTS, NO_HITS, TEMPLATES, Hits
from data_prep.command import option
from hpcai.errors import ConfigError, DataError
from hpcai.models.openfold.alignments import read_alignments, read_hhr
from hpcai.models.openfold.residues import GAP
from hpcai.models.openfold.structures import Chain, Entry, read_mmcif
from hpcai.models.openfold.templates import Match, rejection_reason, select_hits, too_few_atoms

WORK = ".convert"
MADE = "simulated: folded by data_prep.proteins, not nature"
FAMILIES = 1_000_000                            # that one seed can have
SCANNED = 64                                    # structure files of one part of the scan


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """All that decides the content of a simulated family, besides its number, and where it lies."""

    seed: int = command.seed()
    members: int = 4
    length: tuple[int, int] = option((48, 96), "residues", metavar=("LEAST", "MOST"), nargs=2, type=command.positive)
    depth: int = option(256, "of an alignment", "rows", type=command.positive)
    each: int = option(4, "families of a file", type=command.positive)
    validation: float = command.fraction(0.125, "the families")
    test: float = command.fraction(0.0, "the families")
    templates: int = option(0, "of a chain: others of its family", type=command.natural)

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
        rows = list(store.read_rows(file, chains.TEMPLATE_FIELDS))
    store.write_rows(path, chains.TEMPLATE_FIELDS, rows, {"kind": "simulated", "label": MADE})


def add_chains(made: argparse.ArgumentParser) -> None:
    made.add_argument("--chains", metavar="N", type=command.positive, default=256, help="of all families")


def simulate(options: argparse.Namespace) -> command.Plan:
    if options.families > FAMILIES or options.families % options.each or options.chains % options.families:
        raise ConfigError(f"--chains {options.chains} --families {options.families} --each {options.each}: expected a multiple of "
                          f"--families for chains and of --each for families, {FAMILIES:,} families at most")  # fmt: skip
    recipe = Recipe.of(options, members=options.chains // options.families)
    splits = [recipe.split(file) for file in range(options.families // options.each)]
    command.refuse_empty(splits, options, f"--families {options.families} in files of {options.each}")
    rows = recipe.each * recipe.members
    jobs = [store.Job(options.out / split / f"families_{file:06d}.h5", partial(write_families, recipe, file), CONTENTS, rows)
            for file, split in enumerate(splits)]  # fmt: skip
    beside = [store.Job(options.out / TEMPLATES / job.path.name, partial(write_relatives, job.path), chains.TEMPLATE_CONTENTS, rows)
              for job in jobs if recipe.templates]  # fmt: skip
    told = f"{options.families} families of {recipe.members} chains in {options.out}; {MADE}"
    return command.Plan(recipe, jobs, chains.header(MADE), told, beside)


# ---- convert: what the structures hold


day = command.taking("day such as 2021-09-16", date.fromisoformat)
share = command.taking("number above 0, 1 at most", float, lambda value: 0 < value <= 1)
above_zero = command.taking("number above 0", float, lambda value: value > 0)


@dataclass(frozen=True)
class Source(command.Settings):
    """Settings of a conversion: limits of the chains that are taken, and their splits."""

    released_until: date = option(date(2021, 9, 16), "training", metavar="DAY", type=day)  # noqa: RUF009
    validation_from: date = option(date(2021, 9, 17), "validation", metavar="DAY", type=day)  # noqa: RUF009
    validation_until: date = option(date(2021, 12, 11), "validation", metavar="DAY", type=day)  # noqa: RUF009
    validation_length: int = option(700, "residues, at most", type=command.positive)
    resolution: float = option(9.0, "angstrom, of training below it or unknown", metavar="A", type=above_zero)
    single: float = option(0.8, "share of one amino acid in training, at most", metavar="F", type=share)
    most: int | None = option(None, "of an alignment, the first; without it all", metavar="ROWS", type=command.positive)
    each: int = option(64, "chains of a file, at most", type=command.positive)
    templates: int = option(20, "of a chain, at most; 0: none", type=command.natural)


def add_sources(made: argparse.ArgumentParser) -> None:
    for name, required, text in (
        ("structures", True, ".cif and .cif.gz, at any depth"), ("alignments", True, "a folder for each chain"),
        ("clusters", False, "a line of chains (or entities) for each cluster"),
        ("duplicates", False, "a line for chains that share an alignment"),
        ("validation", False, "chains of validation, instead of those between two days"),
    ):  # fmt: skip
        made.add_argument(f"--{name}", type=Path, metavar="DIR" if required else "FILE", required=required, help=text)


@dataclass(frozen=True, slots=True)
class Found:
    """A chain of a structure."""

    source: Path
    name: str
    key: str                                    # 5zyh_A
    sequence: str
    resolution: float
    release: date | None
    entity: str                                 # 5zyh_1
    usable: bool                                # as a template
    atoms: bytes                                # how many each residue has
    resolved: int                               # residues with a CA

    def share(self) -> float:
        """The share of the most frequent residue."""
        return max(Counter(self.sequence).values()) / len(self.sequence)


def key(name: str) -> str:
    """The name with its entry in small letters, so that 5zyh_A and 5ZYH_A are one chain."""
    entry, _, chain = name.rpartition("_")
    return f"{entry.lower()}_{chain}"


def scan(sources: Sequence[Path], entities: bool) -> dict[str, Any]:
    """Looks at a part of the structures; ``entities``: clusters name these, not chains. Gives chains, and what is refused."""
    found: list[dict[str, Any]] = []
    refused = []
    for source in sources:
        try:
            entry = read_mmcif(source)
            named = _entities(source) if entities else {}
        except DataError as problem:
            refused.append((str(source), str(problem)))
            continue
        for author, chain in entry.chains.items():
            if len(chain.name.encode()) > chains.NAME or not chain.name.isascii():
                text = f"{source}: the name of the chain is longer than {chains.NAME} letters; rename the file"
                refused.append((chain.name, text))
                continue
            found.append({
                "source": str(source), "name": chain.name, "sequence": chain.sequence, "resolution": chain.resolution or 0,
                "release": chain.release and chain.release.isoformat(), "usable": rejection_reason(chain) is None,
                "entity": f"{chain.name.rpartition('_')[0].lower()}_{named.get(author, '')}",
                "atoms": (chain.mask > 0).sum(1).tolist(), "resolved": int(chain.mask[:, chains.CA].sum()),
            })  # fmt: skip
    return {"chains": found, "refused": refused}


def _entities(path: Path) -> dict[str, str]:
    """The number of the entity of each chain, by the authors' name."""
    import gemmi

    rows = gemmi.cif.read(str(path))[0].find("_entity_poly.", ["entity_id", "pdbx_strand_id"])
    return {author: row.str(0) for row in rows for author in "".join(row.str(1).split()).split(",")}


def _found(one: Mapping[str, Any]) -> Found:
    release = one["release"] and date.fromisoformat(one["release"])
    changed = {"source": Path(one["source"]), "release": release, "atoms": bytes(one["atoms"]), "key": key(one["name"])}
    return Found(**{**one, **changed})


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


@lru_cache(1)
def _known(work: Path) -> dict[str, Found]:
    """All chains of the scan, by key; once in a process."""
    every = (one for path in sorted(work.glob("structures_*.json")) for one in store.read_json(path)["chains"])
    return {one.key: one for one in map(_found, every)}


def search(work: Path, picks: Sequence[Pick], most: int) -> dict[str, Any]:
    """The hits of some chains, matched with what was found in the structures, which is in the folder ``work``; and what is
    refused."""
    everyone, refused = _known(work), list[tuple[str, str]]()

    def known(name: str) -> Found | None:
        return one if (one := everyone.get(name)) and one.usable else None

    def refuse(one: Match) -> str | None:
        return too_few_atoms(np.frombuffer(everyone[one.name].atoms, np.uint8), one.residue_map)

    every: list[list[Any]] = []
    for pick in picks:
        own, entry, found = everyone[key(pick.name)], key(pick.name).rpartition("_")[0], list[Match]()
        limits: dict[str, Any] = {"entry": entry, "before": own.release, "most": most, "reject": refuse}
        for file in _hit_files(pick.folder):
            try:
                found += select_hits(read_hhr(file), own.sequence, known, **limits)[0]
            except DataError as problem:
                refused.append((str(file), str(problem)))
        best = sorted(found, key=lambda one: -one.sum_probs)[:most]
        every.append([(one.name, float(one.sum_probs), one.residue_map.tolist()) for one in best])
    return {"hits": every, "refused": refused}


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
    """The chains of one file."""

    split: str
    name: str
    picks: tuple[Pick, ...]
    most: int | None
    hits: Path | None = None                    # what a search for these chains found
    hit_rows: tuple[int, ...] = ()              # templates of all chains, one after the other


def convert_structures(picks: Sequence[Found], path: Path) -> None:
    entry = lru_cache(1)(read_mmcif)
    rows = [chains.template(_chain(entry(one.source), one.name)) for one in picks]
    store.write_rows(path, chains.TEMPLATE_FIELDS, rows, {"kind": "converted"})


def _chain(entry: Entry, name: str) -> Chain:
    return entry.chains[name.rpartition("_")[2]]


def _hits(share: Share) -> Iterator[Hits]:
    """The hits of each of its chains."""
    rows, every = iter(share.hit_rows), store.read_json(share.hits)["hits"] if share.hits else [[]] * len(share.picks)
    for hits in every:
        _, probs, places = zip(*hits) if hits else ((), (), ())
        some = np.fromiter(islice(rows, len(hits)), np.int32)
        yield Hits(some, np.array(probs), np.array(places, np.int16)) if hits else NO_HITS


def convert_share(share: Share, path: Path) -> store.Refused:
    """Gives the chains that cannot be used."""
    taken, refused, entry = [], list[tuple[str, str]](), lru_cache(1)(read_mmcif)
    for pick, hits in zip(share.picks, _hits(share)):
        try:
            chain = _chain(entry(pick.source), pick.name)
            alignment = None if pick.folder is None else read_alignments(pick.folder, chain.sequence)
            taken.append(chains.sample(chain, alignment, pick.cluster, pick.cluster_size, share.most, hits))
        except DataError as problem:
            refused.append((pick.name, str(problem)))
    if not taken:
        raise DataError(f"{path}: none of its {len(refused)} chains can be used, the first because {refused[0][1]}")
    chains.write(path, taken, {"kind": "converted"})
    return refused


def _templates(
    options: argparse.Namespace, shares: Sequence[Share], found: Sequence[Found]
) -> tuple[list[Share], list[store.Job], list[tuple[str, str]]]:
    """The shares with the hits of their chains, the files of the structures that these name, and what cannot be read."""
    work, tasks = options.out / WORK, dict[Path, Any]()
    for share in shares:
        # Filters may still change, and with them what a share is of.
        about = [str(options.templates), *(f"{one.name} {one.folder and one.folder.relative_to(options.alignments)}"
                                           for one in share.picks)]  # fmt: skip
        tasks[work / f"hits_{command.digest(about)}.json"] = partial(search, work, share.picks, options.templates)
    names, unread = list[list[str]](), list[tuple[str, str]]()          # of templates, of each share; one file in memory
    counts: list[int] = []
    for result in store.gather(tasks, options.workers, "hits"):
        names.append([name for hits in result["hits"] for name, _, _ in hits])
        counts += map(len, result["hits"])
        unread += _refused(result)
    _known.cache_clear()
    named = {name for each in names for name in each}
    middle = f"{np.median(counts):g} at the median"
    some = sum(count > 0 for count in counts)
    command.print_once(f"templates: {some} of {len(counts)} chains have some, {middle}; {len(named)} structures")
    picks = [one for one in found if one.key in named]
    rows = {one.key: row for row, one in enumerate(picks)}
    beside = [store.Job(options.out / TEMPLATES / f"templates_{number:06d}.h5", partial(convert_structures, picks[begin:end]),
                        chains.TEMPLATE_CONTENTS, end - begin)
              for number, (begin, end) in enumerate(_even(len(picks), options.each))]  # fmt: skip
    full = [replace(share, hits=path, hit_rows=tuple(rows[name] for name in each))
            for share, path, each in zip(shares, tasks, names)]  # fmt: skip
    return full, beside, unread


def _refused(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(where, why) for where, why in result["refused"]]


def convert(options: argparse.Namespace) -> command.Plan:
    source = Source.of(options)
    structures, folders = _structures(options.structures), _folders(options.alignments)
    if options.validation is None and source.validation_from <= source.released_until:
        raise ConfigError(f"--validation-from {source.validation_from}: expected after --released-until {source.released_until}")
    clusters, twins, wanted = (_lines(path) for path in (options.clusters, options.duplicates, options.validation))
    members = [name for line in clusters for name in line]
    entities = sum(bool(re.search(r"_\d+$", name)) for name in members) > len(members) / 2
    if entities:
        command.print_once(f"warning: {options.clusters}: names entities (5ZYH_1), not chains; the structures tell whose they are")
    lists = {name: store.digest(path)[:16] if (path := getattr(options, name)) else None
             for name in ("clusters", "duplicates", "validation")}  # fmt: skip
    told = {name: command.listed([path.relative_to(root).as_posix() for path in paths], "names") for name, root, paths in
            (("structures", options.structures, structures), ("alignments", options.alignments, folders.values()))}  # fmt: skip
    recipe = {"kind": "convert", **source.told, **lists, **told}
    if (options.out / "recipe.json").is_file():
        store.claim(options.out, recipe)        # refused before hours of looking at structures
    # Filters may still change.
    store.claim(options.out / WORK, {"format": 3, "structures": told["structures"], "entities": entities})
    tasks = {options.out / WORK / f"structures_{number:06d}.json": partial(scan, part, entities)
             for number, part in enumerate(command.parts_of(structures, SCANNED))}  # fmt: skip
    every, refused = list[Found](), list[tuple[str, str]]()
    for result in store.gather(tasks, options.workers, "scan"):
        every += map(_found, result["chains"])
        refused += _refused(result)
    found = sorted(every, key=lambda one: one.key)
    command.print_once(f"{len(structures)} structures with {len(found)} chains; cannot be used: {len(refused)}")
    if not found:
        raise DataError(f"{options.structures}: none of its {len(structures)} files can be used, the first because {refused[0][1]}")
    of = {name.lower() if entities else key(name): number for number, line in enumerate(clusters) for name in line}
    plan, filtered = _plan(options, found, of, [key(name) for line in wanted for name in line])
    shares = _shares(options, plan, folders, [[key(name) for name in line] for line in twins])
    there = {one.key for one in found}
    missing = [name for line in wanted for name in line if key(name) not in there]
    filtered |= dict.fromkeys(missing, f"named in {options.validation}, in no structure")
    beside: list[store.Job] = []
    if source.templates:
        shares, beside, unread = _templates(options, shares, found)
        refused += unread
    label = "converted: clusters " + (f"of {options.clusters.name}" if clusters else "are equal sequences")
    jobs = [store.Job(options.out / one.split / f"{one.name}.h5", partial(convert_share, one), CONTENTS) for one in shares]
    return command.Plan(recipe, jobs, chains.header(label), label, beside, refused, filtered=[*filtered.items()])


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


Plan = dict[str, list[tuple[Found, int, int]]]  # each with its cluster and the size of that


def _plan(
    options: argparse.Namespace, found: Sequence[Found], of: Mapping[str, int], wanted: Sequence[str],
) -> tuple[Plan, dict[str, str]]:  # fmt: skip
    """The chains of each split, and why the others are in none."""
    held, sequences = set(wanted), dict[str, int]()
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
        command.print_once(f"{len(kin)} chains of training, such as {kin[0].name}, are in a cluster with one of validation")
    for split, those in parts.items():
        if not those:
            some = next(iter(filtered.items()), ("", ""))
            advice = "change the filters" if split == "train" else "name some in a file: --validation FILE"
            raise ConfigError(f"none of {len(found)} chains is left for {split}, {some[0]} because: {some[1]}; {advice}")
    undated = sum(one.release is None for one, _ in parts["train"])
    if undated:
        command.print_once(f"{undated} chains without a release date are taken for training")
    plan = {}
    for split, those in parts.items():
        sizes = Counter(cluster for _, cluster in those)
        plan[split] = [(one, cluster, sizes[cluster] if cluster >= 0 else 1) for one, cluster in those]
    return plan, filtered


def _split(one: Found, cluster: int, options: argparse.Namespace, held: set[str]) -> str:
    """Where a chain goes, or why nowhere. Validation has no bounds of quality, as in MLPerf HPC."""
    if not one.resolved:
        return "no residue has a CA"
    if held:
        if one.key in held:
            return "validation"
    elif one.release and options.validation_from <= one.release <= options.validation_until:
        most = options.validation_length
        return "validation" if len(one.sequence) <= most else f"{len(one.sequence)} residues, --validation-length {most}"
    if one.release and one.release > options.released_until:
        return f"released {one.release}, --released-until {options.released_until}"
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
            shares.append(Share(split, f"chains_{number:06d}", tuple(picks[begin:end]), options.most))
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


# ---- check


def look(prepared: command.Prepared, options: argparse.Namespace) -> Iterator[str]:
    """Yield the values of the files that no chain can have."""
    lengths: list[int] = []
    for path in sorted((prepared.out / TEMPLATES).glob("*.h5")):
        with h5py.File(path, "r") as file:
            lengths += file["residues"][...].tolist()
    for path in sorted(prepared.paths):
        yield from _odd(path, lengths)


def _odd(path: Path, lengths: Sequence[int]) -> Iterator[str]:
    """Yield the values of a file that no chain can have. ``lengths``: residues of each template."""
    again = "delete the file and make it again"
    with h5py.File(path, "r") as file:
        for row in range(file["residues"].shape[0]):
            found = chains.read(file, row)
            where = f"{path}: row {row} ({found['name'].decode()})"
            query, types = found["msa"][0], found["aatype"]
            unlike = int(((query != types) & (query < 20) & (types < 20)).sum())
            if unlike or (query == GAP).any():
                yield f"{where}: the first row of the alignment differs from the chain at {unlike} residues; {again}"
            seen = found["mask"] > 0
            if not seen[:, chains.CA].any():
                yield f"{where}: no residue has a CA; {again}"
            if found["positions"][~seen].any():
                yield f"{where}: positions are not 0 where 'mask' is; {again}"
            for hit, (at, residues) in enumerate(zip(found["hit_row"].tolist(), found["hit_places"]), 1):
                if not 0 <= at < len(lengths):
                    yield f"{where}: hit {hit} is row {at} of {TEMPLATES}, which holds {len(lengths)}; {again}"
                elif residues.min() < -1 or residues.max() >= lengths[at]:
                    text = f"is aligned to residues {residues.min()} to {residues.max()} of a template of {lengths[at]}"
                    yield f"{where}: hit {hit} {text}, expected -1 to {lengths[at] - 1}; {again}"


MAKER = command.Maker(
    "openfold", "Protein chains with their alignments: simulate families, check them, or convert files.", "openfold",
    command.Check("Files against index.json, every chain looked at.", look, None),
    (command.Simulate("Families of chains that share a fold, with alignments that evolved.", Recipe,
                      ("families", 64, "a later run may ask for more"), simulate, add_chains),
     command.Convert("mmCIF, A3M and Stockholm files to ours.", Source, convert, add_sources)),
)  # fmt: skip
main, parser = MAKER.main, MAKER.parser

if __name__ == "__main__":
    sys.exit(main())
