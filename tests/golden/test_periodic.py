"""Neighbour lists against those of the reference implementation (tests/data/dimenet)."""

import numpy as np
import pytest

from hpcai.models.dimenet.periodic import count_triplets, find_reverse_edges, neighbour_list
from tests.reference_data import load_arrays

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_fifty_nearest_of_three_structures() -> None:
    """27 edges have no reverse; 38,923 triplets."""
    given = load_arrays("dimenet/small_input")
    other, centre = given["edge_index"]
    edges, triplets, lone = list[np.ndarray](), 0, 0
    for b, size in enumerate(given["natoms"]):
        own = given["batch"] == b
        found = neighbour_list(given["pos"][own], given["cell"][b], np.ones(3, bool), 6.0, 50)
        assert len(found.centre) == given["neighbors"][b]
        edges.append(np.c_[found.centre + own.argmax(), found.neighbour + own.argmax(), found.offset])
        triplets += count_triplets(found, int(size))
        lone += int((find_reverse_edges(found, int(size)) < 0).sum())
    assert sorted(np.concatenate(edges).tolist()) == sorted(np.c_[centre, other, given["cell_offsets"]].tolist())
    assert (triplets, lone) == (38923, 27)
