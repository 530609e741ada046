"""Files in gzip that may come from anybody: a few megabytes can unpack to more than a machine holds."""

import gzip
from pathlib import Path

from hpcai.errors import DataError

_BLOCK, _LEAST, _TIMES = 1 << 24, 1 << 26, 100


def gunzip(path: Path, most: int | None = None) -> bytes:
    """What ``path`` unpacks to: at most ``most`` bytes, by default 100 times its own size and 64 MiB where that is more.

    Raises DataError for a file that holds more, and OSError, EOFError or zlib.error for a damaged one.
    """
    most = max(_LEAST, _TIMES * path.stat().st_size) if most is None else most
    found = bytearray()
    with gzip.open(path) as file:
        while block := file.read(_BLOCK):
            found += block
            if len(found) > most:
                raise DataError(f"{path}: unpacks to more than {most:,} bytes; if that is meant, unpack it first")
    return bytes(found)
