"""An ASE calculator of a trained DimeNet++: relaxations, dynamics, vibrations."""

from typing import Any

from hpcai.errors import ConfigError, MissingExtraError
from hpcai.models.dimenet.graph import build_structure

try:
    from ase.calculators.calculator import Calculator, all_changes
except ImportError as problem:
    raise MissingExtraError("an ASE calculator needs ASE: pip install 'hpcai-suite[opencatalyst]'") from problem


class DimeNetCalculator(Calculator):
    """Energy in eV and forces in eV/angstrom. Forces on fixed atoms are given too; ASE applies the constraints."""

    implemented_properties = ["energy", "free_energy", "forces"]

    def __init__(self, model: Any, **kwargs: Any) -> None:
        if model.cfg.angles == "detached":
            raise ConfigError(
                "this model's forces ignore the change of angles (model.angles=detached, as in MLPerf HPC): they are not the "
                "gradient of its energy, and cannot drive relaxations or dynamics; train a model with model.angles=conservative"
            )
        super().__init__(**kwargs)
        self.model = model.eval()

    def calculate(self, atoms_: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        super().calculate(atoms_, properties, system_changes)
        cfg = self.model.cfg
        energy, forces = self.model.energy_and_forces(build_structure(self.atoms, cutoff=cfg.cutoff, most=cfg.most))
        self.results = {"energy": energy, "free_energy": energy, "forces": forces}
