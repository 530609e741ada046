"""Numbers that tests compare with: the files below ``tests/data``, whose README.md files say where each comes from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

DATA = Path(__file__).parent / "data"
EVERY, RUN = 61, 256


def told(name: str) -> Any:
    """The content of a JSON file."""
    return json.loads((DATA / f"{name}.json").read_text())


def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def digest(array: np.ndarray) -> str:
    """SHA-256 of the values, row by row. Equal digests are equal arrays, to the last bit."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def thinned(whole: np.ndarray) -> dict[str, np.ndarray]:
    """What is stored of a large array: every 61st value, and the mean of every run of 256 values, in row-major order."""
    flat = whole.ravel()
    starts = np.arange(0, flat.size, RUN)
    lengths = np.diff(starts, append=flat.size)
    means = np.add.reduceat(flat.astype(np.float64), starts) / lengths
    return {"shape": np.array(whole.shape), "values": flat[::EVERY], "means": means}


def check_thinned(found: Tensor | np.ndarray, stored: dict[str, np.ndarray], name: str, tolerance: float) -> None:
    """Compares ``found`` with the thinned array ``name``. Rounding cancels in means, which must be four times as close."""
    ours = thinned(found.detach().numpy() if isinstance(found, Tensor) else found)
    assert ours["shape"].tolist() == stored[f"{name}.shape"].tolist()
    for part, allowed in (("values", tolerance), ("means", tolerance / 4)):
        np.testing.assert_allclose(ours[part], stored[f"{name}.{part}"], rtol=0, atol=allowed, err_msg=f"{name}: {part}")
