"""Readers of images or latents with captions, in the formats in which such sets are published.

    a folder            NAME.png .jpg .jpeg .jfif .webp .npy at any depth, also linked, with captions NAME.txt
    *.tar               webdataset: members KEY.png and so on, KEY.txt
                        KEY.npy, KEY.txt: MLPerf's Stable Diffusion, moments float32 [1, 2L, h, w]
    *.arrow             MLPerf's Flux.1: __key__, mean, logvar [L, h, w], t5_encodings [N, J], clip_encodings [J'], timestep

Each array of MLPerf's Flux.1 is the bytes of a .npy of uint16, the upper halves of float32: bfloat16. Arrow files are streams, as
datasets.save_to_disk writes them and lists them in state.json.

L channels of a latent   h w its pixels   N tokens of J elements   J' elements of a pooled text vector
"""

import io
import math
import os
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_prep import store
from hpcai.data import image_files
from hpcai.data.image_files import MAX_PIXELS, image_size, open_image, to_rgb
from hpcai.data.layout import parse_errors, read_npy_header
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import check_fields, check_relative, open_regular, read_regular
from hpcai.lazy import import_optional

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
Entry = dict[str, Any]

STATE = "state.json"
IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "jfif", "webp", "npy")
OTHER_SUFFIXES = ("avif", "bmp", "gif", "heic", "jp2", "jxl", "tga", "tif", "tiff")    # of images that are not read
CHUNK = 4096                                    # images of a folder in a shard
REMEDY = image_files.REMEDY
COLUMNS = {"mean": "mean", "logvar": "logvar", "t5_encodings": "tokens", "clip_encodings": "pooled"}


@dataclass(frozen=True)
class Shard:
    """A shard of a source: a tar file, a table, or some images of a folder."""

    path: Path
    names: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "images" if self.names else "tar" if self.path.suffix == ".tar" else "table"


@dataclass
class Sample:
    """The data of a sample. ``image`` is the bytes of a file, or uint8 [H, W, 3]; moments [2L, h, w], tokens [N, J] and pooled [J']
    have a floating-point type."""

    name: str
    caption: str | None = None
    image: bytes | Array | None = None
    moments: Array | None = None
    tokens: Array | None = None
    pooled: Array | None = None
    level: int | None = None
    over_white: bool = False    # its image had transparent pixels
    sizes: tuple[int, ...] | None = None        # of its image: height and width, then crop top and left, target height and width


# ---- listings


def find_shards(folder: Path) -> list[Shard]:
    """Return all shards of a source, in order. Raises ConfigError if the folder has no samples."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; SOURCE is a folder of images, of .tar, or of .arrow files")
    saved = [folder] if (folder / STATE).is_file() else sorted(path.parent for path in folder.glob(f"*/{STATE}"))
    if saved:
        tables: list[Shard] = []
        for table in saved:
            with check_fields(path := table / STATE, "_data_files, each with a filename", DataError):
                names = [check_relative(entry["filename"], path, DataError) for entry in store.read_json(path)["_data_files"]]
            tables += [Shard(table / name) for name in names]
        return tables
    for ending in (".tar", ".arrow"):           # tables beside tar files are their metadata
        if shards := sorted(path for path in _walk(folder) if path.name.endswith(ending)):
            return [Shard(path) for path in shards]
    names = _names_of(folder, IMAGE_SUFFIXES)
    if not names:
        raise ConfigError(f"{folder}: holds no image ({', '.join(IMAGE_SUFFIXES)}), no .tar or .arrow; name another SOURCE")
    return [Shard(folder, tuple(names[start : start + CHUNK])) for start in range(0, len(names), CHUNK)]


def _names_of(folder: Path, suffixes: Collection[str]) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if path.suffix[1:].lower() in suffixes)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder at any depth but hidden ones. Symbolic links are followed, to each folder once."""
    seen = set[str]()
    for root, folders, files in os.walk(folder, followlinks=True):
        is_new = (real := os.path.realpath(root)) not in seen
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        yield from (Path(root, name) for name in (*folders, *files) if is_new and not name.startswith("."))


def list_unread(shards: Sequence[Shard]) -> list[tuple[str, str]]:
    """Return the images of other formats in the folders of some shards, and why they are left out."""
    folders = dict.fromkeys(shard.path for shard in shards if shard.names)
    paths = [folder / name for folder in folders for name in _names_of(folder, OTHER_SUFFIXES)]
    return [(str(path), f"{path.suffix.lower()} is not read; convert it to .png") for path in paths]


def list_samples(shard: Shard, skip_bad: bool = False, sizes: bool = False) -> dict[str, Any]:
    """List the samples of a shard, so that any of them can be read directly, with ``sizes`` of their images. Raises DataError if
    there are none, or for an image that cannot be read; with ``skip_bad`` the shard or the image is then "refused"."""
    entries, skipped = list[Entry](), store.Skipped(skip_bad)
    with skipped.catch(shard.path):
        if shard.kind == "tar":
            entries = list(_tar_entries(shard.path))
        elif shard.kind == "table":
            batches = _read_batches(shard.path, ("__key__",))
            entries = [{"name": name, "row": row, "caption": False}
                       for begin, batch in batches for row, name in enumerate(batch.column(0).to_pylist(), begin)]  # fmt: skip
        else:
            entries = [{"name": name, "caption": (shard.path / name).with_suffix(".txt").is_file()} for name in shard.names]
        if not entries:
            raise DataError(f"{shard.path}: holds no sample; leave it out")
    if sizes and shard.kind != "table":         # tables hold latents
        listed, entries = entries, []
        for entry in listed:
            for sample in read_samples(shard, [entry], skipped):
                with skipped.catch(sample.name):
                    entries.append(entry | {"size": _image_size(sample)})
    return {"entries": entries, "refused": list(skipped)}


def read_entries(path: Path, numbers: Sequence[int]) -> list[Entry]:
    entries = store.read_json(path)["entries"]
    return [entries[number] for number in numbers]


def _tar_entries(path: Path) -> Iterator[Entry]:
    """Yield each sample with offset and size of its members. Raises DataError if the tar is damaged or truncated."""
    samples: dict[str, dict[str, list[int]]] = {}
    with parse_errors(path, REMEDY, "not a complete tar"):
        end = 0
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // 512) * 512
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                if name.startswith("."):
                    continue
                key, _, ending = name.partition(".")
                members = samples.setdefault(f"{folder}/{key}" if folder else key, {})
                if members.setdefault(ending.lower(), [member.offset_data, member.size])[0] != member.offset_data:
                    raise tarfile.ReadError(f"{member.name} occurs twice")
        with path.open("rb") as file:
            file.seek(end)
            # tarfile accepts damage after the first member, or the end of the file, as the end of the archive.
            if (rest := file.read(512)) != bytes(512):
                raise tarfile.ReadError("truncated" if not rest else f"the data at byte {end:,} is no member")
    for name, members in samples.items():
        yield {"name": name, "caption": "txt" in members, "members": members}


# ---- samples


def read_samples(shard: Shard, entries: Sequence[Entry], skipped: store.Skipped) -> Iterator[Sample]:
    """Yield the samples of some entries of a shard, but those that cannot be read, which are ``skipped``."""
    if shard.kind == "table":
        rows, at = [entry["row"] for entry in entries], 0
        for begin, batch in _read_batches(shard.path, ("__key__", *COLUMNS, "timestep")):
            while at < len(rows) and rows[at] < begin + batch.num_rows:
                row = {name: batch.column(name)[rows[at] - begin].as_py() for name in batch.schema.names}
                at, name = at + 1, f"{shard.path}: {row['__key__']}"
                with skipped.catch(name):
                    yield Sample(name, level=row.get("timestep"), **_decode_flux(name, row))
            if at == len(rows):
                return
    elif shard.kind == "tar":
        with shard.path.open("rb") as file:
            for entry in entries:
                with skipped.catch(f"{shard.path}: {entry['name']}"):
                    yield _tar_sample(file, shard.path, entry)
    else:
        for entry in entries:
            with skipped.catch(path := shard.path / entry["name"]):
                caption = decode_text(_read_bytes(beside := path.with_suffix(".txt")), str(beside)) if entry["caption"] else None
                yield Sample(str(path), caption, **_image_or_moments(_read_bytes(path), path.suffix[1:].lower(), str(path)))


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); {REMEDY}") from problem


def decode_text(data: bytes, where: str) -> str:
    """Return UTF-8 text without spaces at its ends. Raises DataError."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: byte 0x{data[problem.start]:02x} is not UTF-8; convert it (iconv -t UTF-8)") from None


def read_member(file: IO[bytes], member: Sequence[int], name: str) -> bytes:
    """Return the content of a member of a tar file, given by offset and size."""
    file.seek(member[0])
    if len(content := file.read(member[1])) < member[1]:
        raise DataError(f"{name}: truncated; {REMEDY}")
    return content


def _tar_sample(file: IO[bytes], path: Path, entry: Entry) -> Sample:
    name, members = f"{path}: {entry['name']}", entry["members"]

    def data(ending: str) -> bytes:
        return read_member(file, members[ending], f"{name}.{ending}")

    caption = decode_text(data("txt"), f"{name}.txt") if entry["caption"] else None
    ending = next((suffix for suffix in IMAGE_SUFFIXES if suffix in members), None)
    if ending is None:
        has = ", ".join(members) or "nothing"
        raise DataError(f"{name}: no image or moments ({', '.join(IMAGE_SUFFIXES)}); it has {has}: leave it out")
    return Sample(name, caption, **_image_or_moments(data(ending), ending, f"{name}.{ending}"))


def _read_batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the batches of a table, each after the number of its first row, with those of ``columns`` that exist. Skipped parts of
    the memory-mapped stream are not read."""
    arrow, ipc = (import_optional(name, f"{path.suffix} of {path} needs", "latents") for name in ("pyarrow", "pyarrow.ipc"))
    with (
        parse_errors(path, REMEDY, "not a complete table"), open_regular(path), arrow.memory_map(str(path)) as mapped,
        ipc.open_stream(mapped) as stream,
    ):  # fmt: skip
        has, begin = stream.schema.names, 0
        if missing := [name for name in columns if name not in has and name in ("__key__", "mean", "logvar")]:
            raise DataError(f"{path}: no column '{missing[0]}'; it has {', '.join(has)}: expected those of MLPerf's Flux.1")
        for batch in stream:
            (selected := batch.select([name for name in columns if name in has])).validate(full=True)  # else it may crash
            yield begin, selected
            begin += batch.num_rows


def _load_npy(data: bytes, where: str) -> Array:
    stream = io.BytesIO(data)
    shape, fortran, dtype, offset = read_npy_header(stream, where)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - offset:
        raise DataError(f"{where}: not a complete .npy of {dtype} {list(shape)}: {len(data) - offset:,} bytes of values; {REMEDY}")
    return np.frombuffer(data, dtype, offset=offset).reshape(shape, order="F" if fortran else "C").copy()


def _decode_flux(name: str, row: Mapping[str, bytes | None]) -> dict[str, Any]:
    """Return the arrays of a sample of MLPerf's Flux.1."""
    arrays = {}
    for column, part in COLUMNS.items():
        if column in row:
            if (data := row[column]) is None:
                raise DataError(f"{name}: {column}: empty, expected the bytes of a .npy; {REMEDY}")
            arrays[part] = bfloat16_to_float32(_load_npy(data, f"{name}: {column}"), f"{name}: {column}")
    mean, logvar = arrays.pop("mean"), arrays.pop("logvar")
    if mean.shape != logvar.shape or mean.ndim != 3:
        shapes = f"{list(mean.shape)} and {list(logvar.shape)}"
        raise DataError(f"{name}: mean and logvar are {shapes}, expected the same [L, h, w]; {REMEDY}")
    return {"moments": np.concatenate((mean, logvar)), **arrays}


def bfloat16_to_float32(values: Array, where: str) -> Array:
    """Convert the bits of bfloat16, as uint16, to float32, and return floating-point values unchanged."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype.kind != "f":
        raise DataError(f"{where}: holds {values.dtype}, expected uint16, the bits of bfloat16, or floating-point values; {REMEDY}")
    return values


def read_empty_caption(path: Path) -> Array:
    """Read the vectors of an empty caption.   Shape: [1, ...]"""
    return bfloat16_to_float32(_load_npy(_read_bytes(path), str(path)), str(path))


def _image_or_moments(data: bytes, ending: str, where: str) -> dict[str, Any]:
    if ending != "npy":
        return {"image": data}
    values = _load_npy(data, where)
    if values.dtype == np.uint8 and values.ndim == 3 and values.shape[2] == 3:
        return {"image": values}
    shape = values.shape[1:] if values.ndim == 4 and values.shape[0] == 1 else values.shape
    if values.dtype.kind != "f" or len(shape) != 3 or shape[0] % 2:
        actual, expected = f"{values.dtype} {list(values.shape)}", "an image uint8 [H, W, 3], or moments float32 [1, 2L, h, w]"
        raise DataError(f"{where}: holds {actual}, expected {expected}; {REMEDY}")
    return {"moments": values.reshape(shape)}


# ---- images


def resize_and_crop(sample: Sample, size: tuple[int, int], enlarge: bool) -> "Tensor":
    """Return an image [3, H, W], -1 to 1, resized to cover ``size`` (bicubic, antialiased) and cropped at its centre, and set the
    ``sizes`` of the sample. Raises DataError if it is smaller than ``size``, unless ``enlarge``."""
    import torch

    pixels = torch.from_numpy(_decode_image(sample).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    sides = pixels.shape[1:]
    if min(side - target for side, target in zip(sides, size)) < 0 and not enlarge:
        actual, expected = (" x ".join(map(str, shape)) for shape in (sides, size))
        raise DataError(f"{sample.name}: {actual}, smaller than --size {expected}; leave it out, or give --enlarge")
    factor = max(target / side for side, target in zip(sides, size))
    if factor != 1:
        covering = [max(target, round(side * factor)) for side, target in zip(sides, size)]
        if math.prod(covering) > MAX_PIXELS:
            raise DataError(f"{sample.name}: {' x '.join(map(str, sides))}, too long to cover --size; crop it, or leave it out")
        pixels = torch.nn.functional.interpolate(pixels[None], covering, mode="bicubic", antialias=True)[0].clamp(-1, 1)
    top, left = ((side - target) // 2 for side, target in zip(pixels.shape[1:], size))
    sample.sizes = (*sides, top, left, *size)
    return pixels[:, top : top + size[0], left : left + size[1]]


def _image_size(sample: Sample) -> list[int]:
    """Return height and width of an image, which is not decoded."""
    if sample.image is None:
        raise DataError(f"{sample.name}: holds latents, and --buckets is for images; leave one of them out")
    return list(sample.image.shape[:2]) if isinstance(sample.image, np.ndarray) else image_size(sample.image, sample.name)


def _decode_image(sample: Sample) -> Array:
    """Return the pixels as uint8 [H, W, 3]; transparent ones are laid over white."""
    if isinstance(sample.image, np.ndarray):
        return sample.image
    assert sample.image is not None
    with open_image(sample.image, sample.name) as opened:
        image, sample.over_white = to_rgb(opened)
        return np.asarray(image)
