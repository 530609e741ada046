"""JSON that other programs wrote: bounded in size and depth, with errors of one line that name the file and its key."""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpcai.errors import CheckpointError, ConfigError, DataError, HpcaiError

MAX_BYTES = 256 << 20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a FIFO, without waiting for its writer, or another kind of file."""
    file: BinaryIO = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(0, "is no regular file")
    return file


def read_regular(path: Path, max_bytes: int | None = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError for another kind of file, and if it has more bytes."""
    with open_regular(path) as file:
        if max_bytes is not None and (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(0, f"has {size:,} bytes, more than {max_bytes:,}")
        return file.read()


def read_object(path: Path, expected: str, error: type[HpcaiError] = CheckpointError) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ``error``, which says that ``expected`` was expected."""
    try:
        text = read_regular(path)
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); expected {expected}") from problem
    return parse_object(text, str(path), expected, error)


def parse_object(text: str | bytes, where: str, expected: str, error: type[HpcaiError] = CheckpointError) -> dict[str, Any]:
    """Return the JSON object in ``text``, the content of ``where``. Raises ``error`` if it is no object or nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else problem
        raise error(f"{where}: not JSON ({reason}); expected {expected}") from None
    if not isinstance(value, dict):
        raise error(f"{where}: a JSON {type(value).__name__}; expected {expected}")
    return value


def read_json_lines(path: Path, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line that is not blank. Raises DataError with the number of a line that is no JSON object."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, parse_object(line, f"{path}: line {number}", expected, DataError)


def read_text(path: Path) -> str:
    """Return the content of a file in UTF-8. Raises DataError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from problem


def check_relative(name: str, where: object, error: type[HpcaiError] = CheckpointError) -> str:
    """Return the name of a file in the folder of ``where``. Raises ``error`` if it leads out of this folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise error(f"{where}: names {name!r}, a file outside its folder; fetch or save the folder again")
    return name


@contextmanager
def check_fields(
    where: object, expected: str, error: type[HpcaiError] = CheckpointError, keys: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Context manager for code that reads the fields of a JSON object. Raises ``error`` for a missing key or a value of another
    type, and ConfigError for values that a settings class refuses. ``keys``: Keys of the object, by names of settings."""
    from pydantic import ValidationError

    from hpcai.schema import format_first_error

    try:
        yield
    except HpcaiError:
        raise
    except ValidationError as problem:
        name, colon, reason = format_first_error(problem).partition(": ")
        raise ConfigError(f"{where}: {(keys or {}).get(name, name)}{colon}{reason}") from problem
    except KeyError as problem:
        raise error(f"{where}: has no {problem}; expected {expected}") from problem
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, re.error) as problem:
        raise error(f"{where}: {problem}; expected {expected}") from problem
