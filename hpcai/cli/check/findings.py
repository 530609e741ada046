"""The kinds of findings of a data check, its options and its results."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from hpcai.cli import findings
from hpcai.errors import ConfigError

KINDS: findings.FindingKinds = {
    # index.json and the names of files
    "index/none": ("warning", "is missing, so truncated, damaged or missing files are not detected; --index makes it from the "
                              "existing files"),
    "index/lost": ("error", "cannot be read: {why}; --index makes it again from the files; its own information is lost, so "
                            "compare them with their source first"),
    "index": ("error", "cannot be used: {why}; correct it by hand"),
    "index/table": ("error", "{why}: jobs refuse to start; --index writes it again"),
    "stranger": ("warning", "is not in index.json, so a loader may leave it out; move it away, or add it by hand"),
    "missing": ("error", "is in index.json and not in the folder; copy it again from its source, or remove its entry by hand"),
    "leftover": ("warning", "was left by a process that ended early, or is being written; delete it when no process writes here"),
    "empty": ("error", "{why}; make it again, or delete it"),
    # one file
    "truncated": ("error", "is truncated: has {found:,} bytes, the index says {want:,}; copy it again from its source"),
    "overlong": ("error", "is too long: has {found:,} bytes, the index says {want:,}; copy it again from its source"),
    "bit-flip": ("error", "its SHA-256 is {found:.16}..., expected {want:.16}...: bits were flipped, or it was rewritten; "
                          "copy it from its source, or if it is right, correct the index by hand"),
    "table": ("error", "is not the file from which the table of index.json was made: it was rewritten; compare it with its "
                       "source, or --index if it is right"),
    "unreadable": ("error", "{why}; copy or make it again"),
    "rows": ("error", "has {found:,} rows, expected {want:,} as {have}; make it again, or correct the index"),
    "unwritten": ("error", "{missing:,} of {chunks:,} chunks of {shape} were never written: its writer ended early; make it again"),
    "compressed": ("warning", "{why} (to {packed:.0%} of the size); each read decompresses a whole chunk of {chunk}; {advice}"),
    "layout": ("warning", "{why}; direct reads need contiguous values in the file; {advice}"),
    "layout/elsewhere": ("warning", "{why}, which are not checked; direct reads need contiguous values in the file"),
    "layout/objects": ("note", "{why}; its values are not checked"),
    "chunked": ("note", "is stored in chunks of {chunk}, so that a row is {pieces} reads instead of one; {advice}"),
    "unaligned": ("note", "begins at byte {offset:,}, not at a page boundary: each direct read of a row of {width} fetches a page "
                          "more than it needs; {advice}"),
    # values
    "nan": ("error", "{rows} of {all:,} holds NaN or infinity, expected finite values; find the cause, or leave them out"),
    "range": ("error", "{rows} of {all:,} holds values such as {value:g}, expected {low} to {high}; correct the file or the range"),
    "constant": ("warning", "{rows} of {all:,} holds nothing but {value:g}, expected values that differ; find why it is blank, or "
                            "leave it out; if it is allowed, declare it in 'fields' of index.json: \"blank\" and this value"),
    "duplicate": ("warning", "row {row} is the same sample as {place}{more}; it counts twice in every epoch: drop one of them"),
    "leak": ("error", "row {row} is the same sample as {place}{more}; memorized samples inflate the score: drop one"),
    # files against one another, against the index, and splits against one another
    "schema": ("error", "is not in this file; expected {want}, as {have}; make it again"),
    "schema/extra": ("error", "is in this file and not in {most:,} of {all:,} files; delete it there, or make the others again"),
    "schema/index": ("error", "'fields' names dataset '{name}', which no file has; correct it by hand, or make the files again"),
    "schema/splits": ("warning", "'{name}' is {found} here, expected {want} as in {first}; make both splits equal"),
    "dtype": ("error", "is {found}, expected {want}, as {have}; make it again"),
    "shape": ("error", "has rows of {found}, expected {want}, as {have}; make it again"),
    # the job and the disk
    "batch": ("error", "a batch of {batch} samples does not divide by {world} processes; expected a multiple: {near}"),
    "few": ("error", "{samples} samples are less than one batch of {batch}, or than {world} processes; use a smaller one"),
    "remainder": ("note", "{samples} samples in batches of {batch}: 'drop' leaves {left} out of each epoch, 'pad' repeats {more}"),
    "inodes": ("warning", "{files:,} files of {each} on average: opening them costs more than reading, and each takes an "
                          "inode of a quota; pack rows into files of 64 MiB and more, such as {better:,}"),
    "network": ("note", "is on {file_system}, one server for all nodes; copy it to local disks: hpcai data stage"),
    "rate": ("error", "random rows come at {best}, but {job}; the GPUs will wait: copy to local disks (hpcai data stage), read "
                      "with more threads, or make samples smaller"),
}  # fmt: skip


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
    """The results of a check."""

    directory: Path
    options: Options
    findings: tuple[Finding, ...]
    splits: tuple[Summary, ...]
    figures: Mapping[str, Any]

    def failed(self, strict: bool = False) -> bool:
        return findings.failed(self.findings, strict)

    def as_json(self) -> dict[str, Any]:
        splits = [asdict(split) for split in self.splits]
        return {"directory": str(self.directory), "splits": splits, "figures": self.figures, **findings.as_json(self.findings)}
