"""Sample an alignment for one pass: cluster centres, masked letters, and statistics of the other rows.

Jumper et al., Nature 2021, supplement 1.2.5 to 1.2.9. S rows of an alignment, C clusters, M other rows, N residues.
Letters are numbered as in ``residues``; 22 is a masked one. Rows and letters are drawn; everything else follows from them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.models.openfold.config import MaskConfig
from hpcai.models.openfold.residues import MASKED, UNKNOWN

Array = NDArray[Any]

NUM_LETTERS = MASKED + 1
_MAX_BYTE_PAIRS = 127  # pairs of residues that a byte can count
_CHUNK = 32  # residues of a chunk: their counts fit the cache of a core, and bound the memory of large alignments


def choose_clusters(rows: int, clusters: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the rows of cluster centres, the query first, and the other rows; both in random order.   [min(C, S)], [the rest]"""
    order = np.concatenate([[0], 1 + generator.permutation(rows - 1)])
    return order[:clusters], order[clusters:]


def delete_blocks(rows: int, blocks: int, share: float, generator: np.random.Generator) -> Array:
    """Return the rows that remain after deleting ``blocks`` of neighbours, each ``share`` of all rows, but never the query.

    Blocks may overlap. Searches sort homologs by similarity, so that a block is often one branch of the family (Algorithm 1).
    """
    size = int(rows * share)
    if not size:
        return np.arange(rows)
    deleted = generator.integers(1, rows, blocks)[:, None] + np.arange(size)
    return np.delete(np.arange(rows), np.minimum(deleted, rows - 1))


def mask_msa(msa: Array, profile: Array, cfg: MaskConfig, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return masked letters, and the mask of those selected, changed or not.   [C, N], profile [N, 22] -> [C, N], bool [C, N]"""
    selected = generator.random(msa.shape) < cfg.fraction
    row, column = np.nonzero(selected)
    replacement = np.searchsorted(np.cumsum([cfg.uniform, cfg.profile, cfg.same]), generator.random(len(row)), side="right")
    ends = np.cumsum(profile, 1)[column]
    likely = (generator.random((len(row), 1)) * ends[:, -1:] >= ends[:, :-1]).sum(1)
    masked = msa.copy()
    masked[row, column] = np.choose(replacement, [generator.integers(0, UNKNOWN, len(row)), likely, msa[row, column], MASKED])
    return masked, selected


def msa_profile(msa: Array) -> NDArray[np.float32]:
    """Return the frequency of each letter, including gaps, in each column.   [S, N] -> [N, 22]"""
    return (count_letters(msa, np.zeros(len(msa), np.intp), 1)[0, :, :MASKED] / len(msa)).astype(np.float32)


def count_letters(rows: Array, cluster: Array, clusters: int) -> NDArray[np.intp]:
    """Count the rows of each cluster with a letter at a residue.   [M, N], [M] -> [C, N, 23]"""
    counts = np.empty((clusters, rows.shape[1], NUM_LETTERS), np.intp)
    for start in range(0, rows.shape[1], _CHUNK):
        chunk = rows[:, start : start + _CHUNK]
        width = chunk.shape[1]
        index = np.arange(width) * NUM_LETTERS + chunk
        index += (cluster * (width * NUM_LETTERS))[:, None]
        chunk_counts = np.bincount(index.ravel(), minlength=clusters * width * NUM_LETTERS)
        counts[:, start : start + width] = chunk_counts.reshape(clusters, width, NUM_LETTERS)
    return counts


def assign_clusters(clusters: Array, rows: Array) -> NDArray[np.intp]:
    """Return the cluster with most letters in common with each row, the first of equals; gaps and masked letters do not count.

    [C, N] with masks, [M, N] -> [M]. Pairs of residues are looked up in tables, and summed in bytes: products of one-hot rows take
    six to ten times as long on a CPU.
    """
    padding = clusters.shape[1] % 2
    letters_of_clusters = np.pad(np.where(clusters > UNKNOWN, -1, clusters), ((0, 0), (0, padding)), constant_values=-1).T
    same = (np.arange(NUM_LETTERS)[:, None] == letters_of_clusters[:, None]).astype(np.uint8)  # [N, 23, C]
    letters = np.pad(rows, ((0, 0), (0, padding))).T.astype(np.int16)
    pairs = letters[::2] * NUM_LETTERS + letters[1::2]  # [N / 2, M]
    agreement = np.zeros((len(rows), len(clusters)), np.uint16)
    for start in range(0, len(pairs), _MAX_BYTE_PAIRS):
        chunk_total = np.zeros(agreement.shape, np.uint8)
        for pair in range(start, min(start + _MAX_BYTE_PAIRS, len(pairs))):
            table = same[2 * pair][:, None] + same[2 * pair + 1]  # [23, 23, C]
            chunk_total += table.reshape(-1, len(clusters)).take(pairs[pair], 0)
        agreement += chunk_total
    return agreement.argmax(1)


def summarize_clusters(
    clusters: Array, deletions: Array, rows: Array, row_deletions: Array, cluster: Array
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the frequency of each letter at a residue of a cluster, including its centre, and the mean of deletions.

    [C, N] and [M, N] twice each, [M] the clusters of the rows -> [C, N, 23], [C, N]
    """
    letters = count_letters(rows, cluster, len(clusters)) + (clusters[..., None] == np.arange(NUM_LETTERS))
    (count, width), nonzero = clusters.shape, np.flatnonzero(row_deletions)
    index = cluster[nonzero // width] * width + nonzero % width
    deletion_mean = np.bincount(index, row_deletions.ravel()[nonzero], count * width).reshape(count, width) + deletions
    # The public code adds 1e-6, so that frequencies do not quite sum to 1.
    size = np.float32(1e-6) + (1 + np.bincount(cluster, minlength=count)).astype(np.float32)[:, None]
    return letters.astype(np.float32) / size[..., None], deletion_mean.astype(np.float32) / size


def one_hot(letters: Array, kinds: int) -> NDArray[np.float32]:
    return np.eye(kinds, dtype=np.float32)[letters]


def deletion_value(deletions: Array) -> NDArray[np.float32]:
    """Scale a deletion count, or a mean of counts, to 0 to 1."""
    return np.arctan(deletions.astype(np.float32) / np.float32(3)) * np.float32(2 / np.pi)


def has_deletion(deletions: Array) -> NDArray[np.float32]:
    return np.clip(deletions, 0, 1).astype(np.float32)


def msa_feat(msa: Array, deletions: Array, cluster_profile: Array, deletion_mean: Array) -> NDArray[np.float32]:
    """Concatenate letters, deletions, and those of the cluster.   [C, N] ..., cluster_profile [C, N, 23] -> [C, N, 49]"""
    feat = np.empty((*msa.shape, 2 * NUM_LETTERS + 3), np.float32)
    feat[..., :NUM_LETTERS] = one_hot(msa, NUM_LETTERS)
    feat[..., NUM_LETTERS], feat[..., NUM_LETTERS + 1] = has_deletion(deletions), deletion_value(deletions)
    feat[..., NUM_LETTERS + 2 : -1], feat[..., -1] = cluster_profile, deletion_value(deletion_mean)
    return feat


def target_feat(aatype: Array) -> NDArray[np.float32]:
    """Concatenate whether the chain is broken before a residue, always 0 for single chains, and its type.   [N] -> [N, 22]"""
    return np.pad(one_hot(aatype, UNKNOWN + 1), ((0, 0), (1, 0)))
