"""Settings of DLRM-dcnv2. Does not import torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from hpcai.config import PositiveFloat, PositiveInt, Settings

Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976,
    14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
HOTNESS = 3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1


class DLRMConfig(Settings):
    """The network of MLPerf by default: 26,151,671,809 parameters, of which 16,044,545 are dense."""

    dense_features: PositiveInt = 13
    """numbers of a sample"""
    rows: Sizes = ROWS
    """rows of each embedding table"""
    hotness: Sizes = HOTNESS
    """ids of a sample in each table, at most"""
    dim: PositiveInt = 128
    """columns of each table"""
    bottom: Sizes = (512, 256, 128)
    """layers of the bottom MLP; the last has dim channels"""
    cross_layers: PositiveInt = 3
    """low-rank cross layers (DCN V2)"""
    cross_rank: PositiveInt = 512
    """rank of their matrices"""
    top: Sizes = (1024, 1024, 512, 256, 1)
    """layers of the top MLP; the last has the one logit"""
    adagrad_rowwise: bool = False
    """Adagrad of the tables with one state for each row: half the memory, and another result"""
    adagrad_eps: PositiveFloat = 1e-8
    """added to the denominator of Adagrad of the tables"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.rows) != len(self.hotness):
            raise ValueError(f"rows has {len(self.rows)} entries and hotness {len(self.hotness)}; give one of each for a table")
        if (self.bottom[-1], self.top[-1]) != (self.dim, 1):
            raise ValueError(f"bottom ends with {self.bottom[-1]} channels, top with {self.top[-1]}; expected {self.dim} and 1")
        return self
