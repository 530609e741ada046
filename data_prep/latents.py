"""Training data of latent diffusion models: moments of the latents of images, vectors of their captions.

    python -m data_prep.latents convert SOURCE OUT --model DIR     a pipeline of diffusers: vae/, text_encoder/, tokenizer/ ...
    python -m data_prep.latents convert SOURCE OUT --vae DIR --tokens DIR --pooled DIR      any of its parts
    python -m data_prep.latents convert MLPERF OUT                 copies latents and vectors of the source
    python -m data_prep.latents check OUT                          verify files and values, draw a picture

    SOURCE is a folder of images, of webdataset .tar, or MLPerf's Stable Diffusion or Flux.1 (data_prep.captioned), or holds such
    folders: train (cc12m_preprocessed), validation (val, coco_preprocessed), empty_encodings.

    OUT/{train,validation}/*.h5, R samples
        "moments" float16 [R, 2L, h, w]   means, then logarithms of variances (-30 to 20), of latents of the autoencoder, unscaled
        "tokens" float16 [R, N, J]        last hidden states of a text encoder; of SDXL's and SD3's as diffusers combines them
        "pooled" float16 [R, J']          pooled output of a text encoder
        "sizes" int64 [R, 6]              of images: original height and width, crop top and left, target height and width
        "level" int64 [R]                 time of a validation sample, if the source has it (MLPerf's Flux.1: 0 to 7)
    OUT/nothing.npz                       "tokens" [N, J] and "pooled" [J'] of the empty caption; of SDXL zeros, by model_index.json
    OUT/.work                             listings of the samples of the sources; may be deleted

The input of a model is (latent - shift) * scale; the index has both. docs/data.md ("Latents of images, vectors of captions")
describes sources, sizes, buckets (Podell et al. 2023, section 2.3; as in kohya's scripts) and pipelines. A value is a function of
its sample, the networks and the options, to rounding: device and batch size may change its last digit.

R rows of a file   L channels of a latent   h w its pixels   N tokens of J elements   J' elements of a pooled text vector
"""

import argparse
import io
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from data_prep import captioned, command, moments, store
from data_prep.captioned import Array, Entry, Sample, Shard
from data_prep.command import option
from data_prep.store import Field
from hpcai.durable import replace_file
from hpcai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.encoders import NetworkConfig

_encoders = partial(import_module, "data_prep.encoders")        # imports torch

WORK, EMPTY_CAPTION = ".work", "nothing.npz"
SPLIT_FOLDERS = {"train": ("train", "cc12m_preprocessed"), "validation": ("validation", "val", "coco_preprocessed")}
EMPTY_FOLDER, EMPTY_FILES = "empty_encodings", {"tokens": "t5_empty.npy", "pooled": "clip_empty.npy"}
MLPERF_SCALING = {4: (0.18215, 0.0), 16: (0.3611, 0.1159)}      # scale and shift by latent channels: Stable Diffusion, Flux.1
VAE_SCALE_FACTOR = 8                            # side of an image over that of its latent, in both
FILE_BYTES = 1 << 26                            # of a file, about
TRUNCATED = {"tokens": "tokens_cut", "pooled": "pooled_cut"}    # attributes of a file: number of truncated captions
COUNTED = {"tokens_cut": "captions were truncated for tokens", "pooled_cut": "captions were truncated for pooled",
           "over_white": "images had transparent pixels, which were laid over white"}  # fmt: skip
Size = tuple[int, int]
FLOAT16_MAX = float(np.finfo(np.float16).max)
MIN_LOGVAR, MAX_LOGVAR = -30.0, 20.0
MAX_ASPECT = 2                                  # of a bucket
LEVELS = 8                                      # of noise, at which the validation loss is measured


# ---- options


def _parse_size(text: str) -> tuple[int, ...]:
    sides = tuple(command.positive(side) for side in text.split("x"))
    return sides if len(sides) > 1 else sides * 2


image_size = command.option_type("height and width such as 512 or 512x768", _parse_size, lambda value: len(value) == 2)
share = command.option_type("number of samples, or fraction below 1", float, lambda x: 0 <= x < 1 or x in range(1, 1 << 48))


@dataclass(frozen=True)
class LatentSettings(command.Settings):
    """Settings of the encoding of samples, and of the split."""

    size: tuple[int, int] = option((512, 512), "of images: 512, or 512x768", metavar="HxW", type=image_size)
    buckets: int | None = option(None, "sizes of images by their aspect ratio, in multiples of N pixels", type=command.positive)
    enlarge: bool = option(False, "enlarge smaller images, which are otherwise refused", action="store_true")
    length: int | None = option(None, "tokens of a caption; without it 77 of CLIP, 256 of T5", type=command.positive)
    long: str = option("refuse", "refuse or truncate longer captions", choices=("refuse", "cut"))
    precision: str = option("float32", "of the networks", choices=("float32", "bfloat16"))
    rows: int | None = option(None, "of a file; without it 64 MB of them", type=command.positive)
    limit: int | None = option(None, "use only the first N samples", type=command.positive)
    validation: float = option(None, "samples held out, or a fraction of them; without it 0.02", type=share)
    seed: int = option(0, "of the choice of these samples", type=command.natural)
    skip_bad: bool = command.skip_bad()


def add_networks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="pipeline of diffusers: its folders vae, text_encoder ...")
    parser.add_argument("--vae", type=Path, metavar="DIR", help="autoencoder of diffusers")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto: a GPU for each process, if there are any")
    parser.add_argument("--tokens", type=Path, metavar="DIR", help="text encoder, for its last hidden states: CLIP or T5")
    parser.add_argument("--pooled", type=Path, metavar="DIR", help="text encoder, for its pooled output: CLIP")
    parser.add_argument("--nothing", type=Path, metavar="DIR", help=f"has {' and '.join(EMPTY_FILES.values())}; or {EMPTY_FOLDER}")
    parser.add_argument("--batch", metavar="N", type=command.positive, default=16, help="samples that are encoded together")


# ---- datasets


FIELDS = {      # latents identify a sample: several may have the same caption
    "moments": Field("float16", key=True), "tokens": Field("float16"), "pooled": Field("float16"),
    "sizes": Field("int64", (6,), 0), "level": Field("int64", (), 0, LEVELS - 1),
}  # fmt: skip


def _sums(file: h5py.File) -> dict[str, Any]:
    """Return the moments of each channel of the means, and the numbers of truncated captions and transparent images."""
    rows, channels = file["moments"].shape[:2]
    means = (file["moments"][row, : channels // 2].reshape(channels // 2, -1).T for row in range(rows))
    cut = {name: int(file.attrs[name]) for name in COUNTED if name in file.attrs}
    return {"means": moments.merge(map(moments.compute, means)), "cut": cut}


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    cut = {name: sum(record["sums"]["cut"].get(name, 0) for record in records) for name in COUNTED}
    return {"cut": cut, "means": moments.summarize(record["sums"]["means"] for record in records)}


# ---- sources


def find_sources(root: Path) -> dict[str, list[Shard]]:
    """Return the shards of each split, or under "" those of a source without splits."""
    folders = {split: folder for split, names in SPLIT_FOLDERS.items() for name in names[::-1] if (folder := root / name).is_dir()}
    if "train" not in folders:
        return {"": captioned.find_shards(root)}
    return {split if len(folders) > 1 else "": captioned.find_shards(folder) for split, folder in folders.items()}


def fingerprint_shards(parts: Sequence[Shard], root: Path) -> str:
    """Return the number of files, and a digest of their names and sizes."""
    paths = [path for part in parts for path in ([part.path / name for name in part.names] or [part.path])]
    lines = [f"{path.relative_to(root).as_posix()} {path.stat().st_size if path.is_file() else 'missing'}" for path in paths]
    return command.fingerprint(lines, "files, names and sizes")


@dataclass(frozen=True)
class ListedShard:
    """A shard of a source with the listing of its samples."""

    shard: Shard
    path: Path                                  # of the listing
    rows: int
    refused: store.Refused                      # the shard itself or images, if they cannot be read
    uncaptioned: tuple[str, ...]                # the first sample without a caption, if any
    captions: int
    sizes: tuple[tuple[int, int], ...]          # of its images, with --buckets


def list_shards(parts: Sequence[Shard], folder: Path, options: argparse.Namespace) -> list[ListedShard]:
    bad, shards = options.skip_bad, list[ListedShard]()
    read = partial(captioned.list_samples, skip_bad=bad, sizes=options.buckets is not None)
    tasks = {folder / f"{number:06d}.json": partial(read, part) for number, part in enumerate(parts)}
    for part, path, listing in zip(parts, tasks, store.all_gather_results(tasks, options.workers, "samples")):
        entries, refused = listing["entries"], [tuple(item) for item in listing["refused"]]
        if refused and not bad:            # of an earlier run
            raise DataError(": ".join(refused[0]))
        bare = [entry["name"] for entry in entries if not entry["caption"]]
        sizes = tuple(tuple(entry["size"]) for entry in entries if "size" in entry)
        shards.append(ListedShard(part, path, len(entries), refused, tuple(bare[:1]), len(entries) - len(bare), sizes))
    return shards


def first_sample(shards: Sequence[ListedShard], skip_bad: bool) -> Sample:
    """Return the first sample that can be read. Raises DataError if there is none."""
    skipped = store.Skipped(skip_bad)
    for shard in shards:
        for sample in captioned.read_samples(shard.shard, captioned.read_entries(shard.path, range(shard.rows)), skipped):
            return sample
        skipped += shard.refused
    raise DataError(f"{shards[0].shard.path}: no item can be used: {store.count_by_reason(skipped)}")


def validation_mask(total: int, share: float, seed: int) -> Array:
    """Return the mask of validation samples, a number or a fraction of all.   Shape: [total]"""
    count = int(share) if share >= 1 else math.floor(share * total + 0.5)
    mask = np.zeros(total, bool)
    mask[store.generator(seed, 0, 0).permutation(total)[:count]] = True
    return mask


def bucket_sizes(size: Size, step: int) -> Array:
    """Return the sizes of images with --buckets, largest first.   Shape: [G, 2]"""
    area = math.prod(size)
    pairs = [(side, area // side // step * step) for side in range(step, math.isqrt(area) + 1, step)]
    sizes = {each for low, high in pairs if high <= MAX_ASPECT * low for each in ((low, high), (high, low))}
    if not sizes:
        raise ConfigError(f"--buckets {step}: --size {_format_size(size)} has no such size; give a smaller step")
    return np.array(sorted(sizes, key=lambda size: (-math.prod(size), size)))


def split_by_bucket(shard: ListedShard, rows: Array, buckets: Array | None) -> list[tuple[Size | None, list[int]]]:
    """Return the rows of a shard for each of the ``buckets`` [G, 2] that is nearest in aspect ratio, the largest of equal ones."""
    if buckets is None or not len(rows):
        return [(None, rows.tolist())]
    (height, width), ratios = np.array(shard.sizes)[rows].T, np.log(buckets[:, 0] / buckets[:, 1])
    nearest = np.abs(np.log(height / width)[:, None] - ratios).argmin(1)
    return [((int(buckets[n, 0]), int(buckets[n, 1])), rows[nearest == n].tolist()) for n in np.unique(nearest)]


# ---- a file


@dataclass(frozen=True)
class EncodeArgs:
    """The settings of ``write_latents``, the same for all files of a split."""

    networks: "NetworkConfig"
    size: Size | None                           # of an image; None if the source has latents
    enlarge: bool
    encoded: tuple[str, ...]                    # those of "tokens" and "pooled" that are encoded from captions
    batch: int
    threads: int
    fields: tuple[tuple[str, Field], ...]
    skip_bad: bool


def write_latents(args: EncodeArgs, source: ListedShard, numbers: Sequence[int], path: Path) -> store.Refused:
    """Write a file of some samples of a shard. Returns the samples without a usable image."""
    shard, entries = source.shard, captioned.read_entries(source.path, numbers)
    counts = dict.fromkeys([*(TRUNCATED[name] for name in args.encoded), "over_white"], 0)
    with store.create_file(path, len(entries), dict(args.fields), {"origin": shard.path.name}) as file:
        begin, skipped = 0, store.Skipped(args.skip_bad)
        for batch in _prefetch(args, shard, entries, skipped):
            rows = slice(begin, begin := begin + len(batch))
            for name, values in _encode_batch(args, batch, counts).items() if batch else ():
                file[name][rows] = values
        store.truncate_rows(file, begin)
        file.attrs.update(counts)
    return skipped


def _prefetch(
    args: EncodeArgs, shard: Shard, entries: Sequence[Entry], skipped: store.Skipped
) -> "Iterator[list[tuple[Sample, Tensor | None, dict[str, Array]]]]":
    """Yield batches of samples, images and stored values. Images of the next batch are prepared in threads meanwhile."""
    with ThreadPoolExecutor(args.threads) as pool:
        reader = captioned.read_samples(shard, entries, skipped)
        batches = iter(lambda: list(islice(reader, args.batch)), [])
        submitted = ([(sample, pool.submit(_prepare_image, args, sample)) for sample in samples] for samples in batches)
        for batch, _ in pairwise(chain(submitted, [[]])):
            usable = []
            for sample, image in batch:
                with skipped.catch(sample.name):
                    usable.append((sample, image.result(), _stored_values(args, sample)))
            yield usable


def _prepare_image(args: EncodeArgs, sample: Sample) -> "Tensor | None":
    if args.size is None:
        return None
    if sample.image is None:
        raise DataError(f"{sample.name}: holds latents, where others are images; convert them separately")
    return captioned.resize_and_crop(sample, args.size, args.enlarge)


def _encode_batch(
    args: EncodeArgs, batch: "Sequence[tuple[Sample, Tensor | None, dict[str, Array]]]", counts: dict[str, int],
) -> dict[str, Array]:  # fmt: skip
    """Return the values of each dataset for a batch of samples."""
    samples, images, stored = zip(*batch)
    names, columns = [sample.name for sample in samples], dict[str, Array]()
    if args.size is not None:
        counts["over_white"] += sum(sample.over_white for sample in samples)
        columns["moments"] = _encoders().load_networks(args.networks).encode(images).numpy()
    for name in args.encoded:
        captions = [sample.caption or "" for sample in samples]
        vectors, count = _encoders().load_networks(args.networks).text_encoders[name].encode(captions, names)
        columns[name], counts[TRUNCATED[name]] = vectors.numpy(), counts[TRUNCATED[name]] + count
    encoded = {name: _to_float16(values, name, names) for name, values in columns.items()}
    return encoded | {name: np.stack([values[name] for values in stored]) for name in stored[0]}


def _stored_values(args: EncodeArgs, sample: Sample) -> dict[str, Array]:
    """Return the values of a sample that are not encoded. Raises DataError for them, and for a caption that cannot be encoded."""
    columns: dict[str, Array] = {}
    for name in args.encoded:
        if sample.caption is None:
            raise DataError(f"{sample.name}: no caption, where others have one; write one, which may be empty")
        _encoders().load_networks(args.networks).text_encoders[name].is_truncated(sample.caption, sample.name)
    for name, field in args.fields:
        if name in args.encoded or (name == "moments" and args.size is not None):
            continue
        values = getattr(sample, name)
        if values is None or (name == "level" and (not isinstance(values, int) or not 0 <= values < LEVELS)):
            text = "no latents" if name == "moments" else f"{name} {values}"
            raise DataError(f"{sample.name}: {text}, where others have one; {captioned.REMEDY}")
        if np.shape(values) != field.shape:
            actual, expected = list(np.shape(values)), list(field.shape)
            raise DataError(f"{sample.name}: {name} is {actual}, expected {expected} as in the first sample; {captioned.REMEDY}")
        columns[name] = np.asarray(values) if field.dtype == "int64" else _to_float16(np.array([values]), name, [sample.name])[0]
    return columns


def _to_float16(values: Array, name: str, names: Sequence[str]) -> Array:
    """Convert to float16. Raises DataError for NaN and for values beyond 65504."""
    wide = values.astype(np.float32)
    for number in np.flatnonzero(~(np.abs(wide) <= FLOAT16_MAX).reshape(len(wide), -1).all(1))[:1]:
        row = wide[number]
        bad = row[~(np.abs(row) <= FLOAT16_MAX)].flat[0]
        raise DataError(f"{names[number]}: {name} holds {bad:g}, expected numbers within {FLOAT16_MAX:g}; {captioned.REMEDY}")
    if name == "moments":
        half = wide.shape[1] // 2
        wide[:, half:] = wide[:, half:].clip(MIN_LOGVAR, MAX_LOGVAR)
    return wide.astype(np.float16)


# ---- convert


def convert(options: argparse.Namespace) -> command.Plan:
    root, out = options.source, options.out
    if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{out}: OUT lies within SOURCE {root}; choose another OUT")
    parts = find_sources(root)
    if options.validation is not None and "" not in parts:
        raise ConfigError(f"--validation {options.validation:g}: {root} has a folder for validation; leave the option out")
    settings = LatentSettings.from_options(options, validation=0.02 if options.validation is None else options.validation)
    networks = _encoders().resolve_networks(options.model, options.vae, options.tokens, options.pooled, options.length,
                                            options.long == "cut", options.precision, options.device)  # fmt: skip
    vae, text_encoders = networks.identities()
    recipe = {"kind": "convert", "vae": vae, "encoders": text_encoders, **settings.json_dict,
              "sources": {split or "all": fingerprint_shards(group, root) for split, group in parts.items()}}  # fmt: skip
    begun = any(out.glob("*/*.h5")) and (out / "recipe.json").is_file()
    options.sizes = not begun or "sizes" in store.read_json(out / "recipe.json")        # folders of earlier versions have none
    recipe |= {"sizes": True} if options.sizes else {}
    store.claim_folder(out, recipe)
    listings = out / WORK / command.digest([*recipe["sources"].values(), *(["sizes"] if options.buckets else [])])
    shards = {split: list_shards(group, listings / (split or "all"), options) for split, group in parts.items()}
    firsts = {split: first_sample(group, options.skip_bad) for split, group in shards.items()}
    args, header = _plan_encoding(options, networks, shards, firsts, vae, text_encoders)
    if args.size is not None or args.encoded:
        options.workers = 1                     # networks fill a device: one process per rank, whose workers are reader threads
    if options.buckets and args.size is None:
        raise ConfigError(f"--buckets {options.buckets}: {root} holds latents, which have their size; leave it out")
    jobs = list(_make_jobs(out, settings, args, shards, firsts))
    text = (f"{sum(job.rows or 0 for job in jobs)} samples of {_format_size(header['image'])}, latents of "
            f"{_format_size([header['latents'], *header['size']])}; autoencoder {header['vae']}")  # fmt: skip
    networks_text = [*(f"{name} {header[name]}" for name in ("tokens", "pooled") if header[name]),
                     *(f"encoder {name}" for name in header["encoders"])]  # fmt: skip
    networks_text += [f"buckets of {options.buckets} pixels"] * bool(options.buckets)
    config = {"sdxl": "sdxl-lora", "sd3": "sd3"}.get(networks.pipeline, "flux" if header["pooled"] else "sd2")
    finalize = partial(_finalize, options, args, header)
    return command.Plan(recipe, jobs, header, ", ".join([text, *networks_text]), finalize=finalize, config=config,
                        refused=[item for group in parts.values() for item in captioned.list_unread(group)]
                        + [item for group in shards.values() for shard in group for item in shard.refused])  # fmt: skip


def _plan_encoding(
    options: argparse.Namespace, cfg: "NetworkConfig", shards: dict[str, list[ListedShard]], firsts: dict[str, Sample],
    vae: str | None, text_encoders: list[str],
) -> tuple[EncodeArgs, dict[str, Any]]:  # fmt: skip
    """Return the settings of the encoding and the header of the index, from the first sample of each split."""
    all_shards = [shard for group in shards.values() for shard in group]
    rows, captions = sum(shard.rows for shard in all_shards), sum(shard.captions for shard in all_shards)
    first = next(iter(firsts.values()))
    stored = [name for name in ("tokens", "pooled") if getattr(first, name) is not None]
    encoded = [name for name in ("tokens", "pooled") if name not in stored and getattr(cfg, name) is not None]
    if 0 < captions < rows and encoded and not options.skip_bad:
        first_bare = next(shard for shard in all_shards if shard.uncaptioned)
        where, others = f"{first_bare.shard.path}: {first_bare.uncaptioned[0]}", f"as {rows - captions} of {rows} samples"
        raise DataError(f"{where}: no caption, {others}; write one, which may be empty, or leave them out (--skip-bad)")
    if encoded and not captions:
        command.print_rank_0("there are no captions: no text vectors are written")
        encoded = []
    if captions and not encoded and not stored:
        command.print_rank_0(f"{captions} captions are left out: no encoder is named by --tokens, --pooled or --model")
    if first.moments is None:
        if cfg.vae is None:
            raise ConfigError(f"{first.name}: an image, which needs an autoencoder; name one by --vae or --model")
        if first.image is None:
            raise DataError(f"{first.name}: no image and no latents; {captioned.REMEDY}")
    tokens, pooled = (getattr(cfg, name) if name in (*encoded, *stored) else None for name in ("tokens", "pooled"))
    networks = replace(cfg, vae=cfg.vae if first.moments is None else None, tokens=tokens, pooled=pooled)
    shape, image, scale, shift = _layout(options, cfg, first)
    shapes = {"moments": shape} | {name: getattr(first, name).shape for name in stored}
    shapes |= {"sizes": FIELDS["sizes"].shape} if first.moments is None and options.sizes else {}
    shapes |= {name: _encoders().load_networks(networks).text_encoders[name].shape for name in encoded}
    fields = tuple((name, field._replace(shape=tuple(shapes[name]))) for name, field in FIELDS.items() if name in shapes)
    size = None if first.moments is not None else options.size
    args = EncodeArgs(networks, size, options.enlarge, tuple(encoded), options.batch, options.workers, fields, options.skip_bad)
    header = {
        "kind": "latents", "scale": scale, "shift": shift, "latents": shape[0] // 2, "size": list(shape[1:]), "image": image,
        "buckets": options.buckets, "tokens": list(shapes["tokens"]) if "tokens" in shapes else None,
        "pooled": shapes["pooled"][0] if "pooled" in shapes else None, "vae": vae or "mlperf",
        "encoders": (text_encoders if captions or stored else []) or (["mlperf"] if stored else []),
    }  # fmt: skip
    return args, header


def _layout(
    options: argparse.Namespace, networks: "NetworkConfig", first: Sample
) -> tuple[tuple[int, ...], list[int], float, float]:
    """Return the shape of moments, the size of their images, scale and shift."""
    cfg = None if networks.vae is None else _encoders().vae_config(networks.vae)
    factor = VAE_SCALE_FACTOR if cfg is None else 2 ** (len(cfg.channels) - 1)
    if first.moments is None:
        assert cfg is not None
        for name, sides in {"size": options.size, "buckets": (options.buckets or 0,)}.items():
            if any(side % factor for side in sides):
                text = f"--{name} {_format_size(sides)}: expected multiples of {factor}"
                raise ConfigError(f"{text}, by which {networks.vae} downsamples")
        return (2 * cfg.latents, *(side // factor for side in options.size)), list(options.size), cfg.scale, cfg.shift
    shape = first.moments.shape
    if cfg is not None and 2 * cfg.latents != shape[0]:
        raise ConfigError(f"{networks.vae}: has latents of {cfg.latents} channels, those of {first.name} have {shape[0] // 2}")
    if cfg is None and shape[0] // 2 not in MLPERF_SCALING:
        text = f"latents of {shape[0] // 2} channels, MLPerf's have 4 or 16"
        raise ConfigError(f"{first.name}: {text}; name their autoencoder by --vae")
    scale, shift = MLPERF_SCALING[shape[0] // 2] if cfg is None else (cfg.scale, cfg.shift)
    return shape, [factor * side for side in shape[1:]], scale, shift


def _make_jobs(
    out: Path, settings: LatentSettings, args: EncodeArgs, shards: dict[str, list[ListedShard]], firsts: dict[str, Sample]
) -> Iterator[store.Job]:
    rows_per_file = settings.rows or max(1, FILE_BYTES // sum(2 * math.prod(field.shape) for _, field in args.fields))
    buckets = None if settings.buckets is None else bucket_sizes(settings.size, settings.buckets)
    for folder, group in shards.items():
        total = min(sum(shard.rows for shard in group), settings.limit or sys.maxsize)
        mask = validation_mask(total, settings.validation, settings.seed) if not folder else np.full(total, folder == "validation")
        for split in (folder,) if folder else store.SPLITS[:2]:
            split_args, selected = args, mask == (split == "validation")
            if not selected.any() and (split == "train" or settings.validation):
                raise ConfigError(f"{total} samples: none is left for {split}; change --validation")
            if split == "validation" and firsts[folder].level is not None:
                split_args = replace(args, fields=(*args.fields, ("level", FIELDS["level"])))
            begin, number = 0, 0
            for shard in group:
                rows = np.flatnonzero(selected[begin : begin + shard.rows])
                begin += shard.rows
                for size, members in split_by_bucket(shard, rows, buckets):
                    fields, sized = dict(split_args.fields), split_args
                    if size is not None:
                        channels, height, _ = fields["moments"].shape
                        shape = channels, *(side * height // settings.size[0] for side in size)
                        own = fields | {"moments": fields["moments"]._replace(shape=shape)}
                        sized = replace(split_args, size=size, fields=tuple(own.items()))
                        fields["moments"] = fields["moments"]._replace(shape=(channels, None, None))
                    for part in command.batched(members, rows_per_file):
                        contents = store.Contents(fields, _sums, _merge, varies=size is not None)
                        path = out / split / f"latents_{number:06d}.h5"
                        yield store.Job(path, partial(write_latents, sized, shard, part), contents, len(part))
                        number += 1


def _format_size(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))


def _finalize(options: argparse.Namespace, args: EncodeArgs, header: dict[str, Any], out: Path) -> None:
    """Write the vectors of the empty caption, which replace those of captions dropped in training, and print statistics."""
    path, vectors = out / EMPTY_CAPTION, {}
    folders = (options.nothing, options.source / EMPTY_FOLDER, options.source.parent / EMPTY_FOLDER)
    folder = next((path for path in folders if path is not None and path.is_dir()), None)
    for name in ("tokens", "pooled"):
        if not header[name]:
            continue
        where = f"the empty caption of {name}"
        if getattr(args.networks, name) is not None:
            values = _encoders().load_networks(args.networks).text_encoders[name].encode([""], [where])[0].numpy()
            values = np.zeros_like(values) if args.networks.zero_empty else values
        elif folder is not None and (array := folder / EMPTY_FILES[name]).is_file():
            where, values = str(array), captioned.read_empty_caption(array)
        else:
            print(f"{path.name} has no {name}: name an encoder, or the folder of {EMPTY_FILES[name]} by --nothing")
            continue
        expected = tuple(np.atleast_1d(header[name]))
        if values.shape[1:] != expected:
            raise DataError(f"{where}: {list(values.shape)}, expected {[1, *map(int, expected)]}, as captions have it")
        vectors[name] = _to_float16(values, name, [where])[0]
    if vectors:
        np.savez(content := io.BytesIO(), **vectors)
        replace_file(path, content.getvalue())
    _print_statistics(out)


def _print_statistics(out: Path) -> None:
    """Print the sizes of the splits, and the root mean square of the scaled latents, which should be about 1."""
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        index, means = store.read_json(out / split / "index.json"), part["means"]
        scaled = [(np.array(means["mean"]) - index["shift"]) * index["scale"], np.array(means["deviation"]) * index["scale"]]
        size = float(np.sqrt(np.mean(scaled[0] ** 2 + scaled[1] ** 2)))
        print(f"{split}: {part['rows']} samples, root mean square of scaled latents {size:.3f}")
        if not 0.4 <= size <= 2.5:
            print("warning: expected about 1; is the scale of the autoencoder that of its weights?")
        for name, count in part["cut"].items():
            if count:
                print(f"{split}: {count} {COUNTED[name]}")


# ---- check


def check_latents(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the mistakes of moments and of the empty caption."""
    out, index = prepared.out, prepared.index
    if index.get("kind") != "latents":
        raise DataError(f"{out}: was not written by data_prep.latents; name another folder")
    for path in prepared.paths:
        with h5py.File(path, "r") as file:
            logvar = file["moments"][:, file["moments"].shape[1] // 2 :]
        if logvar.min() < MIN_LOGVAR or logvar.max() > MAX_LOGVAR:
            yield f"{path}: logarithms of variances outside {MIN_LOGVAR:g} to {MAX_LOGVAR:g}; convert again"
    if (empty := out / EMPTY_CAPTION).is_file():
        with np.load(empty) as arrays:
            for name, values in arrays.items():
                if list(values.shape) != list(np.atleast_1d(index[name] or 0)) or not np.isfinite(values).all():
                    yield f"{empty}: {name} is {list(values.shape)}, expected finite numbers {index[name]}; convert again"
    elif index["tokens"] or index["pooled"]:
        print(f"{empty.name} does not exist: no caption can be dropped in training")
    _print_statistics(out)


BUILDER = command.DatasetBuilder(
    "latents", "Images with captions to moments of latents and vectors of captions.", "diffusion",
    command.Check("Files against index.json, and values.", check_latents, None),
    (command.Convert("Images, or MLPerf's latents, with captions.", LatentSettings, convert,
                     "images, .tar, MLPerf's layouts, or folders of them by split", add_networks),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
