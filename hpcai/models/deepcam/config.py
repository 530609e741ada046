"""Shape of DeepCAM's network and the meaning of its input and output. No torch here."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeInt, PositiveInt, Settings

VARIABLES = (
    "TMQ", "U850", "V850", "UBOT", "VBOT", "QREFHT", "PS", "PSL", "T200", "T500", "PRECT", "TS", "TREFHT", "Z1000", "Z200", "ZBOT",
)  # fmt: skip
UNITS = ("kg/m2", "m/s", "m/s", "m/s", "m/s", "kg/kg", "Pa", "Pa", "K", "K", "m/s", "K", "K", "m", "m", "m")
CLASSES = ("background", "tropical cyclone", "atmospheric river")
FREQUENCIES = (0.986267818, 0.000457871, 0.013274311)  # in the public data set
STRIDE = 16  # cells of the image per cell of the deepest features


class DeepCamConfig(Settings):
    """The network of MLPerf HPC by default: 56,454,720 parameters."""

    variables: tuple[str, ...] = VARIABLES
    """fields of the atmosphere, in the order of the channels"""
    units: tuple[str, ...] = UNITS
    classes: tuple[str, ...] = CLASSES
    """what a cell can be, in the order of the outputs"""
    divide: PositiveInt = 1
    """all widths are divided by it: 8 gives a small network of the same form"""
    middle: NonNegativeInt = 16
    """blocks between the entry and the exit flow"""
    skip: Literal["after", "before"] = "after"
    """where the decoder takes the first block's output: after its rectifier (MLPerf's reference rectifies in place) or before
    it (weights of NVIDIA's submissions)"""
    init: Literal["reference", "vendor"] = "reference"
    """first weights: kaiming_normal by fan-in in encoder and ASPP and torch's own elsewhere, or normal(0, sqrt(2/(k*k*out))) for
    every convolution (NVIDIA)"""
    frequencies: tuple[Annotated[float, Field(gt=0, lt=1)], ...] | None = FREQUENCIES
    """share of the cells that are of each class, for its weight in the loss; null: taken from the data"""
    low: tuple[float, ...] | None = None
    """least value of each variable, which the network sees as 0; null: taken from the data"""
    high: tuple[float, ...] | None = None
    """largest value of each variable, which the network sees as 1; null: taken from the data"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("units", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.variables):
                raise ValueError(f"{name} has {len(values)} entries, variables {len(self.variables)}; give one for each")
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high are given together or not at all")
        if self.low is not None and self.high is not None:
            for name, least, most in zip(self.variables, self.low, self.high):
                if not least < most:
                    raise ValueError(f"{name}: low is {least:g} and high {most:g}; low must be below high")
        if self.frequencies is not None and len(self.frequencies) != len(self.classes):
            raise ValueError(f"frequencies has {len(self.frequencies)} entries, classes {len(self.classes)}; give one for each")
        if len(self.classes) < 2:
            raise ValueError(f"classes is {self.classes}; expected at least two, the first one being what is neither")
        if len(set(self.variables)) < len(self.variables):
            raise ValueError(f"variables {self.variables} names one twice")
        return self
