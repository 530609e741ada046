"""Neighbour lists against those of the reference implementation (tests/data/dimenet)."""

import numpy as np
import pytest
import torch

from hpcai.models.dimenet.periodic import count_triplets, neighbours, reverse
from hpcai.models.dimenet.periodic_batch import neighbours_of_batch
from tests.stored import arrays

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_fifty_nearest_of_three_structures() -> None:
    """In the reference's order too: by structure, centre and distance. 27 edges have no reverse; 38,923 triplets."""
    given = arrays("dimenet/small_input")
    other, centre = given["edge_index"]
    pbc = np.ones((3, 3), bool)
    i, j, offset = neighbours_of_batch(
        *(torch.from_numpy(array) for array in (given["pos"], given["cell"], pbc, given["batch"])), cutoff=6.0, most=50
    )
    assert sorted(np.c_[i, j, offset].tolist()) == sorted(np.c_[centre, other, given["cell_offsets"]].tolist())
    assert np.array_equal(i, centre)
    triplets = lone = 0
    for b, size in enumerate(given["natoms"]):
        found = neighbours(given["pos"][given["batch"] == b], given["cell"][b], pbc[b], 6.0, 50)
        assert len(found.centre) == given["neighbors"][b]
        triplets += count_triplets(found, int(size))
        lone += int((reverse(found, int(size)) < 0).sum())
    assert (triplets, lone) == (38923, 27)
