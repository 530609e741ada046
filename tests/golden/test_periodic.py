"""Neighbour lists equal those of the reference implementation (tests/data/dimenet)."""

import numpy as np
import pytest

from hpcai.models.dimenet.periodic import count_triplets, find_reverse_edges, neighbour_list
from tests.reference_data import load_arrays

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fifty_nearest_neighbours_of_three_structures() -> None:
    stored = load_arrays("dimenet/small_input")
    other, centre = stored["edge_index"]
    edges, triplets, unpaired = list[np.ndarray](), 0, 0
    for b, size in enumerate(stored["natoms"]):
        atoms = stored["batch"] == b
        neighbours = neighbour_list(stored["pos"][atoms], stored["cell"][b], np.ones(3, bool), 6.0, 50)
        assert len(neighbours.centre) == stored["neighbors"][b]
        edges.append(np.c_[neighbours.centre + atoms.argmax(), neighbours.neighbour + atoms.argmax(), neighbours.offset])
        triplets += count_triplets(neighbours, int(size))
        unpaired += int((find_reverse_edges(neighbours, int(size)) < 0).sum())
    assert sorted(np.concatenate(edges).tolist()) == sorted(np.c_[centre, other, stored["cell_offsets"]].tolist())
    assert (triplets, unpaired) == (38923, 27)
