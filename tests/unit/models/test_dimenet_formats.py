"""DimeNet++ with PyTorch Geometric and ASE: atoms, labels and weights in both directions, and the code cells of the app's page."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import fcc111, molecule
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from torch_geometric.data import Batch as Geometric
from torch_geometric.data import Data
from torch_geometric.nn.models import DimeNetPlusPlus

from hpcai.errors import DataError
from hpcai.models.dimenet import DimeNet, DimeNetConfig, build_structure, pyg_kwargs, read_frames, to_ase, to_data
from tests.atoms import SMALL, random_crystal, random_network

TINY = SMALL.model_copy(update={"spherical": 3, "radial": 3})
KWARGS: Any = {"cutoff": 4.0, "most": None}


def slab() -> Atoms:
    atoms = fcc111("Cu", (2, 2, 3), vacuum=5.0)
    atoms.pbc = (True, True, False)
    atoms.rattle(0.05, seed=0)
    atoms.set_constraint(FixAtoms([0, 3]))
    atoms.calc = EMT()
    atoms.get_forces()
    return atoms


def fairchem_data(**changes: Any) -> Data:
    """Return a structure as in the Open Catalyst databases, with labels under the older names."""
    numbers, positions, cell = random_crystal(0)
    fields = {
        "atomic_numbers": torch.tensor(numbers).float(), "pos": torch.tensor(positions), "cell": torch.tensor(cell)[None],
        "natoms": 4, "fixed": torch.tensor([1, 0, 0, 1]), "y": -3.5, "force": torch.arange(12.0).view(4, 3), **changes,
    }  # fmt: skip
    return Data(**{name: value for name, value in fields.items() if value is not None})


# ---- atoms


def test_structures_of_data_and_atoms_equal_those_of_arrays() -> None:
    numbers, positions, cell = random_crystal(0)
    expected = build_structure(numbers, positions, cell, **KWARGS)
    pyg_data = Data(z=torch.tensor(numbers), pos=torch.tensor(positions), cell=torch.tensor(cell), pbc=torch.tensor([True] * 3))
    for source in (fairchem_data(), pyg_data, Atoms(numbers, positions, cell=cell, pbc=True)):
        structure = build_structure(source, **KWARGS)
        assert all(np.array_equal(actual, target) for actual, target in zip(structure, expected))
    isolated = Data(z=torch.tensor(numbers), pos=torch.tensor(positions), y=torch.ones(1, 19))
    for actual, target in zip(build_structure(isolated, **KWARGS), build_structure(numbers, positions, **KWARGS)):
        assert np.array_equal(actual, target), "a molecule of QM9; its nineteen labels are ignored"


@pytest.mark.parametrize("batched", [list, Geometric.from_data_list])
def test_labels_are_converted(batched: Any) -> None:
    data = [fairchem_data(), fairchem_data(y=2.0, natoms=None, pbc=torch.tensor([[True, False, True]]))]
    data[0].pbc, data[1].natoms = torch.ones(1, 3, dtype=torch.bool), 4
    frames = read_frames(batched(data), **KWARGS)
    assert [frame.energy for frame in frames] == [-3.5, 2.0]
    assert [frame.structure.pbc.tolist() for frame in frames] == [[True] * 3, [True, False, True]]  # type: ignore[union-attr]
    for frame in frames:
        assert np.array_equal(frame.forces, np.arange(12.0).reshape(4, 3)) and frame.free.tolist() == [0, 1, 1, 0]  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"2 structures, expected one; or use hpcai.models.dimenet.read_frames"):
        build_structure(Geometric.from_data_list(data))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"pos": torch.full((4, 3), torch.nan)}, r"positions\[0, 0\] is nan"),
        ({"natoms": 5}, r"natoms is \[5\], 5 in all, expected one or more each, and 4 as in pos"),
        ({"fixed": torch.ones(3)}, r"fixed has shape \[3\], expected \[4\]"),
    ],
)
def test_invalid_fields_raise(changes: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        read_frames(fairchem_data(**changes), **KWARGS)


# ---- conversion back


def test_data_have_the_fields_of_fairchem() -> None:
    structure = build_structure(slab(), **KWARGS)
    energy, forces = random_network().energy_and_forces(structure)
    data = to_data(structure, (energy, forces))
    (j, i), offsets = data.edge_index, data.cell_offsets
    vector = data.pos[j] - data.pos[i] + offsets @ data.cell[0]
    torch.testing.assert_close(vector.norm(dim=1), data.distances, rtol=1e-12, atol=1e-12)
    assert len(j) == data.neighbors and data.natoms == 12 and torch.equal(data.z, data.atomic_numbers)
    assert data.energy.item() == energy and np.array_equal(data.forces, forces) and data.validate()
    assert data.cell.shape == (1, 3, 3) and data.pbc.tolist() == [[True, True, False]]


def test_round_trip_is_bitwise() -> None:
    first = read_frames([slab(), *map(molecule, ("H2O", "CH4"))], **KWARGS)
    first[1:] = [frame._replace(energy=float(k), forces=np.full((len(frame.free), 3), k)) for k, frame in enumerate(first[1:])]
    for restored in (read_frames(to_data(first), **KWARGS), read_frames(to_ase(first), **KWARGS)):
        for a, b in zip(restored, first):
            assert a.energy == b.energy and np.array_equal(a.forces, b.forces) and np.array_equal(a.free, b.free)  # type: ignore[arg-type]
            assert all(np.array_equal(x, y) for x, y in zip(a.structure, b.structure))
    (j, i), batch = (data := to_data(first)).edge_index, data.batch
    assert torch.equal(batch[j], batch[i]) and data.ptr.tolist() == [0, 12, 15, 20]


def test_ase_has_the_prediction_in_a_calculator() -> None:
    model, structures = random_network(), [build_structure(slab(), **KWARGS), build_structure(molecule("H2O"), **KWARGS)]
    predictions = model.energy_and_forces(structures)
    for atoms, (energy, forces) in zip(to_ase(structures, predictions), predictions):
        assert atoms.get_potential_energy() == energy and np.array_equal(atoms.get_forces(), forces)
    assert to_ase(structures[0]).calc is None and to_ase(structures[0]) == Atoms(slab(), constraint=None)
    with pytest.raises(DataError, match="1 pairs of energy and forces for 2 structures"):
        to_ase(structures, predictions[:1])
    with pytest.raises(DataError, match=r"structure 0: forces \(3, 3\), expected \(12, 3\)"):
        to_data(structures, predictions[::-1])


# ---- weights


@pytest.fixture(scope="module")
def pyg(tmp_path_factory: pytest.TempPathFactory) -> tuple[DimeNet, Any, Path]:
    """Return a network with random biases, the network of PyTorch Geometric with its weights, and their file."""
    model = random_network(TINY)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    path = tmp_path_factory.mktemp("weights") / "pyg.pt"
    model.save(path, form="pyg")
    net = DimeNetPlusPlus(**pyg_kwargs(TINY)).double()
    net.load_state_dict(torch.load(path, weights_only=True))
    return model, net, path


def test_exported_weights_load_again(pyg: Any, tmp_path: Path) -> None:
    model, _, path = pyg
    structure, loaded = build_structure(slab(), **KWARGS), DimeNet.load(path, TINY)
    assert loaded.double().energy_and_forces(structure)[0] == pytest.approx(model.energy_and_forces(structure)[0], rel=1e-6)
    model.save(tmp_path / "ocp.pt", form="fairchem")
    state = torch.load(tmp_path / "ocp.pt", weights_only=True)["state_dict"]
    assert list(state) == [f"module.module.{name}" for name in model.state_dict()]
    for name, value in DimeNet.load(tmp_path / "ocp.pt", TINY).double().state_dict().items():
        assert torch.equal(value, model.state_dict()[name].float().double())
    assert [each.name for each in tmp_path.iterdir()] == ["ocp.pt"]


# ---- the page


def test_code_cells_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "apps/opencatalyst/README.md").read_text()
    (tmp_path / "runs/opencatalyst-small").mkdir(parents=True)
    small = DimeNetConfig(hidden=8, output=8, interaction=4, blocks=1, cutoff=5.0, most=None)
    random_network(small, dtype=torch.float32).save(tmp_path / "runs/opencatalyst-small/model.safetensors")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"slab": slab()}
    for cell in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(cell, namespace)
    assert namespace["frame"].get_potential_energy() == namespace["data"].energy.item() == pytest.approx(namespace["energy"])
    assert "output_blocks.0.lin_up.bias" not in torch.load(tmp_path / "pyg.pt", weights_only=True)
