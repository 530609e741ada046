"""The files of a source, their shards, and the record of the files of a target."""

import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from hpcai.data.index import INDEX, TABLE
from hpcai.errors import DataError

logger = logging.getLogger(__name__)

RECORD = ".stage.json"
DATA_SUFFIXES = (".h5", ".npy", ".tfrecord")
MIN_DATA_BYTES = 1 << 20
"""Bytes. A file that is listed in an index, has one of these suffixes, or has this size (but is no index or table) is data, and is
assigned to one shard. All others are copied to all nodes."""


class SourceFile(NamedTuple):
    """A file of the source. ``shard`` is None if it is copied to every node."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str | None
    shard: int | None


def is_copy(path: Path, size: int, mtime_ns: int) -> bool:
    """Whether a complete copy of a file of this size and time is at ``path``."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (size, mtime_ns)


class Record(NamedTuple):
    """The contents of a target. ``files``: size and time in ns of files that were complete when the record was written;
    ``verified``: their SHA-256 were compared."""

    source: str
    verified: bool
    files: dict[str, tuple[int, int]]


def read_record(target: Path, source: Path) -> Record | None:
    """Return the record of ``target``, or None. Raises DataError if it is of another source."""
    path = target / RECORD
    try:
        content = json.loads(path.read_bytes())
        files = {name: (size, mtime) for name, (size, mtime) in content["files"].items()}
        record = Record(content["source"], content["verified"], files)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; repair this node's disk, or name another folder") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"{path}: not a record of staged files, or one of another version ({error!r})"
        raise DataError(f"{fault}; delete it and stage again") from error
    if record.source != str(source):
        advice = f"name another folder, or delete it with its {RECORD}"
        raise DataError(f"{target}: holds files staged from {record.source}, not from {source}; {advice}")
    return record


def staged_paths(target: str | Path, source: str | Path, check: bool = True) -> dict[Path, Path]:
    """Return the local copy of each staged file of ``source``, so that ``staged_paths(...).get(path, path)`` is the path to read.

    Keys begin with ``source`` as given. Copies that were deleted or changed since are left out, unless ``check`` is false. Raises
    DataError if nothing was staged, and for a record of another source.
    """
    target, source = Path(target), Path(source)
    record = read_record(target, source.resolve())
    if record is None:
        raise DataError(f"{target / RECORD}: not there; run hpcai data stage {source} {target} on this node, or read {source}")
    names = [name for name, stat_ in record.files.items() if not check or is_copy(target / name, *stat_)]
    if len(names) < len(record.files):
        logger.warning("%s: %d of %d staged files are gone or changed", target, len(record.files) - len(names), len(record.files))
    return {source / name: target / name for name in names}


def expand_on_node(text: str) -> str:
    """Expand ~ and environment variables of this node. Raises DataError for a user or variable that is not set."""

    def expand(part: str) -> str:
        return os.path.expanduser(os.path.expandvars(part))

    for part in re.findall(r"^~[^/]*|\$\{[^}/]*\}?|\$\w*", text):
        if expand(part) in ("", part):
            problem = "no user" if part[0] == "~" else "not set"
            raise DataError(f"{text}: {part} is {problem} on this node; set it, or name a path without it")
    if not text.strip():
        raise DataError(f"{text!r} is no name")
    return expand(text)


def assign_shards(source: str | Path, shards: int) -> dict[Path, int]:
    """Return the shard of each data file of ``source``, as in ``stage_in``."""
    source = Path(source)
    return {source / file.name: file.shard for file in scan(source.resolve(), shards) if file.shard is not None}


def scan(source: Path, shards: int) -> list[SourceFile]:
    """Return all files to be copied, by name. Raises DataError for a file that does not match its index.

    Data files are assigned to shards round robin, by folder and descending size: numbers of files differ by at most one in each
    folder and in total, and bytes in each folder by at most its largest file.
    """
    status = dict(_walk(source))
    indexed: dict[str, tuple[int, str | None]] = {}
    for name in [name for name in status if PurePosixPath(name).name == INDEX]:
        indexed |= _indexed_files(source, name)
    bad = [
        f"{source / name}: " + (f"has {status[name].st_size:,} bytes (truncated or rewritten?)" if name in status else "is missing")
        + f", {INDEX} has {size:,} bytes"
        for name, (size, _) in indexed.items() if name not in status or status[name].st_size != size
    ]  # fmt: skip
    if bad:
        more = f" (and {len(bad) - 1} more files)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0]}{more}; restore the file or prepare the data set anew; nothing was copied")
    if not status:
        raise DataError(f"{source}: holds no file to copy; name the folder of a data set")

    def is_data(name: str) -> bool:
        is_metadata = name.endswith(".json") or PurePosixPath(name).match(TABLE.format("*"))
        return name in indexed or name.endswith(DATA_SUFFIXES) or (status[name].st_size >= MIN_DATA_BYTES and not is_metadata)

    data = sorted(filter(is_data, status), key=lambda name: (PurePosixPath(name).parent, -status[name].st_size, name))
    shard = {name: number % shards for number, name in enumerate(data)}
    return [
        SourceFile(name, stat_.st_size, stat_.st_mtime_ns, indexed.get(name, (0, None))[1], shard.get(name))
        for name, stat_ in sorted(status.items())
    ]


def _walk(source: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Iterate over all files below ``source`` except hidden ones. Links are followed, also out of the tree."""

    def raise_error(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}; give this user the permission") from error

    for folder, folders, names in os.walk(source, onerror=raise_error, followlinks=True):
        folder_path = Path(folder)
        if folder_path != source and folder_path.parent.resolve().is_relative_to(folder_path.resolve()):
            raise DataError(f"{folder}: this link leads back to a folder that contains it: the tree is infinite; delete it")
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (folder_path / name for name in names if not name.startswith(".") and not name.endswith(".partial")):
            try:
                status = os.stat(path)
            except OSError as error:
                problem = "leads nowhere" if path.is_symlink() else error.strerror
                raise DataError(f"{path}: {problem}; mend or delete it") from error
            if stat.S_ISREG(status.st_mode):
                yield str(path.relative_to(source)), status
            else:
                logger.warning("%s is neither a file nor a folder and is not copied", path)


def _validate_name(name: str) -> str:
    if not name or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ValueError("expected the name of a file in the folder of the index")
    return name


class _IndexedFile(BaseModel):
    """An entry of an index. Other keys are ignored."""

    name: Annotated[str, AfterValidator(_validate_name)]
    bytes: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None


def _indexed_files(source: Path, name: str) -> dict[str, tuple[int, str | None]]:
    """Return sizes and SHA-256 of the files of an index, or nothing if ``name`` is no index."""
    path, remedy = source / name, "repair it or prepare the data set anew"
    try:
        content = json.loads(path.read_bytes())
        entries = content.get("files") if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "name" in entry for entry in entries):
            return {}
        files = TypeAdapter(list[_IndexedFile]).validate_python(entries)
    except ValidationError as error:
        first = error.errors()[0]
        number, key = first["loc"][:2]
        raise DataError(f"{path}: entry {number}: {key} {first['input']!r}: {first['msg']}; {remedy}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {remedy}") from error
    folder = PurePosixPath(name).parent
    return {str(folder / file.name): (file.bytes, file.sha256 and file.sha256.lower()) for file in files}
