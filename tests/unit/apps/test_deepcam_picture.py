"""The picture of a DeepCAM run: what is drawn is what maps.npz holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.contour import QuadContourSet

from apps.deepcam import picture
from hpcai.cli.report import curves
from hpcai.cli.report.masks import OPACITY, WRONG_OPACITY, Masks
from hpcai.cli.report.theme import DARK, LIGHT
from hpcai.cli.report.theme import PALETTE as CLASSES
from hpcai.errors import DataError
from tests import report_runs

NAMES = ["background", "tropical cyclone", "atmospheric $river"]
SIZE = 24, 36
SCORES = [{"iou": 0.3 * n, "loss": 1.0 / n, "iou_atmospheric_$river": 0.2, "iou_background": 0.9, "iou_tropical_cyclone": 0.1 * n}
          for n in (1, 2)]  # fmt: skip


def arrays(count: int = 3) -> dict[str, Any]:
    """Each map has a cyclone in its south-west that is seen a cell too far north, and the odd ones a river that nobody sees."""
    rng = np.random.default_rng(0)
    fields = rng.uniform(10, 60, (count, *SIZE, 3)).astype(np.float32)
    fields[..., 2] = np.linspace(98000, 102000, SIZE[1])
    true = np.zeros((count, *SIZE), np.uint8)
    predicted = np.zeros_like(true)
    true[:, 4:8, 4:8], predicted[:, 5:9, 4:8] = 1, 1
    true[1::2, 15:17, 10:30] = 2
    names = {"variables": np.array(["U850", "TMQ", "PSL"]), "units": np.array(["m/s", "kg/m2", "Pa"]), "classes": np.array(NAMES)}
    return {**names, "fields": fields, "true": true, "predicted": predicted}


def loaded(folder: Path, found: dict[str, Any]) -> Masks:
    return picture.read(report_runs.write_arrays(folder / "maps.npz", found))


def outlines(axes: Any) -> dict[str, list[np.ndarray]]:
    """Corners of the lines of each colour, without those of pressure.   [line][corner, x y]"""
    found: dict[str, list[np.ndarray]] = {}
    for lines in axes.get_children():
        if isinstance(lines, QuadContourSet) and lines.levels.tolist() == [0.5] and lines.get_linewidth()[0] > 0:
            found[to_hex(lines.get_edgecolor()[0])] = [path.vertices for path in lines.get_paths()]
    return found


# ---- the page


def test_the_page_shows_the_maps_and_measures_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, arrays())
    run = report_runs.write_evaluated_run(tmp_path, "deepcam", "higher", *SCORES)
    found = report_runs.page_text(run)
    # Each cyclone has 4 x 4 cells, of which 12 are common to what is true and to what is seen: 12 of 20.
    for words in ("Predicted and true maps 3 validation maps, 24 x 36 cells, north up. Outlined: true.",
                  "All 2,592 cells of 3 maps together",
                  "class IoU cells predicted as background predicted as tropical cyclone predicted as atmospheric $river",
                  "background 0.9750 2,504 99.52 % 0.48 % 0.00 %", "tropical cyclone 0.6000 48 25.00 % 75.00 % 0.00 %",
                  "atmospheric $river 0.0000 40 100.00 % 0.00 % 0.00 %", "best validation iou 0.6 at step 80"):
        assert words in found, words
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)
    assert run.higher_is_better("iou_of_rain") and picture.classes(run.predictions) == NAMES


# ---- the picture


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_truth_is_outlined_and_what_is_seen_is_filled_in_the_colour_of_its_class(tmp_path: Path, theme: Any) -> None:
    found = loaded(tmp_path, arrays(2))
    figure = picture.draw(found, theme)
    for m, axes in enumerate(figure.axes[:2]):
        lines = outlines(axes)
        assert set(lines) == set(CLASSES[: 1 + m])
        corners = np.concatenate(lines[CLASSES[0]])
        assert corners.min(0).tolist() == [3.5, 3.5] and corners.max(0).tolist() == [7.5, 7.5]
        assert {image.origin for image in axes.get_images()} == {"lower"}
        water, seen = (image.get_array() for image in axes.get_images())
        assert np.allclose(water, found.field(1)[m])
        assert ((seen[..., 3] > 0) == (found.predicted[m] == 1)).all()
        assert to_hex(seen[6, 6, :3]) == CLASSES[0] and (seen[6, 6, 3], seen[8, 6, 3]) == (OPACITY, WRONG_OPACITY)  # 8: not true
        assert axes.get_ylim() == (-0.5, 23.5)                                  # the first row, the southernmost, is below
        said = " ".join(axes.get_title(loc="left").split())
        assert said == f"Map {m}: tropical cyclone 0.60, atmospheric \\$river {('–', '0.00')[m]}"
    labels = [label.get_text() for label in figure.legends[0].get_texts()]
    assert labels == ["tropical cyclone", r"atmospheric \$river", "filled: predicted", "deep: predicted, but not true",
                      "outlined: true", "PSL [Pa]"]  # fmt: skip
    assert figure.axes[-1].get_xlabel() == "TMQ [kg/m2]"


@pytest.mark.filterwarnings("error")
def test_odd_maps_are_drawn_too(tmp_path: Path) -> None:
    """No pressure, or none that is finite or varies; other variables and units; gaps; classes everywhere; wide, high and large."""
    for change in (
        {"variables": np.array(["$a", "b", "c"])},
        {"units": np.array(["", "", "furlong"])},
        {"fields": np.where(np.arange(3) == 2, np.nan, arrays()["fields"])},
        {"fields": np.where(np.arange(SIZE[1])[:, None] < 9, np.nan, arrays()["fields"])},
        {"fields": np.ones((3, *SIZE, 3))},
        {"true": np.full((3, *SIZE), 2, np.int64)},
        {"predicted": np.full((3, *SIZE), 1, np.int16)},
        {"classes": np.array([f"class number {k}" for k in range(12)])},
        {name: arrays(1)[name][:, :2, :9] for name in ("fields", "true", "predicted")},
        {name: np.repeat(arrays(1)[name], 12, axis=2) for name in ("fields", "true", "predicted")},
    ):
        said = arrays() | change
        figure = picture.draw(loaded(tmp_path, {name: part[:1] if part.ndim > 1 else part for name, part in said.items()}), DARK)
        figure.draw_without_rendering()


def test_classes_of_the_metric_have_the_colours_of_the_maps(tmp_path: Path) -> None:
    loaded(tmp_path, arrays())
    run = report_runs.write_evaluated_run(tmp_path, "deepcam", "higher", *SCORES)
    ((name, members),) = run.metric_families().items()
    assert name == "iou" and len(members) == 3
    run.settings["model"] = {"classes": NAMES}
    for found in (run.predictions, None):  # the same without maps, by the model's settings
        run.predictions = found
        (axes,) = curves._draw_metric(run, name, members, LIGHT).axes
        colors = {line.get_label(): line.get_color() for line in axes.lines}
        assert colors["tropical cyclone"] == CLASSES[0] and colors[r"atmospheric \$river"] == CLASSES[1]
        assert colors["background"] == LIGHT.faint and colors["iou"] == LIGHT.ink
    run.settings.clear()
    (axes,) = curves._draw_metric(run, name, members, LIGHT).axes
    assert [line.get_color() for line in axes.lines[1:4]] == list(CLASSES[:3])


# ---- files that cannot be used


@pytest.mark.parametrize(("change", "reason"), [
    ({"classes": None}, "has no array classes"),
    ({"fields": np.zeros((2, *SIZE, 3))}, r"true is uint8 \(3, 24, 36\), expected whole \[N, H, W\] with N = 2, H = 24, W = 36"),
    ({"true": np.full((3, *SIZE), 3, np.uint8)}, "true is 3 to 3, expected 0 to 2, one for each of classes"),
    ({"classes": np.array(NAMES, dtype=object)}, "allow_pickle"),
])  # fmt: skip
def test_unusable_maps_are_refused_with_a_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises((DataError, ValueError), match=reason):
        loaded(tmp_path, arrays() | change)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    report_runs.check_damaged_files(picture, report_runs.write_arrays(tmp_path / "maps.npz", arrays(1)))
