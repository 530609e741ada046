"""The formats of 8 bits that tensor cores multiply."""

import torch

UNIT = 16  # tensor cores read rows of 8 bits in so many bytes
HALVINGS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The greatest number of each format is 1.75 times 2 to this power: 448, 57,344."""


def width(T: int) -> int:
    """Return the row stride of the transpose of T rows, in elements."""
    return -(-T // UNIT) * UNIT
