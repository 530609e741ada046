"""A trained DimeNet++ where ASE wants energies and forces: relaxations, dynamics, vibrations."""

from typing import Any

from hpcai.errors import ConfigError, MissingExtraError
from hpcai.models.dimenet.graph import build_structure

try:
    from ase.calculators.calculator import Calculator, all_changes
except ImportError as problem:
    raise MissingExtraError("an ASE calculator needs ASE: pip install 'hpcai-suite[opencatalyst]'") from problem


class DimeNetCalculator(Calculator):
    """Energy in eV and forces in eV/angstrom. Fixed atoms are ASE's business: their forces are given, too."""

    implemented_properties = ["energy", "free_energy", "forces"]

    def __init__(self, model: Any, **kwargs: Any) -> None:
        if model.cfg.angles == "detached":
            raise ConfigError(
                "this model's forces leave out how angles change (model.angles=detached, as MLPerf HPC has it): they are no "
                "gradient of its energy, and nothing can be relaxed or moved by them; train one with model.angles=conservative"
            )
        super().__init__(**kwargs)
        self.model = model.eval()

    def calculate(self, atoms_: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        super().calculate(atoms_, properties, system_changes)
        cfg = self.model.cfg
        energy, forces = self.model.energy_and_forces(build_structure(self.atoms, cutoff=cfg.cutoff, most=cfg.most))
        self.results = {"energy": energy, "free_energy": energy, "forces": forces}
