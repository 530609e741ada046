"""Decompression of untrusted gzip files, of which a few megabytes can unpack to more than the memory of a machine."""

import gzip
from pathlib import Path

from hpcai.errors import DataError
from hpcai.json_file import open_regular, read_regular

_BLOCK, _MIN_LIMIT, _MAX_RATIO = 1 << 24, 1 << 26, 100
_MAGIC = b"\x1f\x8b"


def read_decompressed(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of ``path``, decompressed if its first bytes are gzip's, whatever its name: at most ``max_bytes``, by
    default 100 times the compressed size, and 64 MiB at least; a file that is not compressed has no default limit.

    Raises DataError for a compressed file with more content, and OSError, EOFError or zlib.error for a damaged one.
    """
    unpacked = bytearray()
    with open_regular(path) as packed:
        if packed.read(len(_MAGIC)) != _MAGIC:
            return read_regular(path, max_bytes)
        packed.seek(0)
        max_bytes = max(_MIN_LIMIT, _MAX_RATIO * path.stat().st_size) if max_bytes is None else max_bytes
        with gzip.open(packed) as file:
            while block := file.read(_BLOCK):
                unpacked += block
                if len(unpacked) > max_bytes:
                    raise DataError(f"{path}: unpacks to more than {max_bytes:,} bytes; if that is meant, unpack it first")
    return bytes(unpacked)
