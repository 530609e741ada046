"""Settings of DeepCAM, its input and its output. Does not import torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeInt, PositiveInt, Settings

VARIABLES = (
    "TMQ", "U850", "V850", "UBOT", "VBOT", "QREFHT", "PS", "PSL", "T200", "T500", "PRECT", "TS", "TREFHT", "Z1000", "Z200", "ZBOT",
)  # fmt: skip
UNITS = ("kg/m2", "m/s", "m/s", "m/s", "m/s", "kg/kg", "Pa", "Pa", "K", "K", "m/s", "K", "K", "m", "m", "m")
CLASSES = ("background", "tropical cyclone", "atmospheric river")
FREQUENCIES = (0.986267818, 0.000457871, 0.013274311)  # in the public data set
STRIDE = 16  # pixels of the map per pixel of the deepest features


class DeepCamConfig(Settings):
    """The network of MLPerf HPC by default: 56,454,720 parameters."""

    variables: tuple[str, ...] = VARIABLES
    """fields of the atmosphere, in the order of the channels"""
    units: tuple[str, ...] = UNITS
    classes: tuple[str, ...] = CLASSES
    """classes of a pixel, in the order of the outputs"""
    divide: PositiveInt = 1
    """divisor of all widths: 8 gives a small network of the same form"""
    middle: NonNegativeInt = 16
    """blocks between the entry and the exit flow"""
    skip: Literal["after", "before"] = "after"
    """input of the decoder from the first block: after its ReLU (MLPerf's reference applies ReLU in place) or before it (weights of
    NVIDIA's submissions)"""
    init: Literal["reference", "vendor"] = "reference"
    """initial weights: kaiming_normal by fan-in in encoder and ASPP and torch's default elsewhere, or normal(0, sqrt(2/(k*k*out)))
    for every convolution (NVIDIA)"""
    frequencies: tuple[Annotated[float, Field(gt=0, lt=1)], ...] | None = FREQUENCIES
    """fraction of pixels of each class, for its weight in the loss; null: read from the data"""
    low: tuple[float, ...] | None = None
    """minimum of each variable, scaled to 0 for the network; null: read from the data"""
    high: tuple[float, ...] | None = None
    """maximum of each variable, scaled to 1 for the network; null: read from the data"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("units", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.variables):
                raise ValueError(f"{name} has {len(values)} entries, variables {len(self.variables)}; give one for each")
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high must both be given, or neither")
        if self.low is not None and self.high is not None:
            for name, least, most in zip(self.variables, self.low, self.high):
                if not least < most:
                    raise ValueError(f"{name}: low is {least:g} and high {most:g}; low must be below high")
        if self.frequencies is not None and len(self.frequencies) != len(self.classes):
            raise ValueError(f"frequencies has {len(self.frequencies)} entries, classes {len(self.classes)}; give one for each")
        if len(self.classes) < 2:
            raise ValueError(f"classes is {self.classes}; expected at least two, the first of them background")
        if len(set(self.variables)) < len(self.variables):
            raise ValueError(f"variables {self.variables} contains a duplicate")
        return self
