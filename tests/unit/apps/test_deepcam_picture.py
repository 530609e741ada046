"""The picture of a DeepCAM run shows the contents of maps.npz."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.contour import QuadContourSet

from apps.deepcam import picture
from hpcai.cli.report.masks import OPACITY, WRONG_OPACITY, Masks
from hpcai.cli.report.theme import DARK
from hpcai.cli.report.theme import PALETTE as CLASSES
from hpcai.errors import DataError
from tests import report_runs
from tests.reference_data import load_json

NAMES = ["background", "tropical cyclone", "atmospheric $river"]
SIZE = 24, 36
SCORES = [{"iou": 0.3 * n, "loss": 1.0 / n, "iou_atmospheric_$river": 0.2, "iou_background": 0.9, "iou_tropical_cyclone": 0.1 * n}
          for n in (1, 2)]  # fmt: skip


def make_arrays(count: int = 3) -> dict[str, Any]:
    """Return maps with a cyclone in the south-west, predicted a cell too far north; odd maps also have a river, not predicted."""
    rng = np.random.default_rng(0)
    fields = rng.uniform(10, 60, (count, *SIZE, 3)).astype(np.float32)
    fields[..., 2] = np.linspace(98000, 102000, SIZE[1])
    true = np.zeros((count, *SIZE), np.uint8)
    predicted = np.zeros_like(true)
    true[:, 4:8, 4:8], predicted[:, 5:9, 4:8] = 1, 1
    true[1::2, 15:17, 10:30] = 2
    names = {"variables": np.array(["U850", "TMQ", "PSL"]), "units": np.array(["m/s", "kg/m2", "Pa"]), "classes": np.array(NAMES)}
    return {**names, "fields": fields, "true": true, "predicted": predicted}


def write_and_read(folder: Path, arrays: dict[str, Any]) -> Masks:
    return picture.read(report_runs.write_arrays(folder / "maps.npz", arrays))


def collect_outlines(axes: Any) -> dict[str, list[np.ndarray]]:
    """Return the vertices of contour lines by colour, without those of pressure.   [line][vertex, x y]"""
    outlines: dict[str, list[np.ndarray]] = {}
    for lines in axes.get_children():
        if isinstance(lines, QuadContourSet) and lines.levels.tolist() == [0.5] and lines.get_linewidth()[0] > 0:
            outlines[to_hex(lines.get_edgecolor()[0])] = [path.vertices for path in lines.get_paths()]
    return outlines


# ---- the page


def test_the_page_shows_the_maps_and_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_and_read(tmp_path, make_arrays())
    run = report_runs.write_evaluated_run(tmp_path, "deepcam", "higher", *SCORES)
    text = report_runs.page_text(run)
    # Each cyclone has 4 x 4 cells, and true and predicted cells share 12: an IoU of 12 / 20.
    for entry in load_json("settings/deepcam_page"):
        assert entry in text, entry
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)
    assert run.higher_is_better("iou_of_rain") and picture.classes(run.predictions) == NAMES


# ---- the picture


def test_true_masks_are_outlined_and_predicted_masks_filled_in_the_colour_of_their_class(tmp_path: Path) -> None:
    masks = write_and_read(tmp_path, make_arrays(2))
    for m, figure in enumerate(picture.draw(masks, DARK)):
        axes, bar = figure.axes
        lines = collect_outlines(axes)
        assert set(lines) == set(CLASSES[: 1 + m])
        corners = np.concatenate(lines[CLASSES[0]])
        assert corners.min(0).tolist() == [3.5, 3.5] and corners.max(0).tolist() == [7.5, 7.5]
        assert {image.origin for image in axes.get_images()} == {"lower"}
        water, layer = (image.get_array() for image in axes.get_images())
        assert np.allclose(water, masks.field(1)[m])
        assert ((layer[..., 3] > 0) == (masks.predicted[m] == 1)).all()
        assert to_hex(layer[6, 6, :3]) == CLASSES[0] and (layer[6, 6, 3], layer[8, 6, 3]) == (OPACITY, WRONG_OPACITY)  # 8: not true
        assert axes.get_ylim() == (-0.5, 23.5)                                  # the first row, the southernmost, is at the bottom
        title = " ".join(axes.get_title(loc="left").split())
        assert title == f"Map {m}: tropical cyclone 0.60, atmospheric \\$river {('–', '0.00')[m]}"
        assert bar.get_xlabel() == "TMQ [kg/m2]"


@pytest.mark.filterwarnings("error")
def test_maps_of_unusual_contents_are_drawn(tmp_path: Path) -> None:
    """Pressure absent, not finite or constant; other variables and units; gaps; one class everywhere; many classes; wide maps."""
    for change in (
        {"variables": np.array(["$a", "b", "c"])}, {"units": np.array(["", "", "furlong"])},
        {"fields": np.where(np.arange(3) == 2, np.nan, make_arrays()["fields"])},
        {"fields": np.where(np.arange(SIZE[1])[:, None] < 9, np.nan, make_arrays()["fields"])}, {"fields": np.ones((3, *SIZE, 3))},
        {"true": np.full((3, *SIZE), 2, np.int64)}, {"predicted": np.full((3, *SIZE), 1, np.int16)},
        {"classes": np.array([f"class number {k}" for k in range(12)])},
        {name: make_arrays(1)[name][:, :2, :9] for name in ("fields", "true", "predicted")},
        {name: np.repeat(make_arrays(1)[name], 12, axis=2) for name in ("fields", "true", "predicted")},
    ):
        arrays = make_arrays() | change
        (figure,) = picture.draw(write_and_read(tmp_path, {name: x[:1] if x.ndim > 1 else x for name, x in arrays.items()}), DARK)
        figure.draw_without_rendering()


# ---- unusable files


@pytest.mark.parametrize(("change", "reason"), [
    ({"fields": np.zeros((2, *SIZE, 3))}, r"true is uint8 \(3, 24, 36\), expected whole \[N, H, W\] with N = 2, H = 24, W = 36"),
    ({"true": np.full((3, *SIZE), 3, np.uint8)}, "true is 3 to 3, expected 0 to 2, one for each of classes"),
])  # fmt: skip
def test_unusable_maps_are_refused_with_a_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        write_and_read(tmp_path, make_arrays() | change)
