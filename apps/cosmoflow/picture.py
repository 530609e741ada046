"""The figure of a run: predicted against true cosmological parameters of the validation universes.   N universes, P parameters"""

import statistics
from pathlib import Path

import numpy as np

from hpcai.cli.report import pairs
from hpcai.cli.report.pairs import Pair
from hpcai.cli.report.picture import Finding, Table, arrays
from hpcai.errors import DataError

FILE = "predictions.npz"
TITLE = "Predicted against true"
draw = pairs.draw


def read(path: Path) -> list[Pair]:
    content = arrays(path, {"names": "text P", "units": "text P", "predicted": "real N P", "true": "real N P"})
    predicted, true = content["predicted"].astype(float), content["true"].astype(float)
    finite = np.isfinite(predicted).all(1) & np.isfinite(true).all(1)
    if not finite.any():
        raise DataError("no sample has finite predictions and truths")
    columns = zip(content["names"].tolist(), true[finite].T, predicted[finite].T, content["units"].tolist())
    return [Pair(*column) for column in columns]


def caption(results: list[Pair]) -> str:
    return (f"{len(results[0].true):,} validation samples. The baseline (dashed) predicts the mean: R² 0."
            " A perfect one lies on the diagonal: R² 1.")


def finding(results: list[Pair]) -> Finding:
    return pairs.finding(results[0], f"{results[0].name} of unseen universes is", "rms")


def table(results: list[Pair]) -> Table:
    return pairs.table(results, f"mean R² {statistics.fmean(pair.r2() for pair in results):.4f}; the constant is the mean")
