"""Entries of an index of files."""

from typing import Annotated

from pydantic import BaseModel, Field

_Size = Annotated[int, Field(ge=0, lt=1 << 53)]


class Entry(BaseModel):
    """A data file, directly in the folder of the index."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$", max_length=255)]
    rows: Annotated[int, Field(ge=1, lt=1 << 48)]
    bytes: _Size


class TableEntry(BaseModel):
    """The table of file layouts (``hpcai.data.table``)."""

    name: Annotated[str, Field(pattern=r"^index-[0-9a-f]{8}\.safetensors$")]
    bytes: _Size
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
