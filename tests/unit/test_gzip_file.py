"""Compressed files: decompression bombs and damaged files raise."""

import gzip
import zlib
from pathlib import Path

import pytest

from data_prep import nifti
from hpcai.errors import DataError
from hpcai.gzip_file import read_decompressed
from hpcai.models.openfold.alignments import read_alignments
from hpcai.models.openfold.structures import read_structure


@pytest.fixture
def bomb(tmp_path: Path) -> bytes:
    """Return 80 kB that decompress to 80 MB."""
    return gzip.compress(b"ATOM 1 C CA . ALA A 1\n" * (80_000_000 // 22), 9)


def test_a_decompression_bomb_raises(tmp_path: Path, bomb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nifti, "MAX_BYTES", 1 << 20)
    folder = tmp_path / "case"
    folder.mkdir()
    for path, read in (
        (tmp_path / "hits.a3m.gz", read_alignments),
        (tmp_path / "1abc.cif.gz", read_structure),
        (folder / nifti.IMAGE, lambda path: nifti.read(path.parent)),
    ):
        path.write_bytes(bomb)
        with pytest.raises(DataError, match=f"{path.name}: unpacks to more than"):
            read(path)


def test_complete_files_are_unpacked_and_damaged_ones_raise(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"abc" * 1000) + gzip.compress(b"next"))
    assert read_decompressed(path) == b"abc" * 1000 + b"next"
    with pytest.raises(DataError, match="more than 3,003 bytes"):
        read_decompressed(path, 3003)
    for damaged in (path.read_bytes()[:-6], path.read_bytes()[:20] + b"xxxx" + path.read_bytes()[24:]):
        path.write_bytes(damaged)
        with pytest.raises((EOFError, OSError, zlib.error)):
            read_decompressed(path)
