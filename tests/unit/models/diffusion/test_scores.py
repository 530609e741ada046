"""Scores of fields equal those of NumPy, SciPy and public packages; sums over batches equal those of one batch."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai import dist
from hpcai.errors import DataError
from hpcai.models.diffusion import scores
from hpcai.train.metrics import MetricSums
from tests.reference_data import load_arrays, load_json

ENSEMBLE, SPECTRA, POINTS, SETS = (
    {name: torch.from_numpy(array) for name, array in load_arrays(f"diffusion/{path}").items()}
    for path in ("metrics/ensemble", "metrics/spectra", "metrics/one_point", "metrics/distribution")
)
X, Y = ENSEMBLE["ensemble"], ENSEMBLE["observation"]


def check_close(actual: Any, expected: Tensor, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected.squeeze().numpy(), rtol=tolerance, atol=tolerance)


def reduce_scores(*totals: scores.ScoreSums) -> dict[str, float]:
    """Return the scores that an evaluation reports for these sums of batches."""
    sums = MetricSums()
    for total in totals:
        sums.add({"scores": total}, 1)
    return sums.reduce(dist.single_process()["replicate"], torch.device("cpu"))


def test_ensembles_have_the_scores_of_public_packages() -> None:
    check_close(scores.crps(X, Y), ENSEMBLE["crps"])
    check_close(scores.crps(X, Y, fair=True), ENSEMBLE["crps_fair"])
    results = reduce_scores(scores.ensemble_sums(X, Y))
    check_close(results["crps"], ENSEMBLE["crps_fair"].mean())
    check_close(results["coverage_90"], ENSEMBLE["coverage_90"])
    rmse, spread = (X.mean(0) - Y).square().mean().sqrt(), X.var(0).mean().sqrt()
    check_close(results["rmse"], rmse)
    check_close(results["spread_over_skill"], spread / rmse * (9 / 8) ** 0.5)
    assert scores.crps(X.float(), Y.float()).dtype == torch.float64
    check_close(scores.crps(X[:1], Y), (X[0] - Y).abs())


def test_ranks_of_ties_are_shared() -> None:
    check_close(scores.rank_histogram(X, Y), ENSEMBLE["rank_histogram"])


@pytest.mark.parametrize("case", load_json("diffusion/metrics/spectra"), ids=lambda case: str(case["shape"]))
def test_spectra_are_those_of_numpy(case: dict[str, Any]) -> None:
    field, i = SPECTRA[f"field_{case['index']}"], case["index"]
    bins = scores.shells(case["shape"], case["lengths"])
    assert torch.equal(bins.modes, SPECTRA[f"count_{i}"])
    check_close(bins.center, SPECTRA[f"k_center_{i}"])
    power = scores.spectrum(field[None], bins)[0]
    check_close(power, SPECTRA[f"power_{i}"], 1e-10)
    check_close(power * bins.modes / bins.volume, SPECTRA[f"energy_{i}"], 1e-10)
    results = reduce_scores(scores.spectrum_sums(torch.stack((field, 2 * field)), field[None], bins))
    assert results["spectrum_error"] == pytest.approx(np.log(2.5))


def test_one_point_distributions_are_those_of_numpy_and_scipy() -> None:
    a, b, edges = POINTS["a"], POINTS["b"], POINTS["edges"]
    counts = scores.histogram(a, edges)
    assert torch.equal(counts[1:-1], POINTS["count_a"]) and (counts[0], counts[-1]) == (POINTS["below_a"], POINTS["above_a"])
    assert torch.equal(scores.histogram(edges, edges)[1:-1], torch.tensor([1] * 23 + [2])), "the last edge is in the last bin"
    fine = torch.linspace(min(a.min(), b.min()) - 1, max(a.max(), b.max()) + 1, 40_001, dtype=torch.float64)
    results = reduce_scores(scores.one_point_sums(a, b, fine))
    assert POINTS["ks"].item() - 5e-3 < results["ks"] <= POINTS["ks"].item() + 1e-12
    assert reduce_scores(scores.one_point_sums(a, b, edges))["ks"] <= POINTS["ks"].item() + 1e-12


def test_distances_of_features_are_those_of_the_formulas() -> None:
    a, b = SETS["features_a"], SETS["features_b"]
    moments = b.mean(0), b.T.cov()
    check_close(reduce_scores(scores.fid_to_sums(a, *moments))["fid"], SETS["fid"], 1e-9)
    check_close(scores.frechet(a.mean(0), a.T.cov(), *moments), SETS["fid"], 1e-9)
    check_close(scores.frechet(*moments, *moments), torch.zeros(()), 1e-9)
    results = reduce_scores(scores.clip_sums(SETS["image_embedding"], SETS["text_embedding"]))
    check_close(results["clip_cosine"], SETS["clip_cosine_mean"], 1e-9)


def test_sums_over_four_batches_are_those_of_one() -> None:
    torch.manual_seed(0)
    members, truth = torch.randn(5, 8, 6, 4), torch.randn(8, 6, 4).mul(4).round().div(4)
    shells, edges = scores.shells((6, 4), (3.0, 2.0)), torch.linspace(-2, 2, 9)
    cases: list[tuple[Any, tuple[Tensor, ...], tuple[int, ...]]] = [
        (scores.ensemble_sums, (members, truth), (1, 0)),
        (partial(scores.spectrum_sums, bins=shells), (members[0], truth), (0, 0)),
        (partial(scores.one_point_sums, edges=edges), (members[0], truth), (0, 0)),
        (partial(scores.fid_to_sums, mean=torch.zeros(6), covariance=torch.eye(6)), (torch.randn(40, 6),), (0,)),
        (scores.clip_sums, (torch.randn(20, 6), torch.randn(20, 6)), (0, 0)),
    ]
    for sums, arrays, dims in cases:
        parts = zip(*(x.chunk(4, dim) for x, dim in zip(arrays, dims)))
        expected = reduce_scores(sums(*arrays))
        assert len(expected), sums
        assert reduce_scores(*(sums(*part) for part in parts)) == pytest.approx(expected, rel=1e-10, abs=1e-12), sums


def test_wrong_shapes_are_errors() -> None:
    shells = scores.shells((4, 4))
    for call, text in (
        (lambda: scores.ensemble_sums(X[:1], Y), "2 members at least"),
        (lambda: scores.spectrum(torch.zeros(2, 4, 5), shells), r"but the shells are of samples of \[4, 4\]"),
        (lambda: scores.fid_to_sums(torch.zeros(4, 3), torch.zeros(2), torch.eye(3)), r"mean is \[2\] and covariance \[3, 3\]"),
        (lambda: reduce_scores(scores.fid_to_sums(torch.zeros(1, 3), torch.zeros(3), torch.eye(3))), "FID: 1 rows"),
    ):
        with pytest.raises(DataError, match=text):
            call()
