"""The kinds of findings of a data check, its options and its results."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from hpcai.cli import findings
from hpcai.errors import ConfigError

KINDS = findings.read_kinds(Path(__file__).with_name("kinds.toml"))


@dataclass(frozen=True)
class Finding(findings.Finding):
    """A fault of a file or a folder. ``row`` is the first of the rows in ``text``; ``repairable``: by ``--index``."""

    path: Path
    dataset: str | None = None
    row: int | None = None
    repairable: bool = False


def finding(
    kind: str, path: Path, dataset: str | None = None, row: int | None = None, repairable: bool = False, **fields: Any
) -> Finding:
    """Return a finding of one of ``KINDS``; ``fields`` fill in its text."""
    place = "/".join(path.parts[-2:]) + (f" '{dataset}'" if dataset else "") + ("" if row is None else f" row {row}")
    kwargs = findings.describe(KINDS, kind, row=row, **fields)
    return Finding(**kwargs, place=place, path=path, dataset=dataset, row=row, repairable=repairable)


Time = Annotated[float, Field(ge=0, lt=math.inf)]


class Options(BaseModel):
    """The options of a check. Raises ConfigError with all mistakes.

    ``quick``: Check only sizes and headers. ``ranges``: Minimum and maximum of datasets, which override those of the index.
    ``batch``: Samples per step over all ``world`` processes. ``step_time``: In seconds. ``nodes``: Nodes that share the reads.
    ``seconds``: Time to measure each read mode, 0 for none.
    """

    model_config = ConfigDict(frozen=True)

    quick: bool = False
    ranges: dict[str, tuple[float | None, float | None]] = {}
    world: PositiveInt | None = None
    batch: PositiveInt | None = None
    nodes: PositiveInt = 1
    step_time: Annotated[Time, Field(gt=0)] | None = None
    seconds: Time = 3.0
    threads: PositiveInt = 4

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as invalid:
            lines = (f"{'.'.join(map(str, error['loc'])) or 'options'}: {error['msg']}" for error in invalid.errors())
            raise ConfigError("\n".join(lines)) from invalid

    @model_validator(mode="after")
    def _check_consistency(self) -> "Options":
        if self.step_time is not None and self.batch is None:
            raise ValueError("step-time needs the samples of a step; add batch, counted over all processes")
        for name, (low, high) in self.ranges.items():
            if low is not None and high is not None and not low <= high:
                raise ValueError(f"range {name}={low:g}:{high:g}: expected the least value first")
        return self


EVALUATED = ("validation", "test")
"""Splits of which each sample is used once, in batches of any size: last_batch="keep" of ``hpcai.data.Loader``."""


def divide_into_batches(path: Path, samples: int, batch: int, world: int) -> tuple[dict[str, int], list[Finding]]:
    """Divide the samples of a split into batches, with the rest dropped, or padded by repeated samples. Return the counts, and
    findings about divisions that deadlock or surprise."""
    (batches, left), padded, results = divmod(samples, batch), -(-samples // batch), []
    counts = {"samples": samples, "batch": batch, "world": world, "batches": batches, "left_out": left, "padded_batches": padded}
    counts["repeated"] = padded * batch - samples
    if batch % world:
        nearest = [count for count in (batch // world * world, -(-batch // world) * world) if count]
        results.append(finding("batch", path, batch=batch, world=world, near=" or ".join(map(str, nearest))))
    if samples < max(world, batch):
        results.append(finding("few", path, samples=samples, batch=batch, world=world))
    elif left:
        results.append(finding("remainder", path, samples=samples, batch=batch, left=left, more=counts["repeated"]))
    return counts, results


@dataclass(frozen=True)
class Summary:
    """Figures of a split. ``verified`` files match the SHA-256 of the index."""

    name: str
    files: int
    samples: int
    bytes: int
    verified: int
    fields: Mapping[str, str]
    division: Mapping[str, int] | None


@dataclass(frozen=True)
class Outcome:
    directory: Path
    options: Options
    findings: tuple[Finding, ...]
    splits: tuple[Summary, ...]
    figures: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        splits = [asdict(split) for split in self.splits]
        return {"directory": str(self.directory), "splits": splits, "figures": self.figures, **findings.as_json(self.findings)}
