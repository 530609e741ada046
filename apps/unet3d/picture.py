"""The figure of a run: axial slices of validation scans, with true and predicted organs."""

from functools import partial
from pathlib import Path

from hpcai.cli.report import masks
from hpcai.cli.report.masks import ImageKind, Masks

FILE = "maps.npz"
TITLE = "Predicted and true slices"
HIGHER = ("dice",)
# Tissues on a grey scan: blue and orange are distinct from it and from each other also with red-green color blindness
PALETTE = ("#2f8fff", "#ff9f1c", "#00c08b", "#e64980", "#b197fc", "#f2e205")
SOFT = -79.0, 250.0                                      # HU from black to white: soft tissue and enhanced kidneys apart
KIND = ImageKind("slice", "Dice", colors="gray", palette=PALETTE, edge="#101010", enlarged=True)
classes = masks.classes
caption, finding, table, draw = (partial(each, KIND) for each in (masks.caption, masks.finding, masks.table, masks.draw))


def read(path: Path) -> Masks:
    """Read an axial slice of each volume, with the front of the body in the first row."""
    result, more = masks.read(path, optional=("spacing_mm",))
    spacing = more["spacing_mm"]
    result.aspect, result.limits = float(spacing[0] / spacing[1]), SOFT if result.units[0] == "HU" else None
    each = " x ".join(f"{n:g}" for n in spacing)
    result.note = f" of {each} mm, the part with organs; the front is on top, the patient's right on the left"
    return result
