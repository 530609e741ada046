"""Panels and tables of predicted and true values."""

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.colors import to_rgb

from hpcai.cli.report.pairs import MAX_POINTS, Pair, draw, finding, table
from hpcai.cli.report.theme import DARK, LIGHT
from tests.report_runs import subtitle


def pair(count: int, **kwargs: Any) -> Pair:
    rng = np.random.default_rng(0)
    true = rng.normal(size=count) * rng.lognormal(-2, 1.5, count)
    return Pair("$odd", true, 0.5 * true, "eV", **kwargs)


@pytest.mark.parametrize(("theme", "count", "kwargs"), [
    (LIGHT, 30, {}), (DARK, MAX_POINTS + 1, {}), (LIGHT, 300, {"linear": 0.1, "constant": ("nothing", 0.0)}),
])  # fmt: skip
def test_every_sample_is_drawn_with_true_on_x_and_predicted_on_y(theme: Any, count: int, kwargs: dict[str, Any]) -> None:
    samples = pair(count, **kwargs)
    (figure,) = draw([samples], theme)
    (axes,) = figure.axes
    diagonal, dashed = axes.get_lines()
    assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata()) and axes.get_xlim() == axes.get_ylim()
    name, constant = kwargs.get("constant", ("the mean", samples.true.mean()))
    assert np.asarray(dashed.get_ydata()) == pytest.approx([constant] * 2) and dashed.get_label() == name
    mae = np.abs(samples.true / 2).mean()
    assert subtitle(axes).endswith(f"MAE {mae:.3g} ({name}: {np.abs(samples.true - constant).mean():.3g})")
    assert axes.get_xscale() == ("asinh" if kwargs else "linear") and axes.get_title(loc="left") == "\\$odd"
    artists = {type(artist): artist for artist in axes.get_children()}
    if count > MAX_POINTS or kwargs:
        mesh = artists[QuadMesh]
        edges, counts = mesh.get_coordinates()[0, :, 0], np.zeros(mesh.get_array().shape)
        np.add.at(counts, tuple(np.searchsorted(edges, each) - 1 for each in (samples.predicted, samples.true)), 1)
        assert (np.ma.filled(mesh.get_array(), 0) == counts).all() and counts.sum() == count
        assert np.abs(np.subtract(mesh.cmap(0.0)[:3], to_rgb(theme.paper))).max() > 0.2
    else:
        assert np.allclose(artists[PathCollection].get_offsets(), np.stack((samples.true, samples.predicted), 1))
    figure.draw_without_rendering()


def test_the_table_has_errors_and_those_of_the_baseline() -> None:
    rows = table([Pair("a", np.array([1.0, 3.0]), np.array([1.0, 2.0])), Pair("b", np.ones(2), np.zeros(2), "K")], "caption").rows
    assert [*rows[0]] == ["a", "2", "0.5000", "0.7071", "0.5", "1", "1"]
    assert finding(pair(30), "$odd is", "rms").sentence.endswith(" eV (rms), 1.9 times closer than predicting the mean.")
    constant = Pair("c", np.array([1.0, 3.0]), np.array([1.0, 2.0]), constant=("nothing", 0.0))
    assert [*table([constant]).rows[0]][2:] == ["0.9000", "0.7071", "0.5", "2.236", "2"]
    assert rows[1][0] == "b [K]" and rows[1][2] == "nan" and math.isnan(Pair("b", np.ones(2), np.zeros(2)).r2())


@pytest.mark.filterwarnings("error")
def test_odd_values_and_many_panels_are_drawn_too() -> None:
    odd = [Pair("one", np.ones(1), np.ones(1)), Pair("zeros", np.zeros(9), np.zeros(9), linear=1.0),
           Pair("far", np.arange(4.0), np.array([0, 1e30, 0, 0]), linear=0.1), *[pair(5)] * 3]  # fmt: skip
    figures = draw(odd, DARK)
    for figure in figures:
        figure.draw_without_rendering()
    assert len(figures) == len(odd)
