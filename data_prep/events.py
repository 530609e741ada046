"""Tables of events for DLRM: simulated reads of metagenomes or clicks, or Criteo's click logs.

    python -m data_prep.events simulate OUT         k-mers of reads from related genomes, or --kind clicks
    python -m data_prep.events convert SOURCE OUT   Criteo as MLPerf has it: day_*_{labels,dense}.npy with day_*_sparse.npy (one id
                                                    each) or day_*_sparse_multi_hot.npz; or {train,val,test}_data.bin (HugeCTR)
    python -m data_prep.events check OUT            all rows; positives, ids, and how unevenly they are used

OUT has the form of hpcai.data.events. Training rows are shuffled, in parts of bounded size; the halves of the last day are for
validation and test (MLPerf). Of a simulation, truth.npz has what is known of the validation rows.

N rows, F numbers, K ids, L bases, P positions of k-mers"""

import argparse
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from data_prep import command, store
from data_prep.command import option
from hpcai.durable import commit_file, write_json
from hpcai.errors import ConfigError, DataError
from hpcai.programs import command_of_app

Array = NDArray[Any]
Part = Callable[[], Array]                      # the rows of a part of a file [n, 1 + F + K]
CHUNK, PART, WORK = 1 << 16, 1 << 14, ".work"   # rows read at a time, simulated rows of a part, unfinished files
DENSE = 13                                      # of Criteo


# ---- files


def pack(label: Array, dense: Array, ids: Array) -> Array:
    """Return rows of words.   [N], [N, F], [N, K] -> [N, 1 + F + K] int32"""
    numbers = np.concatenate((np.reshape(label, (-1, 1)), dense), 1, dtype="<f4", casting="unsafe")
    return np.concatenate((numbers.view("<i4"), ids), 1, dtype="<i4", casting="same_kind")


def write_split(
    options: argparse.Namespace, split: str, counts: Sequence[int], parts: Sequence[Part], width: int
) -> dict[str, int]:
    """Write a file, whose parts the workers of all ranks write at their places, and return its entry of table.json. A part that was
    written is kept."""
    path, ends = options.out / f"{split}.bin", np.cumsum([0, *counts]).tolist()
    unfinished = path.with_name(f".{path.name}.partial")
    if not path.is_file():
        with unfinished.open("ab") as file:
            file.truncate(4 * width * ends[-1])
    tasks = {options.out / WORK / f"{split}-{k:05}.json": partial(_write_part, unfinished, 4 * width * first, part)
             for k, (first, part) in enumerate(zip(ends, parts))}  # fmt: skip
    positives = sum(done["positives"] for done in store.all_gather_results(tasks, options.workers, split))
    if store.rank_and_size()[0] == 0 and unfinished.is_file():
        commit_file(unfinished, path)
    return {"rows": ends[-1], "positives": positives}


def _write_part(path: Path, offset: int, part: Part) -> dict[str, Any]:
    rows = part()
    with path.open("r+b") as file:
        file.seek(offset)
        rows.astype("<i4", copy=False).tofile(file)
    return {"positives": int(rows[:, 0].view("<f4").sum())}


def finish(options: argparse.Namespace, dense: int, tables: Sequence[tuple[str, int, int]], splits: dict[str, Any]) -> None:
    """Write table.json on rank 0, last, and print what it holds. ``tables``: Name, rows and hotness."""
    if store.rank_and_size()[0]:
        return
    content = {"dense": dense, "tables": [{"name": name, "rows": n, "hotness": k} for name, n, k in tables], "splits": splits}
    write_json(options.out / "table.json", content)
    shutil.rmtree(options.out / WORK, ignore_errors=True)
    describe(options.out, getattr(options, "check", False))
    print(f"next: {command_of_app('dlrm', 'small' if 'check' in options else 'node')} data.directory={options.out}", flush=True)


def is_finished(options: argparse.Namespace, recipe: dict[str, Any]) -> bool:
    store.claim_folder(options.out, recipe)
    if (options.out / "table.json").is_file():
        command.print_rank_0(f"{options.out} is finished")
        return True
    (options.out / WORK).mkdir(exist_ok=True)
    return False


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    rows: tuple[int, ...] = option((), "of each table, to cap ids; default: MLPerf's", nargs="+", type=command.positive)
    hotness: tuple[int, ...] = option((), "ids of each table; default: MLPerf's", nargs="+", type=command.positive)
    memory: float = option(8.0, "GB of each worker, for a part of the training rows", type=command.within(1e-6, 1e4))
    shuffle: bool = option(True, "shuffle training rows", action=argparse.BooleanOptionalAction)
    seed: int = command.seed()


def map_npz(path: Path) -> dict[str, Array]:
    """Map the arrays of an uncompressed npz file, of which np.load would read each in full."""
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{path}: {info.filename} is compressed; write it by numpy.savez")
                file.seek(info.header_offset + 26)
                file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
                read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
                shape, fortran, dtype = read(file)
                order: Any = "F" if fortran else "C"
                arrays[Path(info.filename).stem] = np.memmap(path, dtype, "r", file.tell(), shape, order)
    except (zipfile.BadZipFile, ValueError, struct.error) as problem:
        raise DataError(f"{path}: is no npz file ({problem}); fetch it again") from problem
    return arrays


def map_npy(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read ({problem}); fetch it again") from problem
    return array.reshape(len(array), -1)


class Criteo:
    """Criteo's days, or the files of HugeCTR, as ranges of rows."""

    def __init__(self, root: Path, source: Source, work: Path) -> None:
        from hpcai.models.dlrm.config import HOTNESS, ROWS  # pydantic, which --help does not need

        self.root, self.work, self.seed = root, work, source.seed
        self.rows, self.hotness = source.rows or ROWS, source.hotness or HOTNESS
        if len(self.rows) != len(self.hotness):
            raise ConfigError(f"--rows has {len(self.rows)} tables, --hotness {len(self.hotness)}; give one of each for a table")
        self.width = 1 + DENSE + sum(self.hotness)
        days = sorted(root.glob("day_*_labels.npy"), key=lambda path: (len(path.name), path.name))
        self.days = [path.name.removesuffix("_labels.npy") for path in days]
        self.raw = {split: root / f"{name}_data.bin" for split, name in zip(store.SPLITS, ("train", "val", "test"))
                    if (root / f"{name}_data.bin").is_file()}  # fmt: skip
        if len(self.days) < 2 and not {"train", "validation"} <= self.raw.keys():
            raise ConfigError(f"{root}: holds no day_*_labels.npy of two days or more, and no train_data.bin with val_data.bin")

    def ranges(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return (day or file, first row, end) of each split."""
        if self.days:
            counts = {day: len(map_npy(self.root / f"{day}_labels.npy")) for day in self.days}
            last, half = self.days[-1], -(-counts[self.days[-1]] // 2)
            return {"train": [(day, 0, counts[day]) for day in self.days[:-1]], "validation": [(last, 0, half)],
                    "test": [(last, half, counts[last])]}  # fmt: skip
        for path in self.raw.values():
            if path.stat().st_size % (4 * self.width):
                raise DataError(f"{path}: its bytes are no multiple of the {4 * self.width} of a row; see --hotness, or fetch it")
        return {split: [(path.name, 0, path.stat().st_size // 4 // self.width)] for split, path in self.raw.items()}

    def read(self, name: str, first: int, end: int) -> Array:
        """Return rows with capped ids.   [n, 1 + F + K]"""
        if not self.days:
            rows = np.array(np.memmap(self.root / name, "<i4", "r").reshape(-1, self.width)[first:end])
            label = np.where(rows[:, 0] == 1, 1.0, rows[:, 0].view("<f4"))  # integers or float32
            bags = np.split(rows[:, 1 + DENSE :], np.cumsum(self.hotness)[:-1], 1)
            return pack(label, rows[:, 1 : 1 + DENSE].view("<f4"), self._capped(name, first, bags))
        label, dense = (map_npy(self.root / f"{name}_{kind}.npy")[first:end] for kind in ("labels", "dense"))
        return pack(label, dense, self._capped(name, first, self._bags(name, first, end)))

    def _bags(self, day: str, first: int, end: int) -> list[Array]:
        if (path := self.root / f"{day}_sparse_multi_hot.npz").is_file():
            arrays = map_npz(path)
            return [np.asarray(arrays[str(t)][first:end]) for t in range(len(self.rows))]
        ids = map_npy(self.root / f"{day}_sparse.npy")[first:end]
        capped = [ids[:, t] % n for t, n in enumerate(self.rows)]
        extra = [np.load(self.work / f"multi-hot-{t}.npy", mmap_mode="r") for t in range(len(self.rows))]
        return [np.column_stack((own, further[own])) for own, further in zip(capped, extra)]

    def _capped(self, name: str, first: int, bags: list[Array]) -> Array:
        for t, (bag, k) in enumerate(zip(bags, self.hotness, strict=True)):
            if bag.shape[1] != k:
                raise DataError(f"{name}: table {t} has {bag.shape[1]} ids, expected its hotness, {k}; see --hotness")
            if bag.size and bag.min() < 0:
                row = first + int(np.argwhere(bag < 0)[0, 0])
                raise DataError(f"{name}: row {row:,} has a negative id in table {t}; fetch it again")
        return np.concatenate([bag % n for bag, n in zip(bags, self.rows)], 1)

    def write_extra_ids(self) -> dict[str, Any]:
        """Write the further ids of each id, those of MLPerf's generator: table after table from one stream of numpy's legacy
        generator."""
        random = np.random.RandomState(0)
        for t, (n, k) in enumerate(zip(self.rows, self.hotness)):
            out = npy.open_memmap(self.work / f"multi-hot-{t}.npy", "w+", np.int32, (n, k - 1))
            for first in range(0, n if k > 1 else 0, step := max((CHUNK << 6) // k, 1)):
                part = out[first : first + step]
                part[...] = random.randint(0, n, part.shape)
            out.flush()
        return {}

    def scatter(self, name: str, first: int, end: int, buckets: int) -> dict[str, Any]:
        """Send rows to the files of random buckets, and return their counts."""
        folder, rng = self.work / name, store.generator(self.seed, 1, zlib.crc32(name.encode()))
        folder.mkdir(parents=True, exist_ok=True)
        counts, files = np.zeros(buckets, int), [(folder / f"{bucket}.bin").open("wb") for bucket in range(buckets)]
        for start in range(first, end, CHUNK):
            rows = self.read(name, start, min(start + CHUNK, end))
            owner = rng.integers(0, buckets, len(rows))
            for bucket in np.unique(owner):
                rows[owner == bucket].tofile(files[bucket])
            counts += np.bincount(owner, minlength=buckets)
        for file in files:
            file.close()
        return {"counts": counts.tolist()}

    def gather(self, folders: Sequence[str], bucket: int) -> Array:
        parts = [np.fromfile(self.work / folder / f"{bucket}.bin", "<i4") for folder in folders]
        rows = np.concatenate(parts).reshape(-1, self.width)
        return rows[store.generator(self.seed, 2, bucket).permutation(len(rows))]


def convert(options: argparse.Namespace) -> None:
    source, work, splits = Source.from_options(options), options.out / WORK, {}
    criteo = Criteo(options.source, source, work)
    ranges = criteo.ranges()
    if is_finished(options, {"kind": "convert", **source.json_dict, "source": str(options.source)}):
        return
    if criteo.days and not (options.source / f"{criteo.days[0]}_sparse_multi_hot.npz").is_file():
        list(store.all_gather_results({work / "multi-hot.json": criteo.write_extra_ids}, 1, "ids"))
    step = max(int(source.memory * 1e9 / 12) // criteo.width, 1)  # rows of a part, of which there are three copies
    for split, pieces in ranges.items():
        cut = [(name, a, min(a + step, end)) for name, first, end in pieces for a in range(first, end, step)]
        counts, parts = [end - a for _, a, end in cut], [partial(criteo.read, *piece) for piece in cut]
        if split == "train" and source.shuffle:
            tasks = {work / f"scatter-{piece[0]}.json": partial(criteo.scatter, *piece, len(cut)) for piece in pieces}
            counts = np.sum([done["counts"] for done in store.all_gather_results(tasks, options.workers, "shuffle")], 0).tolist()
            parts = [partial(criteo.gather, [name for name, *_ in pieces], bucket) for bucket in range(len(cut))]
        splits[split] = write_split(options, split, counts, parts, criteo.width)
    names = [f"cat_{t}" for t in range(len(criteo.rows))]
    finish(options, DENSE, list(zip(names, criteo.rows, criteo.hotness)), splits)


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    kind: str = option("reads", "of events", choices=["reads", "clicks"])
    seed: int = command.seed()
    validation: float = command.fraction(0.25, "validation events")
    test: float = 0.0
    organisms: int = option(24, "strains of the species", type=command.within(2, 10_000, int))
    genome: int = option(20_000, "bases of a genome", type=command.within(1000, 1e8, int))
    divergence: float = option(0.02, "mean substitutions of a base on a branch of their tree", type=command.within(0, 0.5))
    recombination: float = option(0.9, "fraction of the bases that strains exchange", type=command.within(0, 1))
    pathogens: float = option(0.5, "fraction of strains and reads that are positive", type=command.within(0.01, 0.9))
    length: int = option(100, "mean bases of a read", type=command.within(60, 1000, int))
    rows: int = option(14, "log2 of the rows of the largest tables", type=command.within(12, 30, int))
    fields: int = option(8, "tables of clicks", type=command.within(2, 100, int))
    positives: float = option(0.03, "fraction of clicks", type=command.within(1e-4, 0.5))

    def mistakes(self) -> Iterator[str]:
        if self.genome < 2 * self.length:
            yield f"--genome {self.genome} and --length {self.length}: expected a genome of two reads or more"


class Reads:
    """Reads of the strains of a species. Genomes are the leaves of a random tree, with conserved genes; then strains exchange
    bases, as in a species that recombines: pathogens differ from others by combinations. Tables: canonical k-mers of a read, at all
    positions, at minimizers (Roberts et al. 2004), or of a spaced seed (Ma et al. 2002), hashed."""

    names = "6-mers", "8-mers", "10-mers", "12-mers", "spaced", "minimizers"
    seeds = 6 * "1", 8 * "1", 10 * "1", 12 * "1", "1101100110110011011", 15 * "1"
    window, gene, error = 9, 500, 0.02          # k-mers of a minimizer's window, bases, mean rate
    dense = 6

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, rng, n = recipe, recipe.generator(1, 0), recipe.organisms
        low, size = recipe.length * 4 // 5, recipe.genome
        self.lengths = low, 2 * recipe.length - low
        conserved = np.repeat(rng.random(-(-size // self.gene)) < 0.3, self.gene)[:size]
        genomes = [rng.integers(0, 4, size, np.int8)]
        while len(genomes) < n:
            parent = genomes.pop(int(rng.integers(len(genomes))))
            for _ in range(2):
                changed = rng.random(size) < rng.exponential(recipe.divergence) * np.where(conserved, 0.1, 1.0)
                genomes.append(np.where(changed, (parent + rng.integers(1, 4, size, np.int8)) % 4, parent))
        self.genomes = np.stack(genomes)
        exchanged = rng.random(size) < recipe.recombination
        self.genomes[:, exchanged] = rng.permuted(self.genomes[:, exchanged], axis=0)
        self.target = rng.permutation(n) < min(max(round(recipe.pathogens * n), 1), n - 1)
        self.distance = np.array([min((own != other).mean() for other in self.genomes[self.target]) for own in self.genomes])
        share = rng.lognormal(0, 0.7, n)
        parts = [np.where(self.target == kind, share, 0) for kind in (False, True)]
        self.abundance = (1 - recipe.pathogens) * parts[0] / parts[0].sum() + recipe.pathogens * parts[1] / parts[1].sum()
        log2 = recipe.rows
        self.rows = [1 << k for k in (12, log2 - 4, log2 - 2, log2 - 2, log2, log2)]
        *positions, last = (self.lengths[1] - len(seed) + 1 for seed in self.seeds)
        self.hotness = [*positions, 2 * last // 5]  # twice the expected minimizers
        codes = self._codes(self._draw(2, 0, PART)[1])[2]
        self.coverage = np.bincount(codes[codes >= 0], minlength=self.rows[2])

    def organisms(self, number: int, count: int) -> Array:
        return self.recipe.generator(3, number).choice(len(self.genomes), count, p=self.abundance)

    def _draw(self, stream: int, number: int, count: int) -> tuple[Array, Array, Array, Array]:
        """Return organisms, bases (4 beyond the end), lengths and error rates of reads.   [N], [N, L], [N], [N]"""
        rng, organism = self.recipe.generator(stream, number), self.organisms(number, count)
        length, at = rng.integers(*self.lengths, count, endpoint=True), np.arange(self.lengths[1])
        first = rng.integers(0, self.recipe.genome - self.lengths[1], count)
        bases, rate = self.genomes[organism[:, None], first[:, None] + at], self.error * rng.lognormal(-0.125, 0.5, count)
        wrong = rng.random(bases.shape) < rate[:, None]
        bases = np.where(wrong, (bases + rng.integers(1, 4, bases.shape, np.int8)) % 4, bases)
        bases[at >= length[:, None]] = 4
        return organism, bases, length, rate

    def _codes(self, bases: Array) -> list[Array]:
        """Return the ids of each table at each position, -1 for none.   [N, L] -> [N, P] of each"""
        tables = []
        for number, (seed, rows) in enumerate(zip(self.seeds, self.rows)):
            used = [k for k, bit in enumerate(seed) if bit == "1"]
            span, weight = bases.shape[1] - len(seed) + 1, len(used)
            forward, backward = np.zeros((2, len(bases), span), np.uint64)
            for place, k in enumerate(used):    # the seed is a palindrome: the other strand has the same places
                column = bases[:, k : k + span].astype(np.uint64)
                forward |= (column & np.uint64(3)) << np.uint64(2 * (weight - 1 - place))
                backward |= (np.uint64(3) - (column & np.uint64(3))) << np.uint64(2 * place)
            code = (np.minimum(forward, backward) + np.uint64(number)) * np.uint64(0x9E3779B97F4A7C15)
            code = ((code ^ (code >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(32)
            code[bases[:, len(seed) - 1 :] == 4] = 1 << 32
            kept = code < 1 << 32
            if self.names[number] == "minimizers":
                kept &= _is_minimum(code, self.window)
            tables.append(np.where(kept, (code % np.uint64(rows)).astype(np.int64), -1))
        return tables

    def part(self, number: int, count: int) -> Array:
        organism, bases, length, rate = self._draw(4, number, count)
        codes = self._codes(bases)
        ids = [np.take_along_axis(code, np.argsort(code < 0, 1, "stable"), 1)[:, :most] for code, most in zip(codes, self.hotness)]
        inside = bases < 4
        gc = ((bases == 1) | (bases == 2)).sum(1) / length
        run = longest = np.zeros(count, int)
        for left, right, valid in zip(bases.T, bases.T[1:], inside.T[1:]):
            run = np.where((left == right) & valid, run + 1, 0)
            longest = np.maximum(longest, run)
        quality = -10 * np.log10(rate) + self.recipe.generator(5, number).normal(0, 1, count)
        depth = np.ma.masked_array(self.coverage[codes[2]], codes[2] < 0)
        dense = (4 * (gc - 0.5), np.log(length / self.recipe.length), (quality - 18) / 4, np.log1p(longest) - 1,
                 np.log1p(np.ma.median(depth, 1).filled(0)) - 1, np.log1p(depth.max(1).filled(0)) - 2)  # fmt: skip
        return pack(self.target[organism], np.stack(dense, 1), np.concatenate(ids, 1))

    def truth(self, parts: Sequence[tuple[int, int]]) -> dict[str, Array]:
        organism = np.concatenate([self.organisms(*part) for part in parts])
        return {"organism": organism, "abundance": self.abundance, "distance": self.distance}


def _is_minimum(code: Array, window: int) -> Array:
    """Return whether a k-mer is the least of some window of consecutive ones.   [N, P]"""
    least = np.lib.stride_tricks.sliding_window_view(code, window, 1).min(2)
    padded = np.pad(least, ((0, 0), (window - 1, window - 1)), constant_values=np.iinfo(np.uint64).max)
    return (np.lib.stride_tricks.sliding_window_view(padded, window, 1) == code[..., None]).any(2)


class Clicks:
    """Clicks of a hidden teacher: a bias of each id, interactions of rank 8 of all pairs of fields, and terms of the numbers. Ids
    of a field have a Zipf distribution, fewer of a frequent one."""

    dense = 4

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, rng, fields = recipe, recipe.generator(1, 0), recipe.fields
        self.rows = np.geomspace(20, 1 << recipe.rows - 4, fields).astype(int).tolist()
        self.names, self.hotness = [f"field {t}" for t in range(fields)], [1 + t % 3 for t in range(fields)]
        weights = [np.arange(1, n + 1) ** -power for n, power in zip(self.rows, rng.uniform(1.05, 1.2, fields))]
        self.ends = [(weight / weight.sum()).cumsum() for weight in weights]
        self.bias = [rng.normal(0, 0.4, n) for n in self.rows]
        self.vectors = [rng.normal(0, 1, (n, 8)) for n in self.rows]
        self.linear, self.offset = rng.normal(0, 0.4, self.dense), 0.0
        low, high, logit = -30.0, 30.0, self._draw(2, 0, PART)[0]
        while high - low > 1e-6:
            self.offset = (low + high) / 2
            low, high = (self.offset, high) if _sigmoid(logit + self.offset).mean() < recipe.positives else (low, self.offset)

    def _draw(self, stream: int, number: int, count: int) -> tuple[Array, Array, Array, Array]:
        """Return logits, numbers, ids and uniform random numbers.   [N], [N, F], [N, K], [N]"""
        rng = self.recipe.generator(stream, number)
        dense, fields = rng.normal(0, 1, (count, self.dense)), []
        logit = self.offset + dense @ self.linear + 0.3 * dense[:, 0] * dense[:, 1]
        total, squares = np.zeros((2, count, 8))
        for end, most, bias, vectors in zip(self.ends, self.hotness, self.bias, self.vectors):
            ids = np.searchsorted(end, rng.random((count, most)), "right").clip(0, len(end) - 1)
            used = np.arange(most) <= rng.integers(0, most, count)[:, None]
            scale = used / np.sqrt(used.sum(1, keepdims=True))
            logit, pooled = logit + (bias[ids] * scale).sum(1), (vectors[ids] * scale[..., None]).sum(1)
            total, squares = total + pooled, squares + pooled**2
            fields.append(np.where(used, ids, -1))
        pairs = (total**2 - squares).sum(1) / 2
        scale = 1.2 / np.sqrt(8 * len(fields) * (len(fields) - 1) / 2)
        return logit + scale * pairs, dense, np.concatenate(fields, 1), rng.random(count)

    def part(self, number: int, count: int) -> Array:
        logit, dense, ids, uniform = self._draw(4, number, count)
        return pack(uniform < _sigmoid(logit), dense, ids)

    def truth(self, parts: Sequence[tuple[int, int]]) -> dict[str, Array]:
        return {"logit": np.concatenate([self._draw(4, *part)[0] for part in parts])}


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def simulate(options: argparse.Namespace) -> None:
    recipe, splits, number = Recipe.from_options(options), {}, 0
    held = round(options.events * recipe.validation)
    if not 0 < held < options.events:
        raise ConfigError(f"--events {options.events}: none is left for a split; ask for more, or change --validation")
    if is_finished(options, {**recipe.json_dict, "events": options.events}):
        return
    source: Reads | Clicks = (Reads if recipe.kind == "reads" else Clicks)(recipe)
    for split, total in (("train", options.events - held), ("validation", held)):
        counts = [min(PART, total - first) for first in range(0, total, PART)]
        numbers = range(number, number := number + len(counts))
        parts = [partial(source.part, *part) for part in zip(numbers, counts)]
        splits[split] = write_split(options, split, counts, parts, 1 + source.dense + sum(source.hotness))
    if store.rank_and_size()[0] == 0:
        truth: Any = source.truth(list(zip(numbers, counts)))
        np.savez(options.out / "truth.npz", **truth)
    finish(options, source.dense, list(zip(source.names, source.rows, source.hotness)), splits)


# ---- check


def describe(folder: Path, check: bool) -> None:
    """Print counts and tables. ``check``: all rows, also how the ids of training are used; raises DataError."""
    from hpcai.data.events import EventTable

    table = EventTable(folder)
    uses = [np.zeros(n, int) for n in table.rows]
    for split, content in table.splits.items():
        print(f"{split}: {content['rows']:,} events, {content['positives'] / max(content['rows'], 1):.2%} positive")
        rows = table.mapped(split)
        for first in range(0, len(rows) if check else 0, CHUNK):
            _, ids, _ = table.check(rows[first : first + CHUNK], table.path(split), first)
            for bag, count in zip(np.split(ids, np.cumsum(table.hotness)[:-1], 1), uses if split == "train" else ()):
                count += np.bincount(bag[bag >= 0], minlength=len(count))
    for name, n, most, count in zip(table.names, table.rows, table.hotness, uses):
        top, hot = (np.sort(count)[-most_used:].sum() / max(count.sum(), 1) for most_used in (1, max(n // 100, 1)))
        used = f": {(count > 0).mean():.1%} of the ids are used; the most frequent one is {top:.2%} of all, the first 1 % {hot:.0%}"
        print(f"  {name}: {n:,} rows, up to {most} ids" + (used if check else ""), flush=True)


BUILDER = command.DatasetBuilder(
    "events", "Tables of events for DLRM.", "dlrm",
    command.Check("All rows; positives, ids, and how unevenly they are used.", lambda *_: iter(()), None, None, describe),
    (command.Simulate("Reads of metagenomes, or clicks.", Recipe, ("events", 80_000), simulate, count_help="or reads"),
     command.Convert("Criteo's click logs to our files.", Source, convert, "folder of Criteo's files")),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
