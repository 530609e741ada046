"""Images with captions as what a latent diffusion model trains on: moments of their latents, vectors of their captions.

    python -m data_prep.latents convert SOURCE OUT --model DIR     a pipeline of diffusers: vae/, text_encoder/, tokenizer/ ...
    python -m data_prep.latents convert SOURCE OUT --vae DIR --tokens DIR --pooled DIR      its parts, those that are wanted
    python -m data_prep.latents convert MLPERF OUT                 latents and vectors that are there are taken as they are
    python -m data_prep.latents check OUT --vae DIR                files against their index, values, a picture of decoded rows

    SOURCE is a folder of images, of webdataset .tar, or MLPerf's Stable Diffusion or Flux.1 (data_prep.captioned), or holds such
    folders: train (cc12m_preprocessed), validation (val, coco_preprocessed), empty_encodings.

    OUT/{train,validation}/*.h5, R samples
        "moments" float16 [R, 2L, h, w]   means, then logarithms of variances (-30 to 20), of latents as the autoencoder has them
        "tokens" float16 [R, N, J]        last hidden states of an encoder of captions
        "pooled" float16 [R, J']          pooled output of one
        "level" int64 [R]                 time of a validation sample, where the source gives one (MLPerf's Flux.1: 0 to 7)
    OUT/nothing.npz                       "tokens" [N, J] and "pooled" [J'] of the empty caption
    OUT/.work                             where the samples of the sources lie; may be deleted

What a model sees is (latent - shift) * scale. The index, which a reader has as ``rows.about``, states these, the sizes, and which
networks made the values. Images are made smaller until they just cover --size, and their middle is taken. Which samples are held
out is a permutation that the seed decides. A value is a function of its sample, the networks and the options, to rounding: the
device and how many images are encoded at a time may change its last digit.

R rows of a file   L channels of a latent   h w its places   N tokens of J numbers   J' numbers of a caption as a whole
"""

import argparse
import math
import shlex
import sys
import time
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
from data_prep.encoders import Networks, opened
from hpcai.data.index import settle
from hpcai.errors import ConfigError, DataError
from hpcai.programs import start, start_app

WORK, NOTHING, PICTURE = ".work", "nothing.npz", "latents.png"
FOLDERS = {"train": ("train", "cc12m_preprocessed"), "validation": ("validation", "val", "coco_preprocessed")}
EMPTY, EMPTIES = "empty_encodings", {"tokens": "t5_empty.npy", "pooled": "clip_empty.npy"}
MLPERF = {4: (0.18215, 0.0), 16: (0.3611, 0.1159)}      # scale and shift by channels of a latent: Stable Diffusion's, Flux.1's
EIGHTH = 8                                      # of an image's side is a latent's, in both
FILE = 1 << 26                                  # bytes of a file, about
CUT = {"tokens": "tokens_cut", "pooled": "pooled_cut"}     # attributes of a file: how many captions were cut
MOST = float(np.finfo(np.float16).max)
LOW_LOGVAR, HIGH_LOGVAR = -30.0, 20.0
LEVELS = 8                                      # of noise, at which samples that are held out are measured
POOR = 15.0                                     # dB: what is decoded is another picture
COMPARED = 4                                    # images that are decoded again after a conversion


# ---- what the files hold


def _sums(file: h5py.File) -> dict[str, Any]:
    """Moments of each channel of the means, and how many captions were cut."""
    rows, channels = file["moments"].shape[:2]
    means = (file["moments"][row, : channels // 2].reshape(channels // 2, -1).T for row in range(rows))
    cut = {name: int(file.attrs[name]) for name in CUT.values() if name in file.attrs}
    return {"means": moments.join(map(moments.measure, means)), "cut": cut}


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    cut = {name: sum(record["sums"]["cut"].get(name, 0) for record in records) for name in CUT.values()}
    return {"rows": sum(record["rows"] for record in records), "cut": cut,
            "means": moments.summary(record["sums"]["means"] for record in records)}  # fmt: skip


def _fields(layouts: store.Layouts, shape: list[int], header: dict[str, Any]) -> dict[str, Any]:
    """Samples are told apart by their latents: many may have one caption."""
    also: dict[str, dict[str, Any]] = {"moments": {"key": True}, "level": {"low": 0, "high": LEVELS - 1}}
    return {name: {"dtype": dtype, "shape": list(row), **also.get(name, {})} for name, (dtype, row) in layouts.items()}


def _contents(layouts: store.Layouts) -> store.Contents:
    return store.Contents("moments", partial(_fields, layouts), _sums, _merge)


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
    captions = [str(part.captions) for part in parts if part.captions is not None]
    return f"{len(lines)} files, names and sizes {command.digest([*lines, *captions])}"


@dataclass(frozen=True)
class Listed:
    """The samples of a part of a source."""

    shard: Shard
    path: Path                                  # of what ``captioned.write_listing`` writes
    rows: int
    captions: int


def listed(parts: Sequence[Shard], where: Path, workers: int) -> list[Listed]:
    contents = store.Contents("letters", measure=captioned.count_captions)
    jobs = [store.Job(where / f"{number:06d}.h5", partial(captioned.write_listing, part), contents)
            for number, part in enumerate(parts)]  # fmt: skip
    store.make_share(jobs, workers, "samples")
    store.wait_for(jobs)
    records = [store.read_json(job.path.parent / ".records" / f"{job.path.name}.json") for job in jobs]
    return [Listed(part, job.path, record["rows"], record["sums"]["captions"])
            for part, job, record in zip(parts, jobs, records)]  # fmt: skip


def first_without_caption(found: Sequence[Listed]) -> str:
    one = next(one for one in found if one.captions < one.rows)
    return f"{one.shard.path}: {next(entry['name'] for entry in captioned.entries_of(one.path) if not entry['caption'])}"


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
    layouts: tuple[tuple[str, tuple[str, tuple[int, ...]]], ...]


@dataclass(frozen=True)
class Part:
    """The samples of a file of ours, all of one part of a source."""

    making: Making
    source: Listed
    numbers: tuple[int, ...]
    path: Path

    def samples(self, most: int | None = None) -> tuple[Shard, list[Entry]]:
        return self.source.shard, captioned.entries_of(self.source.path, self.numbers[:most])

    @property
    def job(self) -> store.Job:
        return store.Job(self.path, partial(write_latents, self), _contents(dict(self.making.layouts)), len(self.numbers))


def write_latents(part: Part, path: Path) -> None:
    making, (shard, entries) = part.making, part.samples()
    cut = {CUT[name]: 0 for name in making.encoded}
    with store.rows_file(path, len(entries), dict(making.layouts), {"origin": shard.path.name}) as file:
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
    layouts, names = dict(making.layouts), [sample.name for sample in samples]
    found: dict[str, Array] = {}
    if making.size is not None:
        found["moments"] = opened(making.networks).moments(torch.stack([image for image in images if image is not None])).numpy()
    for name in layouts:
        if name in making.encoded:
            captions = [sample.caption or "" for sample in samples]
            vectors, many = opened(making.networks).texts[name].encode(captions, names)
            found[name], cut[CUT[name]] = vectors.numpy(), cut[CUT[name]] + many
        elif name not in found:
            found[name] = np.stack([_given(sample, name, layouts[name][1]) for sample in samples])
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


def convert(options: argparse.Namespace) -> int:
    root, out = options.source, options.out
    if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{out}: OUT lies within SOURCE {root}; choose another OUT")
    parts = sources(root)
    if options.validation is not None and "" not in parts:
        raise ConfigError(f"--validation {options.validation:g}: {root} has a folder for validation; leave the option out")
    held = 0.02 if options.validation is None else options.validation
    asked = encoders.chosen(options.model, options.vae, options.tokens, options.pooled, options.length, options.long == "cut",
                            options.precision, options.device)  # fmt: skip
    vae, texts = asked.identities()
    recipe = {
        "kind": "convert", "vae": vae, "encoders": texts, "size": list(options.size), "enlarge": options.enlarge,
        "length": options.length, "long": options.long, "precision": options.precision, "rows": options.rows,
        "limit": options.limit, "validation": held, "seed": options.seed,
        "sources": {split or "all": told(some, root) for split, some in parts.items()},
    }  # fmt: skip
    store.claim(out, recipe)
    found = {split: listed(some, out / WORK / (split or "all"), options.workers) for split, some in parts.items()}
    firsts = {split: next(captioned.read(one[0].shard, captioned.entries_of(one[0].path, [0]))) for split, one in found.items()}
    making, header = _planned(options, asked, found, firsts, vae, texts)
    files = list(_parts(options, making, found, firsts, held))
    jobs = [file.job for file in files]
    command.print_once(f"{sum(len(file.numbers) for file in files)} samples of {_by(header['image'])}, "
                       f"latents of {_by([header['latents'], *header['size']])}; {_named(header)}")  # fmt: skip
    networks = making.size is not None or making.encoded
    begin, left = time.monotonic(), sum(len(file.numbers) for file, job in zip(files, jobs) if not store.finished(job))
    # Networks fill a device: processes are ranks then, and workers the threads that read images.
    command.work(argparse.Namespace(**{**vars(options), "workers": 1 if networks else options.workers}), jobs, recipe, header)
    if store.launched()[0] == 0:
        if left and networks:
            print(f"{left / (time.monotonic() - begin):,.1f} samples a second, on {asked.device}")
        _write_nothing(options, making, header)
        _tell(out)
        if making.size is not None:
            _compare(files[0])
        folder, network = (shlex.quote(str(one)) for one in (out, asked.vae or "DIR"))
        print(f"next: {start('data_prep.latents')} check {folder} --vae {network}", flush=True)
        trained = start_app("diffusion", "flux" if header["pooled"] else "sd2")
        print(f"then: {trained} data.directory={folder}", flush=True)
    return 0


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
        raise DataError(f"{first_without_caption(every)}: no caption, as {rows - captions} of {rows} samples; write one, which may "
                        "be empty, or leave them out")  # fmt: skip
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
    layouts = tuple((name, ("float16", tuple(shape))) for name, shape in shapes.items())
    size = None if first.moments is not None else options.size
    making = Making(networks, size, options.enlarge, tuple(encoded), options.batch, options.workers, layouts)
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


def _parts(
    options: argparse.Namespace, making: Making, found: dict[str, list[Listed]], firsts: dict[str, Sample], held: float,
) -> Iterator[Part]:  # fmt: skip
    each = options.rows or max(1, FILE // sum(2 * math.prod(shape) for _, (_, shape) in making.layouts))
    for folder, some in found.items():
        total = min(sum(one.rows for one in some), options.limit or sys.maxsize)
        mask = held_out(total, held, options.seed) if not folder else np.full(total, folder == "validation")
        for split in (folder,) if folder else store.SPLITS[:2]:
            mine, of = making, mask == (split == "validation")
            if not of.any() and (split == "train" or held):
                raise ConfigError(f"{total} samples: none is left for {split}; change --validation")
            if split == "validation" and firsts[folder].level is not None:
                mine = replace(making, layouts=(*making.layouts, ("level", ("int64", ()))))
            begin, number = 0, 0
            for one in some:
                rows = np.flatnonzero(of[begin : begin + one.rows]).tolist()
                begin += one.rows
                for part in command.parts_of(rows, each):
                    yield Part(mine, one, part, options.out / split / f"latents_{number:06d}.h5")
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
        settle(half, path)


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


def _compare(file: Part) -> None:
    """How near decoded latents come to the images that they were made of."""
    making = file.making
    samples = list(captioned.read(*file.samples(COMPARED)))
    assert making.size is not None
    with h5py.File(file.path, "r") as made:
        means = torch.from_numpy(made["moments"][: len(samples)]).float().chunk(2, 1)[0]
    images = torch.stack([captioned.fitted(sample, making.size, making.enlarge) for sample in samples])
    errors = (opened(making.networks).decoded(means) - images).square().flatten(1).mean(1)
    ratios = (10 * torch.log10(4 / errors)).tolist()
    print(f"decoded against the first {len(ratios)} images: {', '.join(f'{one:.1f}' for one in ratios)} dB (peak signal to noise)")
    if min(ratios) < POOR:
        print(f"warning: expected more than {POOR:g} dB; is {making.networks.vae} a trained autoencoder of such images?")


# ---- check


def check(options: argparse.Namespace) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    out: Path = options.out
    files, wrong = command.against_index(out)
    about = files[0][2]
    if about.get("kind") != "latents":
        raise DataError(f"{out}: was not made by data_prep.latents; name another folder")
    if not wrong:
        wrong = [f"{path}: {text}" for path, _, _ in files for text in _wrong_values(path)] + list(_wrong_nothing(out, about))
    _tell(out)
    vae = options.model / "vae" if options.model else options.vae
    if vae is None:
        print("nothing is decoded: name the autoencoder by --vae or --model")
    elif not wrong:
        asked = encoders.chosen(None, vae, None, None, None, False, "float32", options.device)
        if about["vae"] not in ("mlperf", found := asked.identities()[0]):
            raise ConfigError(f"{vae}: is {found}, {out} was made with {about['vae']}; name that one")
        if encoders.settings(vae).latents != about["latents"]:
            raise ConfigError(f"{vae}: makes latents of other channels than the {about['latents']} of {out}; name another one")
        _draw(out / PICTURE, opened(asked), command.spread(command.places_of(files), options.rows))
    return command.told(wrong)


def _wrong_values(path: Path) -> Iterator[str]:
    with h5py.File(path, "r") as file:
        for name in file:
            for row in range(file[name].shape[0] if name != "level" else 0):
                if not np.isfinite(file[name][row]).all():
                    yield f"row {row}: '{name}' holds NaN or infinity; make the file again"
                    break
        logvar = file["moments"][:, file["moments"].shape[1] // 2 :]
        if not (np.abs(logvar - (LOW_LOGVAR + HIGH_LOGVAR) / 2) <= (HIGH_LOGVAR - LOW_LOGVAR) / 2).all():
            yield f"logarithms of variances outside {LOW_LOGVAR:g} to {HIGH_LOGVAR:g}; make the file again"
        if "level" in file and not np.isin(file["level"][...], range(LEVELS)).all():
            yield f"a level that is not one of 0 to {LEVELS - 1}; make the file again"


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


def _draw(path: Path, networks: encoders.Opened, places: Sequence[tuple[Path, int]]) -> None:
    """Decoded means."""
    images, darkest = [], 1.0
    for name, row in places:
        with h5py.File(name, "r") as file:
            means = torch.from_numpy(file["moments"][row]).float().chunk(2)[0]
        image = networks.decoded(means[None])[0]
        darkest = min(darkest, float(image.flatten().quantile(0.01)))
        images.append((f"{name.parent.name}/{name.name} row {row}", image.permute(1, 2, 0).numpy() / 2 + 0.5))
    if darkest > -0.5:
        # As in MLPerf's Stable Diffusion (mlcommons/training, issue 721).
        print(f"note: no decoded picture has a value below {darkest:.2f} of -1 to 1; were images from 0 to 1 encoded?")
    columns = min(4, len(images))
    lines = -(-len(images) // columns)
    with command.picture(path, (3 * columns, 3.3 * lines), 100) as figure:
        for axis, shown in zip(figure.subplots(lines, columns, squeeze=False).ravel(), [*images, *[None] * (columns * lines)]):
            axis.set_axis_off()
            if shown is not None:
                axis.imshow(shown[1])
                axis.set_title(shown[0], fontsize=8)


# ---- command line


def _sides(text: str) -> tuple[int, ...]:
    sides = tuple(command.positive(one) for one in text.split("x"))
    return sides if len(sides) > 1 else sides * 2


size = command.taking("height and width such as 512 or 512x768", _sides, lambda value: len(value) == 2)
share = command.taking("number of samples, or fraction below 1", float, lambda value: 0 <= value < 1 or value in range(1, 1 << 48))


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("latents", "Images with captions to moments of latents and vectors of captions.", "convert | check")

    def networks(made: argparse.ArgumentParser) -> None:
        made.add_argument("--model", type=Path, metavar="DIR", help="pipeline of diffusers: its folders vae, text_encoder ...")
        made.add_argument("--vae", type=Path, metavar="DIR", help="autoencoder alone, as diffusers has it")
        made.add_argument("--device", default="auto", metavar="NAME", help="auto: a GPU where there is one, each process its own")

    one = add("convert", "Images, or MLPerf's latents, with captions.", convert)
    one.add_argument("source", type=Path, metavar="SOURCE", help="images, .tar, MLPerf's layouts, or folders of them by split")
    command.add_out(one)
    networks(one)
    one.add_argument("--tokens", type=Path, metavar="DIR", help="encoder whose last hidden states are wanted: CLIP or T5")
    one.add_argument("--pooled", type=Path, metavar="DIR", help="encoder whose pooled output is wanted: CLIP")
    one.add_argument("--size", metavar="HxW", type=size, default="512", help="of images: 512, or 512x768")
    one.add_argument("--enlarge", action="store_true", help="make smaller images larger, which are otherwise refused")
    one.add_argument("--length", metavar="N", type=command.positive, help="tokens of a caption; without it 77 of CLIP, 256 of T5")
    one.add_argument("--long", choices=("refuse", "cut"), default="refuse", help="what is done with longer captions")
    one.add_argument("--validation", metavar="N", type=share, help="samples held out, or a fraction of them; without it 0.02")
    one.add_argument("--seed", metavar="N", type=command.natural, default=0, help="of which samples those are")
    one.add_argument("--limit", metavar="N", type=command.positive, help="at most so many samples, the first")
    one.add_argument("--nothing", type=Path, metavar="DIR", help=f"holds {' and '.join(EMPTIES.values())}; otherwise {EMPTY}")
    one.add_argument("--rows", metavar="N", type=command.positive, help="of a file; without it 64 MB of them")
    one.add_argument("--batch", metavar="N", type=command.positive, default=16, help="samples that are encoded at a time")
    one.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the networks")
    one.add_argument("--workers", metavar="N", type=command.workers, default="cores",
                     help="threads that read images; without networks, processes")  # fmt: skip

    two = add("check", f"Files against index.json, values, and decoded rows in OUT/{PICTURE}.", check)
    two.add_argument("out", type=Path, metavar="OUT")
    networks(two)
    two.add_argument("--rows", metavar="N", type=command.positive, default=8, help="that are decoded, about")
    return top


main = partial(command.main, parser)

if __name__ == "__main__":
    sys.exit(main())
