"""Masked tokens of packed rows, drawn anew for each epoch.   T tokens of a row, P sequences and M masked tokens of it at most"""

import numpy as np

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""the first tokens of a vocabulary"""
MASK = SPECIAL.index("[MASK]")


def max_masked(width: int, sequences: int, fraction: float) -> int:
    """Return M, the most masked tokens of a row of ``width`` tokens."""
    return int(width * fraction) + sequences


def mask_tokens(
    tokens: np.ndarray, lengths: np.ndarray, vocabulary: int, fraction: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens with masks [T], the columns of the tokens to predict [M], and the original tokens there [M], -1 beyond them.

    Of each sequence ``fraction`` of its tokens, at least one, are chosen among those that are not special. Of these 80 % become
    [MASK], 10 % a random token and 10 % stay (Devlin et al. 2018).   tokens [T], lengths [P]
    """
    result, chosen, begin = tokens.copy(), list[np.ndarray](), 0
    for length in lengths[lengths > 0]:
        candidates = begin + np.flatnonzero(tokens[begin : begin + length] >= len(SPECIAL))
        count = min(max(1, int(length * fraction)), len(candidates))
        chosen.append(np.sort(random.choice(candidates, count, replace=False)))
        begin += length
    at = np.concatenate(chosen)
    draw = random.random(len(at))
    others = random.integers(len(SPECIAL), vocabulary, len(at))
    result[at] = np.where(draw < 0.8, MASK, np.where(draw < 0.9, others, tokens[at]))
    size = max_masked(len(tokens), len(lengths), fraction)
    masked, targets = np.zeros(size, np.int64), np.full(size, -1, np.int64)
    masked[: len(at)], targets[: len(at)] = at, tokens[at]
    return result, masked, targets
