"""Reader of the public CosmoFlow TFRecords, with every checksum checked. Needs the extra hpcai-suite[cosmoflow].

A record is: length (8 bytes), masked CRC-32C of the length (4), payload, masked CRC-32C of the payload (4), little endian. The
payload is a tf.train.Example whose "x" holds int16 counts as bytes [D, H, W, C] and whose "y" holds the parameters in [-1, 1].
Plain and gzip files are distinguished by content, never by name.
"""

import gzip
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from hpcai.data.layout import parse_errors
from hpcai.errors import DataError
from hpcai.lazy import import_optional

GZIP = b"\x1f\x8b\x08"
FRAME = 16                                      # bytes of a record that are not payload
MAX_RECORD = 1 << 28                            # bytes of a record; a universe of 128^3 in four redshifts has 2^24
MAX_TARGET = 1.5                                # targets are scaled to [-1, 1]; larger values mean another kind of file


def _masked_crc(data: bytes) -> int:
    crc = import_optional("google_crc32c", "reading TFRecords needs", "cosmoflow").value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _example_class() -> Any:
    """Return the class of tf.train.Example, which tfrecord.json declares without TensorFlow."""
    descriptor_pb2, descriptor_pool, json_format, message_factory = (
        import_optional(f"google.protobuf.{part}", "reading TFRecords needs protobuf of", "cosmoflow")
        for part in ("descriptor_pb2", "descriptor_pool", "json_format", "message_factory")
    )
    pool = descriptor_pool.DescriptorPool()
    declaration = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    pool.Add(json_format.Parse(declaration, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _is_header(head: bytes) -> bool:
    return len(head) >= 12 and struct.unpack("<I", head[8:12])[0] == _masked_crc(head[:8])


def _open(path: Path) -> tuple[IO[bytes], str]:
    with path.open("rb") as file:
        head = file.read(12)
    if _is_header(head):                        # also of a plain record that begins with the magic bytes of gzip
        return path.open("rb"), ""
    if head[:3] == GZIP:
        return cast(IO[bytes], gzip.open(path, "rb")), " of the decompressed file"
    begin = f"begins with bytes {head.hex(' ')}" if head else "is empty"
    raise DataError(f"{path}: {begin}, expected a TFRecord or gzip file; fetch it again, or move it away")


def _read(file: IO[bytes], size: int, path: Path, at: str) -> bytes:
    with parse_errors(path, "fetch the file again", f"damaged gzip in the record at {at}"):
        return file.read(size)


def read_payloads(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (location, payload) of every record. Raises DataError, with file and byte offset, if one is truncated or corrupt."""
    file, suffix = _open(path)
    with file:
        offset = 0
        while True:
            at = f"byte {offset}{suffix}"
            head = _read(file, 12, path, at)
            if not head:
                if offset == 0:
                    raise DataError(f"{path}: empty, expected at least one record; fetch the file again")
                return
            if len(head) < 12:
                raise DataError(f"{path}: truncated in the record at {at}: {len(head)} bytes of a header of 12; fetch it again")
            if not _is_header(head):
                raise DataError(f"{path}: wrong checksum of the length in the record at {at}: corrupt; fetch the file again")
            (length,) = struct.unpack("<Q", head[:8])
            if length > MAX_RECORD:
                text = f"{length:,} bytes, expected at most {MAX_RECORD:,}"
                raise DataError(f"{path}: the header of the record at {at} has {text}; fetch the file again")
            body = _read(file, length + 4, path, at)
            if len(body) < length + 4:
                text = f"{len(body)} bytes after the header, expected {length + 4}"
                raise DataError(f"{path}: truncated in the record at {at}: {text}; fetch the file again")
            payload = body[:-4]
            if struct.unpack("<I", body[-4:])[0] != _masked_crc(payload):
                raise DataError(f"{path}: wrong checksum of the payload in the record at {at}: corrupt; fetch the file again")
            yield at, payload
            offset += length + FRAME


def read_samples(path: Path, channels: int) -> Iterator[tuple[str, NDArray[np.int16], NDArray[np.float32]]]:
    """Yield (location, counts [D, H, W, C] with D = H = W from the size, target [P]) of every record."""
    for at, payload in read_payloads(path):
        where = f"{path}: record at {at}"
        example = _example_class()()
        with parse_errors(where, "is it a CosmoFlow file?", "not a tf.train.Example, although its checksum is right"):
            example.ParseFromString(payload)
        features = example.features.feature
        if len(features["x"].bytes_list.value) != 1 or not features["y"].float_list.value:
            raise DataError(f"{where}: features {sorted(features)}, expected bytes 'x' and floats 'y'; is it a CosmoFlow file?")
        raw = features["x"].bytes_list.value[0]
        edge = round((len(raw) / 2 / channels) ** (1 / 3))
        if edge < 1 or edge**3 * 2 * channels != len(raw):
            raise DataError(f"{where}: {len(raw)} bytes are no cube of {channels} int16 channels; see --channels")
        target = np.array(features["y"].float_list.value, np.float32)
        check_target(target, where)
        counts = np.frombuffer(raw, "<i2").reshape(edge, edge, edge, channels).astype(np.int16, copy=False)
        if counts.min() < 0:
            raise DataError(f"{where}: a count of {counts.min()}, expected none below 0; these are no particle counts")
        yield where, counts, target


def check_target(target: NDArray[np.float32], where: str) -> None:
    if not (np.abs(target) <= MAX_TARGET).all():     # also refuses NaN
        raise DataError(f"{where}: target {target.tolist()}, expected finite numbers within [-{MAX_TARGET}, {MAX_TARGET}]")
