"""Mutations of a file's bytes, as by disks, transfers and attackers: pure functions of a seed."""

import re

import numpy as np

EXTREMES = [b"0", b"-1", b"-0", b"1e309", b"nan", b"-inf", b"9" * 12, b"9" * 40, b"18446744073709551615", b"2147483648",
            b"0.1e-400", b"", b"..", b"\xff\xfe", b"null", b"{}", b"[]", b"true"]  # fmt: skip
INTEGERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Return ``data`` with one to four mutations."""
    for _ in range(int(rng.integers(1, 5))):
        data = MUTATIONS[rng.integers(len(MUTATIONS))](data, rng) if data else rng.bytes(3)
    return data


def _slice(data: bytes, rng: np.random.Generator, limit: int = 64) -> tuple[int, int]:
    begin = int(rng.integers(len(data)))
    return begin, min(len(data), begin + int(rng.integers(1, limit + 1)))


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    offset = int(rng.integers(len(data)))
    return data[:offset] + bytes([data[offset] ^ 1 << int(rng.integers(8))]) + data[offset + 1 :]


def overwrite(data: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _slice(data, rng)
    filler = [b"\0", b"\xff", None][rng.integers(3)]
    return data[:begin] + (rng.bytes(end - begin) if filler is None else filler * (end - begin)) + data[end:]


def truncate(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def remove(data: bytes, rng: np.random.Generator) -> bytes:
    begin, end = _slice(data, rng, max(64, len(data) // 4))
    return data[:begin] + data[end:]


def insert(data: bytes, rng: np.random.Generator) -> bytes:
    offset = int(rng.integers(len(data) + 1))
    return data[:offset] + rng.bytes(int(rng.integers(1, 65))) + data[offset:]


def splice(data: bytes, rng: np.random.Generator) -> bytes:
    """Copy a slice of the file over, or before, another part."""
    begin, end = _slice(data, rng, max(64, len(data) // 4))
    offset = int(rng.integers(len(data) + 1))
    return data[:offset] + data[begin:end] + data[offset + (end - begin) * int(rng.integers(2)) :]


def replace_integer(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace an integer of 1, 2, 4 or 8 bytes by an extreme one, in either byte order."""
    size = int(2 ** rng.integers(4))
    offset = int(rng.integers(max(1, len(data) - size)))
    order = ("little", "big")[rng.integers(2)]
    value = int(rng.choice(np.array(INTEGERS, np.uint64))) & (1 << 8 * size) - 1
    return data[:offset] + value.to_bytes(size, order) + data[offset + size :]


def replace_number(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace a decimal number by an extreme one."""
    spans = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?", data[: 1 << 16])]
    if not spans:
        return flip(data, rng)
    begin, end = spans[rng.integers(len(spans))]
    return data[:begin] + EXTREMES[rng.integers(len(EXTREMES))] + data[end:]


def change_line(data: bytes, rng: np.random.Generator) -> bytes:
    """Remove, duplicate or move a line."""
    lines = data.split(b"\n")
    chosen = lines[rng.integers(len(lines))]
    kind = rng.integers(3)
    if kind != 1:
        lines.remove(chosen)
    if kind:
        lines.insert(int(rng.integers(len(lines) + 1)), chosen)
    return b"\n".join(lines)


MUTATIONS = (flip, overwrite, truncate, remove, insert, splice, replace_integer, replace_number, change_line)
