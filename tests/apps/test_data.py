"""CosmoFlow's samples: turned cubes, ranges and whitening from the data."""

from pathlib import Path

import numpy as np
import pytest

from apps.cosmoflow.data import Universes, turned, universes, whitening
from apps.cosmoflow.settings import Config
from hpcai import config, dist
from hpcai.errors import DataError
from tests.apps.universes import make


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("data") / "universes", train=2, validation=1, rows=2)


def settings(data: Path, *words: str) -> Config:
    return config.load(Config, None, [f"data.directory={data}", "model.size=32", "data.batch=2", *words])


def test_there_are_48_turns_and_each_keeps_the_redshifts_apart() -> None:
    cube = np.arange(4 * 4 * 4 * 2).reshape(4, 4, 4, 2)
    seen = {turned(cube, np.random.default_rng(i)).tobytes() for i in range(2000)}
    assert len(seen) == 48
    for i in range(20):
        once = turned(cube, np.random.default_rng(i))
        assert sorted(once[..., 0].ravel()) == sorted(cube[..., 0].ravel())
        neighbours = {
            abs(int(a) - int(b)) for axis in range(3) for a, b in zip(once.take(0, axis).ravel(), once.take(1, axis).ravel())
        }
        assert neighbours == {2, 8, 32}, "neighbours stay neighbours"


def test_a_turn_is_a_pure_function_of_seed_epoch_and_index(data: Path) -> None:
    model = settings(data).model
    one, same, other = (Universes(data / "train", model, turn) for turn in (5, 5, 6))
    indices = np.arange(4)
    first = one.batch(indices, 0).counts.numpy()
    assert np.array_equal(first, same.batch(indices, 0).counts.numpy())
    assert np.array_equal(first[2:], same.batch(indices[2:], 0).counts.numpy()), "alone or in a batch"
    assert not np.array_equal(first, one.batch(indices, 1).counts.numpy())
    assert not np.array_equal(first, other.batch(indices, 0).counts.numpy())
    plain = Universes(data / "train", model, None)
    assert np.array_equal(plain.batch(indices, 0).counts.numpy(), plain.batch(indices, 1).counts.numpy())


def test_whitened_input_has_no_covariance_and_ranges_come_with_the_data(data: Path) -> None:
    training, _, model = universes(settings(data, "data.whiten=true"), dist.alone())
    batch = training.source.batch(np.arange(4), 0)
    x = (np.log1p(batch.counts.numpy().reshape(-1, 4)) - np.array(model.mean)) @ np.array(model.mix)
    np.testing.assert_allclose(np.cov(x.T), np.eye(4), atol=1e-3)
    assert model.low == (0.27, 0.72, 0.86, 63.0)
    assert universes(settings(data), dist.alone())[2].mix is None
    given = settings(data, "model.low=[0,0,0,0]", "model.high=[1,1,1,1]")
    assert universes(given, dist.alone())[2].high == (1.0, 1.0, 1.0, 1.0)


def test_whitening_is_one_matrix_whatever_the_signs_of_the_eigenvectors() -> None:
    basis = np.random.default_rng(0).standard_normal((4, 4))
    matrix = whitening(basis @ basis.T)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    np.testing.assert_allclose(matrix @ basis @ basis.T @ matrix, np.eye(4), atol=1e-9)
    assert np.isfinite(whitening(np.ones((3, 3)))).all(), "redshifts that are all the same"


def test_other_parameters_than_those_of_the_data_are_refused(data: Path) -> None:
    with pytest.raises(DataError, match=r"holds the parameters \['Omega_m'"):
        universes(settings(data, "model.parameters=[a,b,c,d]"), dist.alone())
