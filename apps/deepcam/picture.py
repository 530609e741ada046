"""The figure of a run: validation maps of the weather, with true and predicted cyclones and rivers."""

from functools import partial
from pathlib import Path

from hpcai.cli.report import masks
from hpcai.cli.report.masks import ImageKind, Masks

FILE = "maps.npz"
TITLE = "Predicted and true maps"
HIGHER = ("iou",)
KIND = ImageKind("map", "IoU", origin="lower")
classes = masks.classes
caption, finding, table, draw = (partial(each, KIND) for each in (masks.caption, masks.finding, masks.table, masks.draw))


def read(path: Path) -> Masks:
    """Read maps, with precipitable water as colors and pressure at sea level as contour lines."""
    result, _ = masks.read(path, color="TMQ", lines="PSL")
    result.note = ", north up"
    return result
