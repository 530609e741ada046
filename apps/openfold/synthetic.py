"""Random chains and alignments for benchmarks."""

import numpy as np

from hpcai.models.openfold import residues
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.structures import Chain


def random_chain(length: int, draw: np.random.Generator) -> Chain:
    """Return a chain with residues along a random walk, and atoms at random around them."""
    aatype = draw.integers(0, 20, length)
    mask = residues.ATOM37_EXISTS[aatype].astype("float32")
    positions = draw.normal(0, 2.2, (length, 1, 3)).cumsum(0) + draw.normal(0, 1.5, (length, 37, 3))
    sequence = "".join(residues.RESTYPES[kind] for kind in aatype)
    return Chain("synthetic", sequence, aatype, (positions * mask[..., None]).astype("float32"), mask, mask, 2.0, None, "none")


def random_alignment(protein: Chain, rows: int, draw: np.random.Generator) -> Alignment:
    """Return an alignment of sequences that share 30 to 90 % of the residues; 2 % of the positions have deletions."""
    shape = rows, len(protein.aatype)
    changed = draw.random(shape, np.float32) < draw.uniform(0.1, 0.7, (rows, 1))
    msa = np.where(changed, draw.integers(0, 22, shape, np.int8), protein.aatype.astype(np.int8))
    deletions = draw.integers(1, 20, shape, np.int32) * (draw.random(shape, np.float32) < 0.02)
    msa[0], deletions[0] = protein.aatype, 0
    return Alignment(msa, deletions, [f"row {number}" for number in range(rows)])
