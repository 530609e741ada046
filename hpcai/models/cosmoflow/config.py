"""Settings of CosmoFlow and of its outputs. Does not import torch: errors in settings are reported at once."""

from typing import Self

from pydantic import model_validator

from hpcai.config import PositiveInt, Rate, Settings


class CosmoFlowConfig(Settings):
    """The network of MLPerf HPC (v1.0 and later) by default: 8,907,556 parameters."""

    channels: PositiveInt = 4
    """redshifts of a universe"""
    size: PositiveInt = 128
    """edge of the cube, cells"""
    filters: PositiveInt = 32
    """output channels of the first convolution; doubled by each further one"""
    blocks: PositiveInt = 5
    """convolutions, each followed by a pooling with stride 2"""
    dropout: Rate = 0.5
    """rate of dropout after each hidden dense layer"""
    parameters: tuple[str, ...] = ("Omega_m", "sigma_8", "n_s", "H_0")
    """predicted parameters, in the order of the outputs"""
    units: tuple[str, ...] = ("", "", "", "km/s/Mpc")
    low: tuple[float, ...] | None = None
    """physical value of each parameter at output -1; null: read from the data"""
    high: tuple[float, ...] | None = None
    """physical value of each parameter at output +1; null: read from the data"""

    mean: tuple[float, ...] | None = None
    """mean of log(1 + counts) of each redshift, subtracted from the input; null: no subtraction (MLPerf HPC)"""
    mix: tuple[tuple[float, ...], ...] | None = None
    """matrix applied to the redshifts after subtraction, one row for each of them"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.size < 2**self.blocks:
            raise ValueError(f"size {self.size} cannot be halved {self.blocks} times; give at least {2**self.blocks}")
        for name in ("units", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.parameters):
                raise ValueError(f"{name} has {len(values)} entries, parameters {len(self.parameters)}; give one for each")
        for name, rows in (("mean", [self.mean]), ("mix", [self.mix, *(self.mix or ())])):
            for values in rows:
                if values is not None and len(values) != self.channels:
                    raise ValueError(f"{name} has {len(values)} entries, but there are {self.channels} channels; give one for each")
        for pair in (("low", "high"), ("mean", "mix")):
            if len({getattr(self, name) is None for name in pair}) > 1:
                raise ValueError(f"{pair[0]} and {pair[1]} must both be given, or neither")
        return self

    @property
    def edge(self) -> int:
        """Edge of the cube after the last pooling, cells."""
        return self.size >> self.blocks
