"""A very small dataset of universes, for tests that need files rather than physics."""

import json
from pathlib import Path

import h5py
import numpy as np


def write_universes(folder: Path, size: int = 32, train: int = 6, validation: int = 3, rows: int = 4) -> Path:
    """Write files of ``rows`` Poisson universes each, whose mean and clumping follow two of four parameters."""
    for split, count in (("train", train), ("validation", validation)):
        (folder / split).mkdir(parents=True)
        files = []
        for i in range(count):
            rng = np.random.default_rng([len(split), i])
            target = rng.uniform(-1, 1, 4).astype(np.float32)
            density = np.exp((0.5 + 0.3 * target[1]) * rng.standard_normal((rows, size, size, size, 4))) * (2 + target[0])
            path = folder / split / f"universe_{i:05d}.h5"
            with h5py.File(path, "w") as file:
                file["counts"] = rng.poisson(density).astype(np.int16)
                file["target"] = np.tile(target, (rows, 1))
            files.append({"name": path.name, "rows": rows, "bytes": path.stat().st_size})
        index = {
            "format": 1, "files": files, "shape": [size] * 3 + [4], "parameters": ["Omega_m", "sigma_8", "n_s", "H_0"],
            "low": [0.27, 0.72, 0.86, 63.0], "high": [0.33, 0.88, 1.06, 77.0], "units": ["", "", "", "km/s/Mpc"],
        }  # fmt: skip
        (folder / split / "index.json").write_text(json.dumps(index))
    cells = np.concatenate([np.log1p(h5py.File(p)["counts"][:]).reshape(-1, 4) for p in sorted(folder.glob("train/*.h5"))])
    log1p = {"mean": cells.mean(0, dtype=float).tolist(), "covariance": np.cov(cells.T).tolist()}
    statistics = {"log1p": log1p, "target": {"minimum": [-1.0] * 4, "maximum": [1.0] * 4}}
    (folder / "statistics.json").write_text(json.dumps({"splits": {"train": statistics}}))
    return folder
