"""The picture of a CosmoFlow run: each parameter is plotted, with its errors relative to the mean."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.cosmoflow import picture
from hpcai.errors import DataError
from tests import report_runs

ARRAYS = {"names": ["a"], "units": [""], "predicted": np.zeros((3, 1)), "true": np.ones((3, 1))}


def test_the_page_lists_errors_of_every_parameter_relative_to_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = np.random.default_rng(0).uniform(-1, 1, (200, 3))
    predicted = np.stack([true[:, 0], np.full(200, true[:, 1].mean()), -true[:, 2]], axis=1)
    predicted[7, 0] = np.nan
    names = {"names": ["Omega_m", "$\\sigma{$", "H_0"], "units": ["", "", "km/s/Mpc"]}
    report_runs.write_arrays(tmp_path / "predictions.npz", names | {"predicted": predicted, "true": true})
    run = report_runs.write_evaluated_run(tmp_path, "cosmoflow", "lower", {"mae": 0.2}, {"mae": 0.1})
    text = report_runs.page_text(run)
    assert "Omega_m 199 1.0000 0 0 0.5" in text
    error = r"(0\.\d{3,4})"
    assert re.search(rf"\$\\sigma\{{\$ 199 -?0\.000\d {error} {error} \1 \2 ", text)   # a prediction of the mean
    assert re.search(r"H_0 \[km/s/Mpc\] 199 -[23]\.\d+ ", text)
    assert "Omega_m of unseen universes is predicted within 0 (rms), infinitely many times closer than predicting the mean." in text
    words = [picture.finding(run.predictions[k:]).sentence.partition("(rms), ")[2] for k in (1, 2)]
    assert words == ["no closer than predicting the mean (0.54).", "no closer than predicting the mean (0.6)."]
    assert "199 validation samples" in text                                        # one prediction is NaN
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)


@pytest.mark.parametrize(("change", "reason"), [
    ({"names": ["a", "b"]}, r"units is <U1 \(1,\), expected text \[P\] with P = 2"),
    ({"true": np.zeros((2, 1))}, r"true is float64 \(2, 1\), expected real \[N, P\] with N = 3, P = 1"),
    ({"predicted": np.full((3, 1), np.nan)}, "no sample has finite"),
])  # fmt: skip
def test_unusable_predictions_are_refused_with_a_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        picture.read(report_runs.write_arrays(tmp_path / "predictions.npz", ARRAYS | change))
