"""Weights in MXFP4 (OCP Microscaling Formats 1.0, 2023): blocks of 32 numbers of 4 bits with a common power of two."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpcai.nn.safetensors_files import Box, LazyTensor

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1; the highest bit is the sign


@dataclass(frozen=True)
class Mxfp4View:
    """The numbers [..., 32 N] in bfloat16 of ``blocks`` [..., N, 16], two a byte, the low bits first, and ``scales`` [..., N], the
    exponents plus 127."""

    blocks: LazyTensor
    scales: LazyTensor

    @property
    def size(self) -> tuple[int, ...]:
        return (*self.scales.size[:-1], 32 * self.scales.size[-1])

    @property
    def path(self) -> Path:
        return self.blocks.path

    def __getitem__(self, box: Box) -> Tensor:
        first, last, _ = box[-1].indices(self.size[-1])
        part = slice(first // 32, -(-last // 32))
        bytes_, exponents = self.blocks[*box[:-1], part, slice(None)], self.scales[*box[:-1], part].int() - 127
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
        numbers = torch.stack((values[(bytes_ & 15).int()], values[(bytes_ >> 4).int()]), -1).flatten(-2)
        full = torch.ldexp(numbers, exponents[..., None]).flatten(-2).bfloat16()
        return full[..., first - 32 * part.start : last - 32 * part.start]
