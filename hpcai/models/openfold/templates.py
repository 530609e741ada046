"""Templates: known structures, selected from the hits of a search, and their features.

The rules are those of MLPerf HPC's reference. A hit is rejected if its chain is in no file; if it reveals the target (it is of
the query's own entry, was released less than 60 days before it or on an unknown day, or is a copy of it); or if it
has little information: a tenth of the query or less is aligned, it has fewer than 10 letters, or fewer than 5 known atoms.
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
from hpcai.models.openfold.alignments import Hit, check_same_sequence, encode, read_hhr, residues_match
from hpcai.models.openfold.residues import ATOM_ORDER, GAP, UNKNOWN
from hpcai.models.openfold.structures import Chain, entry_name, list_structures, read_structure

Array = NDArray[Any]

MIN_DAYS_BEFORE_QUERY = 60  # minimum time from the release of a template to that of the query
MAX_UNALIGNED_RATIO = 10  # the query has less than so many residues for each aligned one
COPY_FRACTION = 19, 20  # a subsequence longer than this fraction of the query is a copy
MIN_LETTERS, MIN_ATOMS = 10, 5
MIN_IDENTITY = 9, 10  # minimum fraction of common letters of hit and structure, after realignment
MAX_STEP = 150.0  # angstrom, maximum distance of consecutive CA
MAX_RESIDUES = np.iinfo(np.int16).max  # maximum residues of a template
_CA, _BACKBONE = ATOM_ORDER["CA"], [ATOM_ORDER[name] for name in ("N", "CA", "C")]


class ChainInfo(Protocol):
    """Sequence and release of a chain, needed before its atoms are read; a Chain has them."""

    @property
    def sequence(self) -> str: ...

    @property
    def release(self) -> date | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A selected template. ``residue_map`` [N] int16: The residue of its chain, counted from 0 over its full sequence, aligned to
    each residue of the query, or -1. ``sum_probs`` is the sum of the posteriors of these pairs."""

    name: str
    sum_probs: float
    residue_map: NDArray[np.int16]


def select_hits(
    hits: Iterable[Hit], sequence: str, chain_info: Callable[[str], ChainInfo | None], *, entry: str | None = None,
    before: date | None = None, most: int = 20, reject: Callable[[Match], str | None] | None = None,
) -> tuple[list[Match], dict[str, str]]:  # fmt: skip
    """Return the hits that may be templates of ``sequence``, by descending ``sum_probs``, and the reasons against others.

    ``chain_info`` returns that of a chain such as "4zey_A", or None without a file of it; its DataError is a reason too. ``entry``
    is the query's own and ``before`` the day of its release; None sets no limit. ``reject`` is called last, and may return a
    reason. Raises DataError for hits of another sequence than ``sequence``.
    """
    query = encode(sequence)
    matches: list[Match] = []
    reasons: dict[str, str] = {}
    for hit in sorted(hits, key=lambda hit: (not hit.sum_probs >= 0, -hit.sum_probs)):
        if len(matches) >= most:
            break
        where = f"hit {hit.index}, {hit.name.strip()[:40]!r}"
        for text, indices in ((hit.query, hit.query_indices), (hit.hit, hit.hit_indices)):
            letters = np.array([letter != "-" for letter in text], bool)
            if len(text) != len(hit.query) or indices.shape != letters.shape or (letters != (indices >= 0)).any():
                raise DataError(f"{where}: query, template and their indices do not fit together; expected one alignment")
        positions = hit.query_indices[hit.query_indices >= 0]
        if len(positions) and (positions[-1] >= len(query) or (np.diff(positions) <= 0).any()):
            text = f"the query's residues {positions.min() + 1} to {positions.max() + 1}, expected them in order"
            raise DataError(f"{where}: {text}, {len(query)} at most; is it of another chain?")
        stated = np.full_like(query, UNKNOWN)
        stated[positions] = encode(hit.query.replace("-", ""))
        check_same_sequence(stated, query, f"{where}: the query")
        name = parse_chain_name(hit)
        result = _match_or_reason(hit, name, sequence, chain_info, entry, before)
        if isinstance(result, Match):
            result = (reject(result) if reject else None) or result
        if isinstance(result, Match):
            matches.append(result)
            continue
        label = name or hit.name.strip()[:40]
        reasons[f"{label}, hit {hit.index}" if label in reasons else label] = " ".join(result.split())
    return matches, reasons


def parse_chain_name(hit: Hit) -> str | None:
    """Return the chain of a hit: 4zey_A for "4ZEY_A Some protein; 1.5A {Homo sapiens}", or None for other forms."""
    entry, _, chain = (hit.name.split() or [""])[0].rpartition("_")
    return f"{entry.lower()}_{chain}" if entry and re.fullmatch("[A-Za-z0-9.]+", chain) else None


def _match_or_reason(
    hit: Hit, name: str | None, sequence: str, chain_info: Callable[[str], ChainInfo | None], entry: str | None, before: date | None
) -> Match | str:
    letters = hit.hit.replace("-", "")
    if name is None:
        return "not named as a chain of an entry, such as 4zey_A"
    if entry is not None and name.rpartition("_")[0] == entry.lower():
        return f"of the same entry as the query, {entry.lower()}"
    if not 0 <= hit.sum_probs <= 1e6:
        return f"Sum_probs={hit.sum_probs}, expected 0 or more"
    if hit.aligned_columns * MAX_UNALIGNED_RATIO <= len(sequence):
        return f"{hit.aligned_columns} residues are aligned, expected more than a tenth of {len(sequence)}"
    if letters in sequence and len(letters) * COPY_FRACTION[1] > len(sequence) * COPY_FRACTION[0]:
        return f"a copy of {len(letters)} of the query's {len(sequence)} residues"
    if len(letters) < MIN_LETTERS:
        return f"{len(letters)} letters, expected {MIN_LETTERS} at least"
    try:
        chain = chain_info(name)
    except DataError as problem:
        return str(problem)
    if chain is None:
        return "its structure is missing"
    if before is not None and chain.release is None:
        return f"no day of release, expected {MIN_DAYS_BEFORE_QUERY} days before {before} at least"
    if before is not None and chain.release is not None and (before - chain.release).days < MIN_DAYS_BEFORE_QUERY:
        return f"released {chain.release}, expected {MIN_DAYS_BEFORE_QUERY} days before {before} at least"
    if not 0 < len(chain.sequence) <= MAX_RESIDUES:
        return f"{len(chain.sequence)} residues, expected 1 to {MAX_RESIDUES}"
    residue_map = _map_residues(hit, letters, len(sequence), chain.sequence)
    return residue_map if isinstance(residue_map, str) else Match(name, hit.sum_probs, residue_map)


def _map_residues(hit: Hit, letters: str, length: int, sequence: str) -> Array | str:
    """Return the residue of the chain for each of the query, or -1 [N], or the reason against the hit."""
    hit_types, chain_types = encode(letters), encode(sequence)
    stated = hit.hit_indices[hit.hit_indices >= 0]
    first = int(stated[0])
    contiguous = (np.diff(stated) == 1).all() and first + len(hit_types) <= len(chain_types)
    if not (contiguous and residues_match(hit_types, chain_types[first : first + len(hit_types)]).all()):
        first = _find_subsequence(hit_types, chain_types)
    residues = first + np.arange(len(hit_types)) if first >= 0 else _align(hit_types, chain_types)
    same = int((residues_match(hit_types, chain_types[residues]) & (residues >= 0)).sum())
    shorter = min(len(hit_types), len(chain_types))
    if same * MIN_IDENTITY[1] < shorter * MIN_IDENTITY[0]:
        return f"{same} of {shorter} letters match its structure, expected {MIN_IDENTITY[0] / MIN_IDENTITY[1]:.0%} at least"
    residue_map = np.full(length, -1, np.int16)
    aligned = (hit.query_indices >= 0) & (hit.hit_indices >= 0)
    residue_map[hit.query_indices[aligned]] = residues[(np.cumsum(hit.hit_indices >= 0) - 1)[aligned]]
    return residue_map if (residue_map >= 0).any() else "no residue of the query is aligned to one of it"


def _find_subsequence(part: Array, sequence: Array) -> int:
    """Return the start of ``part`` in ``sequence``, or -1; unknown letters match all only if there is no exact match."""
    exact = bytes(sequence.astype(np.uint8)).find(bytes(part.astype(np.uint8)))
    if exact >= 0 or len(part) > len(sequence):
        return exact
    starts = np.arange(len(sequence) - len(part) + 1)
    for offset, letter in enumerate(part):
        starts = starts[residues_match(letter, sequence[starts + offset])]
    return int(starts[0]) if len(starts) else -1


def _align(part: Array, sequence: Array) -> Array:
    """Return the letter of ``sequence`` aligned to each letter of ``part``, or -1; long gaps have a low penalty."""
    gemmi = import_optional("gemmi", "alignments of chains need", "openfold")
    alignment = gemmi.align_string_sequences([str(code) for code in part], [str(code) for code in sequence], [])
    residues = np.full(len(part), -1)
    position = [0, 0]
    for count, kind in re.findall(r"(\d+)([MID])", alignment.cigar_str()):
        steps = int(count)
        if kind == "M":
            residues[position[0] : position[0] + steps] = position[1] + np.arange(steps)
        position = [position[0] + steps * (kind != "D"), position[1] + steps * (kind != "I")]
    return residues


def _chain_arrays(chain: Any) -> tuple[Array, Array, Array]:
    """Return aatype [P], positions [P, 37, 3] and mask [P, 37] of a Chain, or of a row with these names."""
    names = "aatype", "positions", "mask"
    aatype, positions, mask = (np.asarray(chain[name] if isinstance(chain, Mapping) else getattr(chain, name)) for name in names)
    if aatype.ndim != 1 or positions.shape != (len(aatype), 37, 3) or mask.shape != (len(aatype), 37):
        shapes = f"aatype {aatype.shape}, positions {positions.shape} and mask {mask.shape}"
        raise DataError(f"a template with {shapes}, expected [P], [P, 37, 3] and [P, 37]")
    return aatype, positions, mask


def rejection_reason(chain: Any) -> str | None:
    """Return why a chain, or a row with ``aatype``, ``positions`` and ``mask``, cannot be a template; None if it can."""
    _, positions, mask = _chain_arrays(chain)
    known = mask[:, _CA] > 0
    if not (mask[:, _BACKBONE] > 0).all(1).any():
        return "no residue has its backbone"
    steps = np.linalg.norm(np.diff(positions[:, _CA].astype(np.float64), axis=0), axis=1)
    jumps = np.flatnonzero((steps > MAX_STEP) & known[1:] & known[:-1])
    return f"{steps[jumps[0]]:.0f} angstrom from residue {jumps[0] + 1} to the next, {MAX_STEP:g} at most" if len(jumps) else None


def too_few_atoms(atoms: Array, residue_map: Array) -> str | None:
    """Return a reason if the residues of ``residue_map`` have too few known atoms. ``atoms`` [P] are their numbers per residue."""
    known = int(atoms[residue_map[residue_map >= 0]].sum(dtype=np.int64))
    return f"{known} atoms of its aligned residues are known, expected {MIN_ATOMS} at least" if known < MIN_ATOMS else None


def template_features(chains: Sequence[Any], residue_maps: Array, sum_probs: Any) -> dict[str, Array]:
    """Return the ``templates`` of ``featurize`` from K chains (or rows of a store), their residue maps [K, N] and sum_probs [K].

    Raises DataError for residues that a chain does not have.
    """
    from hpcai.models.openfold.features import TEMPLATES  # imports settings, which the help of data_prep does not need

    residue_maps, probs = np.asarray(residue_maps), np.asarray(sum_probs, np.float32)
    if residue_maps.ndim != 2 or residue_maps.dtype.kind not in "iu" or not len(chains) == len(residue_maps) == probs.size:
        text = f"residue maps {residue_maps.dtype} {residue_maps.shape} and {probs.size} sum_probs"
        raise DataError(f"templates: {text} of {len(chains)} chains, expected integers [{len(chains)}, N] and as many")
    shape = residue_maps.shape
    aatype, mask = np.full(shape, GAP, np.int64), np.zeros((*shape, 37), np.float32)
    positions = np.zeros((*shape, 37, 3), np.float32)
    for row, (chain, residue_map) in enumerate(zip(chains, residue_maps)):
        types, xyz, atom_mask = _chain_arrays(chain)
        if residue_map.size and (residue_map.min() < -1 or residue_map.max() >= len(types)):
            text = f"residues from {residue_map.min()} to {residue_map.max()} of template {row + 1}"
            raise DataError(f"templates: {text}, which has {len(types)}, expected -1 to {len(types) - 1}")
        aligned = residue_map >= 0
        aatype[row, aligned], mask[row, aligned] = types[residue_map[aligned]], atom_mask[residue_map[aligned]]
        positions[row, aligned] = np.where(atom_mask[residue_map[aligned], :, None] > 0, xyz[residue_map[aligned]], 0)
    return dict(zip(TEMPLATES, (aatype, positions, mask, probs.reshape(-1, 1))))


def read_templates(
    hits: str | Path | Iterable[Hit], sequence: str, structures: str | Path, *, entry: str | None = None,
    before: date | None = None, most: int = 20,
) -> tuple[dict[str, Array], dict[str, str]]:  # fmt: skip
    """Return the ``templates`` of ``featurize`` and ``OpenFold.fold``, and the reasons against other hits.

    ``hits`` are those of ``sequence``, or their .hhr file; ``structures`` is the folder with mmCIF and PDB files, at any depth:
    only required ones are read. The query's own ``entry`` and ``before``, the day of its release, exclude templates that reveal the
    target. Raises DataError for a file or folder that cannot be read and hits of another sequence; a structure that cannot be read
    is only a reason.
    """
    folder, chains = Path(structures), dict[str, Chain]()
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one of mmCIF and PDB files")
    # By entry; the first, if two have one name.
    files = {str(entry_name(path)).lower(): path for path in reversed(list_structures(folder))}

    def chain_info(name: str) -> Chain | None:
        stem, _, chain = name.rpartition("_")
        if name not in chains and stem in files:
            chains[name] = read_structure(files[stem], chain).chains[chain]
        return chains.get(name)

    def reject(match: Match) -> str | None:
        return rejection_reason(chains[match.name]) or too_few_atoms((chains[match.name].mask > 0).sum(1), match.residue_map)

    hits = read_hhr(Path(hits)) if isinstance(hits, str | Path) else hits
    matches, reasons = select_hits(hits, sequence, chain_info, entry=entry, before=before, most=most, reject=reject)
    residue_maps = np.array([hit.residue_map for hit in matches], np.int16).reshape(len(matches), len(sequence))
    return template_features([chains[hit.name] for hit in matches], residue_maps, [hit.sum_probs for hit in matches]), reasons
