"""Settings of R-GAT. Does not import torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from hpcai.config import PositiveInt, Rate, Settings

SEPARATOR = "___"  # of PyTorch Geometric, in the name of a relation
RELATIONS = (
    "paper___cites___paper", "paper___written_by___author", "author___affiliated_to___institute", "paper___topic___fos",
    "author___rev_written_by___paper", "institute___rev_affiliated_to___author", "fos___rev_topic___paper",
    "paper___published___journal", "paper___venue___conference", "journal___rev_published___paper",
    "conference___rev_venue___paper",
)  # fmt: skip


class RGATConfig(Settings):
    """The network of MLPerf by default, with 13,115,303 parameters for the 2,983 classes and 11 relations of IGB."""

    features: PositiveInt | None = None
    """features of a node; null: read from the data, 1024 without data"""
    hidden: PositiveInt = 512
    """channels of a node after each layer, over all heads"""
    heads: PositiveInt = 4
    """attention heads"""
    layers: PositiveInt = 3
    """layers of graph attention, and hops of a sub-graph"""
    dropout: Rate = 0.2
    """dropout between layers"""
    relations: tuple[str, ...] = ()
    """relations source___name___destination between node types; empty: read from the data, those of IGB without data"""
    target: str = "paper"
    """type of the nodes to classify"""
    classes: tuple[str, ...] = ()
    """names of the classes, in the order of the outputs; empty: read from the data, or numbers"""
    num_classes: PositiveInt | None = None
    """number of classes; null: read from the data, 2983 without data"""
    slope: Annotated[float, Field(ge=0, le=1)] = 0.2
    """of the LeakyReLU of attention scores"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = len(self.classes)
        if names and self.num_classes not in (None, names):
            raise ValueError(f"num_classes is {self.num_classes}, but classes has {names} names; give one of them")
        if len(set(self.classes)) < names:
            raise ValueError(f"classes {self.classes} contains a duplicate")
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; expected a multiple of the {self.heads} heads")
        for name in self.relations:
            parts = name.split(SEPARATOR)
            if len(parts) != 3 or not all(parts) or set(name) & set(".<>"):
                raise ValueError(f"relations has {name!r}; expected source{SEPARATOR}name{SEPARATOR}destination without . < >")
        if len(set(self.relations)) < len(self.relations):
            raise ValueError(f"relations {self.relations} contains a duplicate")
        if not any(name.endswith(f"{SEPARATOR}{self.target}") for name in self.relation_names):
            raise ValueError(f"no relation ends in target {self.target!r}: {', '.join(self.relation_names)}")
        return self

    @property
    def inputs(self) -> int:
        """The number of features of a node."""
        return self.features or 1024

    @property
    def outputs(self) -> int:
        """The number of classes."""
        return len(self.classes) or self.num_classes or 2983

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.classes or tuple(map(str, range(self.outputs)))

    @property
    def relation_names(self) -> tuple[str, ...]:
        return self.relations or RELATIONS

    def needed(self) -> list[list[str]]:
        """Return the relations of each layer whose results can reach a node of the target type."""
        layers: list[list[str]] = []
        types = {self.target}
        for _ in range(self.layers):
            layers.insert(0, [name for name in self.relation_names if name.split(SEPARATOR)[2] in types])
            types = {kind for name in layers[0] for kind in name.split(SEPARATOR)[::2]}
        return layers
