"""DimeNet++: the sums without triplets, forces, symmetries, padding, and what a notebook does with it."""

from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.optimize import BFGS
from scipy.spatial.transform import Rotation

from hpcai.errors import ConfigError, DataError
from hpcai.models.dimenet import Batch, DimeNet, DimeNetConfig, ObjectiveConfig, Sizes, loss, pairs, score
from hpcai.models.dimenet.graph import build_structure, collate, graph_sizes
from hpcai.models.dimenet.triplets import TripletDimeNet
from hpcai.train.auto_settings import cast_to_bf16
from tests.atoms import SMALL, random_crystal, random_network, random_structure
from tests.unit.models.watched import Without

DETACHED = SMALL.model_copy(update={"angles": "detached"})
FEW = SMALL.model_copy(update={"most": 9})


@pytest.mark.parametrize("cfg", [SMALL, DETACHED, FEW], ids=["conservative", "detached", "nine neighbours"])
def test_moments_are_the_sum_over_all_triplets(cfg: DimeNetConfig) -> None:
    """Energies, forces, and the gradients of a loss of both."""
    model, plain, found = random_network(cfg), TripletDimeNet(cfg).double(), []
    plain.load_state_dict(model.state_dict())
    graph = collate([random_structure(seed, cfg, count) for seed, count in ((0, 3), (1, 1), (2, 5))])
    for way in (model, plain):
        energy, forces = way(graph)
        (energy.square().sum() + (forces[:-1] - 0.3).abs().sum()).backward()
        found.append([energy, forces[:-1], *(p.grad for p in way.parameters())])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_energies_do_not_change_and_forces_turn_with_the_atoms() -> None:
    """Rotation, translation, the order of the atoms, and the choice of the unit cell."""
    model, (numbers, positions, cell), rng = random_network(), random_crystal(0), np.random.default_rng(0)

    def found(numbers: Any, positions: Any, cell: Any) -> Any:
        return model.energy_and_forces(build_structure(numbers, positions, cell, cutoff=4.0, most=None))

    energy, forces = found(numbers, positions, cell)
    assert abs(energy) > 1e-3 and np.abs(forces.sum(0)).max() < 1e-9
    turn, order = Rotation.random(random_state=0).as_matrix(), rng.permutation(len(numbers))
    wrapped = positions + rng.integers(-2, 3, (len(numbers), 3)) @ cell
    sheared = cell + np.array([[0, 0, 0], [1, 0, 0], [-2, 1, 0]]) @ cell
    for other, expected in (
        (found(numbers, positions @ turn.T, cell @ turn.T), forces @ turn.T),
        (found(numbers, positions + [3.0, -7, 1], cell), forces),
        (found(numbers[order], positions[order], cell), forces[order]), (found(numbers, wrapped, cell), forces),
        (found(numbers, positions, sheared), forces),
    ):  # fmt: skip
        assert other[0] == pytest.approx(energy, rel=1e-9) and np.abs(other[1] - expected).max() < 1e-9


def test_padding_and_batching_change_nothing() -> None:
    model, parts = random_network(), [random_structure(seed, count=count) for seed, count in ((0, 3), (1, 1), (2, 5))]
    exact, found = collate(parts), []
    tables = exact.incoming, exact.outgoing, exact.members
    assert graph_sizes(parts) == (len(exact.numbers), len(exact.centre), *(table.shape[1] for table in tables))
    for graph in (exact, collate(parts, Sizes(40, 900, 90, 95, 17))):
        model.zero_grad()
        energy, forces = model(graph)
        (energy.sum() + forces.square().sum()).backward()
        found.append([energy, forces[:9], *(p.grad.clone() for p in model.parameters())])
        assert not forces[9:].any()
    for one, other in zip(*found):
        assert (one - other).norm() <= 1e-12 * other.norm()
    alone = torch.stack([model(collate([part])).energy[0] for part in parts])
    assert (alone - found[0][0]).norm() <= 1e-12 * alone.norm()


def test_no_nondeterministic_operations() -> None:
    model, graph = random_network(), collate([random_structure(0)])
    kinds = ("index_add", "scatter_add", "index_put", "_index_put_impl", "index_reduce", "scatter_reduce")
    with Without(*kinds, *(f"{name}_" for name in kinds), "lift_fresh"):
        model(graph).forces.sum().backward()


def test_initialisation_has_glorot_variance_and_zero_output() -> None:
    model = DimeNet(DimeNetConfig(hidden=32, output=48, blocks=1))
    layer = model.interaction_blocks[0].lin_kj.weight
    assert layer.var().item() == pytest.approx(2 / 64, rel=1e-5)
    torch.testing.assert_close(layer @ layer.T, (layer @ layer.T)[0, 0] * torch.eye(32), rtol=1e-4, atol=1e-5)
    assert not model(collate([build_structure([1, 8], [[0, 0, 0], [0, 0, 1.0]])]).to("cpu", torch.float32)).energy.any()


def test_sums_are_float32_under_bf16() -> None:
    model, graph = random_network(dtype=torch.float32), collate([random_structure(0), random_structure(1)]).to("cpu", torch.float32)
    expected = model(graph)
    cast_to_bf16(model)
    assert model.rbf.freq.dtype == torch.float32 and model.emb.lin.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = model(graph)
        found.forces.square().sum().backward()
    assert found.energy.dtype == found.forces.dtype == torch.float32
    assert (found.forces - expected.forces).norm() < 0.05 * expected.forces.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- objective


def batch(cfg: DimeNetConfig = SMALL, dtype: torch.dtype = torch.float64) -> Batch:
    graph = collate([random_structure(seed, cfg, count) for seed, count in ((0, 3), (2, 5))]).to("cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    forces, free = torch.randn(9, 3, generator=generator, dtype=dtype), torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 0], dtype=dtype)
    return Batch(torch.tensor([5.0, 7], dtype=torch.float64), forces, free, graph)


def test_scores_are_in_physical_units_and_of_free_atoms() -> None:
    cfg = SMALL.model_copy(update={"mean": 1.5, "scale": 2.0, "references": {number: 0.1 * number for number in range(1, 60)}})
    model, given = random_network(cfg), batch(cfg)
    energy, forces = model(given.graph)
    offset = torch.tensor([1.5 + sum(0.1 * int(z) for z in given.graph.numbers[rows]) for rows in (slice(0, 3), slice(3, 8))])
    free = given.free.bool()
    force = (forces - given.forces / 2).abs()[free].sum() / 6
    off = (energy - (given.energy - offset) / 2).abs().mean()
    value = loss(model, given, ObjectiveConfig(force=50, energy=3))["loss"].item()
    assert value == pytest.approx((50 * force + 3 * off).item(), rel=1e-7), "divided by atoms and not by directions"
    found = {name: float(a.detach()) / float(b) for name, (a, b) in score(model, given).items()}
    physical, true = (2 * forces)[free].detach(), given.forces[free]
    assert found["force_mae"] == pytest.approx((physical - true).abs().mean().item())
    assert found["force_cosine"] == pytest.approx(torch.cosine_similarity(physical, true).mean().item())
    assert found["energy_mae"] == pytest.approx((2 * energy + offset - given.energy).abs().mean().item())
    assert found["force_zero"] == pytest.approx(true.abs().mean().item()) and found["within"] == 0
    assert found["energy_mean"] == pytest.approx((offset - given.energy).abs().mean().item())
    kept = pairs(model, given)
    assert torch.equal(kept["forces"][:, 0], true) and kept["numbers"].tolist() == given.graph.numbers[free].tolist()


def test_within_needs_energy_and_all_free_forces() -> None:
    model, given = random_network(), batch()
    energy, forces = model.to_physical(given.graph, model(given.graph))
    right = given._replace(energy=energy.detach() + 0.019, forces=forces.detach() + 0.02)
    assert float(score(model, right)["within"][0]) == 2
    wrong = right.forces.clone()
    wrong[1] += 9  # held fast
    assert float(score(model, right._replace(forces=wrong))["within"][0]) == 2
    wrong[7, 2] += 0.0101  # one direction of one atom
    assert float(score(model, right._replace(forces=wrong))["within"][0]) == 1
    assert float(score(model, right._replace(energy=right.energy + 0.01))["within"][0]) == 0


# ---- for people


def test_relaxation_with_ase() -> None:
    slab = Atoms("H3", [[0, 0, 0], [0.9, 0, 0], [0.2, 1.1, 0.3]])
    slab.calc = random_network(SMALL).calculator()
    before = slab.get_potential_energy()
    BFGS(slab, logfile=None).run(fmax=1e-3, steps=8)
    assert slab.get_potential_energy() < before
    with pytest.raises(ConfigError, match="not the gradient of its energy.*conservative"):
        random_network(DETACHED).calculator()


@pytest.mark.parametrize(
    "given, text",
    [
        ({"positions": [[0, 0, 0], [0, 0, 9.0]]}, "no atom has a neighbour within 4 angstrom"),
        ({"numbers": [1, 97]}, "element 97; the model has embeddings up to 94"),
        ({"cutoff": 5.0}, "cutoff=4, most=None"),
    ],
)
def test_invalid_structures_raise(given: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        two = {"numbers": [1, 1], "positions": np.eye(3)[:2], "cutoff": 4.0, "most": None}
        random_network().energy_and_forces(build_structure(**{**two, **given}))


def test_weights_of_other_codes_load(tmp_path: Any) -> None:
    model = random_network(DETACHED)
    state = model.state_dict()
    torch.save(state, tmp_path / "ocp.pt")
    assert DimeNet.load(tmp_path / "ocp.pt").cfg == DETACHED.model_copy(update={"cutoff": 6.0, "most": 50})
    again = DimeNet.load(tmp_path / "ocp.pt", DETACHED).double()
    assert torch.equal(again(collate([random_structure(0)])).energy, model(collate([random_structure(0)])).energy)
    torch.save({name: value for name, value in state.items() if not name.endswith("lin_up.bias")}, tmp_path / "pyg.pt")
    assert not DimeNet.load(tmp_path / "pyg.pt", SMALL).output_blocks[0].lin_up.bias.any()
