"""Reference values below ``tests/data``; the README.md files there document their origin."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/data"
STRIDE, BLOCK = 61, 256


def load_json(name: str) -> Any:
    """Return the content of a JSON file."""
    return json.loads((DATA / f"{name}.json").read_text())


def load_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def load_tensors(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return arrays as tensors, floating-point ones in ``dtype``."""
    stored = {key: torch.from_numpy(array) for key, array in load_arrays(name).items()}
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in stored.items()}


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of the values in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def subsample(array: np.ndarray) -> dict[str, np.ndarray]:
    """Return the stored values of a large array, in row-major order: every 61st value, and the means of blocks of 256 values."""
    flat = array.ravel()
    starts = np.arange(0, flat.size, BLOCK)
    lengths = np.diff(starts, append=flat.size)
    means = np.add.reduceat(flat.astype(np.float64), starts) / lengths
    return {"shape": np.array(array.shape), "values": flat[::STRIDE], "means": means}


def check_subsample(actual: Tensor | np.ndarray, expected: dict[str, np.ndarray], name: str, tolerance: float) -> None:
    """Compare an array with the subsampled reference ``name``. Means must agree four times as closely: rounding cancels in them."""
    sample = subsample(actual.detach().numpy() if isinstance(actual, Tensor) else actual)
    assert sample["shape"].tolist() == expected[f"{name}.shape"].tolist()
    for part, allowed in (("values", tolerance), ("means", tolerance / 4)):
        np.testing.assert_allclose(sample[part], expected[f"{name}.{part}"], rtol=0, atol=allowed, err_msg=f"{name}: {part}")
