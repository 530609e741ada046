"""The picture of a U-Net run shows the slices of maps.npz and their scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.unet3d import picture
from hpcai.cli.report.masks import Masks
from hpcai.errors import DataError
from hpcai.models.unet3d import UNet3DConfig
from tests import report_runs

SIDE = 48
SCORES = ({"mean_dice": 0.4, "dice_kidney": 0.6, "dice_tumour": 0.2, "loss": 0.5},
          {"mean_dice": 0.9, "dice_kidney": 0.95, "dice_tumour": 0.85, "loss": 0.3})  # fmt: skip


def make_tensors(count: int = 3) -> dict[str, torch.Tensor]:
    """Return slices with a kidney, predicted a row too far back; in odd slices with a tumour, a column predicted as kidney."""
    rng = torch.Generator().manual_seed(0)
    fields = torch.rand((count, SIDE, SIDE, 1), generator=rng) * 383 - 79
    true = torch.zeros((count, SIDE, SIDE), dtype=torch.uint8)
    predicted = true.clone()
    true[:, 10:20, 30:40], predicted[:, 11:21, 30:40] = 1, 1
    true[1::2, 13:17, 33:37], predicted[1::2, 13:17, 34:37] = 2, 2
    return {"fields": fields, "true": true, "predicted": predicted}


def write_and_read(folder: Path, slices: dict[str, torch.Tensor], **overrides: Any) -> Masks:
    cfg = UNet3DConfig()
    about = {"variables": ["CT"], "units": ["HU"], "classes": cfg.classes, "spacing_mm": cfg.spacing_mm[1:]}
    arrays = {name: np.asarray(values) for name, values in (about | slices).items()}
    return picture.read(report_runs.write_arrays(folder / "maps.npz", arrays | overrides))


def test_the_page_shows_the_slices_and_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_and_read(tmp_path, make_tensors())
    run = report_runs.write_evaluated_run(tmp_path, "unet3d", "higher", *SCORES)
    run.settings["train"]["target"] = 0.908
    text = report_runs.page_text(run)
    # Kidney: in even slices 100 true and predicted voxels share 90, in odd ones 84 and 88 share 74. Tumour: 16 and 12 share 12.
    for entry in ("3 validation slices, 48 x 48 cells of 1.2 x 1.2 mm, the part with organs; the front is on top, the patient's",
                  "All 6,912 cells of 3 slices together.", "class Dice cells predicted as background",
                  "kidney 0.8881 284 10.56 % 89.44 % 0.00 %", "tumour 0.8571 16 0.00 % 25.00 % 75.00 %",
                  "best validation mean_dice 0.9 at step 80, target 0.908",
                  "unseen slices: kidney: Dice 0.89; tumour: Dice 0.86. 0.87 mean Dice of kidney and tumour"):
        assert entry.replace("'", "&#x27;") in text, entry
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)


def test_slices_without_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no cell has a finite CT"):
        write_and_read(tmp_path, make_tensors(), fields=np.full((3, SIDE, SIDE, 1), np.nan))
