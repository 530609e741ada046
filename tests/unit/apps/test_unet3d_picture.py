"""The picture of a U-Net run: slices of scans are drawn and counted as maps.npz holds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.unet3d import picture
from apps.unet3d.data import write_slices
from hpcai.cli.report.masks import Masks
from hpcai.errors import DataError
from hpcai.models.unet3d import UNet3DConfig
from tests import report_runs

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
            report_runs.write_arrays(path, {**file, **change})
    return picture.read(path)


# ---- the page


def test_the_page_shows_the_slices_and_measures_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, tensors())
    run = report_runs.write_evaluated_run(tmp_path, "unet3d", "higher", *SCORES)
    run.settings["train"]["target"] = 0.908
    found = report_runs.page_text(run)
    # In even slices 90 of twice 100 voxels of kidney are common: 0.9. In odd ones 74 of 84 and 88; of tumour, 12 of 16 and 12.
    for words in ("3 validation slices, 48 x 48 cells of 1.2 x 1.2 mm, the part with organs; the front is on top, the patient's",
                  "All 6,912 cells of 3 slices together.", "class Dice cells predicted as background",
                  "kidney 0.8881 284 10.56 % 89.44 % 0.00 %", "tumour 0.8571 16 0.00 % 25.00 % 75.00 %",
                  "best validation mean_dice 0.9 at step 80, target 0.908"):
        assert words.replace("'", "&#x27;") in found, words
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)


# ---- files that cannot be used


@pytest.mark.parametrize(("change", "reason"), [
    ({"spacing_mm": np.array([1.0])}, r"spacing_mm is \[1\.0\], expected two numbers above 0"),
    ({"fields": np.full((3, SIDE, SIDE, 1), np.nan)}, "no cell has a finite CT"),
])  # fmt: skip
def test_unusable_slices_are_refused_with_a_reason(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        loaded(tmp_path, tensors(), **change)
