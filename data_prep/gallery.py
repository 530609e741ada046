"""A picture of structures with their forces, and of how large forces and energies are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, frames, store
from data_prep.frames import Frame, ase


def draw(path: Path, places: Sequence[tuple[Path, int]], label: str) -> None:
    """Draw four systems from above and from the side with their forces, and histograms of forces and energies."""
    found = _forces_and_energies(places)
    with command.picture(path, (15, 12), 80) as figure:
        grid = figure.add_gridspec(3, 4, height_ratios=(1.15, 1, 0.8))
        for column in range(4):
            frame, title = _titled(*places[min(len(places) - 1, (2 * column + 1) * len(places) // 8)])
            _above_or_beside(figure.add_subplot(grid[0, column]), frame, (0, 1, 2), title)
            _above_or_beside(figure.add_subplot(grid[1, column]), frame, (0, 2, 1), "")
        size, energy = figure.add_subplot(grid[2, :2]), figure.add_subplot(grid[2, 2:])
        for axis, part in ((size, 0), (energy, 1)):
            every = np.concatenate([both[part] for both in found.values()])
            bins = np.linspace(every.min() - 0.01, every.max() + 0.01, 61).tolist()
            for number, (split, both) in enumerate(found.items()):
                axis.hist(both[part], bins, density=True, histtype="stepfilled", alpha=0.25, color=f"C{number}")
                axis.hist(both[part], bins, density=True, histtype="step", linewidth=1.5, color=f"C{number}", label=split)
        size.set(xlabel="log10 of |F| of free atoms, eV/A", ylabel="density")
        energy.set(xlabel="energy of the target, eV")
        size.legend()
        figure.suptitle(f"{label}. Red rims: adsorbate; dotted: held; arrows: forces on free atoms")


def _titled(name: Path, row: int) -> tuple[Frame, str]:
    with h5py.File(name, "r") as file:
        (frame, _), systems = frames.read(file, row), json.loads(file.attrs.get("systems", "[]"))
    formula = ase().Atoms(frame.numbers).get_chemical_formula()
    title = next((each["name"] for each in systems if each["system"] == frame.system), f"{formula}, system {frame.system}")
    return frame, f"{name.parent.name}: {title}\nframe {frame.frame}, {frame.energy:.3f} eV"


def _above_or_beside(axis: Any, frame: Frame, sides: tuple[int, int, int], title: str) -> None:
    """Draw a structure along the third of ``sides``, of which the first lies across and the second up."""
    from matplotlib.patches import Circle, Polygon

    data, (across, up, depth) = ase().data, sides
    assert frame.forces is not None
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) @ frame.cell[[across, up]][:, [across, up]]
    axis.add_patch(Polygon(corners, fill=False, linestyle=":", color="gray"))
    towards = -1 if depth == 1 else 1                               # from the front; from above
    for order, atom in enumerate(np.argsort(towards * frame.positions[:, depth], kind="stable")):
        z, held = int(frame.numbers[atom]), bool(frame.fixed[atom])
        rim, width = ("crimson", 2.0) if frame.tags[atom] == 2 else ("black", 0.6)
        centre = float(frame.positions[atom, across]), float(frame.positions[atom, up])
        axis.add_patch(Circle(centre, 0.85 * data.covalent_radii[z], zorder=2 + order, edgecolor=rim, linewidth=width,
                              facecolor=data.colors.jmol_colors[z], hatch="...." if held else None))  # fmt: skip
    free = frame.fixed == 0
    largest = float(np.sqrt((frame.forces[free] ** 2).sum(1)).max(initial=1e-9))
    arrows = f"longest arrow {largest:.2g} eV/A" if largest > 1e-9 else "no forces"
    tips = frame.forces * (2.0 / largest)
    axis.quiver(*frame.positions[free][:, [across, up]].T, *tips[free][:, [across, up]].T, angles="xy", scale_units="xy",
                scale=1, color="royalblue", width=0.008, zorder=900)  # fmt: skip
    at = frame.positions[:, [across, up]]
    low, high = np.minimum(at.min(0), corners.min(0)), np.maximum(at.max(0), corners.max(0))
    if depth == 1:
        low[1], high[1] = at[:, 1].min(), at[:, 1].max()            # the vacuum is left out
    axis.set(xlim=(low[0] - 1.6, high[0] + 1.6), ylim=(low[1] - 1.6, high[1] + 2.2), aspect="equal", xticks=[], yticks=[])
    axis.set_title(title or f"from the side; {arrows}", fontsize=9)


def _forces_and_energies(places: Sequence[tuple[Path, int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The logarithm of the forces on free atoms, and the energies, of each split; at most some 40 of its files are read."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for folder in sorted({name.parent for name, _ in places}, key=lambda folder: store.SPLITS.index(folder.name)):
        names = sorted({name for name, _ in places if name.parent == folder})
        lengths, energies = [], []
        for name in names[:: max(1, len(names) // 40)]:
            with h5py.File(name, "r") as file:
                forces = file["forces"][...][file["fixed"][...] == 0].astype(np.float64)
                lengths.append(np.sqrt((forces**2).sum(1)))
                energies.append(file["energy"][...])
        found[folder.name] = np.log10(np.concatenate(lengths).clip(1e-4)), np.concatenate(energies)
    return found
