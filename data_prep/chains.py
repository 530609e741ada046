"""Protein chains with their alignments and templates: files of many chains, and their statistics.

R chains   A residues, of all chains, concatenated   L letters of all alignments, row by row, concatenated   lengths angstrom
H hits of templates   P residue maps: a residue of the chain and a hit of it"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import moments, store
from data_prep.store import Field
from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment, encode
from hpcai.models.openfold.residues import ATOM_ORDER, GAP, UNKNOWN
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]
NAME_BYTES = 24                                 # bytes
MAX_DELETIONS = 255                             # the feature of the network, atan(d / 3) * 2 / pi, is 0.9925 at this value
N, CA = ATOM_ORDER["N"], ATOM_ORDER["CA"]
UNKNOWN_DAY = -1
FIELDS = {
    "residues": Field("int32", (), 1), "letters": Field("int32", (), 1), "name": Field(f"S{NAME_BYTES}"),
    "resolution": Field("float32", (), 0, unit="angstrom"), "release": Field("int32", unit="days since 1970"),
    "cluster": Field("int32"), "cluster_size": Field("int32", (), 1), "hits": Field("int32", (), 0),
    "places": Field("int32", (), 0), "aatype": Field("int8", ("residues",), 0, UNKNOWN),
    "positions": Field("float32", ("residues", 37, 3), unit="angstrom"),
    "mask": Field("uint8", ("residues", 37), 0, 1), "msa": Field("int8", ("letters",), 0, GAP),
    "deletions": Field("uint8", ("letters",)), "hit_row": Field("int32", ("hits",), 0),
    "hit_sum_probs": Field("float32", ("hits",), 0), "hit_places": Field("int16", ("places",), -1),
}  # fmt: skip
TEMPLATES = "templates"                         # folder beside the splits
TEMPLATE_FIELDS = {name: FIELDS[name] for name in ("residues", "name", "resolution", "release", "aatype", "positions", "mask")}


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """The templates of a chain of N residues, the best first."""

    row: Array                                  # [H] rows of the folder of templates
    sum_probs: Array                            # [H]
    residue_map: Array                          # [H, N] residues of the template, -1 if none is aligned


NO_HITS = Hits(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros((0, 0), np.int16))


def days_since_epoch(release: date | None) -> int:
    """Return the days since 1970, or ``UNKNOWN_DAY``."""
    return UNKNOWN_DAY if release is None else (release - date(1970, 1, 1)).days


def template_row(chain: Chain) -> dict[str, Any]:
    """Return the stored fields of a structure. Raises DataError if its bonds have the length of another unit."""
    bonds = np.linalg.norm(chain.positions[:, CA] - chain.positions[:, N], axis=1)[chain.mask[:, [N, CA]].all(1)]
    if len(bonds) and not 1.1 <= (median := float(np.median(bonds))) <= 1.9:
        text = f"N and CA are {median:.3g} angstrom apart at the median"
        raise DataError(f"{chain.name}: {text}, expected 1.46; convert the coordinates to angstrom")
    return {"residues": len(chain.aatype), "name": chain.name.encode("ascii"), "resolution": chain.resolution or 0,
            "release": days_since_epoch(chain.release), "aatype": chain.aatype,
            "positions": chain.positions, "mask": chain.mask}  # fmt: skip


def chain_row(
    chain: Chain, alignment: Alignment | None, cluster: int, cluster_size: int, most: int | None = None, hits: Hits = NO_HITS
) -> dict[str, Any]:
    """Return the stored fields of a chain, with the first ``most`` rows of its alignment. Without an alignment, the chain is the
    only row."""
    if alignment is None:
        msa = encode(chain.sequence)[None]
        deletions = np.zeros(msa.shape, np.uint8)
    else:
        msa = alignment.msa[:most].copy()       # a view would keep all rows in memory
        deletions = np.minimum(alignment.deletions[:most], MAX_DELETIONS).astype(np.uint8)
    return template_row(chain) | {
        "letters": msa.size, "cluster": cluster, "cluster_size": cluster_size, "msa": msa, "deletions": deletions,
        "hits": len(hits.row), "places": hits.residue_map.size, "hit_row": hits.row, "hit_sum_probs": hits.sum_probs,
        "hit_places": hits.residue_map,
    }  # fmt: skip


def read(file: h5py.File, row: int) -> dict[str, Any]:
    """Return the fields of one chain, as ``unflatten``."""
    (values,) = store.read_rows(file, FIELDS, row, row + 1)
    return unflatten(values, f"{file.filename}: row {row}")


def unflatten(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a chain with the alignment [S, N] and the residue maps of the templates [H, N]. Raises DataError if one
    of them has another length."""
    hits, residues, letters, places = int(values["hits"]), len(values["aatype"]), len(values["msa"]), len(values["hit_places"])
    advice = "delete the file and make it again with data_prep.openfold"
    if letters % residues or not letters:
        raise DataError(f"{where}: an alignment of {letters} letters for {residues} residues, expected a multiple; {advice}")
    if places != hits * residues:
        raise DataError(f"{where}: {places} places of {hits} hits and {residues} residues, expected {hits * residues}; {advice}")
    alignment = {name: values[name].reshape(-1, residues) for name in ("msa", "deletions")}
    return values | alignment | {"hit_places": values["hit_places"].reshape(hits, residues)}


# ---- contents of the files


def header(about: str) -> dict[str, Any]:
    units = {"length": "angstrom", "resolution": "angstrom, 0 unknown", "release": f"days since 1970, {UNKNOWN_DAY} unknown"}
    return {"label": about, "units": units, "most_deletions": MAX_DELETIONS}


def _sums(file: h5py.File) -> dict[str, Any]:
    residues, letters, hits = (file[name][...].astype(np.int64) for name in ("residues", "letters", "hits"))
    known = file["resolution"][...][file["resolution"][...] > 0]
    columns = {"residues": residues, "depth": letters // residues, "hits": hits, **({"resolution": known} if len(known) else {})}
    return {
        "columns": {name: moments.compute(values[:, None]) for name, values in columns.items()},
        "clusters": np.unique(file["cluster"][...]).tolist(), "undated": int((file["release"][...] == UNKNOWN_DAY).sum()),
    }  # fmt: skip


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    sums = [record["sums"] for record in records]
    names = dict.fromkeys(name for each in sums for name in each["columns"])
    return {
        "clusters": len({number for each in sums for number in each["clusters"]}), "undated": sum(each["undated"] for each in sums),
        **{name: moments.summarize(each["columns"][name] for each in sums if name in each["columns"]) for name in names},
    }  # fmt: skip


TEMPLATE_CONTENTS = store.Contents(TEMPLATE_FIELDS)
CONTENTS = store.Contents(FIELDS, _sums, _merge)
