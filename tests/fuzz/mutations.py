"""Mutations of a file's bytes and of its place, as by disks, transfers and attackers: pure functions of a seed."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

EXTREMES = [b"0", b"-1", b"-0", b"1e309", b"nan", b"-inf", b"9" * 12, b"9" * 40, b"18446744073709551615", b"2147483648",
            b"0.1e-400", b"", b"..", b"\xff\xfe", b"null", b"{}", b"[]", b"true"]  # fmt: skip
VALUES = [b"1000000000000000000", b"1e999", b"-1", b"0.5", b'"text"', b"[]", b"[3]", b"{}", b"null", b"true", b"NaN",
          b"[" * 200_000 + b"]" * 200_000, b'{"a":' * 200_000 + b"1" + b"}" * 200_000]  # fmt: skip
INTEGERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Return ``data`` with one to four mutations; half of the files that have keys with one or two other values and no more."""
    structured = b":" in data[:200] and bool(rng.integers(2))
    for _ in range(int(rng.integers(1, 3 if structured else 5))):
        mutation = replace_value if structured else MUTATIONS[rng.integers(len(MUTATIONS))]
        data = mutation(data, rng) if data else rng.bytes(3)
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


def replace_value(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace a value by one of another kind: in JSON (the file, a line, or the header of safetensors), or a word of other text. In
    JSON, the value may also be removed, or its key repeated."""
    begin, end = 0, len(data)
    if data[8:9] == b"{":
        begin, end = 8, 8 + int.from_bytes(data[:8], "little")
    elif not data.lstrip().startswith(b"{") or b"}\n{" in data:
        starts = [0, *(match.end() for match in re.finditer(b"\n", data[:-1]))]
        begin = starts[rng.integers(len(starts))]
        end = data.find(b"\n", begin) % (len(data) + 1)
    new = VALUES[rng.integers(len(VALUES))]
    try:
        text = _replace_node(json.loads(data[begin:end]), new, rng)
    except (ValueError, RecursionError):
        words = [match.span() for match in re.finditer(rb"(?<=[\s:,(\[])[\w.+-]+(?=\s*[\s,)\]}])", data[: 1 << 16])]
        begin, end = words[rng.integers(len(words))] if words else (0, 0)
        return data[:begin] + new + data[end:]
    return (len(text).to_bytes(8, "little") if begin == 8 else data[:begin]) + text + data[end:]


def _replace_node(content: Any, new: bytes, rng: np.random.Generator) -> bytes:
    parents = [content] if content and isinstance(content, dict | list) else []
    for parent in parents:
        parents += [x for x in (parent.values() if isinstance(parent, dict) else parent) if x and isinstance(x, dict | list)]
    if not parents:
        return new
    parent, kind = parents[rng.integers(len(parents))], rng.integers(8)
    key = [*parent][rng.integers(len(parent))] if isinstance(parent, dict) else int(rng.integers(len(parent)))
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent["<key>"] = "<value>"
    else:
        parent[key] = "<value>"
    return json.dumps(content).encode().replace(b'"<key>"', json.dumps(key).encode()).replace(b'"<value>"', new)


MUTATIONS = (flip, overwrite, truncate, remove, insert, splice, replace_integer, replace_number, change_line, *3 * [replace_value])


def displace(path: Path, kind: int) -> None:
    """Put something else in the place of a file: a FIFO, a folder, a link to nothing, or a link to the file in another folder."""
    elsewhere = path.rename(path.parent.with_name("elsewhere"))
    (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nothing"), lambda path: path.symlink_to(elsewhere))[kind](path)


def remove_any(path: Path) -> None:
    """Remove whatever is at ``path``."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
