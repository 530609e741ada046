"""DimeNet++: moments in place of triplets, forces, symmetries, padding, scores, and relaxation with ASE."""

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
from tests.unit.models.operation_checks import ForbidOps

DETACHED = SMALL.model_copy(update={"angles": "detached"})
FEW = SMALL.model_copy(update={"most": 9})


@pytest.mark.parametrize("cfg", [SMALL, DETACHED, FEW], ids=["conservative", "detached", "nine neighbours"])
def test_moments_are_the_sum_over_all_triplets(cfg: DimeNetConfig) -> None:
    """Compare energies, forces, and the gradients of a loss of both."""
    model, reference, results = random_network(cfg), TripletDimeNet(cfg).double(), []
    reference.load_state_dict(model.state_dict())
    graph = collate([random_structure(seed, cfg, count) for seed, count in ((0, 3), (1, 1), (2, 5))])
    for network in (model, reference):
        energy, forces = network(graph)
        (energy.square().sum() + (forces[:-1] - 0.3).abs().sum()).backward()
        results.append([energy, forces[:-1], *(p.grad for p in network.parameters())])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_energies_are_invariant_and_forces_equivariant() -> None:
    """Rotate and translate the structure, permute its atoms, and choose other unit cells."""
    model, (numbers, positions, cell), rng = random_network(), random_crystal(0), np.random.default_rng(0)

    def predict(numbers: Any, positions: Any, cell: Any) -> Any:
        return model.energy_and_forces(build_structure(numbers, positions, cell, cutoff=4.0, most=None))

    energy, forces = predict(numbers, positions, cell)
    assert abs(energy) > 1e-3 and np.abs(forces.sum(0)).max() < 1e-9
    rotation, order = Rotation.random(random_state=0).as_matrix(), rng.permutation(len(numbers))
    wrapped = positions + rng.integers(-2, 3, (len(numbers), 3)) @ cell
    sheared = cell + np.array([[0, 0, 0], [1, 0, 0], [-2, 1, 0]]) @ cell
    for actual, expected in (
        (predict(numbers, positions @ rotation.T, cell @ rotation.T), forces @ rotation.T),
        (predict(numbers, positions + [3.0, -7, 1], cell), forces),
        (predict(numbers[order], positions[order], cell), forces[order]), (predict(numbers, wrapped, cell), forces),
        (predict(numbers, positions, sheared), forces),
    ):  # fmt: skip
        assert actual[0] == pytest.approx(energy, rel=1e-9) and np.abs(actual[1] - expected).max() < 1e-9


def test_padding_and_batching_change_nothing() -> None:
    model, parts = random_network(), [random_structure(seed, count=count) for seed, count in ((0, 3), (1, 1), (2, 5))]
    exact, results = collate(parts), []
    tables = exact.incoming, exact.outgoing, exact.members
    assert graph_sizes(parts) == (len(exact.numbers), len(exact.centre), *(table.shape[1] for table in tables))
    for graph in (exact, collate(parts, Sizes(40, 900, 90, 95, 17))):
        model.zero_grad()
        energy, forces = model(graph)
        (energy.sum() + forces.square().sum()).backward()
        results.append([energy, forces[:9], *(p.grad.clone() for p in model.parameters())])
        assert not forces[9:].any()
    for unpadded, padded in zip(*results):
        assert (unpadded - padded).norm() <= 1e-12 * padded.norm()
    alone = torch.stack([model(collate([part])).energy[0] for part in parts])
    assert (alone - results[0][0]).norm() <= 1e-12 * alone.norm()


def test_no_nondeterministic_operations() -> None:
    model, graph = random_network(), collate([random_structure(0)])
    kinds = ("index_add", "scatter_add", "index_put", "_index_put_impl", "index_reduce", "scatter_reduce")
    with ForbidOps(*kinds, *(f"{name}_" for name in kinds), "lift_fresh"):
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
        actual = model(graph)
        actual.forces.square().sum().backward()
    assert actual.energy.dtype == actual.forces.dtype == torch.float32
    assert (actual.forces - expected.forces).norm() < 0.05 * expected.forces.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- objective


def batch(cfg: DimeNetConfig = SMALL, dtype: torch.dtype = torch.float64) -> Batch:
    graph = collate([random_structure(seed, cfg, count) for seed, count in ((0, 3), (2, 5))]).to("cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    forces, free = torch.randn(9, 3, generator=generator, dtype=dtype), torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 0], dtype=dtype)
    return Batch(torch.tensor([5.0, 7], dtype=torch.float64), forces, free, graph)


def test_scores_are_in_physical_units_over_free_atoms() -> None:
    cfg = SMALL.model_copy(update={"mean": 1.5, "scale": 2.0, "references": {number: 0.1 * number for number in range(1, 60)}})
    model, sample = random_network(cfg), batch(cfg)
    energy, forces = model(sample.graph)
    offset = torch.tensor([1.5 + sum(0.1 * int(z) for z in sample.graph.numbers[rows]) for rows in (slice(0, 3), slice(3, 8))])
    free = sample.free.bool()
    force_error = (forces - sample.forces / 2).abs()[free].sum() / 6
    energy_error = (energy - (sample.energy - offset) / 2).abs().mean()
    value = loss(model, sample, ObjectiveConfig(force=50, energy=3))["loss"].item()
    assert value == pytest.approx((50 * force_error + 3 * energy_error).item(), rel=1e-7), "a mean over atoms, not over components"
    scores = {name: float(a.detach()) / float(b) for name, (a, b) in score(model, sample).items()}
    physical, target = (2 * forces)[free].detach(), sample.forces[free]
    assert scores["force_mae"] == pytest.approx((physical - target).abs().mean().item())
    assert scores["force_cosine"] == pytest.approx(torch.cosine_similarity(physical, target).mean().item())
    assert scores["energy_mae"] == pytest.approx((2 * energy + offset - sample.energy).abs().mean().item())
    assert scores["force_zero"] == pytest.approx(target.abs().mean().item()) and scores["within"] == 0
    assert scores["energy_mean"] == pytest.approx((offset - sample.energy).abs().mean().item())
    atoms = pairs(model, sample)
    assert torch.equal(atoms["forces"][:, 0], target) and atoms["numbers"].tolist() == sample.graph.numbers[free].tolist()


def test_within_needs_energy_and_all_free_forces() -> None:
    model, sample = random_network(), batch()
    energy, forces = model.to_physical(sample.graph, model(sample.graph))
    close = sample._replace(energy=energy.detach() + 0.019, forces=forces.detach() + 0.02)
    assert float(score(model, close)["within"][0]) == 2
    perturbed = close.forces.clone()
    perturbed[1] += 9  # a fixed atom
    assert float(score(model, close._replace(forces=perturbed))["within"][0]) == 2
    perturbed[7, 2] += 0.0101  # one component of one atom
    assert float(score(model, close._replace(forces=perturbed))["within"][0]) == 1
    assert float(score(model, close._replace(energy=close.energy + 0.01))["within"][0]) == 0


# ---- ASE, errors, weights


def test_relaxation_with_ase() -> None:
    slab = Atoms("H3", [[0, 0, 0], [0.9, 0, 0], [0.2, 1.1, 0.3]])
    slab.calc = random_network(SMALL).calculator()
    before = slab.get_potential_energy()
    BFGS(slab, logfile=None).run(fmax=1e-3, steps=8)
    assert slab.get_potential_energy() < before
    crystal = random_crystal(0)
    other = Atoms(crystal[0], crystal[1], cell=crystal[2][[1, 0, 2]], pbc=True)
    other.calc, right = slab.calc, slab.calc.model.energy_and_forces(build_structure(*crystal, cutoff=4.0, most=None))
    assert other.get_potential_energy() == right[0] and np.array_equal(other.get_forces(), right[1]), "a left-handed cell"
    with pytest.raises(ConfigError, match="not the gradient of its energy.*conservative"):
        random_network(DETACHED).calculator()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"positions": [[0, 0, 0], [0, 0, 9.0]]}, "no atom has a neighbour within 4 angstrom"),
        ({"positions": np.ma.masked_greater(np.eye(3)[:2], 0)}, r"positions: 2 of 6 values are masked, the first at \[0, 0\]"),
        ({"numbers": [1, 97]}, "element 97; the model has embeddings up to 94"),
        ({"cutoff": 5.0}, "cutoff=4, most=None"),
    ],
)
def test_invalid_structures_raise(change: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        valid = {"numbers": [1, 1], "positions": np.eye(3)[:2], "cutoff": 4.0, "most": None}
        random_network().energy_and_forces(build_structure(**{**valid, **change}))


def test_weights_of_other_codes_load(tmp_path: Any) -> None:
    model = random_network(DETACHED)
    state = model.state_dict()
    torch.save(state, tmp_path / "ocp.pt")
    assert DimeNet.load(tmp_path / "ocp.pt").cfg == DETACHED.model_copy(update={"cutoff": 6.0, "most": 50})
    loaded = DimeNet.load(tmp_path / "ocp.pt", DETACHED).double()
    assert torch.equal(loaded(collate([random_structure(0)])).energy, model(collate([random_structure(0)])).energy)
    torch.save({name: value for name, value in state.items() if not name.endswith("lin_up.bias")}, tmp_path / "pyg.pt")
    assert not DimeNet.load(tmp_path / "pyg.pt", SMALL).output_blocks[0].lin_up.bias.any()
