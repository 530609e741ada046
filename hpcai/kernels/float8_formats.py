"""The FP8 formats of tensor cores."""

import torch

ALIGNMENT = 16  # tensor cores read rows of a multiple of 16 bytes
MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Exponent of the largest finite value of each format, which is 1.75 * 2^exponent: 448 and 57,344."""


def padded_width(T: int) -> int:
    """Return the row stride of the transpose of a matrix with T rows, in elements."""
    return -(-T // ALIGNMENT) * ALIGNMENT
