"""Damage to the bytes of a file, as disks, transfers and attackers do it: a pure function of a seed."""

import re

import numpy as np

EXTREMES = [b"0", b"-1", b"-0", b"1e309", b"nan", b"-inf", b"9" * 12, b"9" * 40, b"18446744073709551615", b"2147483648",
            b"0.1e-400", b"", b"..", b"\xff\xfe", b"null", b"{}", b"[]", b"true"]  # fmt: skip
WORDS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """``data`` with one to four pieces of damage."""
    for _ in range(int(random.integers(1, 5))):
        data = DAMAGE[random.integers(len(DAMAGE))](data, random) if data else random.bytes(3)
    return data


def _slice(data: bytes, random: np.random.Generator, most: int = 64) -> tuple[int, int]:
    begin = int(random.integers(len(data)))
    return begin, min(len(data), begin + int(random.integers(1, most + 1)))


def flip(data: bytes, random: np.random.Generator) -> bytes:
    at = int(random.integers(len(data)))
    return data[:at] + bytes([data[at] ^ 1 << int(random.integers(8))]) + data[at + 1 :]


def overwrite(data: bytes, random: np.random.Generator) -> bytes:
    begin, end = _slice(data, random)
    filler = [b"\0", b"\xff", None][random.integers(3)]
    return data[:begin] + (random.bytes(end - begin) if filler is None else filler * (end - begin)) + data[end:]


def truncate(data: bytes, random: np.random.Generator) -> bytes:
    return data[: int(random.integers(len(data)))]


def remove(data: bytes, random: np.random.Generator) -> bytes:
    begin, end = _slice(data, random, max(64, len(data) // 4))
    return data[:begin] + data[end:]


def insert(data: bytes, random: np.random.Generator) -> bytes:
    at = int(random.integers(len(data) + 1))
    return data[:at] + random.bytes(int(random.integers(1, 65))) + data[at:]


def splice(data: bytes, random: np.random.Generator) -> bytes:
    """A part of the file over, or before, another part."""
    begin, end = _slice(data, random, max(64, len(data) // 4))
    at = int(random.integers(len(data) + 1))
    return data[:at] + data[begin:end] + data[at + (end - begin) * int(random.integers(2)) :]


def length(data: bytes, random: np.random.Generator) -> bytes:
    """An integer of 1, 2, 4 or 8 bytes replaced by an extreme one, of either byte order."""
    size = int(2 ** random.integers(4))
    at = int(random.integers(max(1, len(data) - size)))
    order = ("little", "big")[random.integers(2)]
    value = int(random.choice(np.array(WORDS, np.uint64))) & (1 << 8 * size) - 1
    return data[:at] + value.to_bytes(size, order) + data[at + size :]


def number(data: bytes, random: np.random.Generator) -> bytes:
    """A number that is written out replaced by an extreme one."""
    found = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?", data[: 1 << 16])]
    if not found:
        return flip(data, random)
    begin, end = found[random.integers(len(found))]
    return data[:begin] + EXTREMES[random.integers(len(EXTREMES))] + data[end:]


def line(data: bytes, random: np.random.Generator) -> bytes:
    """A line removed, doubled or moved."""
    lines = data.split(b"\n")
    taken = lines[random.integers(len(lines))]
    kind = random.integers(3)
    if kind != 1:
        lines.remove(taken)
    if kind:
        lines.insert(int(random.integers(len(lines) + 1)), taken)
    return b"\n".join(lines)


DAMAGE = (flip, overwrite, truncate, remove, insert, splice, length, number, line)
