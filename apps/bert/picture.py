"""The figure of a run: contacts of residues, predicted from attention by a logistic regression (Rao et al. 2021), and true ones.

F families, K heads of all layers, L tokens
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, hide_axes, panel_title

FILE = "contacts.npz"
TITLE = "Contacts from attention"
LEGEND = {"lengths": "whole F", "attention": "real F K L L", "contacts": "whole F L L"}
APART, DRAWN, RIDGE, ITERATIONS = 6, 4, 1e-2, 25         # residues; families; of the regression


@dataclass
class Contacts:
    """Predicted probabilities of contacts in families that the regression was not fitted to."""

    fitted: int                                          # number of families of the regression
    predicted: list[np.ndarray]                          # [N, N] of each other family
    true: list[np.ndarray]                               # [N, N] 0, 1, or 2 unknown

    def precision(self, index: int) -> tuple[float, float]:
        """Return the precision of the N most probable pairs, and the fraction of all pairs that are in contact."""
        upper = np.triu_indices(len(self.true[index]), APART)
        true, score = self.true[index][upper], self.predicted[index][upper]
        true, score = true[true < 2], score[true < 2]
        top = np.argsort(-score, kind="stable")[: len(self.true[index])]
        return float(true[top].mean()), float(true.mean())


def read(path: Path) -> Contacts:
    content = arrays(path, LEGEND)
    maps, true = [], []
    for length, attention, contacts in zip(*(content[name] for name in LEGEND)):
        inside = slice(1, int(length) - 1)               # without [CLS] and [SEP]
        maps.append(attention[:, inside, inside].astype(float))
        true.append(contacts[inside, inside])
    half = max(len(maps) // 2, 1)
    scale = max(float(np.std(np.concatenate([each.ravel() for each in maps[:half]]))), 1e-12)
    pairs = [np.triu_indices(len(each), APART) for each in true]
    x = np.concatenate([each[:, i, j].T for each, (i, j) in zip(maps[:half], pairs)]) / scale
    y = np.concatenate([each[ij] for each, ij in zip(true[:half], pairs)])
    weights = _regression(x[y < 2], y[y < 2].astype(float))
    predicted = [1 / (1 + np.exp(-np.clip(np.tensordot(weights[1:], each / scale, 1) + weights[0], -50, 50))) for each in maps]
    return Contacts(half, predicted[half:] or predicted, true[half:] or true)


def _regression(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the intercept and the weights of a logistic regression, by Newton's method.   x [S, K], y [S] -> [K + 1]"""
    x = np.pad(x, ((0, 0), (1, 0)), constant_values=1)
    weights, ridge = np.zeros(x.shape[1]), RIDGE * len(x) * np.eye(x.shape[1])
    ridge[0, 0] = 1e-6
    for _ in range(ITERATIONS):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -50, 50)))
        weights += np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + ridge, x.T @ (y - p) - ridge @ weights)
    return weights


def caption(contacts: Contacts) -> str:
    return (f"Above the diagonal true contacts (CB within 8 angstrom), below it predictions. The regression was fitted to"
            f" {contacts.fitted} families, and predicts {len(contacts.true)} others; no structure was used in training.")


def finding(contacts: Contacts) -> Finding:
    precision, random = np.mean([contacts.precision(index) for index in range(len(contacts.true))], 0)
    number = f"{100 * precision:.0f} %"
    sentence = f"Of the most probable pairs, as many as residues, {number} are in contact; of all pairs {100 * random:.0f} %."
    return Finding(sentence, number, f"precision of the top L pairs at least {APART} apart; higher is better")


def draw(contacts: Contacts, theme: Theme) -> list[Figure]:
    count = min(DRAWN, len(contacts.true))
    figure = Figure(figsize=(WIDTH, WIDTH / max(count, 2) + 0.8))
    for index, axes in enumerate(figure.subplots(1, count, squeeze=False)[0]):
        hide_axes(axes)
        true, predicted = contacts.true[index] == 1, contacts.predicted[index]
        both = np.triu(true, APART) + np.tril(predicted, -APART)
        axes.imshow(both, theme.values, vmin=0, vmax=1)
        precision = contacts.precision(index)[0]
        panel_title(axes, f"Family {index + 1}", f"{100 * precision:.0f} % of the top {len(both)}", theme)
    return [figure]


def table(contacts: Contacts) -> Table:
    rows = [[str(number + 1), str(len(true)), *(format_measured(each) for each in contacts.precision(number))]
            for number, true in enumerate(contacts.true)]  # fmt: skip
    note = "Families that the regression was not fitted to: precision of the top L pairs, and the fraction of contacts."
    return Table("Contacts", note, ("family", "residues", "precision", "all pairs"), rows)
