"""Neighbour lists: the edges of ASE, in an order independent of rotation and precision; errors of invalid structures."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from hpcai.errors import DataError
from hpcai.models.dimenet.periodic import NeighbourList, check_atoms, neighbour_list

Structure = tuple[Any, Any, Any]


def random_structure(seed: int) -> Structure:
    """Return up to seven atoms inside and outside of a possibly skewed, thin or left-handed cell, periodic in any directions."""
    rng = np.random.default_rng(seed)
    pbc = rng.integers(0, 2, 3).astype(bool)
    while True:
        cell = rng.normal(size=(3, 3)) * rng.uniform(0.5, 6, size=(3, 1))
        volume = np.linalg.det(cell)
        if abs(volume) / np.linalg.norm(np.cross(np.roll(cell, -1, 0), np.roll(cell, -2, 0)), axis=1).max() > 0.4:
            return rng.uniform(-2, 3, size=(rng.integers(1, 8), 3)) @ cell, cell, pbc


def edges(neighbours: NeighbourList) -> list[list[int]]:
    return np.c_[neighbours.centre, neighbours.neighbour, neighbours.offset].tolist()


def fcc(cells: int, side: float = 3.6) -> Structure:
    corners = np.array(list(product(range(cells), repeat=3)), float)
    sites = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    return (corners[:, None] + sites).reshape(-1, 3) * side, np.eye(3) * side * cells, np.ones(3, bool)


@examples(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.5, 5))
def test_edges_equal_those_of_ase(seed: int, cutoff: float) -> None:
    search = pytest.importorskip("ase.neighborlist").primitive_neighbor_list
    r, cell, pbc = random_structure(seed)
    actual = neighbour_list(r, cell, pbc, cutoff)
    i, j, d, S = search("ijdS", pbc, cell, r, cutoff)
    assert sorted(edges(actual)) == sorted(np.c_[i, j, S].tolist())
    assert np.allclose(actual.vector, r[actual.neighbour] + actual.offset @ cell - r[actual.centre], atol=1e-12)
    assert np.allclose(np.sort(actual.distance), np.sort(d)) and np.allclose(np.linalg.norm(actual.vector, axis=1), actual.distance)


@pytest.mark.parametrize("row", [(0, 0, 0), (1, 0, 0), (0, 0, -9), (1e-9, 5, 0)])
def test_cell_vectors_of_free_directions_do_not_matter(row: tuple[float, ...]) -> None:
    r, pbc = np.random.default_rng(0).uniform(-8, 8, (9, 3)), np.array([True, True, False])
    cell = np.array([[4.0, 0, 0], [1, 5, 0], [0, 0, 30]])
    expected = neighbour_list(r, cell, pbc, 4.5)
    cell[2] = row
    assert edges(neighbour_list(r, cell, pbc, 4.5)) == edges(expected) and not expected.offset[:, 2].any()
    assert len(expected.centre) > 50


def test_left_handed_cells_have_the_edges_of_right_handed_ones() -> None:
    r, cell, _ = fcc(2)
    pbc = np.array([True, True, False])
    _, _, left, periodic = check_atoms(np.full(len(r), 29), r, cell[[1, 0, 2]], pbc[[1, 0, 2]])
    expected, actual = neighbour_list(r, cell, pbc, 6.0, 50), neighbour_list(r, left, periodic, 6.0, 50)
    assert np.array_equal(actual.offset[:, [1, 0, 2]], expected.offset) and np.array_equal(actual.vector, expected.vector)


@pytest.mark.parametrize("most", [None, 15, 50])
def test_ties_do_not_depend_on_rotation_or_float32(most: int | None) -> None:
    """Limits 15 and 50 split a shell (sizes 12, 6, 24, 12, 24) by index and offset, which are invariant under rotation."""
    r, cell, pbc = fcc(2, 3.61495)
    exact = neighbour_list(r, cell, pbc, 6.0, most)
    assert np.bincount(exact.centre).tolist() == [min(78, most or 78)] * len(r)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    rotation *= np.linalg.det(rotation)
    for dtype in (np.float64, np.float32):
        assert edges(neighbour_list((r @ rotation).astype(dtype), (cell @ rotation).astype(dtype), pbc, 6.0, most)) == edges(exact)
    near = [row[1:] for row, d in zip(edges(exact), exact.distance) if row[0] == 0 and d < 2.7]
    assert near == sorted(near) and len(near) == 12, "at equal distance: by neighbour, then offset"


VALID: dict[str, Any] = {"numbers": [29, 29], "positions": [[0.0, 0, 0], [2, 0, 0]], "cell": np.eye(3) * 10, "pbc": [1, 1, 0]}


@pytest.mark.parametrize(("change", "message"), [
    ({"positions": [[0, 0, 0], [np.nan, 0, 0]]}, r"positions\[1, 0\] is nan, expected at most 10000 angstrom"),
    ({"cell": np.diag([9, np.inf, 9])}, r"cell\[1, 1\] is inf, expected a finite number"),
    ({"cell": np.diag([10, 0, 10])}, "cell .* has no volume, .*unset pbc"),
    ({"positions": [[0, 0, 0], [10, -10.0005, 0]]}, r"atoms 0 and 1 \(offset \[-1, 1, 0\]\) are 5.0e-04 angstrom apart"),
    ({"cell": np.eye(3) * 1e-3}, r"2 atoms in .* have about .* neighbours within 6, expected 2e\+08 at most; check the units"),
])  # fmt: skip
def test_invalid_atoms_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^slab_7: {message}"):
        check_atoms(**VALID | change, where="slab_7", cutoff=6.0)
