"""Known structures that a network may look at: which hits of a search these are, and what it sees of them.

The rules are those of MLPerf HPC's reference. A hit is refused where its chain is in no file, where it tells what is to be
predicted (it is of the query's own entry, was released less than 60 days before it or on an unknown day, or is a copy of it), and
where it tells little: a tenth of the query or less is aligned, it has fewer than 10 letters, or fewer than 5 atoms of it are known.
K templates   N residues of the query   P of a template
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.lazy import import_optional
from hpcai.models.openfold.alignments import Hit, agree, alike, encode, read_hhr
from hpcai.models.openfold.features import TEMPLATES
from hpcai.models.openfold.residues import GAP, PLACE, UNKNOWN
from hpcai.models.openfold.structures import Chain, read_mmcif

Array = NDArray[Any]

DAYS = 60  # least time from the release of a template to that of the query
ALIGNED = 10  # more than one in so many residues of the query are aligned
COPY = 19, 20  # a part of the query that is longer than this share of it is a copy
LETTERS_LEAST, ATOMS_LEAST = 10, 5
ALIKE = 9, 10  # least share of their letters that hit and structure have in common, where they are aligned anew
JUMP = 150.0  # angstrom, the farthest from one CA to the next
LONGEST = np.iinfo(np.int16).max  # the most residues of a template
_CA, _BACKBONE = PLACE["CA"], [PLACE[name] for name in ("N", "CA", "C")]


class Known(Protocol):
    """Sequence and release of a chain, which are asked for before its atoms are read; a Chain has them."""

    @property
    def sequence(self) -> str: ...

    @property
    def release(self) -> date | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A template. ``places`` [N] int16: the residue of its chain, counted from 0 over all of its sequence, that each residue of the
    query is aligned to, -1 where none is. ``sum_probs`` is the sum of the posteriors of these pairs."""

    name: str
    sum_probs: float
    places: NDArray[np.int16]


def match(
    hits: Iterable[Hit], sequence: str, known: Callable[[str], Known | None], *, entry: str | None = None,
    before: date | None = None, most: int = 20, refuse: Callable[[Match], str | None] | None = None,
) -> tuple[list[Match], dict[str, str]]:  # fmt: skip
    """The hits that may be templates of ``sequence``, those of the highest ``sum_probs`` first, and why others may not.

    ``known`` tells of a chain such as "4zey_A", None where there is no file of it; its DataError is a reason too. ``entry`` is the
    query's own and ``before`` the day of its release; None sets no limit. ``refuse`` is asked last, and may give a reason. Raises
    DataError for hits that are not of ``sequence``.
    """
    query = encode(sequence)
    found: list[Match] = []
    reasons: dict[str, str] = {}
    for hit in sorted(hits, key=lambda hit: (not hit.sum_probs >= 0, -hit.sum_probs)):
        if len(found) >= most:
            break
        _check(hit, query)
        name = chain_of(hit)
        verdict = _verdict(hit, name, sequence, known, entry, before)
        if isinstance(verdict, Match):
            verdict = (refuse(verdict) if refuse else None) or verdict
        if isinstance(verdict, Match):
            found.append(verdict)
            continue
        shown = name or hit.name.strip()[:40]
        reasons[f"{shown}, hit {hit.index}" if shown in reasons else shown] = " ".join(verdict.split())
    return found, reasons


def chain_of(hit: Hit) -> str | None:
    """The chain of a hit: 4zey_A for "4ZEY_A Some protein; 1.5A {Homo sapiens}", None for what is not named so."""
    entry, _, chain = (hit.name.split() or [""])[0].rpartition("_")
    return f"{entry.lower()}_{chain}" if entry and re.fullmatch("[A-Za-z0-9.]+", chain) else None


def _check(hit: Hit, query: Array) -> None:
    where = f"hit {hit.index}, {hit.name.strip()[:40]!r}"
    for text, places in ((hit.query, hit.query_indices), (hit.hit, hit.hit_indices)):
        letters = np.array([letter != "-" for letter in text], bool)
        if len(text) != len(hit.query) or places.shape != letters.shape or (letters != (places >= 0)).any():
            raise DataError(f"{where}: query, template and their places do not fit together; expected those of one alignment")
    at = hit.query_indices[hit.query_indices >= 0]
    if len(at) and (at[-1] >= len(query) or (np.diff(at) <= 0).any()):
        text = f"the query's residues {at.min() + 1} to {at.max() + 1}, expected them in order, {len(query)} at most"
        raise DataError(f"{where}: {text}; is it of another chain?")
    there = np.full_like(query, UNKNOWN)
    there[at] = encode(hit.query.replace("-", ""))
    agree(there, query, f"{where}: the query")


def _verdict(
    hit: Hit, name: str | None, sequence: str, known: Callable[[str], Known | None], entry: str | None, before: date | None
) -> Match | str:
    """The template, or why the hit is none."""
    letters = hit.hit.replace("-", "")
    if name is None:
        return "not named as a chain of an entry, such as 4zey_A"
    if entry is not None and name.rpartition("_")[0] == entry.lower():
        return f"of the same entry as the query, {entry.lower()}"
    if not 0 <= hit.sum_probs <= 1e6:
        return f"Sum_probs={hit.sum_probs}, expected 0 or more"
    if hit.aligned_columns * ALIGNED <= len(sequence):
        return f"{hit.aligned_columns} residues are aligned, expected more than a tenth of {len(sequence)}"
    if letters in sequence and len(letters) * COPY[1] > len(sequence) * COPY[0]:
        return f"a copy of {len(letters)} of the query's {len(sequence)} residues"
    if len(letters) < LETTERS_LEAST:
        return f"{len(letters)} letters, expected {LETTERS_LEAST} at least"
    try:
        chain = known(name)
    except DataError as problem:
        return str(problem)
    if chain is None:
        return "no structure of it is there"
    if before is not None and chain.release is None:
        return f"no day of release, expected {DAYS} days before {before} at least"
    if before is not None and chain.release is not None and (before - chain.release).days < DAYS:
        return f"released {chain.release}, expected {DAYS} days before {before} at least"
    if not 0 < len(chain.sequence) <= LONGEST:
        return f"{len(chain.sequence)} residues, expected 1 to {LONGEST}"
    places = _places(hit, letters, len(sequence), chain.sequence)
    return places if isinstance(places, str) else Match(name, hit.sum_probs, places)


# ---- from the letters of a hit to residues of a chain


def _places(hit: Hit, letters: str, length: int, sequence: str) -> Array | str:
    own, theirs = encode(letters), encode(sequence)
    said = hit.hit_indices[hit.hit_indices >= 0]
    first = int(said[0])
    at_once = (np.diff(said) == 1).all() and first + len(own) <= len(theirs)
    if not (at_once and alike(own, theirs[first : first + len(own)]).all()):
        first = _first(own, theirs)
    residues = first + np.arange(len(own)) if first >= 0 else _aligned(own, theirs)
    common = int((alike(own, theirs[residues]) & (residues >= 0)).sum())
    shorter = min(len(own), len(theirs))
    if common * ALIKE[1] < shorter * ALIKE[0]:
        return f"{common} of {shorter} letters are those of its structure, expected {ALIKE[0] / ALIKE[1]:.0%} at least"
    places = np.full(length, -1, np.int16)
    both = (hit.query_indices >= 0) & (hit.hit_indices >= 0)
    places[hit.query_indices[both]] = residues[(np.cumsum(hit.hit_indices >= 0) - 1)[both]]
    return places if (places >= 0).any() else "no residue of the query is aligned to one of it"


def _first(part: Array, whole: Array) -> int:
    """Where ``part`` begins in ``whole``, an unknown letter agreeing with all only if it is nowhere else; -1 where it is not."""
    exact = bytes(whole.astype(np.uint8)).find(bytes(part.astype(np.uint8)))
    if exact >= 0 or len(part) > len(whole):
        return exact
    starts = np.arange(len(whole) - len(part) + 1)
    for offset, letter in enumerate(part):
        starts = starts[alike(letter, whole[starts + offset])]
    return int(starts[0]) if len(starts) else -1


def _aligned(part: Array, whole: Array) -> Array:
    """The letter of ``whole`` that each letter of ``part`` is aligned to, -1 where there is none; long gaps cost little."""
    gemmi = import_optional("gemmi", "alignments of chains need", "openfold")
    found = gemmi.align_string_sequences([str(code) for code in part], [str(code) for code in whole], [])
    residues = np.full(len(part), -1)
    at = [0, 0]
    for count, kind in re.findall(r"(\d+)([MID])", found.cigar_str()):
        steps = int(count)
        if kind == "M":
            residues[at[0] : at[0] + steps] = at[1] + np.arange(steps)
        at = [at[0] + steps * (kind != "D"), at[1] + steps * (kind != "I")]
    return residues


# ---- what is seen of them


def _of(chain: Any) -> tuple[Array, Array, Array]:
    """aatype [P], positions [P, 37, 3] and mask [P, 37] of a Chain, or of a row that has these names."""
    names = "aatype", "positions", "mask"
    aatype, positions, mask = (np.asarray(chain[name] if isinstance(chain, Mapping) else getattr(chain, name)) for name in names)
    if aatype.ndim != 1 or positions.shape != (len(aatype), 37, 3) or mask.shape != (len(aatype), 37):
        shapes = f"aatype {aatype.shape}, positions {positions.shape} and mask {mask.shape}"
        raise DataError(f"a template with {shapes}, expected [P], [P, 37, 3] and [P, 37]")
    return aatype, positions, mask


def unusable(chain: Any) -> str | None:
    """Why a chain, or a row with ``aatype``, ``positions`` and ``mask``, cannot be a template; None where it may be one."""
    _, positions, mask = _of(chain)
    seen = mask[:, _CA] > 0
    if not (mask[:, _BACKBONE] > 0).all(1).any():
        return "no residue has its backbone"
    steps = np.linalg.norm(np.diff(positions[:, _CA].astype(np.float64), axis=0), axis=1)
    far = np.flatnonzero((steps > JUMP) & seen[1:] & seen[:-1])
    return f"{steps[far[0]]:.0f} angstrom from residue {far[0] + 1} to the next, {JUMP:g} at most" if len(far) else None


def few_atoms(atoms: Array, places: Array) -> str | None:
    """Why residues at ``places`` tell too little, if they do, when so many ``atoms`` [P] of each residue are known."""
    seen = int(atoms[places[places >= 0]].sum(dtype=np.int64))
    return f"{seen} atoms of its aligned residues are known, expected {ATOMS_LEAST} at least" if seen < ATOMS_LEAST else None


def features_of(chains: Sequence[Any], places: Array, sum_probs: Any) -> dict[str, Array]:
    """The templates that ``featurize`` takes, from K chains (or rows of a store), their places [K, N] and sum_probs [K].

    Raises DataError for places that a chain does not have.
    """
    places, probs = np.asarray(places), np.asarray(sum_probs, np.float32)
    if places.ndim != 2 or places.dtype.kind not in "iu" or not len(chains) == len(places) == probs.size:
        text = f"places {places.dtype} {places.shape} and {probs.size} sum_probs"
        raise DataError(f"templates: {text} of {len(chains)} chains, expected integers [{len(chains)}, N] and as many")
    shape = places.shape
    aatype, mask = np.full(shape, GAP, np.int64), np.zeros((*shape, 37), np.float32)
    positions = np.zeros((*shape, 37, 3), np.float32)
    for row, (chain, at) in enumerate(zip(chains, places)):
        types, xyz, there = _of(chain)
        if at.size and (at.min() < -1 or at.max() >= len(types)):
            text = f"residues from {at.min()} to {at.max()} of template {row + 1}"
            raise DataError(f"templates: {text}, which has {len(types)}, expected -1 to {len(types) - 1}")
        pairs = at >= 0
        aatype[row, pairs], mask[row, pairs] = types[at[pairs]], there[at[pairs]]
        positions[row, pairs] = np.where(there[at[pairs], :, None] > 0, xyz[at[pairs]], 0)
    return dict(zip(TEMPLATES, (aatype, positions, mask, probs.reshape(-1, 1))))


def read_templates(
    hits: str | Path | Iterable[Hit], sequence: str, structures: str | Path, *, entry: str | None = None,
    before: date | None = None, most: int = 20,
) -> tuple[dict[str, Array], dict[str, str]]:  # fmt: skip
    """The ``templates`` of ``featurize`` and ``OpenFold.fold``, and why other hits are none of them.

    ``hits`` are those of ``sequence``, or the .hhr file that has them; ``structures`` is the folder with .cif and .cif.gz files, at
    any depth: only those are read that hits name and that are needed. The query's own ``entry`` and ``before``, the day of its
    release, keep out what tells the answer. Raises DataError for a file or folder that cannot be read and hits of another sequence;
    a structure that cannot be read is only a reason.
    """
    files, read = _entries(Path(structures)), dict[str, Chain]()

    def known(name: str) -> Chain | None:
        stem, _, chain = name.rpartition("_")
        if name not in read and stem in files:
            read[name] = read_mmcif(files[stem], chain).chains[chain]
        return read.get(name)

    def refuse(one: Match) -> str | None:
        return unusable(read[one.name]) or few_atoms((read[one.name].mask > 0).sum(1), one.places)

    hits = read_hhr(Path(hits)) if isinstance(hits, str | Path) else hits
    found, reasons = match(hits, sequence, known, entry=entry, before=before, most=most, refuse=refuse)
    places = np.array([one.places for one in found], np.int16).reshape(len(found), len(sequence))
    return features_of([read[one.name] for one in found], places, [one.sum_probs for one in found]), reasons


def _entries(folder: Path) -> dict[str, Path]:
    """The files by entry; the first, if two have one name."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one of .cif and .cif.gz files")
    paths = sorted((path for path in folder.rglob("*.cif*") if re.search(r"\.cif(\.gz)?$", path.name)), reverse=True)
    return {path.name.removesuffix(".gz").removesuffix(".cif").lower(): path for path in paths}
