"""The picture of a U-Net run: slices of scans are drawn and counted as maps.npz holds them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba
from matplotlib.contour import QuadContourSet

from apps.unet3d import picture
from apps.unet3d.data import write_slices
from apps.unet3d.picture import PALETTE
from hpcai.cli.report import curves
from hpcai.cli.report.masks import OPACITY, WRONG, Masks
from hpcai.cli.report.theme import DARK, LIGHT, MARKS
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


def loaded(folder: Path, found: dict[str, torch.Tensor], **change: Any) -> Masks:
    path = folder / "maps.npz"
    write_slices(path, found, UNet3DConfig())
    if change:
        with np.load(path) as file:
            pages.saved(path, {**file, **change})
    return picture.read(path)


def outlines(axes: Any) -> dict[str, np.ndarray]:
    """Corners [corner, x y] of the outlines of each colour."""
    lines = [each for each in axes.get_children() if isinstance(each, QuadContourSet)]
    return {to_hex(each.get_edgecolor()[0]): np.concatenate([path.vertices for path in each.get_paths()]) for each in lines}


# ---- the page


def test_the_page_shows_the_slices_and_measures_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, tensors())
    run = pages.evaluated(tmp_path, "unet3d", "higher", *SCORES)
    run.settings["train"]["target"] = 0.908
    found = pages.read_by_people(run)
    # In even slices 90 of twice 100 voxels of kidney are common: 0.9. In odd ones 74 of 84 and 88; of tumour, 12 of 16 and 12.
    for words in ("3 validation slices, 48 x 48 cells of 1.2 x 1.2 mm, the part with organs; the front is on top, the patient's",
                  "All 6,912 cells of 3 slices together.", "class Dice cells predicted as background",
                  "kidney 0.8881 284 10.56 % 89.44 % 0.00 %", "tumour 0.8571 16 0.00 % 25.00 % 75.00 %",
                  "best validation mean_dice 0.9 at step 80, target 0.908"):
        assert words.replace("'", "&#x27;") in found, words
    assert pages.shows_something(picture, run.found, monkeypatch)


def test_dice_is_that_of_a_count_by_hand(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    said = tensors()
    said["true"], said["predicted"] = (torch.tensor(rng.integers(0, 3, (3, SIDE, SIDE), np.uint8)) for _ in range(2))
    said["true"][0], said["predicted"][0] = 0, 0
    found = loaded(tmp_path, said)
    assert found.scores(picture.KIND, 0).tolist() == pytest.approx([1, math.nan, math.nan], nan_ok=True)
    for n in (1, 2, None):
        true, seen = (said[name].numpy()[slice(n, None if n is None else n + 1)] for name in ("true", "predicted"))
        each = [2 * ((true == k) & (seen == k)).sum() / ((true == k).sum() + (seen == k).sum()) for k in range(3)]
        assert found.scores(picture.KIND, n).tolist() == pytest.approx(each)


# ---- the picture


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_truth_is_outlined_and_what_is_seen_is_filled_deeply_where_it_is_wrong(tmp_path: Path, theme: Any) -> None:
    said = tensors(2)
    found = loaded(tmp_path, said)
    figure = picture.draw(found, theme)
    for m, axes in enumerate(figure.axes[:2]):
        image, seen = axes.get_images()
        assert image.cmap.name == "gray" and image.get_clim() == picture.SOFT and image.origin == "upper"
        assert np.allclose(np.asarray(image.get_array()), said["fields"][m, ..., 0])
        assert axes.get_ylim()[0] > axes.get_ylim()[1]                          # the first row, the front of the body, is on top
        lines, fill = outlines(axes), np.asarray(seen.get_array())
        assert list(lines) == list(PALETTE[: m + 1])
        assert lines[PALETTE[0]].min(0).tolist() == [29.5, 9.5] and lines[PALETTE[0]].max(0).tolist() == [39.5, 19.5]
        predicted, right = (said["predicted"][m].numpy(), (said["predicted"] == said["true"])[m].numpy())
        assert np.allclose(fill[..., 3], np.where(predicted == 0, 0, np.where(right, OPACITY, WRONG)))
        assert {to_hex(color) for color in fill[predicted == 1][:, :3]} == {PALETTE[0]}
        x, y = axes.get_xlim(), axes.get_ylim()[::-1]
        assert x[0] < 29 and x[1] > 40 and y[0] < 9 and y[1] > 21 and x[1] - x[0] == y[1] - y[0] < SIDE
    titles = [axes.get_title(loc="left") for axes in figure.axes[:2]]
    assert titles == ["Slice 0: kidney 0.90, tumour –", "Slice 1: kidney 0.86, tumour 0.86"]
    labels = [label.get_text() for label in figure.legends[0].get_texts()]
    assert labels == ["kidney", "tumour", "filled: predicted", "deep: predicted, but not true", "outlined: true"]
    assert figure.axes[-1].get_xlabel() == "CT [HU]"


@pytest.mark.filterwarnings("error")
def test_odd_slices_are_drawn_too(tmp_path: Path) -> None:
    """One, nothing in it, all of one class, other units, no spacing, gaps, many classes, wide, a rectangle of voxels, no "HU"."""
    empty = dict.fromkeys(("true", "predicted"), np.zeros((1, SIDE, SIDE), np.uint8))
    for change in (
        {}, empty, {"true": np.full((1, SIDE, SIDE), 2)}, {"units": np.array(["$x"])}, {"spacing_mm": None},
        {"spacing_mm": [3, 1]}, {"classes": np.array([f"class number {k}" for k in range(9)])},
        {"fields": np.where(np.arange(SIDE)[:, None] < 9, np.nan, tensors(1)["fields"].numpy())},
        {name: values.numpy()[:, :5] for name, values in tensors(1).items()},
        {"fields": np.zeros((1, SIDE, SIDE, 1)), "units": np.array([""])},
    ):  # fmt: skip
        found = loaded(tmp_path, tensors(1), **change)
        figure = picture.draw(found, DARK)
        figure.draw_without_rendering()
        said = picture.caption(found)
        assert said.startswith("1 validation slice, ") and ("3 x 1 mm" in said) == (len(change.get("spacing_mm") or ()) == 2)
        assert figure.axes[0].get_aspect() == (3 if "3 x 1 mm" in said else 1)
    found = loaded(tmp_path, tensors(1), **empty)
    assert picture.draw(found, LIGHT).axes[0].get_xlim() == (-0.5, SIDE - 0.5)


# ---- the curves


def test_the_classes_are_drawn_with_the_mean_in_the_colours_of_the_slices(tmp_path: Path) -> None:
    loaded(tmp_path, tensors())
    run = pages.evaluated(tmp_path, "unet3d", "higher", *SCORES, model={"classes": list(UNet3DConfig().classes)})
    run.events += [{"kind": "train", "time": 1.79e9, "step": 10 * n, "epoch": n, "loss": 1 / n, "dice": 0.1 * n} for n in (1, 2, 3)]
    run.settings["train"]["target"] = 0.908
    assert run.families() == {"mean_dice": ["dice_kidney", "dice_tumour"]} and run.higher("dice_of_rain")
    for found in (run.found, None):                                             # the same before there are slices
        run.found = found
        (axes,) = curves._metric(run, "mean_dice", ["dice_kidney", "dice_tumour"], LIGHT).axes
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["dice in training, smoothed", "mean_dice", "kidney", "tumour", "target 0.908", "best 0.9"]
        for name, color, mark in zip(("kidney", "tumour"), PALETTE, MARKS):
            assert to_rgba(lines[name].get_color()) == to_rgba(color) and lines[name].get_marker() == mark
        assert list(np.asarray(lines["kidney"].get_ydata())) == [0.6, 0.95] and lines["mean_dice"].get_color() == LIGHT.ink
        assert list(np.asarray(lines["target 0.908"].get_ydata())) == [0.908] * 2
    run.settings["train"]["better"] = "lower"
    assert not run.higher("mean_dice") and not run.higher("dice_tumour")


# ---- files that cannot be used


@pytest.mark.parametrize(("change", "reason"), [
    ({"spacing_mm": np.array([1.0])}, r"spacing_mm is \[1\.0\], expected two numbers above 0"),
    ({"spacing_mm": np.array([1.0, math.nan])}, r"spacing_mm is \[1\.0, nan\]"),
    ({"spacing_mm": np.array(["a", "b"])}, r"spacing_mm is \['a', 'b'\]"),
    ({"fields": np.full((3, SIDE, SIDE, 1), np.nan)}, "no cell has a finite CT"),
    ({"true": np.full((3, SIDE, SIDE), 3, np.uint8)}, "true is 3 to 3, expected 0 to 2"),
])  # fmt: skip
def test_unusable_slices_are_refused_with_a_reason(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        loaded(tmp_path, tensors(), **change)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    loaded(tmp_path, tensors())
    pages.survives_damage(picture, tmp_path / "maps.npz")
