"""DimeNet++ against numbers that the MLPerf HPC reference produced (tests/data/dimenet)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.opencatalyst.settings import STD, Config
from hpcai import config
from hpcai.models.dimenet import Batch, DimeNet, DimeNetConfig, Structure, collate, loss
from hpcai.models.dimenet.basis import SphericalBessel, angular_factor, envelope, spherical_bessel_zeros, spherical_harmonics
from hpcai.train.schedule import make_lr_schedule
from tests.reference_data import load_arrays, load_json

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = DimeNetConfig(hidden=32, output=48, interaction=16, basis=8, blocks=2)
MEAN = -0.7554450631141663


def read(name: str) -> dict[str, np.ndarray]:
    return load_arrays(f"dimenet/{name}")


def golden() -> Any:
    return load_json("dimenet/golden")


def batch(dtype: Any) -> Batch:
    """The three structures with the edges that the reference had."""
    given = read("small_input")
    made, atom, edge = [], 0, 0
    for atoms, edges, cell in zip(given["natoms"], given["neighbors"], given["cell"]):
        other, centre = given["edge_index"][:, edge : edge + edges] - atom
        offset = given["cell_offsets"][edge : edge + edges]
        place = {key: e for e, key in enumerate(zip(other.tolist(), centre.tolist(), map(tuple, offset.tolist())))}
        back = [place.get((i, j, (-a, -b, -c)), -1) for j, i, (a, b, c) in zip(other.tolist(), centre.tolist(), offset.tolist())]
        own = slice(atom, atom + atoms)
        shift = (offset @ cell.astype(dtype)).astype(dtype)
        positions, numbers = given["pos"][own].astype(dtype), given["atomic_numbers"][own]
        made.append(Structure(positions, numbers, centre, other, shift, np.array(back), 6.0, 50))
        atom, edge = atom + int(atoms), edge + int(edges)
    rest, graph = [[0, 0, 0]], collate(made)
    forces = torch.from_numpy(np.concatenate([given["force_target"], rest]).astype(dtype))
    free = torch.from_numpy(np.append(1 - given["fixed"], 0).astype(dtype))
    return Batch(torch.from_numpy(given["energy_target"]), forces, free, graph)


def network(cfg: DimeNetConfig) -> DimeNet:
    model = DimeNet(cfg).double()
    model.load_state_dict({name: torch.from_numpy(value).double() for name, value in read("small_state").items()})
    return model


UNITS = {"mean": MEAN, "scale": STD}
FOUND = {"detached": ("small_output_f64", "f64"), "conservative": ("small_output_f64_nodetach", "f64_nodetach")}


@pytest.mark.parametrize("angles", FOUND)
def test_energies_forces_losses_and_gradients(angles: Any) -> None:
    model, given = network(SMALL.model_copy(update={"angles": angles, **UNITS})), batch(np.float64)
    about, (name, key) = golden(), FOUND[angles]
    energy, forces = model(given.graph)
    expected = read(name)
    np.testing.assert_allclose(energy.detach(), expected["energy"][:, 0], atol=2e-5)
    np.testing.assert_allclose(forces[:-1].detach(), expected["forces"], atol=5e-6)
    for kind, (weight, tolerance) in {"mlperf": (0, 1e-6), "ef": (1, 1e-6)}.items():
        told = about["results"][key]["losses"][kind]
        model.zero_grad()
        value = loss(model, given, Config().objective.model_copy(update={"energy": weight}))
        value["loss"].backward()
        assert value["loss"].item() == pytest.approx(told["loss"], rel=tolerance)
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        assert norms == pytest.approx(told["per_param"], rel=1e-5)
    if angles == "detached":
        for name, gradient in read("small_grads_f64").items():
            found = dict(model.named_parameters())[name].grad
            assert np.abs(found.numpy() - gradient).max() <= 1e-4 * np.abs(gradient).max(), name
    else:
        for place, slope in about["results"]["finite_difference_force"].items():
            atom, dim = map(int, place.split(","))
            assert forces[atom, dim].item() == pytest.approx(slope, abs=1e-5)


def test_float32() -> None:
    model, expected = network(SMALL.model_copy(update={"angles": "detached"})).float(), read("small_output_f32")
    energy, forces = model(batch(np.float32).graph)
    np.testing.assert_allclose(energy.detach(), expected["energy"][:, 0], rtol=1e-5, atol=1e-4)
    scale = np.sqrt(np.square(expected["forces"]).mean())
    assert np.abs(forces[:-1].detach().numpy() - expected["forces"]).max() < 1e-3 * scale


def test_the_full_size() -> None:
    about, model = golden(), DimeNet(DimeNetConfig())
    assert [[name, list(p.shape)] for name, p in model.named_parameters()] == about["param_names_full"]
    assert sum(p.numel() for p in model.parameters()) == about["params_full"] == 1_810_182


def test_functions_of_distance_and_angle() -> None:
    found = read("basis")
    x, d = torch.from_numpy(found["x"]), torch.from_numpy(found["dist"])
    inside = found["x"] < 1
    near = inside & (found["dist"] > 0.5)
    np.testing.assert_allclose(spherical_bessel_zeros(7, 6), found["jn_zeros"], rtol=1e-7)
    around = envelope(x, 5)
    np.testing.assert_allclose(around[inside], found["envelope_pyg172"][inside], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(DimeNet(SMALL).double().rbf(d).detach()[inside], found["rbf_pyg172"][inside], atol=2e-5)
    table = SphericalBessel(7, 6, 6.0, 5)(d)
    np.testing.assert_allclose((table / around[:, None])[near], found["radial_norm_jl"][near], atol=3e-5)
    theta = torch.from_numpy(found["theta"])
    u = torch.stack((torch.sin(theta), torch.zeros_like(theta), torch.cos(theta)), 1)
    y, factors = spherical_harmonics(u, 7), angular_factor(torch.arange(7))
    along = spherical_harmonics(torch.tensor([[0, 0, 1.0]], dtype=u.dtype), 7)
    columns = [factors[n] * (y * along)[:, n * n : (n + 1) ** 2].sum(1) for n in range(7)]
    np.testing.assert_allclose(torch.stack(columns, 1), found["cbf"], atol=2e-6)


def test_the_schedule() -> None:
    about = load_json("dimenet/lr_schedule")
    cfg = config.load(Config, ROOT / "apps/opencatalyst/configs/batch2048.yaml")
    found = make_lr_schedule(cfg.step.schedule, cfg.step.lr, 976, 976 * 48)
    assert [found(step) / cfg.step.lr for step in about["steps"]] == pytest.approx(about["mult"], rel=1e-9)
