"""Settings of DimeNet++, its energy reference and its loss. Does not import torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings


class ObjectiveConfig(Settings):
    """Weights of the terms of the loss. The defaults are those of MLPerf HPC: forces alone."""

    force: NonNegativeFloat = 50.0
    """weight of the sum of |dF| over the directions of an atom, in units of the network, averaged over free atoms"""
    energy: NonNegativeFloat = 0.0
    """weight of |dE|, averaged over structures; 0: energies are then determined by the forces up to a constant"""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.force or self.energy):
            raise ValueError("force and energy are both 0; set one of them above 0")
        return self


class DimeNetConfig(Settings):
    """The network of MLPerf HPC's OpenCatalyst by default, except for its angles: 1,810,182 parameters."""

    hidden: PositiveInt = 192
    """channels of a message"""
    output: PositiveInt = 192
    """channels of an atom in an output block"""
    interaction: PositiveInt = 64
    """channels of a message in the aggregation over neighbouring edges"""
    basis: PositiveInt = 8
    """channels of the bottleneck of a basis embedding"""
    blocks: PositiveInt = 3
    """interaction blocks"""
    spherical: PositiveInt = 7
    """angular functions: orders 0 to spherical - 1"""
    radial: PositiveInt = 6
    """radial functions of each order"""
    cutoff: PositiveFloat = 6.0
    """angstrom, the largest distance of neighbours"""
    most: PositiveInt | None = 50
    """nearest neighbours that are used; null: all within the cutoff, without which the energy is not smooth"""
    envelope: PositiveInt = 5
    """exponent of the polynomial that brings all basis functions smoothly to 0 at the cutoff"""
    before_skip: NonNegativeInt = 1
    """residual layers before the skip connection of a block"""
    after_skip: NonNegativeInt = 2
    """residual layers after the skip connection"""
    output_layers: NonNegativeInt = 3
    """dense layers of an output block"""
    elements: PositiveInt = 95
    """rows of the embedding: atomic numbers 0 to elements - 1"""
    angles: Literal["conservative", "detached"] = "conservative"
    """detached: forces ignore the change of angles (MLPerf HPC, and both public codes); they are then not the gradient of an energy
    """
    mean: float | None = 0.0
    """eV added to the energy of every structure; null: computed from the data"""
    scale: Annotated[float, Field(gt=0)] | None = 1.0
    """eV per unit of the network's energy, and eV/angstrom of its forces; null: computed from the data"""
    references: dict[Annotated[int, Field(ge=1, le=118)], float] = {}
    """eV added for each atom of an element, by atomic number, in the convention of the data"""
