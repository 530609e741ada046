"""DimeNet++ and its neighbour lists agree with stored results of the MLPerf HPC reference (tests/data/dimenet)."""

from typing import Any

import numpy as np
import pytest
import torch

from apps.opencatalyst.settings import STD, Config
from hpcai import config
from hpcai.models.dimenet import Batch, DimeNet, DimeNetConfig, Structure, collate, loss
from hpcai.models.dimenet.basis import spherical_bessel_zeros
from hpcai.models.dimenet.periodic import count_triplets, find_reverse_edges, neighbour_list
from hpcai.train.schedule import make_lr_schedule
from tests.reference_data import ROOT, load_arrays, load_json

SMALL = DimeNetConfig(hidden=32, output=48, interaction=16, basis=8, blocks=2)
MEAN = -0.7554450631141663


def read(name: str) -> dict[str, np.ndarray]:
    return load_arrays(f"dimenet/{name}")


def load_golden() -> Any:
    return load_json("dimenet/golden")


def reference_batch(dtype: Any) -> Batch:
    """Return the three structures with the edges of the reference."""
    stored = read("small_input")
    structures, atom, edge = [], 0, 0
    for atoms, edges, cell in zip(stored["natoms"], stored["neighbors"], stored["cell"]):
        other, centre = stored["edge_index"][:, edge : edge + edges] - atom
        offset = stored["cell_offsets"][edge : edge + edges]
        index = {key: e for e, key in enumerate(zip(other.tolist(), centre.tolist(), map(tuple, offset.tolist())))}
        back = [index.get((i, j, (-a, -b, -c)), -1) for j, i, (a, b, c) in zip(other.tolist(), centre.tolist(), offset.tolist())]
        own = slice(atom, atom + atoms)
        shift = (offset @ cell.astype(dtype)).astype(dtype)
        positions, numbers = stored["pos"][own].astype(dtype), stored["atomic_numbers"][own]
        structures.append(Structure(positions, numbers, centre, other, shift, np.array(back), 6.0, 50, cell, np.ones(3, bool)))
        atom, edge = atom + int(atoms), edge + int(edges)
    padding_atom, graph = [[0, 0, 0]], collate(structures)
    forces = torch.from_numpy(np.concatenate([stored["force_target"], padding_atom]).astype(dtype))
    free = torch.from_numpy(np.append(1 - stored["fixed"], 0).astype(dtype))
    return Batch(torch.from_numpy(stored["energy_target"]), forces, free, graph)


def build_network(cfg: DimeNetConfig) -> DimeNet:
    model = DimeNet(cfg).double()
    model.load_state_dict({name: torch.from_numpy(value).double() for name, value in read("small_state").items()})
    return model


UNITS = {"mean": MEAN, "scale": STD}
OUTPUTS = {"detached": ("small_output_f64", "f64"), "conservative": ("small_output_f64_nodetach", "f64_nodetach")}


@pytest.mark.parametrize("angles", OUTPUTS)
def test_energies_forces_losses_and_gradients(angles: Any) -> None:
    model, batch = build_network(SMALL.model_copy(update={"angles": angles, **UNITS})), reference_batch(np.float64)
    golden, (name, key) = load_golden(), OUTPUTS[angles]
    energy, forces = model(batch.graph)
    expected = read(name)
    np.testing.assert_allclose(energy.detach(), expected["energy"][:, 0], atol=2e-5)
    np.testing.assert_allclose(forces[:-1].detach(), expected["forces"], atol=5e-6)
    for kind, (weight, tolerance) in {"mlperf": (0, 1e-6), "ef": (1, 1e-6)}.items():
        expected_loss = golden["results"][key]["losses"][kind]
        model.zero_grad()
        value = loss(model, batch, Config().objective.model_copy(update={"energy": weight}))
        value["loss"].backward()
        assert value["loss"].item() == pytest.approx(expected_loss["loss"], rel=tolerance)
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        assert norms == pytest.approx(expected_loss["per_param"], rel=1e-5)
    if angles == "detached":
        for name, gradient in read("small_grads_f64").items():
            actual = dict(model.named_parameters())[name].grad
            assert np.abs(actual.numpy() - gradient).max() <= 1e-4 * np.abs(gradient).max(), name
    else:
        for position, expected_force in golden["results"]["finite_difference_force"].items():
            atom, dim = map(int, position.split(","))
            assert forces[atom, dim].item() == pytest.approx(expected_force, abs=1e-5)


def test_float32() -> None:
    model, expected = build_network(SMALL.model_copy(update={"angles": "detached"})).float(), read("small_output_f32")
    energy, forces = model(reference_batch(np.float32).graph)
    np.testing.assert_allclose(energy.detach(), expected["energy"][:, 0], rtol=1e-5, atol=1e-4)
    scale = np.sqrt(np.square(expected["forces"]).mean())
    assert np.abs(forces[:-1].detach().numpy() - expected["forces"]).max() < 1e-3 * scale


def test_parameters_of_the_full_network() -> None:
    golden, model = load_golden(), DimeNet(DimeNetConfig())
    assert [[name, list(p.shape)] for name, p in model.named_parameters()] == golden["param_names_full"]
    assert sum(p.numel() for p in model.parameters()) == golden["params_full"] == 1_810_182


def test_zeros_of_bessel_functions() -> None:
    np.testing.assert_allclose(spherical_bessel_zeros(7, 6), read("basis")["jn_zeros"], rtol=1e-7)


def test_the_schedule() -> None:
    expected = load_json("dimenet/lr_schedule")
    cfg = config.load(Config, ROOT / "apps/opencatalyst/configs/batch2048.yaml")
    lr_at = make_lr_schedule(cfg.step.schedule, cfg.step.lr, 976, 976 * 48)
    assert [lr_at(step) / cfg.step.lr for step in expected["steps"]] == pytest.approx(expected["mult"], rel=1e-9)


def test_fifty_nearest_neighbours_of_three_structures() -> None:
    stored = load_arrays("dimenet/small_input")
    other, centre = stored["edge_index"]
    edges, triplets, unpaired = list[np.ndarray](), 0, 0
    for b, size in enumerate(stored["natoms"]):
        atoms = stored["batch"] == b
        neighbours = neighbour_list(stored["pos"][atoms], stored["cell"][b], np.ones(3, bool), 6.0, 50)
        assert len(neighbours.centre) == stored["neighbors"][b]
        edges.append(np.c_[neighbours.centre + atoms.argmax(), neighbours.neighbour + atoms.argmax(), neighbours.offset])
        triplets += count_triplets(neighbours, int(size))
        unpaired += int((find_reverse_edges(neighbours, int(size)) < 0).sum())
    assert sorted(np.concatenate(edges).tolist()) == sorted(np.c_[centre, other, stored["cell_offsets"]].tolist())
    assert (triplets, unpaired) == (38923, 27)
