"""Images or latents with their captions, in the forms in which such sets are published, each sample by itself.

    a folder            NAME.png .jpg .jpeg .webp .npy at any depth; captions are NAME.txt beside them
    *.tar               webdataset: members KEY.png and so on, KEY.txt
                        KEY.npy, KEY.txt: MLPerf's Stable Diffusion, moments float32 [1, 2L, h, w]
    *.arrow             MLPerf's Flux.1: __key__, mean, logvar [L, h, w], t5_encodings [N, J], clip_encodings [J'], timestep

Each array of MLPerf's Flux.1 is the bytes of a .npy of uint16, the upper halves of float32: bfloat16. Arrow files are those that
datasets.save_to_disk writes: a stream, named in state.json.

L channels of a latent   h w its places   N tokens of J numbers   J' numbers of a text as a whole
"""

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from data_prep import store
from data_prep.extras import import_extra
from hpcai.errors import ConfigError, DataError, HpcaiError

Array = NDArray[Any]
Entry = dict[str, Any]

STATE = "state.json"
PICTURES = ("png", "jpg", "jpeg", "webp", "npy")
CHUNK = 4096                                    # images of a folder that are listed together
AGAIN = "copy or make it again, or leave it out"
COLUMNS = {"mean": "mean", "logvar": "logvar", "t5_encodings": "tokens", "clip_encodings": "pooled"}


@dataclass(frozen=True)
class Shard:
    """A part of a source: a tar, a table, or some images of a folder."""

    path: Path
    names: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "images" if self.names else "tar" if self.path.suffix == ".tar" else "table"


@dataclass
class Sample:
    """What a source has of a sample. ``image`` is a file, its bytes, or uint8 [H, W, 3]; moments [2L, h, w], tokens [N, J], pooled
    [J'] are floating numbers."""

    name: str
    caption: str | None = None
    image: Path | bytes | Array | None = None
    moments: Array | None = None
    tokens: Array | None = None
    pooled: Array | None = None
    level: int | None = None


# ---- which samples there are


def shards(folder: Path) -> list[Shard]:
    """All parts of a source, in order. Raises ConfigError for a folder that holds nothing of use."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; SOURCE is a folder of images, of .tar, or of .arrow files")
    saved = [folder] if (folder / STATE).is_file() else sorted(path.parent for path in folder.glob(f"*/{STATE}"))
    if saved:
        return [Shard(one / name) for one in saved for name in _saved(one / STATE)]
    for ending in (".tar", ".arrow"):           # tables beside tars tell of those
        if found := sorted(path for path in folder.rglob(f"*{ending}") if not path.name.startswith(".")):
            return [Shard(path) for path in found]
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix[1:].lower() in PICTURES)
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        raise ConfigError(f"{folder}: holds no image ({', '.join(PICTURES)}), no .tar or .arrow; name another SOURCE")
    return [Shard(folder, tuple(names[start : start + CHUNK])) for start in range(0, len(names), CHUNK)]


def _saved(path: Path) -> list[str]:
    try:
        return [str(one["filename"]) for one in store.read_json(path)["_data_files"]]
    except (LookupError, TypeError) as problem:
        raise DataError(f"{path}: no _data_files with a filename ({problem!r}); {AGAIN}") from None


def listing(shard: Shard) -> dict[str, Any]:
    """The samples of a shard, so that those who read some of them need not look for them."""
    found = list(_entries(shard))
    if not found:
        raise DataError(f"{shard.path}: holds no sample; leave it out")
    return {"entries": found}


def entries_of(path: Path, numbers: Sequence[int]) -> list[Entry]:
    """Some samples of a listing."""
    found = store.read_json(path)["entries"]
    return [found[number] for number in numbers]


def _entries(shard: Shard) -> Iterator[Entry]:
    if shard.kind == "tar":
        yield from _of_tar(shard.path)
    elif shard.kind == "table":
        for begin, batch in _batches(shard.path, ("__key__",)):
            for row, name in enumerate(batch.column(0).to_pylist(), begin):
                yield {"name": name, "row": row, "caption": False}
    else:
        for name in shard.names:
            yield {"name": name, "caption": (shard.path / name).with_suffix(".txt").is_file()}


def _of_tar(path: Path) -> Iterator[Entry]:
    """Places of the members of each sample."""
    found: dict[str, dict[str, list[int]]] = {}
    try:
        end = 0
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // 512) * 512
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                if name.startswith("."):
                    continue
                key, _, ending = name.partition(".")
                members = found.setdefault(f"{folder}/{key}" if folder else key, {})
                if members.setdefault(ending.lower(), [member.offset_data, member.size])[0] != member.offset_data:
                    raise tarfile.ReadError(f"{member.name} is there twice")
        with path.open("rb") as file:
            file.seek(end)
            # tarfile takes damage after the first member for the end, and so it does where a file stops.
            if (rest := file.read(512)) != bytes(512):
                raise tarfile.ReadError("cut off" if not rest else f"what is at byte {end:,} is no member")
    except (tarfile.TarError, OSError, EOFError) as problem:
        raise DataError(f"{path}: not a whole tar ({problem}); {AGAIN}") from problem
    for name, members in found.items():
        yield {"name": name, "caption": "txt" in members, "members": members}


# ---- what a sample is


def read(shard: Shard, entries: Sequence[Entry]) -> Iterator[Sample]:
    """Raises DataError that names file and member for what cannot be read."""
    if shard.kind == "table":
        yield from _of_table(shard.path, entries)
    elif shard.kind == "tar":
        with shard.path.open("rb") as file:
            for entry in entries:
                yield _of_members(file, shard.path, entry)
    else:
        for entry in entries:
            path = shard.path / entry["name"]
            caption = _text(_bytes(beside := path.with_suffix(".txt")), str(beside)) if entry["caption"] else None
            found = _picture(_bytes(path), "npy", str(path)) if path.suffix.lower() == ".npy" else {"image": path}
            yield Sample(str(path), caption, **found)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); {AGAIN}") from problem


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: byte 0x{data[problem.start]:02x} is not UTF-8; convert it (iconv -t UTF-8)") from None


def _of_members(file: IO[bytes], path: Path, entry: Entry) -> Sample:
    name, members = f"{path}: {entry['name']}", entry["members"]

    def data(ending: str) -> bytes:
        offset, size = members[ending]
        file.seek(offset)
        if len(found := file.read(size)) < size:
            raise DataError(f"{name}.{ending}: cut off; {AGAIN}")
        return found

    sample = Sample(name, _text(data("txt"), f"{name}.txt") if "txt" in members else None)
    ending = next((one for one in PICTURES if one in members), None)
    if ending is None:
        has = ", ".join(members) or "nothing"
        raise DataError(f"{name}: no image or moments ({', '.join(PICTURES)}); it has {has}: leave it out")
    for key, value in _picture(data(ending), ending, f"{name}.{ending}").items():
        setattr(sample, key, value)
    return sample


def _of_table(path: Path, entries: Sequence[Entry]) -> Iterator[Sample]:
    wanted, at = [entry["row"] for entry in entries], 0
    for begin, batch in _batches(path, ("__key__", *COLUMNS, "timestep")):
        while at < len(wanted) and wanted[at] < begin + batch.num_rows:
            row = {name: batch.column(name)[wanted[at] - begin].as_py() for name in batch.schema.names}
            sample = Sample(f"{path}: {row['__key__']}", level=row.get("timestep"))
            yield _encoded(sample, {part: (row[name], f"{sample.name}: {name}") for name, part in COLUMNS.items() if name in row})
            at += 1
        if at == len(wanted):
            return


def _batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Parts of a table, each after its first row, of the columns that are there. What is passed over in a mapped stream is not
    read."""
    arrow, ipc = (import_extra(name, f"{path.suffix} of {path}", "latents") for name in ("pyarrow", "pyarrow.ipc"))
    with _arrow(path), arrow.memory_map(str(path)) as mapped, ipc.open_stream(mapped) as stream:
        names, begin = _named(path, stream.schema.names, columns), 0
        for batch in stream:
            yield begin, batch.select(names)
            begin += batch.num_rows


def _named(path: Path, has: Sequence[str], columns: Sequence[str]) -> list[str]:
    missing = [name for name in columns if name not in has and name in ("__key__", "mean", "logvar")]
    if missing:
        raise DataError(f"{path}: no column '{missing[0]}'; it has {', '.join(has)}: expected those of MLPerf's Flux.1")
    return [name for name in columns if name in has]


@contextmanager
def _arrow(path: Path) -> Iterator[None]:
    try:
        yield
    except HpcaiError:
        raise
    except Exception as problem:                # Arrow's errors, OSError, and for some damage others
        raise DataError(f"{path}: not a whole table ({str(problem)[:200]}); {AGAIN}") from problem


def _array(data: bytes, where: str) -> Array:
    try:
        return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
    except (ValueError, OSError, EOFError, SyntaxError) as problem:
        raise DataError(f"{where}: not a whole .npy ({problem}); {AGAIN}") from problem


def _encoded(sample: Sample, parts: Mapping[str, tuple[bytes | None, str]]) -> Sample:
    """A sample of MLPerf's Flux.1."""
    found = {}
    for part, (data, where) in parts.items():
        if data is None:
            raise DataError(f"{where}: holds nothing, expected the bytes of a .npy; {AGAIN}")
        found[part] = bfloat16(_array(data, where), where)
    mean, logvar = found.pop("mean", None), found.pop("logvar", None)
    if mean is None or logvar is None or mean.shape != logvar.shape or mean.ndim != 3:
        shapes = [None if one is None else list(one.shape) for one in (mean, logvar)]
        raise DataError(f"{sample.name}: mean and logvar are {shapes[0]} and {shapes[1]}, expected the same [L, h, w]; {AGAIN}")
    sample.moments = np.concatenate((mean, logvar))
    for part, values in found.items():
        setattr(sample, part, values)
    return sample


def bfloat16(values: Array, where: str) -> Array:
    """float32 from the upper halves of its bits; floating numbers as they are."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype.kind != "f":
        raise DataError(f"{where}: holds {values.dtype}, expected uint16, the bits of bfloat16, or floating numbers; {AGAIN}")
    return values


def empty(path: Path) -> Array:
    """The vectors of an empty caption.   [1, ...]"""
    return bfloat16(_array(_bytes(path), str(path)), str(path))


def _picture(data: bytes, ending: str, where: str) -> dict[str, Any]:
    if ending != "npy":
        return {"image": data}
    values = _array(data, where)
    if values.dtype == np.uint8 and values.ndim == 3 and values.shape[2] == 3:
        return {"image": values}
    return {"moments": _moments(values, where)}


def _moments(values: Array, where: str) -> Array:
    shape = values.shape[1:] if values.ndim == 4 and values.shape[0] == 1 else values.shape
    if values.dtype.kind != "f" or len(shape) != 3 or shape[0] % 2:
        found, expected = f"{values.dtype} {list(values.shape)}", "an image uint8 [H, W, 3], or moments float32 [1, 2L, h, w]"
        raise DataError(f"{where}: holds {found}, expected {expected}; {AGAIN}")
    return values.reshape(shape)


# ---- images


def fitted(sample: Sample, size: tuple[int, int], enlarge: bool) -> Tensor:
    """The middle of an image, made smaller until it has the height or the width of ``size``, bicubic over the area that a pixel
    comes from.   [3, H, W], -1 to 1"""
    pixels = torch.from_numpy(_pixels(sample).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    sides = pixels.shape[1:]
    if min(side - asked for side, asked in zip(sides, size)) < 0 and not enlarge:
        found, asked = (" x ".join(map(str, one)) for one in (sides, size))
        raise DataError(f"{sample.name}: {found}, smaller than --size {asked}; leave it out, or give --enlarge")
    factor = max(asked / side for side, asked in zip(sides, size))
    if factor != 1:
        covering = [max(asked, round(side * factor)) for side, asked in zip(sides, size)]
        pixels = functional.interpolate(pixels[None], covering, mode="bicubic", antialias=True)[0].clamp(-1, 1)
    top, left = ((side - asked) // 2 for side, asked in zip(pixels.shape[1:], size))
    return pixels[:, top : top + size[0], left : left + size[1]]


def _pixels(sample: Sample) -> Array:
    """[H, W, 3], uint8"""
    if isinstance(sample.image, np.ndarray):
        return sample.image
    from PIL import Image, ImageOps

    assert sample.image is not None
    try:
        with Image.open(sample.image if isinstance(sample.image, Path) else io.BytesIO(sample.image)) as opened:
            mode = opened.mode
            values = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except Exception as problem:                # Pillow's readers fail in a dozen ways
        raise DataError(f"{sample.name}: cannot be read as an image ({problem}); {AGAIN}") from problem
    if mode[0] in "IF":
        raise DataError(f"{sample.name}: pixels of more than 8 bits (mode {mode}); make it an image of 8 bits")
    return values
