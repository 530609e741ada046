"""Protein chains with their alignments (OpenFold): simulate families of them, check them, or convert mmCIF and A3M files.

    python -m data_prep.openfold simulate OUT       chains folded and evolved by data_prep.proteins: protein-like, not natural
    python -m data_prep.openfold check OUT          files against their index, validation of every chain, a picture
    python -m data_prep.openfold convert --structures DIR --alignments DIR OUT

    OUT/{train,validation}/*.h5, R chains of A residues, with alignments of L letters in total
        "residues" int32 [R]   "letters" int32 [R]    rows of the alignment times residues     "name" S24 [R]   "5zyh_A"
        "resolution" float32 [R] angstrom, 0 unknown   "release" int32 [R]   days since 1970, -1 unknown
        "cluster" int32 [R]   of similar sequences, -1 in none   "cluster_size" int32 [R]   chains of it assigned to the split
        "hits" int32 [R]   templates of the chain, H in total     "places" int32 [R]   hits times residues, P in total
        "aatype" int8 [A]   "positions" float32 [A, 37, 3] angstrom   "mask" uint8 [A, 37]     with residues without coordinates
        "msa" int8 [L]   the query first   "deletions" uint8 [L]   255 at most
        "hit_row" int32 [H]   row in OUT/templates, counted over its files in the order of their index; the best template first
        "hit_sum_probs" float32 [H]   confidence of the search, 0 to the number of aligned residues
        "hit_places" int16 [P]   for each hit and each residue of the chain, the residue of the template, -1 none
    OUT/templates/*.h5  the structures that "hit_row" refers to, each once, with "residues", "name", "resolution", "release",
        "aatype", "positions" and "mask" as above; absent if no chain has a template
    OUT/skipped.json    every chain and file that convert left out, with the reason
    OUT/.convert        intermediate results of convert (structures, hits, omissions), read only by a resumed run

Datasets of shape [A], [L], [H] or [P] hold the chains concatenated; "residues", "letters", "hits" and "places" are their lengths.

apps/openfold/README.md ("From a download to a first step") describes what convert reads, and hpcai.models.openfold.templates which
hits count as templates. A letter takes 2 bytes on disk and a residue 482; --most bounds the number of letters."""

import argparse
import re
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
from hpcai.models.openfold.structures import Chain, entry_name, list_structures, read_blocks, read_structure
from hpcai.models.openfold.templates import Match, rejection_reason, select_hits, too_few_atoms

WORK_FOLDER = ".convert"
SIMULATED = "simulated: folded by data_prep.proteins, not nature"
MAX_FAMILIES = 1_000_000                        # of a seed, at most
FILES_PER_SCAN = 64                             # structure files of a task of the scan


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated family, besides its number, and its split."""

    seed: int = command.seed()
    members: int = 4
    length: tuple[int, int] = option((48, 96), "residues, range", metavar=("LEAST", "MOST"), nargs=2, type=command.positive)
    depth: int = option(256, "rows of an alignment", "rows", type=command.positive)
    each: int = option(4, "families of a file", type=command.positive)
    validation: float = command.fraction(0.125, "the families")
    test: float = command.fraction(0.0, "the families")
    templates: int = option(0, "templates of a chain, from its family", type=command.natural)

    def mistakes(self) -> Iterator[str]:
        least, most = self.length
        if not proteins.MIN_LENGTH <= least <= most:
            yield f"--length {least} {most}: expected the least and the most, {proteins.MIN_LENGTH} at least"
        if self.templates >= self.members:
            yield f"--templates {self.templates}: a family has {self.members} members, expected fewer than that"

    def make_family(self, number: int) -> list[dict[str, Any]]:
        length = int(self.generator(1, number).integers(*self.length, endpoint=True))
        members = proteins.make_family(self.seed * MAX_FAMILIES + number, self.members, length, self.depth)
        hits = [self.template_hits(number, member, [chain for chain, _ in members]) for member in range(self.members)]
        return [chains.chain_row(chain, rows, number, self.members, None, each) for (chain, rows), each in zip(members, hits)]

    def template_hits(self, number: int, member: int, relatives: Sequence[Chain]) -> Hits:
        """Return the most similar chains of the family, aligned residue by residue: they share the fold and its length."""
        own = relatives[member].aatype
        identities = np.array([(chain.aatype == own).sum() for chain in relatives])
        others = np.array([other for other in np.argsort(-identities, kind="stable") if other != member][: self.templates], int)
        residue_map = np.tile(np.arange(len(own)), (len(others), 1))
        return Hits(number * self.members + others, identities[others], residue_map)


def write_families(recipe: Recipe, number: int, path: Path) -> None:
    rows = [row for n in range(number * recipe.each, (number + 1) * recipe.each) for row in recipe.make_family(n)]
    about = {"kind": "simulated", "label": SIMULATED, "seed": recipe.seed, "recipe": recipe.json_text}
    store.write_rows(path, chains.FIELDS, rows, about)


def write_templates(families: Path, path: Path) -> None:
    """Write a file of templates: the chains of a file of families, unchanged."""
    with h5py.File(families, "r") as file:
        rows = list(store.read_rows(file, chains.TEMPLATE_FIELDS))
    store.write_rows(path, chains.TEMPLATE_FIELDS, rows, {"kind": "simulated", "label": SIMULATED})


def simulate(options: argparse.Namespace) -> command.Plan:
    if options.families > MAX_FAMILIES or options.families % options.each or options.chains % options.families:
        raise ConfigError(f"--chains {options.chains} --families {options.families} --each {options.each}: expected a multiple of "
                          f"--families for chains and of --each for families, {MAX_FAMILIES:,} families at most")  # fmt: skip
    recipe = Recipe.from_options(options, members=options.chains // options.families)
    splits = [recipe.split(file) for file in range(options.families // options.each)]
    command.require_splits(splits, options, f"--families {options.families} in files of {options.each}")
    rows = recipe.each * recipe.members
    jobs = [store.Job(options.out / split / f"families_{file:06d}.h5", partial(write_families, recipe, file), CONTENTS, rows)
            for file, split in enumerate(splits)]  # fmt: skip
    extra = [store.Job(options.out / TEMPLATES / job.path.name, partial(write_templates, job.path), chains.TEMPLATE_CONTENTS, rows)
             for job in jobs if recipe.templates]  # fmt: skip
    message = f"{options.families} families of {recipe.members} chains in {options.out}; {SIMULATED}"
    return command.Plan(recipe, jobs, chains.header(SIMULATED), message, extra)


# ---- convert: chains of the structures


iso_date = command.option_type("day such as 2021-09-16", date.fromisoformat)
positive_fraction = command.option_type("number above 0, 1 at most", float, lambda value: 0 < value <= 1)
positive_float = command.option_type("number above 0", float, lambda value: value > 0)


@dataclass(frozen=True)
class Source(command.Settings):
    """Settings of a conversion: the filters of chains, and their splits."""

    released_until: date = option(date(2021, 9, 16), "last of training", metavar="DAY", type=iso_date)  # noqa: RUF009
    validation_from: date = option(date(2021, 9, 17), "first of validation", metavar="DAY", type=iso_date)  # noqa: RUF009
    validation_until: date = option(date(2021, 12, 11), "last of validation", metavar="DAY", type=iso_date)  # noqa: RUF009
    validation_length: int = option(700, "residues of a chain, at most", type=command.positive)
    resolution: float = option(9.0, "angstrom, upper bound in training; unknown passes", metavar="A", type=positive_float)
    single: float = option(0.8, "fraction of one amino acid in training, at most", metavar="F", type=positive_fraction)
    most: int | None = option(None, "first rows of an alignment; without it all", metavar="ROWS", type=command.positive)
    each: int = option(64, "chains of a file, at most", type=command.positive)
    templates: int = option(20, "templates of a chain, at most; 0: none", type=command.natural)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    for name, required, text in (
        ("structures", True, ".cif, .pdb or .ent, also .gz, at any depth"), ("alignments", True, "a folder for each chain"),
        ("clusters", False, "a line of chains (or entities) for each cluster"),
        ("duplicates", False, "a line for chains that share an alignment"),
        ("validation", False, "chains of validation, instead of the release dates"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=Path, metavar="DIR" if required else "FILE", required=required, help=text)


@dataclass(frozen=True, slots=True)
class ScannedChain:
    """A chain of a structure, and where it is assigned to."""

    source: Path
    name: str
    key: str                                    # 5zyh_A
    sequence: str
    resolution: float
    release: date | None
    entity: str                                 # 5zyh_1
    usable: bool                                # as a template
    atoms: bytes                                # number of atoms of each residue
    resolved: int                               # residues with a CA
    cluster: int = -1
    cluster_size: int = 1                       # chains of the cluster in the split
    folder: Path | None = None                  # of its alignments


def chain_key(name: str) -> str:
    """Return the name with its entry in lower case, so that 5zyh_A and 5ZYH_A are one chain."""
    entry, _, chain = name.rpartition("_")
    return f"{entry.lower()}_{chain}"


def scan_structures(sources: Sequence[Path], entities: bool) -> dict[str, Any]:
    """Read the chains of some structures. Returns chains, refused items, and what was assumed. ``entities``: the clusters name
    entities, not chains."""
    entries: list[dict[str, Any]] = []
    notes, refused = list[str](), []
    for source in sources:
        try:
            entry = read_structure(source)
            blocks = read_blocks(source)[0][:1] if entities else []
            rows = [row for block in blocks for row in block.find("_entity_poly.", ["entity_id", "pdbx_strand_id"])]
            # By the authors' name of the chain; none of a PDB file.
            entity_ids = {author: row.str(0) for row in rows for author in "".join(row.str(1).split()).split(",")}
        except DataError as problem:
            refused.append((str(source), str(problem)))
            continue
        notes += entry.notes
        for author, chain in entry.chains.items():
            if len(chain.name.encode()) > chains.NAME_BYTES or not chain.name.isascii():
                text = f"{source}: the name of the chain is longer than {chains.NAME_BYTES} letters; rename the file"
                refused.append((chain.name, text))
                continue
            entries.append({
                "source": str(source), "name": chain.name, "sequence": chain.sequence, "resolution": chain.resolution or 0,
                "release": chain.release and chain.release.isoformat(), "usable": rejection_reason(chain) is None,
                "entity": f"{chain.name.rpartition('_')[0].lower()}_{entity_ids.get(author, '')}",
                "atoms": (chain.mask > 0).sum(1).tolist(), "resolved": int(chain.mask[:, chains.CA].sum()),
            })  # fmt: skip
    return {"chains": entries, "refused": refused, "notes": notes}


def _scanned_chain(entry: Mapping[str, Any]) -> ScannedChain:
    release = entry["release"] and date.fromisoformat(entry["release"])
    changed = {"source": Path(entry["source"]), "release": release, "atoms": bytes(entry["atoms"]), "key": chain_key(entry["name"])}
    return ScannedChain(**{**entry, **changed})


def _structure_paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"--structures {folder}: no such folder")
    paths = list_structures(folder)
    if not paths:
        raise ConfigError(f"--structures {folder}: contains no .cif, .pdb or .ent; name the folder of the structures")
    by_name: dict[str, Path] = {}
    for path in paths:
        other = by_name.setdefault(str(entry_name(path)).lower(), path)
        if other is not path:
            raise DataError(f"{path}: an entry of this name is also in {other}; take one of them out of --structures")
    return sorted(paths)


# ---- convert: templates


@lru_cache(1)
def _scanned_chains(work: Path) -> dict[str, ScannedChain]:
    """Return all chains of the scan by key, cached in a process."""
    entries = (chain for path in sorted(work.glob("structures_*.json")) for chain in store.read_json(path)["chains"])
    return {chain.key: chain for chain in map(_scanned_chain, entries)}


def search_templates(work: Path, selected: Sequence[ScannedChain], most: int) -> dict[str, Any]:
    """Read the hits of some chains and match them with the structures scanned in the folder ``work``. Returns hits and refused
    items."""
    scanned, refused = _scanned_chains(work), list[tuple[str, str]]()

    def chain_info(name: str) -> ScannedChain | None:
        return info if (info := scanned.get(name)) and info.usable else None

    def reject(match: Match) -> str | None:
        return too_few_atoms(np.frombuffer(scanned[match.name].atoms, np.uint8), match.residue_map)

    all_hits: list[list[Any]] = []
    for chain in selected:
        matches, folder, paths = list[Match](), chain.folder, list[Path]()
        limits: dict[str, Any] = {"entry": chain.key.rpartition("_")[0], "before": chain.release, "most": most, "reject": reject}
        if folder is not None:                  # first the hit files in its hhr folder, then those beside its alignments
            root = folder.parent if folder.name == "a3m" else folder
            paths = [path for parent in dict.fromkeys((root / "hhr", root, folder)) for path in sorted(parent.glob("*.hhr*"))]
        for file in (path for path in paths if re.fullmatch(r"[^.].*\.hhr(\.gz)?", path.name)):
            try:
                matches += select_hits(read_hhr(file), chain.sequence, chain_info, **limits)[0]
            except DataError as problem:
                refused.append((str(file), str(problem)))
        best = sorted(matches, key=lambda match: -match.sum_probs)[:most]
        all_hits.append([(match.name, float(match.sum_probs), match.residue_map.tolist()) for match in best])
    return {"hits": all_hits, "refused": refused}


# ---- convert: files


@dataclass(frozen=True)
class OutputFile:
    """The chains of one file."""

    split: str
    name: str
    chains: tuple[ScannedChain, ...]
    most: int | None
    hits: Path | None = None                    # result of the search for these chains
    hit_rows: tuple[int, ...] = ()              # templates of all chains, concatenated


def convert_templates(selected: Sequence[ScannedChain], path: Path) -> None:
    entry = lru_cache(1)(read_structure)
    rows = [chains.template_row(entry(chain.source).chains[chain.name.rpartition("_")[2]]) for chain in selected]
    store.write_rows(path, chains.TEMPLATE_FIELDS, rows, {"kind": "converted"})


def _read_hits(output: OutputFile) -> Iterator[Hits]:
    rows, all_hits = iter(output.hit_rows), store.read_json(output.hits)["hits"] if output.hits else [[]] * len(output.chains)
    for hits in all_hits:
        _, probs, residue_maps = zip(*hits) if hits else ((), (), ())
        template_rows = np.fromiter(islice(rows, len(hits)), np.int32)
        yield Hits(template_rows, np.array(probs), np.array(residue_maps, np.int16)) if hits else NO_HITS


def convert_chains(output: OutputFile, path: Path) -> store.Refused:
    """Write a file of chains. Returns the chains that cannot be used."""
    usable, refused, entry = [], store.Skipped(skip_bad=True), lru_cache(1)(read_structure)
    for selected, hits in zip(output.chains, _read_hits(output)):
        with refused.catch(selected.name):
            chain = entry(selected.source).chains[selected.name.rpartition("_")[2]]
            alignment = None if selected.folder is None else read_alignments(selected.folder, chain.sequence)
            usable.append(chains.chain_row(chain, alignment, selected.cluster, selected.cluster_size, output.most, hits))
    if usable:
        store.write_rows(path, chains.FIELDS, usable, {"kind": "converted"})
    return refused


def _plan_templates(
    options: argparse.Namespace, files: Sequence[OutputFile], scanned: Sequence[ScannedChain]
) -> tuple[list[OutputFile], list[store.Job], list[tuple[str, str]]]:
    """Return the files with the hits of their chains, the jobs for the templates that these refer to, and unreadable items."""
    work, tasks = options.out / WORK_FOLDER, dict[Path, Any]()
    for file in files:
        # Filters may still change, and with them the chains of a file.
        fingerprint = [str(options.templates), *(f"{chain.name} {chain.folder and chain.folder.relative_to(options.alignments)}"
                                                 for chain in file.chains)]  # fmt: skip
        tasks[work / f"hits_{command.digest(fingerprint)}.json"] = partial(search_templates, work, file.chains, options.templates)
    names, unread = list[list[str]](), list[tuple[str, str]]()          # of the templates of each file; one file in memory
    counts: list[int] = []
    for result in store.all_gather_results(tasks, options.workers, "hits"):
        names.append([name for hits in result["hits"] for name, _, _ in hits])
        counts += map(len, result["hits"])
        unread += map(tuple, result["refused"])
    _scanned_chains.cache_clear()
    named = {name for each in names for name in each}
    some = f"{sum(count > 0 for count in counts)} of {len(counts)} chains have some, {np.median(counts):g} at the median"
    command.print_rank_0(f"templates: {some}; {len(named)} structures")
    templates = [chain for chain in scanned if chain.key in named]
    rows = {chain.key: row for row, chain in enumerate(templates)}
    jobs = [store.Job(options.out / TEMPLATES / f"templates_{number:06d}.h5", partial(convert_templates, templates[begin:end]),
                      chains.TEMPLATE_CONTENTS, end - begin)
            for number, (begin, end) in enumerate(_balanced_ranges(len(templates), options.each))]  # fmt: skip
    with_hits = [replace(file, hits=path, hit_rows=tuple(rows[name] for name in each))
                 for file, path, each in zip(files, tasks, names)]  # fmt: skip
    return with_hits, jobs, unread


def convert(options: argparse.Namespace) -> command.Plan:
    source = Source.from_options(options)
    structures = _structure_paths(options.structures)
    if not options.alignments.is_dir():
        raise ConfigError(f"--alignments {options.alignments}: no such folder")
    paths = sorted(path for path in options.alignments.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders = {chain_key(path.name): path / "a3m" if (path / "a3m").is_dir() else path for path in paths}
    if options.validation is None and source.validation_from <= source.released_until:
        raise ConfigError(f"--validation-from {source.validation_from}: expected after --released-until {source.released_until}")
    clusters, duplicates, validation = (_read_lines(path) for path in (options.clusters, options.duplicates, options.validation))
    members = [name for line in clusters for name in line]
    entities = sum(bool(re.search(r"_\d+$", name)) for name in members) > len(members) / 2
    if entities:
        command.print_rank_0(f"warning: {options.clusters}: names entities (5ZYH_1), not chains; structures give the chains")
    lists = {name: store.digest(path)[:16] if (path := getattr(options, name)) else None
             for name in ("clusters", "duplicates", "validation")}  # fmt: skip
    sources = {name: command.fingerprint([path.relative_to(root).as_posix() for path in paths], "names") for name, root, paths in
            (("structures", options.structures, structures), ("alignments", options.alignments, folders.values()))}  # fmt: skip
    recipe = {"kind": "convert", **source.json_dict, **lists, **sources}
    if (options.out / "recipe.json").is_file():
        store.claim_folder(options.out, recipe)        # raises before hours of scanning structures
    # Filters may still change.
    store.claim_folder(options.out / WORK_FOLDER, {"format": 3, "structures": sources["structures"], "entities": entities})
    tasks = {options.out / WORK_FOLDER / f"structures_{number:06d}.json": partial(scan_structures, chunk, entities)
             for number, chunk in enumerate(command.batched(structures, FILES_PER_SCAN))}  # fmt: skip
    unsorted, refused, notes = list[ScannedChain](), list[tuple[str, str]](), list[str]()
    for result in store.all_gather_results(tasks, options.workers, "scan"):
        unsorted += map(_scanned_chain, result["chains"])
        refused += map(tuple, result["refused"])
        notes += result.get("notes", [])        # absent in results of earlier versions
    if notes:
        command.print_rank_0(f"{len(notes)} structures or chains are taken with an assumption, such as {notes[0]}")
    scanned = sorted(unsorted, key=lambda chain: chain.key)
    command.print_rank_0(f"{len(structures)} structures with {len(scanned)} chains; cannot be used: {len(refused)}")
    if not scanned:
        raise DataError(f"{options.structures}: none of its {len(structures)} files can be used, the first because {refused[0][1]}")
    cluster_of = {name.lower() if entities else chain_key(name): number for number, line in enumerate(clusters) for name in line}
    plan, filtered = _assign_splits(options, scanned, cluster_of, [chain_key(name) for line in validation for name in line])
    files = _plan_files(options, plan, folders, [[chain_key(name) for name in line] for line in duplicates])
    keys = {chain.key for chain in scanned}
    missing = [name for line in validation for name in line if chain_key(name) not in keys]
    filtered |= dict.fromkeys(missing, f"named in {options.validation}, in no structure")
    template_jobs: list[store.Job] = []
    if source.templates:
        files, template_jobs, unread = _plan_templates(options, files, scanned)
        refused += unread
    label = "converted: clusters " + (f"of {options.clusters.name}" if clusters else "are equal sequences")
    jobs = [store.Job(options.out / file.split / f"{file.name}.h5", partial(convert_chains, file), CONTENTS) for file in files]
    return command.Plan(recipe, jobs, chains.header(label), label, template_jobs, refused, filtered=[*filtered.items()])


def _read_lines(path: Path | None) -> list[list[str]]:
    """Return the fields of each line of a file; no lines without a path."""
    try:
        lines = [line.split() for line in path.read_text("ascii").splitlines()] if path else []
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read ({problem}); expected lines of names such as 5zyh_A") from problem
    if path and not any(lines):
        raise ConfigError(f"{path}: empty, expected lines of names such as 5zyh_A")
    return lines


def _assign_splits(
    options: argparse.Namespace, scanned: Sequence[ScannedChain], clusters: Mapping[str, int], validation: Sequence[str],
) -> tuple[dict[str, list[ScannedChain]], dict[str, str]]:  # fmt: skip
    """Return the chains of each split, and the reason against each of the others."""
    validation_keys, sequences = set(validation), dict[str, int]()
    filtered: dict[str, str] = {}
    parts: dict[str, list[ScannedChain]] = {"train": [], "validation": []}
    for chain in scanned:
        cluster = (clusters.get(chain.key, clusters.get(chain.entity, -1)) if clusters
                   else sequences.setdefault(chain.sequence, len(sequences)))  # fmt: skip
        split = _split_or_reason(chain, cluster, options, validation_keys)
        if split in parts:
            parts[split].append(replace(chain, cluster=cluster))
        else:
            filtered[chain.name] = split
    validation_clusters = {chain.cluster for chain in parts["validation"]} - {-1}
    related = [chain for chain in parts["train"] if chain.cluster in validation_clusters]
    if related:
        command.print_rank_0(f"{len(related)} chains of training, such as {related[0].name}, share a cluster with validation")
    for split, members in parts.items():
        if not members:
            example = next(iter(filtered.items()), ("", ""))
            advice = "change the filters" if split == "train" else "name some in a file: --validation FILE"
            raise ConfigError(f"none of {len(scanned)} chains is left for {split}, {example[0]} because: {example[1]}; {advice}")
    undated = sum(chain.release is None for chain in parts["train"])
    if undated:
        command.print_rank_0(f"{undated} chains without a release date are taken for training")
    plan = {}
    for split, members in parts.items():
        sizes = Counter(chain.cluster for chain in members)
        plan[split] = [replace(chain, cluster_size=sizes[chain.cluster] if chain.cluster >= 0 else 1) for chain in members]
    return plan, filtered


def _split_or_reason(chain: ScannedChain, cluster: int, options: argparse.Namespace, validation_keys: set[str]) -> str:
    """Return the split of a chain, or the reason why it is in none. Validation has no bounds of quality, as in MLPerf HPC."""
    if not chain.resolved:
        return "no residue has a CA"
    if validation_keys:
        if chain.key in validation_keys:
            return "validation"
    elif chain.release and options.validation_from <= chain.release <= options.validation_until:
        most = options.validation_length
        return "validation" if len(chain.sequence) <= most else f"{len(chain.sequence)} residues, --validation-length {most}"
    if chain.release and chain.release > options.released_until:
        return f"released {chain.release}, --released-until {options.released_until}"
    if chain.resolution >= options.resolution:
        return f"{chain.resolution:g} angstrom, --resolution {options.resolution:g}"
    if (most_frequent := max(Counter(chain.sequence).values()) / len(chain.sequence)) > options.single:
        return f"{most_frequent:.0%} of the residues are the same, --single {options.single:g}"
    return "train" if cluster >= 0 else f"in no cluster of {options.clusters}"


def _plan_files(
    options: argparse.Namespace, plan: Mapping[str, Sequence[ScannedChain]], folders: Mapping[str, Path],
    duplicates: Sequence[Sequence[str]],
) -> list[OutputFile]:  # fmt: skip
    """Split the chains into files of nearly equal size, so that no file has only one."""
    duplicates_of = {name: line for line in duplicates for name in line}
    files: list[OutputFile] = []
    origins: Counter[str] = Counter()
    for split, members in plan.items():
        selected = []
        for chain in members:
            name = next((name for name in (chain.key, *duplicates_of.get(chain.key, ())) if name in folders), None)
            origins["their own" if name == chain.key else "a duplicate's" if name else "none"] += 1
            selected.append(replace(chain, folder=folders[name] if name else None))
        for number, (begin, end) in enumerate(_balanced_ranges(len(selected), options.each)):
            files.append(OutputFile(split, f"chains_{number:06d}", tuple(selected[begin:end]), options.most))
    if origins["none"] == origins.total():
        example = plan["train"][0].name
        raise ConfigError(f"--alignments {options.alignments}: has a folder for none of {origins.total()} chains, such as {example}"
                          "; name the folder that contains them, in OpenProteinSet pdb")  # fmt: skip
    command.print_rank_0("alignments: " + ", ".join(f"{number} chains have {kind}" for kind, number in origins.items()))
    return files


def _balanced_ranges(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of ranges of nearly equal size, ``most`` at most."""
    parts = -(-count // most)
    return pairwise(count * number // parts for number in range(parts + 1)) if parts else iter(())


# ---- check


def check_samples(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the invalid values of all files."""
    lengths: list[int] = []
    for path in sorted((prepared.out / TEMPLATES).glob("*.h5")):
        with h5py.File(path, "r") as file:
            lengths += file["residues"][...].tolist()
    for path in sorted(prepared.paths):
        yield from _invalid_values(path, lengths)


def _invalid_values(path: Path, lengths: Sequence[int]) -> Iterator[str]:
    """Yield the invalid values of a file. ``lengths``: residues of each template."""
    advice = "delete the file and make it again"
    with h5py.File(path, "r") as file:
        for row in range(file["residues"].shape[0]):
            chain = chains.read(file, row)
            where = f"{path}: row {row} ({chain['name'].decode()})"
            query, types = chain["msa"][0], chain["aatype"]
            mismatches = int(((query != types) & (query < 20) & (types < 20)).sum())
            if mismatches or (query == GAP).any():
                yield f"{where}: the first row of the alignment differs from the chain at {mismatches} residues; {advice}"
            resolved = chain["mask"] > 0
            if not resolved[:, chains.CA].any():
                yield f"{where}: no residue has a CA; {advice}"
            if chain["positions"][~resolved].any():
                yield f"{where}: positions are not 0 where 'mask' is; {advice}"
            for hit, (template, residues) in enumerate(zip(chain["hit_row"].tolist(), chain["hit_places"]), 1):
                if not 0 <= template < len(lengths):
                    yield f"{where}: hit {hit} is row {template} of {TEMPLATES}, which has {len(lengths)} rows; {advice}"
                elif residues.min() < -1 or residues.max() >= lengths[template]:
                    text = f"is aligned to residues {residues.min()} to {residues.max()} of a template of {lengths[template]}"
                    yield f"{where}: hit {hit} {text}, expected -1 to {lengths[template] - 1}; {advice}"


BUILDER = command.DatasetBuilder(
    "openfold", "Protein chains with their alignments: simulate families, check them, or convert files.", "openfold",
    command.Check("Files against index.json, every chain looked at.", check_samples, None),
    (command.Simulate("Families of chains that share a fold, with alignments that evolved.", Recipe,
                      ("families", 64), simulate, lambda parser: parser.add_argument(
                          "--chains", metavar="N", type=command.positive, default=256, help="chains of all families")),
     command.Convert("mmCIF, PDB, A3M and Stockholm files to ours.", Source, convert, None, add_source_options)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
