"""What is around a step of OpenFold:  hpcai bench openfold featurize fold"""

import json
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np

from apps.openfold.synthetic import alignment, chain
from hpcai.cli.bench.timing import Row
from hpcai.models.openfold.features import TEMPLATES, FeatureConfig, featurize

_DEPTHS, _LENGTHS = (100, 464, 2154, 10_000), (100, 700)
_EACH = 33  # chains for each repeat
_RESIDUES = (256, 512)


def featurized(cfg: Any, repeats: int, features: FeatureConfig | None = None, depths: tuple[int, ...] = _DEPTHS) -> list[Row]:
    """Seconds from a chain of 100 to 700 residues, its alignment of 100 to 10,000 rows and four templates to what the network of
    MLPerf HPC reads (a crop of 256 residues, 124 clusters, 1,024 extra rows, four passes): of all alignments, and of each third by
    depth, which is drawn evenly in its logarithm."""
    count, draw = _EACH * repeats + 1, np.random.default_rng(0)
    spent = np.empty(count)
    rows_of = np.exp(draw.uniform(np.log(depths[0]), np.log(depths[-1]), count)).round()
    for number, depth in enumerate(rows_of):
        made = chain(int(draw.integers(*_LENGTHS, endpoint=True)), draw)
        rows = alignment(made, int(depth), draw)
        arrays: list[np.ndarray] = [made.aatype, made.positions, made.mask, np.ones(1, np.float32)]
        templates = {name: np.stack([array] * 4) for name, array in zip(TEMPLATES, arrays)}
        began = time.process_time()
        featurize(made, rows, templates, features or FeatureConfig(), index=number)
        spent[number] = time.process_time() - began
    found = []
    for low, high in ((depths[0], depths[-1]), *pairwise(depths)):
        some = spent[(rows_of >= low) & (rows_of < high + (high == depths[-1]))]
        parts = dict(zip(("median_s", "p90_s", "p99_s", "most_s"), np.percentile(some, [50, 90, 99, 100]) if len(some) else ()))
        found.append({"depth": f"{low} to {high}", "samples": len(some), **{name: round(s, 3) for name, s in parts.items()}})
    return found


def folded(cfg: Any, repeats: int) -> list[Row]:
    """A whole chain without gradients, plainly and by ours: seconds and the peak of memory, in a process of its own."""
    rows = []
    for residues in _RESIDUES:
        said = {kind: _apart(cfg, kind, residues) for kind in ("plain", "ours")}
        rows.append({"residues": residues, **{f"{kind}_{what}": value for kind in said for what, value in said[kind].items()}})
    return rows


def _apart(cfg: Any, kind: str, residues: int) -> Row:
    code = f"from apps.openfold.fold_alone import fold; fold({kind!r}, {residues}, {cfg.model_dump_json()!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found
