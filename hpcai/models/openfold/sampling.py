"""The sample of an alignment that one pass sees: rows that stand for clusters, hidden letters, what the other rows add.

Jumper et al., Nature 2021, supplement 1.2.5 to 1.2.9. S rows of an alignment, C clusters, M rows that are none, N residues.
Letters as ``residues`` numbers them, 22 is a masked one. Rows and letters are drawn; all else is a function of what was drawn.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from hpcai.config import Settings, UnitInterval
from hpcai.models.openfold.residues import MASKED, UNKNOWN

Array = NDArray[Any]

KINDS = MASKED + 1  # kinds of letters
_SUMS = 127  # the most pairs of residues that a byte can count
_TOGETHER = 32  # residues at a time: their counts fit a core's cache, and alignments of many rows need little memory


class MaskConfig(Settings):
    """Letters that the network has to guess. What the three replacements leave is for the mask letter."""

    fraction: UnitInterval = 0.15
    """share of all letters of the clusters that is hidden"""
    uniform: UnitInterval = 0.1
    """share that becomes any of the twenty residues"""
    profile: UnitInterval = 0.1
    """share that becomes a letter of the same column"""
    same: UnitInterval = 0.1
    """share that stays as it is"""

    @model_validator(mode="after")
    def _at_most_all(self) -> Self:
        if self.uniform + self.profile + self.same > 1 + 1e-9:
            raise ValueError("uniform, profile and same are shares, expected 1 at most in all")
        return self


# ---- draws


def choose(rows: int, clusters: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Rows that stand for clusters, the query first, and the others; both in random order.   [min(C, S)], [the rest]"""
    order = np.concatenate([[0], 1 + generator.permutation(rows - 1)])
    return order[:clusters], order[clusters:]


def spare(rows: int, blocks: int, share: float, generator: np.random.Generator) -> Array:
    """Rows that are left when ``blocks`` of neighbours go, ``share`` of all rows each; they may overlap. The query stays.

    Searches list relatives by likeness, so that a block is often one branch of the family (Algorithm 1).
    """
    size = int(rows * share)
    if not size:
        return np.arange(rows)
    gone = generator.integers(1, rows, blocks)[:, None] + np.arange(size)
    return np.delete(np.arange(rows), np.minimum(gone, rows - 1))


def hide(msa: Array, column: Array, cfg: MaskConfig, generator: np.random.Generator) -> tuple[Array, Array]:
    """Replaces letters, and says where it did, or chose to leave one as it was.   [C, N], profile [N, 22] -> [C, N], bool [C, N]"""
    chosen = generator.random(msa.shape) < cfg.fraction
    row, at = np.nonzero(chosen)
    kind = np.searchsorted(np.cumsum([cfg.uniform, cfg.profile, cfg.same]), generator.random(len(row)), side="right")
    ends = np.cumsum(column, 1)[at]
    drawn = (generator.random((len(row), 1)) * ends[:, -1:] >= ends[:, :-1]).sum(1)
    hidden = msa.copy()
    hidden[row, at] = np.choose(kind, [generator.integers(0, UNKNOWN, len(row)), drawn, msa[row, at], MASKED])
    return hidden, chosen


# ---- what follows from them


def profile(msa: Array) -> NDArray[np.float32]:
    """How often each letter, gaps too, stands in a column.   [S, N] -> [N, 22]"""
    return (count(msa, np.zeros(len(msa), np.intp), 1)[0, :, :MASKED] / len(msa)).astype(np.float32)


def count(rows: Array, cluster: Array, clusters: int) -> NDArray[np.intp]:
    """How many rows of a cluster have a letter at a residue.   [M, N], [M] -> [C, N, 23]"""
    found = np.empty((clusters, rows.shape[1], KINDS), np.intp)
    for first in range(0, rows.shape[1], _TOGETHER):
        some = rows[:, first : first + _TOGETHER]
        width = some.shape[1]
        index = np.arange(width) * KINDS + some
        index += (cluster * (width * KINDS))[:, None]
        counts = np.bincount(index.ravel(), minlength=clusters * width * KINDS)
        found[:, first : first + width] = counts.reshape(clusters, width, KINDS)
    return found


def nearest(clusters: Array, rows: Array) -> NDArray[np.intp]:
    """The cluster with which a row has most letters in common, the first of equals; gaps and masked letters do not count.

    [C, N] with masks, [M, N] -> [M]. Two residues are looked up at once, and sums kept in bytes: no products of one-hot rows,
    which need six to ten times as long on a CPU.
    """
    odd = clusters.shape[1] % 2
    known = np.pad(np.where(clusters > UNKNOWN, -1, clusters), ((0, 0), (0, odd)), constant_values=-1).T
    same = (np.arange(KINDS)[:, None] == known[:, None]).astype(np.uint8)  # [N, 23, C]
    letters = np.pad(rows, ((0, 0), (0, odd))).T.astype(np.int16)
    pairs = letters[::2] * KINDS + letters[1::2]  # [N / 2, M]
    total = np.zeros((len(rows), len(clusters)), np.uint16)
    for first in range(0, len(pairs), _SUMS):
        part = np.zeros(total.shape, np.uint8)
        for place in range(first, min(first + _SUMS, len(pairs))):
            table = same[2 * place][:, None] + same[2 * place + 1]  # [23, 23, C]
            part += table.reshape(-1, len(clusters)).take(pairs[place], 0)
        total += part
    return total.argmax(1)


def summarise(
    clusters: Array, deletions: Array, rows: Array, row_deletions: Array, cluster: Array
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """How often each letter stands at a residue of a cluster, its own row included, and the mean of deletions.

    [C, N] and [M, N] twice each, [M] the rows' clusters -> [C, N, 23], [C, N]
    """
    letters = count(rows, cluster, len(clusters)) + (clusters[..., None] == np.arange(KINDS))
    (number, width), some = clusters.shape, np.flatnonzero(row_deletions)
    place = cluster[some // width] * width + some % width
    deleted = np.bincount(place, row_deletions.ravel()[some], number * width).reshape(number, width) + deletions
    # The public code adds 1e-6, so that shares do not quite add up to 1.
    size = np.float32(1e-6) + (1 + np.bincount(cluster, minlength=number)).astype(np.float32)[:, None]
    return letters.astype(np.float32) / size[..., None], deleted.astype(np.float32) / size


# ---- as the network reads it


def one_hot(letters: Array, kinds: int) -> NDArray[np.float32]:
    return np.eye(kinds, dtype=np.float32)[letters]


def deletion_value(deletions: Array) -> NDArray[np.float32]:
    """A number of letters, or a mean of numbers, as 0 to 1."""
    return np.arctan(deletions.astype(np.float32) / np.float32(3)) * np.float32(2 / np.pi)


def has_deletion(deletions: Array) -> NDArray[np.float32]:
    return np.clip(deletions, 0, 1).astype(np.float32)


def msa_feat(msa: Array, deletions: Array, column: Array, mean: Array) -> NDArray[np.float32]:
    """23 letters, two of deletions, the cluster's 23 letters and its deletions.   [C, N] ..., profile [C, N, 23] -> [C, N, 49]"""
    found = np.empty((*msa.shape, 2 * KINDS + 3), np.float32)
    found[..., :KINDS] = one_hot(msa, KINDS)
    found[..., KINDS], found[..., KINDS + 1] = has_deletion(deletions), deletion_value(deletions)
    found[..., KINDS + 2 : -1], found[..., -1] = column, deletion_value(mean)
    return found


def target_feat(aatype: Array) -> NDArray[np.float32]:
    """Whether the chain is broken before a residue, which those of single chains never are, and its type.   [N] -> [N, 22]"""
    return np.pad(one_hot(aatype, UNKNOWN + 1), ((0, 0), (1, 0)))
