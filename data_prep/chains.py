"""Protein chains with their alignments, in files of many of them, and what is measured of them.

R chains   A residues, of all chains one after the other   L letters of all alignments, row by row, likewise   lengths angstrom
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import store
from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment, encode
from hpcai.models.openfold.residues import GAP, PLACE, UNKNOWN
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]
NAME = 24                                       # bytes
MOST_DELETIONS = 255                            # atan(d / 3) * 2 / pi, which the network sees, is 0.9925 there
CA = PLACE["CA"]
UNKNOWN_DAY = -1
PER_CHAIN: dict[str, tuple[str, tuple[int, ...]]] = {
    "residues": ("int32", ()), "letters": ("int32", ()), "name": (f"S{NAME}", ()), "resolution": ("float32", ()),
    "release": ("int32", ()), "cluster": ("int32", ()), "cluster_size": ("int32", ()),
}  # fmt: skip
FLAT: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "aatype": ("int8", ("residues",)), "positions": ("float32", ("residues", 37, 3)), "mask": ("uint8", ("residues", 37)),
    "msa": ("int8", ("letters",)), "deletions": ("uint8", ("letters",)),
}  # fmt: skip
RANGES = {"residues": (1, None), "letters": (1, None), "resolution": (0, None), "cluster_size": (1, None), "aatype": (0, UNKNOWN),
          "mask": (0, 1), "msa": (0, GAP)}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A chain as it is stored."""

    chain: Chain
    msa: Array                                  # [S, N]
    deletions: Array                            # [S, N]
    cluster: int
    cluster_size: int


def sample(chain: Chain, alignment: Alignment | None, cluster: int, cluster_size: int, most: int | None = None) -> Sample:
    """``most``: rows of the alignment, the first; without one the chain itself is its only row."""
    if alignment is None:
        query = encode(chain.sequence)[None]
        return Sample(chain, query, np.zeros(query.shape, np.uint8), cluster, cluster_size)
    deletions = np.minimum(alignment.deletions[:most], MOST_DELETIONS).astype(np.uint8)
    return Sample(chain, alignment.msa[:most].copy(), deletions, cluster, cluster_size)     # a view would keep all rows in memory


def days(release: date | None) -> int:
    """Since 1970."""
    return UNKNOWN_DAY if release is None else (release - date(1970, 1, 1)).days


def write(path: Path, samples: Sequence[Sample], about: dict[str, Any]) -> None:
    """A file of chains."""
    ones = [one.chain for one in samples]
    rows: dict[str, list[Any]] = {
        "residues": [len(one.aatype) for one in ones], "letters": [one.msa.size for one in samples],
        "name": [one.name.encode("ascii") for one in ones], "resolution": [one.resolution or 0 for one in ones],
        "release": [days(one.release) for one in ones], "cluster": [one.cluster for one in samples],
        "cluster_size": [one.cluster_size for one in samples],
    }  # fmt: skip
    with store.rows_file(path, len(ones), {**PER_CHAIN, **FLAT}, about, {name: sum(rows[name]) for name in PARTS}) as file:
        for name, (dtype, _) in PER_CHAIN.items():
            file[name][...] = np.array(rows[name], dtype)
        for name, (dtype, (counts, *shape)) in FLAT.items():
            begin = 0
            for each, length in zip(samples, rows[str(counts)]):
                values = getattr(each if counts == "letters" else each.chain, name)
                file[name][begin : begin + length] = values.reshape(length, *shape).astype(dtype)
                begin += length


def read(file: h5py.File, row: int) -> dict[str, Any]:
    """All of one chain, the alignment as rows."""
    found = {name: file[name][row] for name in PER_CHAIN}
    for counts in PARTS:
        end = int(file[counts][: row + 1].sum())
        found |= {name: file[name][end - int(found[counts]) : end] for name, (_, shape) in FLAT.items() if shape[0] == counts}
    depth, rest = divmod(int(found["letters"]), int(found["residues"]))
    if rest or not depth:
        raise DataError(f"{file.filename}: row {row}: {found['letters']} letters for {found['residues']} residues, expected a "
                        "multiple; delete the file and make it again")  # fmt: skip
    return found | {name: found[name].reshape(depth, -1) for name in ("msa", "deletions")}


# ---- what the files hold


def header(about: str) -> dict[str, Any]:
    units = {"length": "angstrom", "resolution": "angstrom, 0 unknown", "release": f"days since 1970, {UNKNOWN_DAY} unknown"}
    return {"label": about, "units": units, "most_deletions": MOST_DELETIONS}


def _sums(file: h5py.File) -> dict[str, Any]:
    residues, letters = (file[name][...].astype(np.int64) for name in PARTS)
    return {
        "residues": residues.tolist(), "depths": (letters // residues).tolist(), "letters": int(letters.sum()),
        "clusters": np.unique(file["cluster"][...]).tolist(), "resolved": int(file["mask"][:, CA].sum(dtype=np.int64)),
        "resolutions": [round(value, 3) for value in file["resolution"][...].tolist() if value],
        "undated": int((file["release"][...] == UNKNOWN_DAY).sum()),
        "clipped": int((file["deletions"][...] == MOST_DELETIONS).sum()),
        "skipped": int(file.attrs.get("skipped", 0)),
    }  # fmt: skip


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    sums = [record["sums"] for record in records]
    lists = {name: np.array([value for each in sums for value in each[name]]) for name in ("residues", "depths", "resolutions")}
    total = {name: sum(each[name] for each in sums) for name in ("letters", "resolved", "undated", "clipped", "skipped")}

    def spread(name: str) -> dict[str, float]:
        values = lists[name]
        if not len(values):
            return {}
        least, middle, most = np.quantile(values, [0, 0.5, 1]).tolist()
        return {"minimum": least, "median": middle, "maximum": most, "mean": float(values.mean())}

    return {
        "chains": len(lists["residues"]), "clusters": len({number for each in sums for number in each["clusters"]}),
        "residues": {"total": int(lists["residues"].sum()), "with CA": total["resolved"], **spread("residues")},
        "depth": {**spread("depths"), "query alone": int((lists["depths"] == 1).sum())},
        "resolution": {"known": len(lists["resolutions"]), **spread("resolutions")},
        "letters": total["letters"], "undated": total["undated"], "clipped_deletions": total["clipped"],
        "skipped": total["skipped"],
    }  # fmt: skip


PARTS = ("residues", "letters")
CONTENTS = store.Contents("residues", store.fields_of({**PER_CHAIN, **FLAT}, RANGES), _sums, _merge, parts=PARTS)


# ---- a picture


def draw(path: Path, places: Sequence[tuple[Path, int]], label: str) -> None:
    """Four chains: how far CA atoms are from each other, and how many rows of the alignment cover each residue."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 4, height_ratios=(2.2, 1), squeeze=False)
    for part, (above, below) in enumerate(grid.T):
        name, row = places[min(len(places) - 1, (2 * part + 1) * len(places) // 8)]
        with h5py.File(name, "r") as file:
            found = read(file, row)
        seen, at = found["mask"][:, CA] > 0, found["positions"][:, CA].astype(np.float64)
        distance = np.linalg.norm(at[:, None] - at, axis=-1)
        distance[~(seen[:, None] & seen)] = np.nan
        shown = above.imshow(distance, cmap="viridis_r", vmin=0, vmax=40, interpolation="nearest")
        about = f"{name.parent.name}: {found['name'].decode()}\n{len(seen)} residues, {len(found['msa'])} rows"
        above.set_title(about, fontsize=10)
        covered = (found["msa"] != GAP).mean(0)
        below.fill_between(np.arange(len(seen)), covered, step="mid", alpha=0.4)
        below.plot(((found["msa"] == found["aatype"]) & (found["aatype"] != UNKNOWN)).mean(0), linewidth=1)
        below.set(xlim=(-0.5, len(seen) - 0.5), ylim=(0, 1.02), xlabel="residue")
    figure.colorbar(shown, ax=grid[0], label="CA to CA, angstrom")
    grid[1, 0].set_ylabel("share of rows")
    figure.suptitle(f"{label}. White: no coordinates; filled: rows that cover a residue; line: rows that have the same residue")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=80, format="png")
    partial.replace(path)
