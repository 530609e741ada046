"""CosmoFlow's samples: turned cubes, and parameter ranges and whitening from the data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.cosmoflow.data import Universes, build_loaders, open_rows, permute_and_flip, whitening_matrix
from apps.cosmoflow.settings import Config
from hpcai import config, dist
from hpcai.data import MemoryPool
from hpcai.data.splits import row_shards
from hpcai.errors import DataError
from tests.apps.universes import write_universes

MEMORY = MemoryPool()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_universes(tmp_path_factory.mktemp("data") / "universes", train=2, validation=1, rows=2)


def settings(data: Path, *overrides: str) -> Config:
    return config.load(Config, None, [f"data.directory={data}", "model.size=32", "data.batch=2", *overrides])


def test_there_are_48_turns_and_none_mixes_redshifts() -> None:
    cube = np.arange(4 * 4 * 4 * 2).reshape(4, 4, 4, 2)
    source: Any = Universes.__new__(Universes)
    source.turn = 3
    assert len({permute_and_flip(cube, *source._draw_turn(i, 0), MEMORY).tobytes() for i in range(2000)}) == 48
    for i in range(20):
        turned = permute_and_flip(cube, *source._draw_turn(i, 0), MEMORY)
        assert sorted(turned[..., 0].ravel()) == sorted(cube[..., 0].ravel())
        neighbours = {
            abs(int(a) - int(b)) for axis in range(3) for a, b in zip(turned.take(0, axis).ravel(), turned.take(1, axis).ravel())
        }
        assert neighbours == {2, 8, 32}, "neighbours stay neighbours"


def test_a_turn_is_a_pure_function_of_seed_epoch_and_index(data: Path) -> None:
    def counts(seed: int, epoch: int, index: int = 2) -> np.ndarray:
        with build_loaders(settings(data, "data.turn=true", f"train.seed={seed}"), dist.single_process()) as (training, _, _):
            return training.source.sample(index, epoch).counts

    first = counts(5, 0)
    assert np.array_equal(first, counts(5, 0))
    assert not np.array_equal(first, counts(5, 1)) and not np.array_equal(first, counts(6, 0))
    with build_loaders(settings(data), dist.single_process()) as (training, held_out, _):
        assert np.array_equal(training.source.sample(2, 0).counts, training.source.sample(2, 1).counts)
        assert held_out.source.turn is None


def test_whitened_input_has_no_covariance_and_ranges_come_with_the_data(data: Path) -> None:
    with build_loaders(settings(data, "data.whiten=true"), dist.single_process()) as (training, _, model):
        counts = np.stack([training.source.sample(i, 0).counts for i in range(4)])
    x = (np.log1p(counts.reshape(-1, 4)) - np.array(model.mean)) @ np.array(model.mix)
    np.testing.assert_allclose(np.cov(x.T), np.eye(4), atol=1e-3)
    assert model.low == (0.27, 0.72, 0.86, 63.0)
    with build_loaders(settings(data), dist.single_process()) as (_, _, model):
        assert model.mix is None
    with build_loaders(settings(data, "model.low=[0,0,0,0]", "model.high=[1,1,1,1]"), dist.single_process()) as (_, _, model):
        assert model.high == (1.0, 1.0, 1.0, 1.0)


def test_whitening_does_not_depend_on_the_signs_of_eigenvectors() -> None:
    basis = np.random.default_rng(0).standard_normal((4, 4))
    matrix = whitening_matrix(basis @ basis.T)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    np.testing.assert_allclose(matrix @ basis @ basis.T @ matrix, np.eye(4), atol=1e-9)
    assert np.isfinite(whitening_matrix(np.ones((3, 3)))).all(), "equal redshifts"


def test_parameters_that_differ_from_those_of_the_data_are_refused(data: Path) -> None:
    with pytest.raises(DataError, match=r"has the parameters \['Omega_m'"):
        build_loaders(settings(data, "model.parameters=[a,b,c,d]"), dist.single_process()).__enter__()


def test_shards_of_samples_are_those_of_their_files(data: Path) -> None:
    cfg = settings(data, "data.stage=/nowhere", "data.shards=2")
    rows = open_rows(settings(data), "train", dist.single_process())
    shard = row_shards(rows, cfg.data.shards)
    assert shard.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0]), "two files of two universes"
    with pytest.raises(DataError, match="2 shards need a multiple of 2 nodes, but the job has 1 node"):
        build_loaders(settings(data, f"data.stage={data.parent / 'own'}", "data.shards=2"), dist.single_process()).__enter__()
