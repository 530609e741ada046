"""What the README promises of the small runs: in minutes on two cores a network has learnt what can be held out and measured."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.optimize import BFGS

from apps.opencatalyst.data import FIELDS
from hpcai import log
from hpcai.data import Rows
from hpcai.models.dimenet import DimeNet

ROOT = Path(__file__).resolve().parents[2]


def small_run(app: str, prep: str, size: list[str], folder: Path) -> Path:
    """The README's two lines: data made up, and the small configuration trained on them. The folder of the run."""
    data, run, environ = folder / "data", folder / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    simulate = [f"data_prep.{prep}", "simulate", str(data), *size, "--no-check"]
    train = [f"apps.{app}", f"apps/{app}/configs/small.yaml", f"data.directory={data}", f"report.directory={run}"]
    for words in (simulate, train):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return run


def last_scores(run: Path) -> dict[str, float]:
    return [event for event in log.read_metrics(run / "metrics.jsonl") if event["kind"] == "evaluate"][-1]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_cosmology_is_learned_from_simulated_universes(tmp_path: Path) -> None:
    run = small_run("cosmoflow", "cosmoflow", ["--universes", "384"], tmp_path)
    pairs = np.load(run / "predictions.npz", allow_pickle=False)
    rmse = np.sqrt(np.square(pairs["predicted"] - pairs["true"]).mean(0))
    better = dict(zip(pairs["names"], pairs["true"].std(0) / rmse))
    print({name: round(float(factor), 2) for name, factor in better.items()})
    assert better["Omega_m"] > 2.0 and better["sigma_8"] > 3.0, better


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_forces_are_learned_from_slabs_and_relax_unseen_ones(tmp_path: Path) -> None:
    """Forces on unseen compositions, and slabs that were shaken go back to EMT's minimum."""
    run = small_run("opencatalyst", "opencatalyst", [], tmp_path)
    last = last_scores(run)
    print({name: round(last[name], 4) for name in ("force_mae", "force_zero", "force_cosine", "energy_mae", "energy_mean")})
    assert last["force_mae"] < 0.5 * last["force_zero"], last
    model, rms = DimeNet.load(run / "model.safetensors"), []
    rows = Rows(tmp_path / "data/validation", {**FIELDS, "system": ("int64", ())})
    for system in np.unique(systems := rows.column("system")):
        values = rows.read(int(np.flatnonzero(systems == system)[0]))
        slab = Atoms(values["numbers"], values["positions"].astype(float), cell=values["cell"], pbc=True)
        slab.set_constraint(FixAtoms(mask=values["fixed"] > 0))
        slab.calc = EMT()
        BFGS(slab, logfile=None).run(fmax=0.02, steps=300)
        shaken = slab.copy()
        shaken.rattle(0.1, seed=1)
        shaken.calc = model.calculator()
        BFGS(shaken, logfile=None).run(fmax=0.05, steps=100)
        metal = (values["fixed"] == 0) & (values["numbers"] > 8)
        rms.append(float(np.sqrt(((shaken.positions - slab.positions)[metal] ** 2).sum(1).mean())))
    print("rms distance of the metal's free atoms from EMT's minimum, angstrom:", [round(x, 3) for x in rms])
    assert np.median(rms) < 0.1, rms


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kidneys_and_tumours_are_found_in_simulated_patients(tmp_path: Path) -> None:
    last = last_scores(small_run("unet3d", "kits19", ["--cases", "96"], tmp_path))
    found = {name: round(last[name], 3) for name in ("mean_dice", "dice_kidney", "dice_tumour")}
    print(found)
    assert last["dice_kidney"] > 0.85 and last["dice_tumour"] > 0.4, found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_cyclones_and_rivers_are_found_in_simulated_weather(tmp_path: Path) -> None:
    """All background would be an IoU of 0.70: a class in neither map counts as one."""
    last = last_scores(small_run("deepcam", "deepcam", ["--samples", "400"], tmp_path))
    found = {name: round(last[name], 3) for name in ("iou", "iou_tropical_cyclone", "iou_atmospheric_river")}
    print(found)
    assert last["iou"] > 0.82 and last["iou_tropical_cyclone"] > 0.75 and last["iou_atmospheric_river"] > 0.65, found
