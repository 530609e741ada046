"""Images with captions as what a latent diffusion model trains on: moments of their latents, vectors of their captions.

    python -m data_prep.latents convert SOURCE OUT --model DIR     a pipeline of diffusers: vae/, text_encoder/, tokenizer/ ...
    python -m data_prep.latents convert SOURCE OUT --vae DIR --tokens DIR --pooled DIR      its parts, those that are wanted
    python -m data_prep.latents convert MLPERF OUT                 latents and vectors that are there are taken as they are
    python -m data_prep.latents check OUT                          files against their index, values, a picture

    SOURCE is a folder of images, of webdataset .tar, or MLPerf's Stable Diffusion or Flux.1 (data_prep.captioned), or holds such
    folders: train (cc12m_preprocessed), validation (val, coco_preprocessed), empty_encodings.

    OUT/{train,validation}/*.h5, R samples
        "moments" float16 [R, 2L, h, w]   means, then logarithms of variances (-30 to 20), of latents as the autoencoder has them
        "tokens" float16 [R, N, J]        last hidden states of an encoder of captions
        "pooled" float16 [R, J']          pooled output of one
        "level" int64 [R]                 time of a validation sample, where the source gives one (MLPerf's Flux.1: 0 to 7)
    OUT/nothing.npz                       "tokens" [N, J] and "pooled" [J'] of the empty caption
    OUT/.work                             where the samples of the sources lie; may be deleted

What a model sees is (latent - shift) * scale. The index, which a reader has as ``rows.metadata``, states these, sizes, and which
networks made the values. Images are made smaller until they just cover --size, and their middle is taken. Which samples are held
out is a permutation that the seed decides. A value is a function of its sample, the networks and the options, to rounding: the
device and how many images are encoded at a time may change its last digit.

R rows of a file   L channels of a latent   h w its places   N tokens of J numbers   J' numbers of a caption as a whole
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from data_prep import captioned, command, encoders, moments, store
from data_prep.captioned import Array, Entry, Sample, Shard
from data_prep.command import option
from data_prep.encoders import Networks, opened
from data_prep.store import Field
from hpcai.data.index import commit_file
from hpcai.errors import ConfigError, DataError

WORK, NOTHING = ".work", "nothing.npz"
FOLDERS = {"train": ("train", "cc12m_preprocessed"), "validation": ("validation", "val", "coco_preprocessed")}
EMPTY, EMPTIES = "empty_encodings", {"tokens": "t5_empty.npy", "pooled": "clip_empty.npy"}
MLPERF = {4: (0.18215, 0.0), 16: (0.3611, 0.1159)}      # scale and shift by channels of a latent: Stable Diffusion's, Flux.1's
EIGHTH = 8                                      # of an image's side is a latent's, in both
FILE = 1 << 26                                  # bytes of a file, about
CUT = {"tokens": "tokens_cut", "pooled": "pooled_cut"}     # attributes of a file: how many captions were cut
MOST = float(np.finfo(np.float16).max)
LOW_LOGVAR, HIGH_LOGVAR = -30.0, 20.0
LEVELS = 8                                      # of noise, at which samples that are held out are measured


# ---- options


def _sides(text: str) -> tuple[int, ...]:
    sides = tuple(command.positive(one) for one in text.split("x"))
    return sides if len(sides) > 1 else sides * 2


size = command.taking("height and width such as 512 or 512x768", _sides, lambda value: len(value) == 2)
share = command.taking("number of samples, or fraction below 1", float, lambda value: 0 <= value < 1 or value in range(1, 1 << 48))


@dataclass(frozen=True)
class Source(command.Settings):
    """How samples are encoded, and which are held out."""

    size: tuple[int, int] = option((512, 512), "of images: 512, or 512x768", metavar="HxW", type=size)
    enlarge: bool = option(False, "make smaller images larger, which are otherwise refused", action="store_true")
    length: int | None = option(None, "tokens of a caption; without it 77 of CLIP, 256 of T5", type=command.positive)
    long: str = option("refuse", "what is done with longer captions", choices=("refuse", "cut"))
    precision: str = option("float32", "of the networks", choices=("float32", "bfloat16"))
    rows: int | None = option(None, "of a file; without it 64 MB of them", type=command.positive)
    limit: int | None = option(None, "at most so many samples, the first", type=command.positive)
    validation: float = option(None, "samples held out, or a fraction of them; without it 0.02", type=share)
    seed: int = option(0, "of which samples those are", type=command.natural)


def add_source(made: argparse.ArgumentParser) -> None:
    made.add_argument("source", type=Path, metavar="SOURCE", help="images, .tar, MLPerf's layouts, or folders of them by split")
    made.add_argument("--model", type=Path, metavar="DIR", help="pipeline of diffusers: its folders vae, text_encoder ...")
    made.add_argument("--vae", type=Path, metavar="DIR", help="autoencoder alone, as diffusers has it")
    made.add_argument("--device", default="auto", metavar="NAME", help="auto: a GPU where there is one, each process its own")

    made.add_argument("--tokens", type=Path, metavar="DIR", help="encoder whose last hidden states are wanted: CLIP or T5")
    made.add_argument("--pooled", type=Path, metavar="DIR", help="encoder whose pooled output is wanted: CLIP")
    made.add_argument("--nothing", type=Path, metavar="DIR", help=f"holds {' and '.join(EMPTIES.values())}; otherwise {EMPTY}")
    made.add_argument("--batch", metavar="N", type=command.positive, default=16, help="samples that are encoded at a time")


# ---- what the files hold


FIELDS = {      # samples are told apart by their latents: many may have one caption
    "moments": Field("float16", key=True), "tokens": Field("float16"), "pooled": Field("float16"),
    "level": Field("int64", (), 0, LEVELS - 1),
}  # fmt: skip


def _sums(file: h5py.File) -> dict[str, Any]:
    """Moments of each channel of the means, and how many captions were cut."""
    rows, channels = file["moments"].shape[:2]
    means = (file["moments"][row, : channels // 2].reshape(channels // 2, -1).T for row in range(rows))
    cut = {name: int(file.attrs[name]) for name in CUT.values() if name in file.attrs}
    return {"means": moments.join(map(moments.measure, means)), "cut": cut}


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    cut = {name: sum(record["sums"]["cut"].get(name, 0) for record in records) for name in CUT.values()}
    return {"cut": cut, "means": moments.summary(record["sums"]["means"] for record in records)}


# ---- sources


def sources(root: Path) -> dict[str, list[Shard]]:
    """The parts of each split, or under "" those that are to be split."""
    found = {split: folder for split, names in FOLDERS.items() for name in names[::-1] if (folder := root / name).is_dir()}
    if "train" not in found:
        return {"": captioned.shards(root)}
    return {split if len(found) > 1 else "": captioned.shards(folder) for split, folder in found.items()}


def told(parts: Sequence[Shard], root: Path) -> str:
    """How many files there are, and a digest of their names and sizes."""
    paths = [path for part in parts for path in ([part.path / name for name in part.names] or [part.path])]
    lines = [f"{path.relative_to(root).as_posix()} {path.stat().st_size if path.is_file() else 'missing'}" for path in paths]
    return command.listed(lines, "files, names and sizes")


@dataclass(frozen=True)
class Listed:
    """The samples of a part of a source."""

    shard: Shard
    path: Path                                  # of their listing
    rows: int
    bare: tuple[str, ...]                       # samples without a caption, the first of them
    captions: int


def listed(parts: Sequence[Shard], where: Path, workers: int) -> list[Listed]:
    tasks = {where / f"{number:06d}.json": partial(captioned.listing, part) for number, part in enumerate(parts)}
    found = []
    for part, path, one in zip(parts, tasks, store.gather(tasks, workers, "samples")):
        bare = [entry["name"] for entry in one["entries"] if not entry["caption"]]
        found.append(Listed(part, path, len(one["entries"]), tuple(bare[:1]), len(one["entries"]) - len(bare)))
    return found


def held_out(total: int, asked: float, seed: int) -> Array:
    """Which samples are for validation: a number of them, or a fraction.   [total]"""
    count = int(asked) if asked >= 1 else math.floor(asked * total + 0.5)
    mask = np.zeros(total, bool)
    mask[store.generator(seed, 0, 0).permutation(total)[:count]] = True
    return mask


# ---- a file


@dataclass(frozen=True)
class Making:
    """How rows are made of samples."""

    networks: Networks
    size: tuple[int, int] | None                # of an image; None where latents are there
    enlarge: bool
    encoded: tuple[str, ...]                    # of tokens and pooled, those that are made of captions
    batch: int
    threads: int
    fields: tuple[tuple[str, Field], ...]


def write_latents(making: Making, source: Listed, numbers: Sequence[int], path: Path) -> None:
    """A file of some samples of a part of a source."""
    shard, entries = source.shard, captioned.entries_of(source.path, numbers)
    cut = {CUT[name]: 0 for name in making.encoded}
    with store.rows_file(path, len(entries), dict(making.fields), {"origin": shard.path.name}) as file:
        begin = 0
        for samples, images in _batches(making, shard, entries):
            rows = slice(begin, begin := begin + len(samples))
            for name, values in _encoded(making, samples, images, cut).items():
                file[name][rows] = values
        file.attrs.update(cut)


def _batches(making: Making, shard: Shard, entries: Sequence[Entry]) -> Iterator[tuple[list[Sample], list[Tensor | None]]]:
    """Samples with their images, of which those of the next batch are made ready meanwhile."""
    ends = [*range(0, len(entries), making.batch), len(entries)]
    fit = partial(_fitted, making)
    with ThreadPoolExecutor(making.threads) as pool:
        every = captioned.read(shard, entries)
        waiting: list[tuple[list[Sample], Any]] = []
        for begin, end in pairwise(ends):
            samples = [next(every) for _ in range(end - begin)]
            waiting.append((samples, pool.map(fit, samples)))
            if len(waiting) > 1:
                ready, images = waiting.pop(0)
                yield ready, list(images)
        for ready, images in waiting:
            yield ready, list(images)


def _fitted(making: Making, sample: Sample) -> Tensor | None:
    if making.size is None:
        return None
    if sample.image is None:
        raise DataError(f"{sample.name}: holds latents, where others are images; convert them by themselves")
    return captioned.fitted(sample, making.size, making.enlarge)


def _encoded(
    making: Making, samples: Sequence[Sample], images: Sequence[Tensor | None], cut: dict[str, int],
) -> dict[str, Array]:  # fmt: skip
    """The rows of samples."""
    fields, names = dict(making.fields), [sample.name for sample in samples]
    found: dict[str, Array] = {}
    if making.size is not None:
        found["moments"] = opened(making.networks).moments(torch.stack([image for image in images if image is not None])).numpy()
    for name in fields:
        if name in making.encoded:
            captions = [sample.caption or "" for sample in samples]
            vectors, many = opened(making.networks).texts[name].encode(captions, names)
            found[name], cut[CUT[name]] = vectors.numpy(), cut[CUT[name]] + many
        elif name not in found:
            found[name] = np.stack([_given(sample, name, fields[name].shape) for sample in samples])
    return {name: values if name == "level" else _half(values, name, names) for name, values in found.items()}


def _given(sample: Sample, name: str, shape: tuple[int, ...]) -> Array:
    values = getattr(sample, name)
    if values is None or (name == "level" and (not isinstance(values, int) or not 0 <= values < LEVELS)):
        found = "no latents" if name == "moments" else f"{name} {values}"
        raise DataError(f"{sample.name}: {found}, where others have one; {captioned.AGAIN}")
    if np.shape(values) != shape:
        raise DataError(f"{sample.name}: {name} is {list(np.shape(values))}, expected {list(shape)} as in the first sample; "
                        f"{captioned.AGAIN}")  # fmt: skip
    return np.asarray(values)


def _half(values: Array, name: str, names: Sequence[str]) -> Array:
    """In float16, which neither NaN nor values above 65504 may enter."""
    wide = values.astype(np.float32)
    for number in np.flatnonzero(~(np.abs(wide) <= MOST).reshape(len(wide), -1).all(1))[:1]:
        row = wide[number]
        bad = row[~(np.abs(row) <= MOST)].flat[0]
        raise DataError(f"{names[number]}: {name} holds {bad:g}, expected numbers within {MOST:g}; {captioned.AGAIN}")
    if name == "moments":
        half = wide.shape[1] // 2
        wide[:, half:] = wide[:, half:].clip(LOW_LOGVAR, HIGH_LOGVAR)
    return wide.astype(np.float16)


# ---- convert


def convert(options: argparse.Namespace) -> command.Plan:
    root, out = options.source, options.out
    if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{out}: OUT lies within SOURCE {root}; choose another OUT")
    parts = sources(root)
    if options.validation is not None and "" not in parts:
        raise ConfigError(f"--validation {options.validation:g}: {root} has a folder for validation; leave the option out")
    source = Source.of(options, validation=0.02 if options.validation is None else options.validation)
    asked = encoders.chosen(options.model, options.vae, options.tokens, options.pooled, options.length, options.long == "cut",
                            options.precision, options.device)  # fmt: skip
    vae, texts = asked.identities()
    recipe = {"kind": "convert", "vae": vae, "encoders": texts, **source.told,
              "sources": {split or "all": told(some, root) for split, some in parts.items()}}  # fmt: skip
    store.claim(out, recipe)
    found = {split: listed(some, out / WORK / (split or "all"), options.workers) for split, some in parts.items()}
    firsts = {split: next(captioned.read(one[0].shard, captioned.entries_of(one[0].path, [0]))) for split, one in found.items()}
    making, header = _planned(options, asked, found, firsts, vae, texts)
    if making.size is not None or making.encoded:
        options.workers = 1                     # networks fill a device: processes are ranks then, workers the threads that read
    jobs = list(_jobs(out, source, making, found, firsts))
    text = (f"{sum(job.rows or 0 for job in jobs)} samples of {_by(header['image'])}, latents of "
            f"{_by([header['latents'], *header['size']])}; {_named(header)}")  # fmt: skip
    return command.Plan(recipe, jobs, header, text, after=partial(_after, options, making, header),
                        config="flux" if header["pooled"] else "sd2")  # fmt: skip


def _after(options: argparse.Namespace, making: Making, header: dict[str, Any], out: Path) -> None:
    _write_nothing(options, making, header)
    _tell(out)


def _planned(
    options: argparse.Namespace, asked: Networks, found: dict[str, list[Listed]], firsts: dict[str, Sample], vae: str | None,
    texts: list[str],
) -> tuple[Making, dict[str, Any]]:  # fmt: skip
    """How rows are made, and what the index says of all, by the first sample of each split."""
    every = [one for some in found.values() for one in some]
    rows, captions = sum(one.rows for one in every), sum(one.captions for one in every)
    first = next(iter(firsts.values()))
    given = [name for name in ("tokens", "pooled") if getattr(first, name) is not None]
    encoded = [name for name in ("tokens", "pooled") if name not in given and getattr(asked, name) is not None]
    if 0 < captions < rows and encoded:
        one = next(one for one in every if one.bare)
        where, others = f"{one.shard.path}: {one.bare[0]}", f"as {rows - captions} of {rows} samples"
        raise DataError(f"{where}: no caption, {others}; write one, which may be empty, or leave them out")
    if encoded and not captions:
        command.print_once("there are no captions: no vectors of texts are made")
        encoded = []
    if captions and not encoded and not given:
        command.print_once(f"{captions} captions are left out: no encoder is named by --tokens, --pooled or --model")
    if first.moments is None:
        if asked.vae is None:
            raise ConfigError(f"{first.name}: an image, which needs an autoencoder; name one by --vae or --model")
        if first.image is None:
            raise DataError(f"{first.name}: no image and no latents; {captioned.AGAIN}")
    of = {name: getattr(asked, name) if name in (*encoded, *given) else None for name in ("tokens", "pooled")}
    networks = replace(asked, vae=asked.vae if first.moments is None else None, tokens=of["tokens"], pooled=of["pooled"])
    shape, image, scale, shift = _latents(options, asked, first)
    shapes = {"moments": shape}
    for name in ("tokens", "pooled"):
        if name in given:
            shapes[name] = getattr(first, name).shape
        elif name in encoded:
            shapes[name] = opened(networks).texts[name].shape
    fields = tuple((name, FIELDS[name]._replace(shape=tuple(shape))) for name, shape in shapes.items())
    size = None if first.moments is not None else options.size
    making = Making(networks, size, options.enlarge, tuple(encoded), options.batch, options.workers, fields)
    header = {
        "kind": "latents", "scale": scale, "shift": shift, "latents": shape[0] // 2, "size": list(shape[1:]), "image": image,
        "tokens": list(shapes["tokens"]) if "tokens" in shapes else None,
        "pooled": shapes["pooled"][0] if "pooled" in shapes else None, "vae": vae or "mlperf",
        "encoders": (texts if captions or given else []) or (["mlperf"] if given else []),
    }  # fmt: skip
    return making, header


def _latents(options: argparse.Namespace, asked: Networks, first: Sample) -> tuple[tuple[int, ...], list[int], float, float]:
    """Shape of moments, size of the images they come from, scale and shift."""
    cfg = None if asked.vae is None else encoders.settings(asked.vae)
    factor = EIGHTH if cfg is None else 2 ** (len(cfg.channels) - 1)
    if first.moments is None:
        assert cfg is not None
        if any(side % factor for side in options.size):
            raise ConfigError(f"--size {_by(options.size)}: expected multiples of {factor}, by which {asked.vae} "
                              "makes sides smaller")  # fmt: skip
        return (2 * cfg.latents, *(side // factor for side in options.size)), list(options.size), cfg.scale, cfg.shift
    shape = first.moments.shape
    if cfg is not None and 2 * cfg.latents != shape[0]:
        raise ConfigError(f"{asked.vae}: makes latents of {cfg.latents} channels, those of {first.name} have {shape[0] // 2}")
    if cfg is None and shape[0] // 2 not in MLPERF:
        found = f"latents of {shape[0] // 2} channels, MLPerf's have 4 or 16"
        raise ConfigError(f"{first.name}: {found}; name their autoencoder by --vae")
    scale, shift = MLPERF[shape[0] // 2] if cfg is None else (cfg.scale, cfg.shift)
    return shape, [factor * side for side in shape[1:]], scale, shift


def _jobs(
    out: Path, source: Source, making: Making, found: dict[str, list[Listed]], firsts: dict[str, Sample]
) -> Iterator[store.Job]:
    each = source.rows or max(1, FILE // sum(2 * math.prod(field.shape) for _, field in making.fields))
    for folder, some in found.items():
        total = min(sum(one.rows for one in some), source.limit or sys.maxsize)
        mask = held_out(total, source.validation, source.seed) if not folder else np.full(total, folder == "validation")
        for split in (folder,) if folder else store.SPLITS[:2]:
            mine, of = making, mask == (split == "validation")
            if not of.any() and (split == "train" or source.validation):
                raise ConfigError(f"{total} samples: none is left for {split}; change --validation")
            if split == "validation" and firsts[folder].level is not None:
                mine = replace(making, fields=(*making.fields, ("level", FIELDS["level"])))
            begin, number = 0, 0
            for one in some:
                rows = np.flatnonzero(of[begin : begin + one.rows]).tolist()
                begin += one.rows
                for part in command.parts_of(rows, each):
                    contents = store.Contents(dict(mine.fields), _sums, _merge)
                    path = out / split / f"latents_{number:06d}.h5"
                    yield store.Job(path, partial(write_latents, mine, one, part), contents, len(part))
                    number += 1


def _by(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))


def _named(header: dict[str, Any]) -> str:
    by = [f"{name} {header[name]}" for name in ("tokens", "pooled") if header[name]]
    return ", ".join([f"autoencoder {header['vae']}", *by, *(f"encoder {one}" for one in header["encoders"])])


def _write_nothing(options: argparse.Namespace, making: Making, header: dict[str, Any]) -> None:
    """What takes the place of a caption that is left out."""
    path, found = options.out / NOTHING, {}
    folders = (options.nothing, options.source / EMPTY, options.source.parent / EMPTY)
    folder = next((one for one in folders if one is not None and one.is_dir()), None)
    for name in ("tokens", "pooled"):
        if not header[name]:
            continue
        where = f"the empty caption of {name}"
        if getattr(making.networks, name) is not None:
            values = opened(making.networks).texts[name].encode([""], [where])[0].numpy()
        elif folder is not None and (one := folder / EMPTIES[name]).is_file():
            where, values = str(one), captioned.empty(one)
        else:
            print(f"{path.name} has no {name}: name an encoder, or the folder of {EMPTIES[name]} by --nothing")
            continue
        expected = tuple(np.atleast_1d(header[name]))
        if values.shape[1:] != expected:
            raise DataError(f"{where}: {list(values.shape)}, expected {[1, *map(int, expected)]}, as captions have it")
        found[name] = _half(values, name, [where])[0]
    if found:
        half = path.with_name(f".{path.name}.partial")
        with half.open("wb") as file:
            np.savez(file, **found)
        commit_file(half, path)


def _tell(out: Path) -> None:
    """Sizes of the splits, and whether latents are of about unit size, as a model wants them."""
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        about, means = store.read_json(out / split / "index.json"), part["means"]
        scaled = [(np.array(means["mean"]) - about["shift"]) * about["scale"], np.array(means["deviation"]) * about["scale"]]
        size = float(np.sqrt(np.mean(scaled[0] ** 2 + scaled[1] ** 2)))
        print(f"{split}: {part['rows']} samples, latents as a model sees them are {size:.3f} (root mean square)")
        if not 0.4 <= size <= 2.5:
            print("warning: expected about 1; is the scale of the autoencoder that of its weights?")
        for name, count in part["cut"].items():
            if count:
                print(f"{split}: {count} captions were cut for {name.removesuffix('_cut')}")


# ---- check


def look(prepared: command.Prepared, options: argparse.Namespace) -> Iterator[str]:
    """Values that no moments can have, and what is wrong with the empty caption."""
    out, about = prepared.out, prepared.index
    if about.get("kind") != "latents":
        raise DataError(f"{out}: was not made by data_prep.latents; name another folder")
    for path in prepared.paths:
        with h5py.File(path, "r") as file:
            logvar = file["moments"][:, file["moments"].shape[1] // 2 :]
        if logvar.min() < LOW_LOGVAR or logvar.max() > HIGH_LOGVAR:
            yield f"{path}: logarithms of variances outside {LOW_LOGVAR:g} to {HIGH_LOGVAR:g}; make the file again"
    yield from _wrong_nothing(out, about)
    _tell(out)


def _wrong_nothing(out: Path, about: dict[str, Any]) -> Iterator[str]:
    path = out / NOTHING
    if not path.is_file():
        if about["tokens"] or about["pooled"]:
            print(f"{path.name} is not there: no caption can be left out in training")
        return
    with np.load(path) as found:
        for name, values in found.items():
            if list(values.shape) != list(np.atleast_1d(about[name] or 0)) or not np.isfinite(values).all():
                yield f"{path}: {name} is {list(values.shape)}, expected finite numbers {about[name]}; convert again"


MAKER = command.Maker(
    "latents", "Images with captions to moments of latents and vectors of captions.", "diffusion",
    command.Check("Files against index.json, and values.", look, None),
    (command.Convert("Images, or MLPerf's latents, with captions.", Source, convert, add_source),),
)  # fmt: skip
main, parser = MAKER.main, MAKER.parser

if __name__ == "__main__":
    sys.exit(main())
