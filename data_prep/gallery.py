"""A picture of structures with their forces, and of how large forces and energies are."""

import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from data_prep import frames, store
from data_prep.frames import Frame, ase


def draw(path: Path, places: Sequence[tuple[Path, int]], label: str) -> None:
    """Four systems from above and from the side with their forces, and histograms of forces and energies."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, Polygon

    data = ase().data
    figure = Figure(figsize=(15, 12), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 4, height_ratios=(1.15, 1, 0.8))
    shown: list[tuple[Frame, str]] = []
    for part in range(4):
        name, row = places[min(len(places) - 1, (2 * part + 1) * len(places) // 8)]
        with h5py.File(name, "r") as file:
            frame, systems = frames.read(file, row), json.loads(file.attrs.get("systems", "[]"))
        formula = ase().Atoms(frame.numbers).get_chemical_formula()
        title = next((each["name"] for each in systems if each["system"] == frame.system), f"{formula}, system {frame.system}")
        shown.append((frame, f"{name.parent.name}: {title}\nframe {frame.frame}, {frame.energy:.3f} eV"))
    for column, (frame, title) in enumerate(shown):
        assert frame.forces is not None
        for line, (across, up, depth) in enumerate(((0, 1, 2), (0, 2, 1))):
            axis = figure.add_subplot(grid[line, column])
            corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) @ frame.cell[[across, up]][:, [across, up]]
            axis.add_patch(Polygon(corners, fill=False, linestyle=":", color="gray"))
            towards = -1 if depth == 1 else 1                       # from above; from the front
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
                low[1], high[1] = at[:, 1].min(), at[:, 1].max()    # the vacuum is left out
            axis.set(xlim=(low[0] - 1.6, high[0] + 1.6), ylim=(low[1] - 1.6, high[1] + 2.2), aspect="equal", xticks=[], yticks=[])
            axis.set_title(title if line == 0 else f"from the side; {arrows}", fontsize=9)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    folders = sorted({name.parent for name, _ in places}, key=lambda folder: store.SPLITS.index(folder.name))
    size, energy = figure.add_subplot(grid[2, :2]), figure.add_subplot(grid[2, 2:])
    for folder in folders:
        names = sorted({name for name, _ in places if name.parent == folder})
        lengths, energies = [], []
        for name in names[:: max(1, len(names) // 40)]:
            with h5py.File(name, "r") as file:
                forces = file["forces"][...][file["fixed"][...] == 0].astype(np.float64)
                lengths.append(np.sqrt((forces**2).sum(1)))
                energies.append(file["energy"][...])
        found[folder.name] = np.log10(np.concatenate(lengths).clip(1e-4)), np.concatenate(energies)
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
    partial_file = path.with_name(f".{path.name}.partial")
    figure.savefig(partial_file, dpi=80, format="png")
    partial_file.replace(path)
