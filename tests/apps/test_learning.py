"""What `make train` promises: in minutes on two cores the network beats predicting the mean on universes that it has not seen."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_cosmology_is_learned_from_simulated_universes(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    simulate = ["data_prep.cosmoflow", "simulate", str(data), "--universes", "384", "--no-check"]
    train = ["apps.cosmoflow", "apps/cosmoflow/configs/small.yaml", f"data.directory={data}", f"report.directory={run}"]
    for words in (simulate, train):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    pairs = np.load(run / "predictions.npz", allow_pickle=False)
    rmse = np.sqrt(np.square(pairs["predicted"] - pairs["true"]).mean(0))
    better = dict(zip(pairs["names"], pairs["true"].std(0) / rmse))
    print({name: round(float(factor), 2) for name, factor in better.items()})
    assert better["Omega_m"] > 2.0 and better["sigma_8"] > 3.0, better
