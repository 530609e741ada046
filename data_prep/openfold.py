"""Protein chains with their alignments (OpenFold): simulate families of them, check them, or convert mmCIF and A3M files.

    python -m data_prep.openfold simulate OUT       chains folded and evolved here (data_prep.proteins): like nature, not of it
    python -m data_prep.openfold check OUT          files against their index, some chains looked at and drawn as text, a picture
    python -m data_prep.openfold convert --structures DIR --alignments DIR OUT

    OUT/{train,validation}/*.h5, R chains of A residues and L letters of alignments in all
        "residues" int32 [R]   "letters" int32 [R]    rows of the alignment times residues     "name" S24 [R]   "5zyh_A"
        "resolution" float32 [R] angstrom, 0 unknown   "release" int32 [R]   days since 1970, -1 unknown
        "cluster" int32 [R]   of similar sequences, -1 in none   "cluster_size" int32 [R]   chains of it that the split has room for
        "aatype" int8 [A]   "positions" float32 [A, 37, 3] angstrom   "mask" uint8 [A, 37]     residues without coordinates too
        "msa" int8 [L]   the query first   "deletions" uint8 [L]   255 at most
    OUT/skipped.json    every chain and file that convert left out, with the reason
    OUT/.convert        what convert found in the structures and left out; a run that goes on needs it, nothing else does

What is [A] or [L] holds chain after chain; "residues" and "letters" tell how much each has.

convert takes a folder of .cif and .cif.gz at any depth, and a folder of alignments with one folder for each chain: the a3m folder
of OpenProteinSet in it, or .a3m and .sto files. Letters of entries may differ in case (5zyh_A, 5ZYH_A), those of chains may not.
A chain without a folder uses that of a twin (--duplicates), else its own sequence is all of its alignment. Chains whose alignment
cannot be read, or is of another sequence, are left out and listed. The filters are those of MLPerf HPC. Clusters are the lines of
--clusters; without it each distinct sequence is a cluster, which makes close relatives count more than they should. Space on the
disk is 2 bytes for each letter and 482 for each residue; --most bounds the first.

A simulated chain is a pure function of (seed, family, member) and the recipe; a converted one of its files and the options. Ranks,
processes and stops change nothing in either.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import chains, command, proteins, store
from data_prep.chains import CONTENTS, UNKNOWN_DAY, Sample, days
from hpcai.errors import ConfigError, DataError
from hpcai.models.openfold.alignments import read_alignments
from hpcai.models.openfold.residues import GAP, LETTERS
from hpcai.models.openfold.structures import Entry, read_mmcif

PICTURE, SKIPPED, WORK = "chains.png", "skipped.json", ".convert"
MADE = "simulated: folded by data_prep.proteins, not nature"
FAMILIES = 1_000_000                            # of one seed
SCANNED = 64                                    # structure files of one part of the scan
TOLD = 10                                       # reasons that are printed; all are in SKIPPED
SCAN = store.Contents("residues", lambda *_: {}, lambda _: {}, lambda _: {})


# ---- simulate


@dataclass(frozen=True)
class Recipe:
    """All that decides the content of a simulated family, besides its number, and where it lies."""

    seed: int
    members: int
    length: tuple[int, int]
    depth: int                                  # rows of an alignment
    each: int                                   # families in a file
    validation: float
    test: float

    def __post_init__(self) -> None:
        wrong = [*command.wrong_fractions(self.validation, self.test)]
        least, most = self.length
        if not proteins.SHORTEST <= least <= most:
            wrong.append(f"--length {least} {most}: expected the least and the most, {proteins.SHORTEST} at least")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def generator(self, stream: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence([self.seed, stream, number])))

    def split(self, file: int) -> str:
        return store.split_of(file, self.validation, self.test, partial(self.generator, 0))

    def family(self, number: int) -> list[Sample]:
        length = int(self.generator(1, number).integers(*self.length, endpoint=True))
        made = proteins.family(self.seed * FAMILIES + number, self.members, length, self.depth)
        return [chains.sample(chain, alignment, number, self.members) for chain, alignment in made]


@dataclass(frozen=True)
class Families:
    """One file to be made."""

    path: Path
    index: int
    recipe: Recipe

    @property
    def rows(self) -> int:
        return self.recipe.each * self.recipe.members


def make_families(job: Families) -> None:
    recipe, text = job.recipe, json.dumps(asdict(job.recipe))
    if not store.is_made(job.path, text, "residues", job.rows):
        made = [one for n in range(job.index * recipe.each, (job.index + 1) * recipe.each) for one in recipe.family(n)]
        chains.write(job.path, made, {"kind": "simulated", "label": MADE, "seed": recipe.seed, "recipe": text})
    store.write_record(job.path, CONTENTS)


def simulate(options: argparse.Namespace) -> int:
    if options.families > FAMILIES or options.families % options.each or options.chains % options.families:
        raise ConfigError(f"--chains {options.chains} --families {options.families} --each {options.each}: expected a multiple of "
                          f"--families for chains and of --each for families, {FAMILIES:,} families at most")  # fmt: skip
    recipe = Recipe(options.seed, options.chains // options.families, tuple(options.length), options.rows, options.each,
                    options.validation, options.test)  # fmt: skip
    splits = [recipe.split(file) for file in range(options.families // options.each)]
    command.refuse_empty(splits, options, f"--families {options.families} in files of {options.each}")
    jobs = [Families(options.out / split / f"families_{file:06d}.h5", file, recipe) for file, split in enumerate(splits)]
    settings = {"kind": "simulate", **command.settings_of(asdict(recipe))}
    command.print_once(f"{options.families} families of {recipe.members} chains in {options.out}; {MADE}")
    advice = f"ask for at least as many as it holds (--families is {options.families}), or choose a new folder"
    command.work(options, jobs, make_families, settings, chains.header(MADE), CONTENTS, advice)
    return command.conclude("openfold", options, partial(inspect, options.out, 3, True) if options.check else None)


# ---- convert: what the structures hold


@dataclass(frozen=True)
class Scan:
    """A part of the structures to be looked at."""

    path: Path
    sources: tuple[Path, ...]
    entities: bool                              # clusters name these, not chains
    rows: None = None


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
        """Of the most frequent residue."""
        return max(Counter(self.sequence).values()) / len(self.sequence)


def key(name: str) -> str:
    """The same for 5zyh_A and 5ZYH_A."""
    entry, _, chain = name.rpartition("_")
    return f"{entry.lower()}_{chain}"


def scan(job: Scan) -> None:
    names = "source", "name", "residues", "resolved", "resolution", "release", "entity"
    columns: dict[str, list[Any]] = {name: [] for name in names}
    sequences, skipped = [], {}
    for number, path in enumerate(job.sources):
        try:
            entry = read_mmcif(path)
            entities = _entities(path) if job.entities else {}
        except DataError as problem:
            skipped[str(path)] = str(problem)
            continue
        for author, chain in entry.chains.items():
            if len(chain.name.encode()) > chains.NAME or not chain.name.isascii():
                skipped[chain.name] = f"{path}: the name of the chain is longer than {chains.NAME} letters; rename the file"
                continue
            facts = (number, chain.name.encode(), len(chain.sequence), int(chain.mask[:, chains.CA].sum()), chain.resolution or 0,
                     days(chain.release), entities.get(author, "").encode())  # fmt: skip
            for column, value in zip(columns.values(), facts):
                column.append(value)
            sequences.append(chain.sequence.encode())
    kinds = {"name": f"S{chains.NAME}", "entity": "S8", "resolution": "float32"}
    datasets: dict[str, tuple[Any, Sequence[Any]]] = {name: (kinds.get(name, "int32"), ()) for name in columns}
    text = np.frombuffer(b"".join(sequences), np.uint8)
    with store.rows_file(job.path, len(sequences), {**datasets, "sequence": ("uint8", ("all",))}, {}, {"all": len(text)}) as file:
        for name, values in columns.items():
            file[name][...] = np.array(values, file[name].dtype)
        file["sequence"][...] = text
    store.write_json(job.path.with_suffix(".json"), skipped)
    store.write_record(job.path, SCAN)


def _entities(path: Path) -> dict[str, str]:
    """The number of the entity of each chain, by the authors' name."""
    import gemmi

    rows = gemmi.cif.read(str(path))[0].find("_entity_poly.", ["entity_id", "pdbx_strand_id"])
    return {author: row.str(0) for row in rows for author in "".join(row.str(1).split()).split(",")}


def _found(jobs: Sequence[Scan]) -> Iterator[Found]:
    for job in jobs:
        with h5py.File(job.path, "r") as file:
            columns = {name: file[name][...].tolist() for name in file if name != "sequence"}
            text, ends = file["sequence"][...].tobytes(), np.cumsum(columns["residues"]).tolist()
        for row, end in enumerate(ends):
            one = {name: column[row] for name, column in columns.items()}
            name = one["name"].decode()
            entry, number = key(name).rpartition("_")[0], one["entity"].decode()
            yield Found(job.sources[one["source"]], name, key(name), text[end - one["residues"] : end], one["resolved"],
                        one["resolution"], one["release"], f"{entry}_{number}")  # fmt: skip


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


# ---- convert: what is made of them


@dataclass(frozen=True)
class Pick:
    """A chain that goes into a file."""

    source: Path
    name: str
    folder: Path | None                         # of its alignments
    cluster: int
    cluster_size: int


@dataclass(frozen=True)
class Share:
    """One file to be made."""

    path: Path
    skipped: Path                               # where it tells what it leaves out
    picks: tuple[Pick, ...]
    most: int | None
    rows: None = None                           # chains that cannot be used are left out


def convert_share(job: Share) -> None:
    taken, skipped = [], {}
    entry: tuple[Path, Entry] | None = None
    for pick in job.picks:
        try:
            if entry is None or entry[0] != pick.source:
                entry = pick.source, read_mmcif(pick.source)
            chain = entry[1].chains[pick.name.rpartition("_")[2]]
            alignment = None if pick.folder is None else read_alignments(pick.folder, chain.sequence)
            taken.append(chains.sample(chain, alignment, pick.cluster, pick.cluster_size, job.most))
        except DataError as problem:
            skipped[pick.name] = str(problem)
    if not taken:
        first = next(iter(skipped.values()))
        raise DataError(f"{job.path}: none of its {len(skipped)} chains can be used, the first because {first}")
    store.write_json(job.skipped, skipped)
    chains.write(job.path, taken, {"kind": "converted", "skipped": len(skipped)})
    store.write_record(job.path, CONTENTS)


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
             "each")  # fmt: skip
    lists = {name: store.digest(path)[:16] if (path := getattr(options, name)) else None
             for name in ("clusters", "duplicates", "validation")}  # fmt: skip
    recipe = {
        "kind": "convert", **{name: getattr(options, name) for name in asked}, **lists,
        "structures": _told(options.structures, structures), "alignments": _told(options.alignments, folders.values()),
    }  # fmt: skip
    recipe = dict(json.loads(json.dumps(recipe, default=str)))
    if (options.out / "recipe.json").is_file():
        store.claim(options.out, recipe)        # refused before hours of looking at structures
    store.claim(options.out / WORK, {"structures": recipe["structures"], "entities": entities})    # filters may still change
    found, skipped = _look(options, structures, entities)
    of = {name.lower() if entities else key(name): number for number, line in enumerate(clusters) for name in line}
    plan, filtered = _plan(options, found, of, [key(name) for line in wanted for name in line])
    jobs = _shares(options, plan, folders, [[key(name) for name in line] for line in twins])
    there = {one.key for one in found}
    missing = [name for line in wanted for name in line if key(name) not in there]
    if missing:
        command.print_once(f"{len(missing)} chains named in {options.validation}, such as {missing[0]}, are in no structure")
    filtered |= dict.fromkeys(missing, f"named in {options.validation}, in no structure")
    label = "converted: clusters " + (f"of {options.clusters.name}" if clusters else "are equal sequences")
    command.work(options, jobs, convert_share, recipe, chains.header(label), CONTENTS, "choose a new folder")
    if store.launched()[0] == 0:
        unusable = skipped | _noted(job.skipped for job in jobs)
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
    """Words of each line."""
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
    rank, size = store.launched()
    jobs = [Scan(options.out / WORK / f"structures_{number:06d}.h5", tuple(structures[begin : begin + SCANNED]), entities)
            for number, begin in enumerate(range(0, len(structures), SCANNED))]  # fmt: skip
    store.make([job for job in jobs[rank::size] if not store.finished(job)], scan, options.workers, "scan", rank == 0)
    store.wait_for(jobs, rank == 0)
    found = sorted(_found(jobs), key=lambda one: one.key)
    skipped = _noted(job.path.with_suffix(".json") for job in jobs)
    command.print_once(f"{len(structures)} structures with {len(found)} chains; cannot be used: {len(skipped)}")
    if not found:
        raise DataError(f"{options.structures}: none of its {len(structures)} files can be used, the first because "
                        f"{next(iter(skipped.values()))}")  # fmt: skip
    return found, skipped


Plan = dict[str, list[tuple[Found, int, int]]]  # with cluster and its size


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
        return f"released {date.fromordinal(one.release + date(1970, 1, 1).toordinal())}, --released-until {options.released_until}"
    if one.resolution >= options.resolution:
        return f"{one.resolution:g} angstrom, --resolution {options.resolution:g}"
    if one.share() > options.single:
        return f"{one.share():.0%} of the residues are the same, --single {options.single:g}"
    return "train" if cluster >= 0 else f"in no cluster of {options.clusters}"


def _shares(options: argparse.Namespace, plan: Plan, folders: Mapping[str, Path], twins: Sequence[Sequence[str]]) -> list[Share]:
    """Files of nearly equal numbers of chains, so that none is left with a single one."""
    other = {name: line for line in twins for name in line}
    jobs: list[Share] = []
    has: Counter[str] = Counter()
    for split, those in plan.items():
        picks = []
        for one, cluster, size in those:
            name = next((name for name in (one.key, *other.get(one.key, ())) if name in folders), None)
            has["their own" if name == one.key else "a twin's" if name else "none"] += 1
            picks.append(Pick(one.source, one.name, folders[name] if name else None, cluster, size))
        files = -(-len(picks) // options.each)
        ends = [len(picks) * number // files for number in range(files + 1)]
        for number, (begin, end) in enumerate(pairwise(ends)):
            name = f"chains_{number:06d}"
            paths = options.out / split / f"{name}.h5", options.out / WORK / f"{split}_{name}.json"
            jobs.append(Share(*paths, tuple(picks[begin:end]), options.most))
    if has["none"] == has.total():
        example = plan["train"][0][0].name
        raise ConfigError(f"--alignments {options.alignments}: holds a folder for none of {has.total()} chains, such as {example}; "
                          "name the folder that has them, of OpenProteinSet: pdb")  # fmt: skip
    command.print_once("alignments: " + ", ".join(f"{number} chains have {kind}" for kind, number in has.items()))
    return jobs


def _tell_skipped(out: Path, unusable: Mapping[str, str]) -> None:
    if unusable:
        print(f"cannot be used: {len(unusable)}")
        for name, text in [*unusable.items()][:TOLD]:
            print(f"  {name}: {text}")
    print(f"left out, with reasons: {out / SKIPPED}")


# ---- check


def inspect(out: Path, some: int, picture: bool) -> int:
    """0 when all is well, 1 with the reasons printed when not. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    places = [(out / split / name, row) for split, name, entry, _ in files for row in range(entry["rows"])]
    _tell(out)
    if not wrong:
        wrong += [text for path in sorted({path for path, _ in places}) for text in _odd(path)]
        for path, row in places[:: max(1, len(places) // some)][:some] if some else []:
            _show(path, row)
    if picture and not wrong:
        chains.draw(out / PICTURE, places, files[0][3]["label"])
        print(f"picture: {out / PICTURE}")
    return command.told(wrong)


def _tell(out: Path) -> None:
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        residues, depth, resolution = part["residues"], part["depth"], part["resolution"]
        known = f"{resolution['median']:.2f} angstrom" if resolution["known"] else "unknown"
        print(f"{split}: {part['chains']} chains of {part['clusters']} clusters; {residues['minimum']:.0f} to "
              f"{residues['maximum']:.0f} residues, {residues['with CA'] / residues['total']:.1%} with a CA")  # fmt: skip
        print(f"  alignments of {depth['median']:.0f} rows (median; deepest {depth['maximum']:.0f}), {depth['query alone']} of the "
              f"query alone; resolution {known} (median of {resolution['known']}), {part['undated']} without a date")  # fmt: skip


def _odd(path: Path) -> Iterator[str]:
    """What no chain can have."""
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


def check(options: argparse.Namespace) -> int:
    return inspect(options.out, options.chains, options.picture)


def day(text: str) -> date:
    return date.fromisoformat(text)


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


day.__name__, share.__name__, above_zero.__name__ = "day such as 2021-09-16", "number above 0, 1 at most", "number above 0"


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("openfold", "Protein chains with their alignments: simulate families, check them, or convert files.")
    one = add("simulate", "Families of chains that share a fold, with alignments that evolved.", simulate)
    command.add_out(one)
    one.add_argument("--chains", metavar="N", type=command.positive, default=256, help="of all families")
    one.add_argument("--families", metavar="N", type=command.positive, default=64, help="a later run may ask for more")
    one.add_argument("--each", metavar="N", type=command.positive, default=4, help="families of a file")
    one.add_argument("--length", metavar=("LEAST", "MOST"), nargs=2, type=command.positive, default=(48, 96), help="residues")
    one.add_argument("--rows", metavar="N", type=command.positive, default=256, help="of an alignment")
    one.add_argument("--validation", metavar="F", type=float, default=0.125, help="fraction of the families")
    one.add_argument("--test", metavar="F", type=float, default=0.0, help="fraction of the families")
    command.add_making(one)

    two = add("check", f"Files against index.json, every chain looked at, some shown, and OUT/{PICTURE}.", check)
    command.add_checking(two, PICTURE)
    two.add_argument("--chains", metavar="N", type=command.natural, default=6, help="how many are shown")

    three = add("convert", "mmCIF, A3M and Stockholm files to ours.", convert)
    three.add_argument("--structures", type=Path, metavar="DIR", required=True, help=".cif and .cif.gz, at any depth")
    three.add_argument("--alignments", type=Path, metavar="DIR", required=True, help="a folder for each chain")
    command.add_out(three)
    three.add_argument("--clusters", type=Path, metavar="FILE", help="a line of chains (or entities) for each cluster")
    three.add_argument("--duplicates", type=Path, metavar="FILE", help="a line for chains that share an alignment")
    three.add_argument("--most", metavar="ROWS", type=command.positive, help="of an alignment, the first; without it all")
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


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
