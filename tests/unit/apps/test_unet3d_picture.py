"""The picture of a U-Net run: slices of scans are drawn and counted as maps.npz holds them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba
from matplotlib.contour import QuadContourSet
from matplotlib.patches import Rectangle

from apps.unet3d import picture
from apps.unet3d.data import write_slices
from apps.unet3d.picture import PALETTE, Slices
from hpcai.cli.report import curves
from hpcai.cli.report.theme import DARK, LIGHT
from hpcai.errors import DataError
from hpcai.models.unet3d import UNet3DConfig
from tests import pages

SIDE = 48
SCORES = ({"mean_dice": 0.4, "dice_kidney": 0.6, "dice_tumour": 0.2, "loss": 0.5},
          {"mean_dice": 0.9, "dice_kidney": 0.95, "dice_tumour": 0.85, "loss": 0.3})  # fmt: skip


def tensors(count: int = 3) -> dict[str, torch.Tensor]:
    """A kidney that is seen a row too far back; in the odd slices a tumour in its middle of which a column is taken for kidney."""
    rng = torch.Generator().manual_seed(0)
    fields = torch.rand((count, SIDE, SIDE, 1), generator=rng) * 383 - 79
    true = torch.zeros((count, SIDE, SIDE), dtype=torch.uint8)
    predicted = true.clone()
    true[:, 10:20, 30:40], predicted[:, 11:21, 30:40] = 1, 1
    true[1::2, 13:17, 33:37], predicted[1::2, 13:17, 34:37] = 2, 2
    return {"fields": fields, "true": true, "predicted": predicted}


def loaded(folder: Path, found: dict[str, torch.Tensor], **change: Any) -> Slices:
    path = folder / "maps.npz"
    write_slices(path, found, UNet3DConfig())
    if change:
        with np.load(path) as file:
            pages.saved(path, {**file, **change})
    return picture.read(path)


def drawn(axes: Any, filled: bool) -> list[tuple[str, float, np.ndarray]]:
    """Colour, opacity and corners [corner, x y] of the outlines, or of the fillings."""
    found = []
    for each in axes.get_children():
        if isinstance(each, QuadContourSet) and each.filled == filled:
            color = np.asarray(each.get_facecolor() if filled else each.get_edgecolor())[0]
            found.append((to_hex(tuple(color[:3])), float(color[3]), np.concatenate([path.vertices for path in each.get_paths()])))
    return found


# ---- the page


def test_the_page_shows_the_slices_and_measures_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, tensors())
    run = pages.evaluated(tmp_path, "unet3d", "higher", *SCORES)
    run.settings["train"]["target"] = 0.908
    found = pages.read_by_people(run)
    # In even slices 90 of twice 100 voxels of kidney are common: 0.9. In odd ones 74 of 84 and 88; of tumour, 12 of 16 and 12.
    for words in ("3 validation volumes, an axial slice of each, 48 x 48 voxels of 1.2 mm; the front is on top, the patient's",
                  "Mean over the 3 shown: kidney 0.89, tumour 0.86.",
                  "All 6,912 voxels of 3 slices, one of each volume, together.", "class Dice voxels seen as background",
                  "kidney 0.8881 284 10.56 % 89.44 % 0.00 %", "tumour 0.8571 16 0.00 % 25.00 % 75.00 %",
                  "best validation mean_dice 0.9 at step 80, target 0.908"):
        assert words.replace("'", "&#x27;") in found, words
    assert pages.shows_something(picture, run.found, monkeypatch)


# ---- the picture


def test_truth_is_outlined_and_what_is_seen_is_filled_deeply_where_it_is_wrong(tmp_path: Path) -> None:
    said = tensors(2)
    figure = picture.draw(loaded(tmp_path, said), DARK)
    for m, (whole, part) in enumerate((figure.axes[:2], figure.axes[2:4])):
        assert not drawn(whole, False) and not drawn(whole, True)                # the scan, as it is
        for axes in (whole, part):
            (image,) = axes.get_images()
            assert image.get_clim() == picture.SOFT and np.allclose(np.asarray(image.get_array()), said["fields"][m, ..., 0])
            assert axes.get_ylim()[0] > axes.get_ylim()[1]                      # the first row, the front of the body, is on top
        kidney, *tumour = drawn(part, False)
        assert kidney[0] == PALETTE[0] and [line[0] for line in tumour] == [PALETTE[1]] * m
        assert kidney[2].min(0).tolist() == [29.5, 9.5] and kidney[2].max(0).tolist() == [39.5, 19.5]
        fills = {(color, round(opacity, 2)): corners for color, opacity, corners in drawn(part, True)}
        assert set(fills) == {(PALETTE[0], picture.OPACITY), (PALETTE[0], picture.WRONG), *[(PALETTE[1], picture.OPACITY)] * m}
        right, wrong = (fills[PALETTE[0], opacity] for opacity in (picture.OPACITY, picture.WRONG))
        assert right.min(0).tolist() == [29.5, 10.5] and right.max(0).tolist() == [39.5, 19.5]
        assert wrong.max(0).tolist() == [39.5, 20.5] and wrong[:, 1].min() == (19.5, 12.5)[m]
        x, y = part.get_xlim(), part.get_ylim()[::-1]
        assert x[0] < 29 and x[1] > 40 and y[0] < 9 and y[1] > 21 and x[1] - x[0] == y[1] - y[0] < SIDE
        (frame,) = (patch.get_bbox() for patch in whole.patches if isinstance(patch, Rectangle))
        assert (frame.x0, frame.x1, frame.y0, frame.y1) == (*x, *y)
    titles = [axes.get_title(loc="left") for axes in figure.axes[:4:2]]
    assert titles == ["Volume 0: kidney 0.90, tumour –", "Volume 1: kidney 0.86, tumour 0.86"]
    labels = [label.get_text() for label in figure.legends[0].get_texts()]
    assert labels == ["kidney", "tumour", "filled: predicted", "deep: predicted, but not true", "outlined: true"]


@pytest.mark.filterwarnings("error")
def test_odd_slices_are_drawn_too(tmp_path: Path) -> None:
    """One, nothing in it, other units, no spacing, gaps, many classes, a rectangle of voxels."""
    empty = dict.fromkeys(("true", "predicted"), np.zeros((1, SIDE, SIDE), np.uint8))
    for change in (
        {}, empty, {"units": np.array(["$x"]), "spacing_mm": None}, {"spacing_mm": np.array([3, 1])},
        {"classes": np.array([f"class number {k}" for k in range(9)])},
        {"fields": np.where(np.arange(SIDE)[:, None] < 9, np.nan, tensors(1)["fields"].numpy())},
        {name: values.numpy()[:, :5] for name, values in tensors(1).items()},
    ):  # fmt: skip
        found = loaded(tmp_path, tensors(1), **change)
        figure, said = picture.draw(found, DARK), picture.caption(found)
        figure.draw_without_rendering()
        assert said.startswith("1 validation volume, ") and (" mm;" in said) == ("spacing_mm" not in change or "3 x 1 mm" in said)
        assert change is not empty or said.endswith("kidney –, tumour –.")


def test_the_ruler_is_as_long_as_it_says(tmp_path: Path) -> None:
    whole = picture.draw(loaded(tmp_path, tensors(1)), LIGHT).axes[0]
    (line,), (label,) = whole.lines, whole.texts
    share = float(np.ptp(line.get_xdata()))
    assert label.get_text() == "2 cm" and share * SIDE * 1.2 == pytest.approx(20)


# ---- the curves


def test_the_classes_are_drawn_with_the_mean_in_the_colours_of_the_slices(tmp_path: Path) -> None:
    loaded(tmp_path, tensors())
    run = pages.evaluated(tmp_path, "unet3d", "higher", *SCORES, model={"classes": list(UNet3DConfig().classes)})
    run.events += [{"kind": "train", "time": 1.79e9, "step": 10 * n, "epoch": n, "loss": 1 / n, "dice": 0.1 * n} for n in (1, 2, 3)]
    run.settings["train"]["target"] = 0.908
    assert run.families() == {"mean_dice": ["dice_kidney", "dice_tumour"]}
    for found in (run.found, None):                                             # the same before there are slices
        run.found = found
        (axes,) = curves._metric(run, "mean_dice", ["dice_kidney", "dice_tumour"], LIGHT).axes
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["dice in training, smoothed", "mean_dice", "kidney", "tumour", "target 0.908", "best 0.9"]
        for name, color in zip(("kidney", "tumour"), PALETTE):
            assert to_rgba(lines[name].get_color()) == to_rgba(color)
        assert list(np.asarray(lines["kidney"].get_ydata())) == [0.6, 0.95] and lines["mean_dice"].get_color() == LIGHT.ink


# ---- files that cannot be used


@pytest.mark.parametrize(("change", "reason"), [
    ({"kind": np.array("films")}, "kind is 'films', expected 'slices'"),
    ({"spacing_mm": np.array([1.0])}, r"spacing_mm is \[1\.0\], expected two numbers above 0"),
    ({"spacing_mm": np.array([1.0, math.nan])}, r"spacing_mm is \[1\.0, nan\]"),
    ({"fields": np.full((3, SIDE, SIDE, 1), np.nan)}, "no voxel has a finite CT"),
    ({"true": np.full((3, SIDE, SIDE), 3, np.uint8)}, "true is 3 to 3, expected 0 to 2"),
])  # fmt: skip
def test_unusable_slices_are_refused_with_a_reason(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        loaded(tmp_path, tensors(), **change)
