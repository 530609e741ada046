"""The picture of a diffusion run: scores beside a baseline with Gaussian errors, for all forms of its file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.diffusion import picture
from hpcai.cli.report.theme import LIGHT
from hpcai.errors import DataError
from hpcai.models.diffusion import scores
from tests import report_runs

SHAPES = {"maps": (4, 6, 2, 8, 12), "volumes": (2, 3, 1, 8, 8, 8), "forecasts": (3, 3, 3, 1, 8, 8)}  # N, M, [L,] C, *S
WEIGHTS = np.cos(np.linspace(-1.4, 1.4, 8))[:, None] * np.pad(np.zeros((2, 2, 4)), ((0, 0), (2, 4), (4, 4)), constant_values=1)
ABOUT = {"about_names": ["rain", "$T$"], "about_units": ["mm/h", "K"], "about_mean": [1.0, 280.0], "about_deviation": [0.5, 9.0],
         "about_transforms": ["sqrt", "none"], "about_floors": [0.0, 0.0], "about_periodic": [False, True]}  # fmt: skip


def ensembles(kind: str) -> dict[str, Any]:
    """Return the arrays of a file: truth and members are a mean and the same normal errors."""
    (n, m, *rest), rng = SHAPES[kind], np.random.default_rng(0)
    mean = rng.normal(size=(n, 1, *rest))
    every = (mean + 0.5 * rng.normal(size=(n, m + 1, *rest))).astype("f4")
    more: dict[str, Any] = {"maps": {"mean": mean[:, 0], "field": mean[:, 0, ..., ::2, ::2], "weights": WEIGHTS} | ABOUT,
                            "forecasts": {"start": every[:, 0, 0], "about_interval": np.array((6.0, "hours"))}}  # fmt: skip
    return {"truth": every[:, 0], "members": every[:, 1:], "index": np.arange(n)[::-1], **more.get(kind, {"about_floor": 0.05})}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "figures", "rows"), [("maps", 8, 2), ("volumes", 4, 1), ("forecasts", 9, 3)])
def test_all_forms_are_drawn(kind: str, figures: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = picture.read(report_runs.write_arrays(tmp_path / "a.npz", arrays := ensembles(kind)))
    assert np.array_equal(fields.truth.reshape(arrays["truth"].shape), arrays["truth"][::-1]), "in the order of index"
    assert (len(picture.draw(fields, LIGHT)), len(picture.table(fields).rows)) == (figures, rows)
    assert ("after 18 hours" in picture.finding(fields).sentence) == (kind == "forecasts")
    monkeypatch.setattr(picture, "CHANNELS", 1)
    assert report_runs.is_drawn(picture, fields, monkeypatch) and ("1 of 2 channels" in picture.caption(fields)) == (kind == "maps")


def test_a_baseline_with_gaussian_errors_is_as_good_as_members_with_these(tmp_path: Path) -> None:
    arrays = ensembles("maps")
    arrays["truth"][:, :, 2:4, 4:8] = 1e3                                          # masked
    fields = picture.read(report_runs.write_arrays(tmp_path / "a.npz", arrays))
    values, (truth, mean) = fields.score(1), (x[:, 0, 1].double() for x in (fields.truth, fields.single))
    sigma = (fields.weights[1] * (mean - truth).square()).mean().sqrt()
    dressed = scores.crps(mean + sigma * torch.special.ndtri((torch.arange(2000.0).view(-1, 1, 1, 1) + 0.5) / 2000), truth)
    assert values["dressed"] == pytest.approx(np.average(dressed.mean(0), weights=WEIGHTS[1]), rel=1e-3)
    assert values["crps"] == pytest.approx(values["dressed"], rel=0.1) and values["spread"] == pytest.approx(1, abs=0.1)
    assert fields.to_physical(0, torch.tensor([-3.0, 2.0])).tolist() == [0, 4]
    assert [axes.get_xlabel() for axes in picture.draw(fields, LIGHT)[1].axes[6:]] == ["spread and error [K]", r"\$T\$ [K]"]
    for change in ({"weights": WEIGHTS - 1}, {"about_units": ["K"]}, {"truth": arrays["truth"] * np.nan}):
        with pytest.raises(DataError, match="weights are negative|about_units has 1|not finite"):
            picture.read(report_runs.write_arrays(tmp_path / "b.npz", arrays | change))
