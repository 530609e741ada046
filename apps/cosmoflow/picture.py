"""The picture of a run: predicted against true cosmological parameters of the validation universes.   N universes, P parameters"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.picture import Table, arrays, panels, scatter
from hpcai.cli.report.theme import Theme, head, verbatim
from hpcai.errors import DataError
from hpcai.log import number

FILE = "predictions.npz"
TITLE = "Predicted against true"
COLUMNS = 4                                              # panels in a row


@dataclass
class Predictions:
    """What the network said about the validation universes, and what is true."""

    names: list[str]
    units: list[str]
    predicted: np.ndarray                                # [N, P]
    true: np.ndarray                                     # [N, P]

    def rmse(self, p: int) -> float:
        return float(np.sqrt(np.mean((self.predicted[:, p] - self.true[:, p]) ** 2)))

    def mae(self, p: int) -> float:
        return float(np.mean(np.abs(self.predicted[:, p] - self.true[:, p])))

    def spread(self, p: int) -> float:
        """The RMSE of a network that always gives the mean, which is the yardstick."""
        return float(np.std(self.true[:, p]))

    def r2(self, p: int) -> float:
        return 1 - (self.rmse(p) / self.spread(p)) ** 2 if self.spread(p) > 0 else math.nan


def read(path: Path) -> Predictions:
    found = arrays(path, {"names": "text P", "units": "text P", "predicted": "real N P", "true": "real N P"})
    predicted, true = found["predicted"].astype(float), found["true"].astype(float)
    finite = np.isfinite(predicted).all(1) & np.isfinite(true).all(1)
    if not finite.any():
        raise DataError("no sample has finite predictions and truths")
    return Predictions(found["names"].tolist(), found["units"].tolist(), predicted[finite], true[finite])


def caption(found: Predictions) -> str:
    return (f"{len(found.true):,} validation samples. A network that has learned nothing always gives the mean (dashed): R² 0."
            " A perfect one lies on the diagonal: R² 1.")


def draw(found: Predictions, theme: Theme) -> Figure:
    count = len(found.names)
    columns = min(count, COLUMNS)
    figure = Figure(figsize=(3.3 * columns, 3.8 * math.ceil(count / columns)))
    every = panels(figure, count, columns)
    for p, axes in enumerate(every):
        scatter(axes, np.stack((found.true[:, p], found.predicted[:, p])), "samples", ("the mean", found.true[:, p].mean()), theme)
        unit = verbatim(f" [{found.units[p]}]") if found.units[p] else ""
        axes.set(xlabel=f"true{unit}", ylabel=f"predicted{unit}" if p % columns == 0 else "")
        axes.xaxis.set_major_locator(MaxNLocator(5, prune="both"))
        said = f"R² {found.r2(p):.3f}   RMSE {found.rmse(p):.3g}  (the mean: {found.spread(p):.3g})"
        head(axes, verbatim(found.names[p]), said, theme)
    every[0].legend(loc="upper left", fontsize=8)
    return figure


def table(found: Predictions) -> Table:
    rows = []
    for p, (name, unit) in enumerate(zip(found.names, found.units)):
        errors = found.rmse(p), found.spread(p), found.mae(p)
        rows.append((f"{name} [{unit}]" if unit else name, f"{found.r2(p):.4f}", *map(number, errors)))
    overall = statistics.fmean(found.r2(p) for p in range(len(found.names)))
    head = ("parameter", "R²", "RMSE", "RMSE of the mean", "mean absolute error")
    return Table("Prediction per parameter", f"mean R² {overall:.4f}", head, rows)
