"""Packed rows of sequences for BERT: simulate families of proteins, check rows, or convert FASTA, SMILES and MLPerf's HDF5.

    python -m data_prep.bert simulate OUT           families that evolve under a Potts model (data_prep.proteins), not nature
    python -m data_prep.bert check OUT              files against their index, a picture
    python -m data_prep.bert convert SOURCE OUT     .fasta, .fa, .faa, .a3m; .smi: a SMILES and anything else in each line; also .gz
    python -m data_prep.bert mlperf SOURCE OUT      packed rows of MLPerf with their masks, *.hdf5 in train and validation

    OUT/{train,validation}/*.h5     "tokens" uint16 [R, T]   "lengths" int16 [R, P]   tokens of each sequence, 0 none
        "nats" float32 [R, T]       cross entropy of each token by a baseline: the profile of its family, or the composition
        of mlperf instead of nats:  "types" uint8 [R, T]   "next_sentence" int8 [R, P]   "masked" int16 and "targets" int32 [R, M],
        -1: no sequence, no token
    OUT/families/*.h5               "tokens" [F, L]   "lengths" [F, 1]   "contacts" uint8 [F, L, L]: of a simulated protein of each
                                    family, CB within 8 angstrom, 6 residues or more apart: 1; 2 unknown

Rows are packed by the histogram of lengths, the longest first, each into the fullest row in which it fits (Krell et al., "Packing:
Towards 2x NLP BERT Acceleration", 2021). A sequence that is longer than a row is refused and counted.

R rows   T tokens of a row   P sequences of a row, at most   M masked tokens of a row, at most"""

import argparse
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import command, documents, proteins, store
from data_prep.command import option
from data_prep.store import Field
from hpcai.data.layout import parse_errors
from hpcai.errors import ConfigError, DataError
from hpcai.models.bert.masking import SPECIAL, max_masked
from hpcai.models.openfold.residues import ATOM_ORDER, GAP, RESTYPES

Array = NDArray[Any]
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
RESIDUES = (*SPECIAL, *RESTYPES, *"XBZUO")
SMILES = re.compile(r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]")
"""tokens of a SMILES (Schwaller et al., "Molecular Transformer", 2019)"""
PSEUDOCOUNT = 5.0                               # of a column of a profile, in proportion to the composition
SEPARATION = 6                                  # residues between those of a contact, at least
SOURCE = "a file, or a folder with files at any depth"


# ---- packing


def pack(lengths: Sequence[int] | Array, capacity: int, most: int) -> list[list[int]]:
    """Return the sequences of each row: indices into ``lengths``, at most ``most`` and ``capacity`` tokens."""
    members, rows = defaultdict[int, list[int]](list), defaultdict[int, list[tuple[tuple[int, ...], int]]](list)
    for index, length in enumerate(lengths):
        members[int(length)].append(index)
    full: list[tuple[tuple[int, ...], int]] = []
    for length in sorted(members, reverse=True):
        count = len(members[length])
        while count:                            # rows of equal lengths are one entry, by the space that is left
            space = next((left for left in range(length, capacity) if rows[left]), None)
            if space is None:
                space, added = capacity, min(most, capacity // length, count)
                content, number = tuple[int, ...](), count // added
            else:
                (content, number), added = rows[space].pop(), 1
            used, left = min(number, count // added), space - added * length
            if number > used:
                rows[space].append((content, number - used))
            packed = (*content, *[length] * added)
            (full if len(packed) == most or not left else rows[left]).append((packed, used))
            count -= used * added
    groups = [*full, *(group for left in sorted(rows) for group in rows[left])]
    return [[members[length].pop() for length in content] for content, number in groups for _ in range(number)]


def fields(width: int, most: int, vocabulary: int) -> store.Fields:
    return {"tokens": Field("uint16", (width,), 0, vocabulary - 1, key=True), "lengths": Field("int16", (most,), 0, width),
            "nats": Field("float32", (width,), 0)}  # fmt: skip


def _measure(file: h5py.File) -> dict[str, Any]:
    lengths = file["lengths"][...].astype(np.int64)
    return {"tokens": int(lengths.sum()), "sequences": int((lengths > 0).sum()), "width": file["tokens"].shape[1]}


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    rows, width = sum(record["rows"] for record in records), records[0]["sums"]["width"]
    tokens, sequences = (sum(record["sums"][name] for record in records) for name in ("tokens", "sequences"))
    return {"tokens": tokens, "sequences": sequences, "sequences_per_row": sequences / rows, "efficiency": tokens / (rows * width)}


def write_packed(path: Path, sequences: Sequence[tuple[Array, Array]], recipe: Any, about: dict[str, Any]) -> None:
    """Write a file of packed rows, in random order, from the tokens and nats of each sequence."""
    groups = pack([len(tokens) for tokens, _ in sequences], recipe.row, recipe.most)
    order = np.random.default_rng(len(sequences)).permutation(len(groups))
    with store.create_file(path, len(groups), fields(recipe.row, recipe.most, 1 << 16), about) as file:
        for row, group in enumerate(order):
            parts = [sequences[index] for index in groups[group]]
            sizes = [len(tokens) for tokens, _ in parts]
            file["lengths"][row, : len(sizes)] = sizes
            for name, arrays in zip(("tokens", "nats"), zip(*parts)):
                file[name][row, : sum(sizes)] = np.concatenate(arrays)
        store.truncate_rows(file, len(groups))


def _frame(letters: Array, nats: Array) -> tuple[Array, Array]:
    """Return tokens between [CLS] and [SEP], and nats."""
    return np.concatenate(([CLS], letters + len(SPECIAL), [SEP])), np.pad(nats, 1)


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a family, besides its number."""

    seed: int = command.seed()
    length: tuple[int, int] = option((32, 48), "residues, range", metavar=("LEAST", "MOST"), nargs=2, type=command.positive)
    sequences: int = option(4096, "sequences of a family", type=command.positive)
    settle: int = option(12, "sweeps of evolution of each sequence by itself", type=command.within(0, 1000, int))
    row: int = option(128, "tokens of a row", type=command.positive)
    most: int = option(3, "sequences of a row, at most", type=command.positive)
    each: int = option(1, "families of a file", type=command.positive)
    validation: float = command.fraction(0.1, "the sequences of each family")
    test: float = 0.0

    def mistakes(self) -> Iterator[str]:
        least, most = self.length
        if not proteins.MIN_LENGTH <= least <= most <= self.row - 2:
            limits = f"{proteins.MIN_LENGTH} at least, and --row minus 2, {self.row - 2}, at most"
            yield f"--length {least} {most}: expected the least and the most, {limits}"


@lru_cache(2)
def _family(recipe: Recipe, number: int) -> tuple[Any, Array, Array, Array]:
    """Return the first chain of a family, its alignment [S, L], the nats of each letter, and whether a row is of validation."""
    rng = recipe.generator(1, number)
    length = int(rng.integers(*recipe.length, endpoint=True))
    ((chain, alignment),) = proteins.make_family(recipe.seed * 1_000_000 + number, 1, length, recipe.sequences, recipe.settle)
    held = rng.random(recipe.sequences) < recipe.validation
    letters = alignment.msa.astype(int)
    onehot = np.eye(GAP + 1)[letters][:, :, :20]
    counts, composition = onehot[~held].sum(0), onehot[~held].sum((0, 1)) / onehot[~held].sum()
    without = counts - onehot * ~held[:, None, None]                # a training sequence is not in its own profile
    profile = (without + PSEUDOCOUNT * composition) / (without.sum(-1, keepdims=True) + PSEUDOCOUNT)
    chosen = np.take_along_axis(profile, np.minimum(letters, 19)[..., None], 2)[..., 0]
    return chain, letters, -np.log(np.maximum(chosen, 1e-12)), held


def write_sequences(recipe: Recipe, validation: bool, file: int, path: Path) -> None:
    sequences = []
    for number in range(file * recipe.each, (file + 1) * recipe.each):
        _, letters, nats, held = _family(recipe, number)
        chosen = held == validation
        sequences += [_frame(row[row != GAP], own[row != GAP]) for row, own in zip(letters[chosen], nats[chosen])]
    write_packed(path, sequences, recipe, {"kind": "simulated", "seed": recipe.seed, "recipe": recipe.json_text})


def family_fields(width: int) -> store.Fields:
    return {"tokens": Field("uint16", (width,)), "lengths": Field("int16", (1,), 1, width),
            "contacts": Field("uint8", (width, width), 0, 2, blank=0)}  # fmt: skip


def write_contacts(recipe: Recipe, file: int, path: Path) -> None:
    width, rows = recipe.length[1] + 2, []
    for number in range(file * recipe.each, (file + 1) * recipe.each):
        chain = _family(recipe, number)[0]
        beta, has_beta = chain.positions[:, ATOM_ORDER["CB"]], chain.mask[:, ATOM_ORDER["CB"]] > 0
        points = np.where(has_beta[:, None], beta, chain.positions[:, ATOM_ORDER["CA"]])
        near = np.linalg.norm(points[:, None] - points, axis=-1) < proteins.CONTACT_DISTANCE
        apart = np.abs(np.subtract.outer(np.arange(len(points)), np.arange(len(points)))) >= SEPARATION
        known = chain.mask[:, ATOM_ORDER["CA"]] > 0
        values, contacts = np.where(known & known[:, None], near & apart, 2), np.zeros((width, width), int)
        contacts[1 : len(points) + 1, 1 : len(points) + 1] = values
        tokens = np.pad(_frame(chain.aatype, np.zeros(0))[0], (0, width - len(points) - 2))
        rows.append({"tokens": tokens, "lengths": [len(points) + 2], "contacts": contacts})
    store.write_rows(path, family_fields(width), rows, {"kind": "simulated"})


def simulate(options: argparse.Namespace) -> command.Plan:
    if options.families % options.each:
        raise ConfigError(f"--families {options.families}: expected a multiple of --each {options.each}")
    recipe, out, count = Recipe.from_options(options), options.out, options.families // options.each
    contents = store.Contents(fields(recipe.row, recipe.most, len(RESIDUES)), _measure, _merge)
    splits = ["train", *(["validation"] if recipe.validation else [])]
    jobs = [store.Job(out / split / f"rows_{file:06d}.h5", partial(write_sequences, recipe, split == "validation", file), contents)
            for split in splits for file in range(count)]  # fmt: skip
    families = store.Contents(family_fields(recipe.length[1] + 2))
    extra = [store.Job(out / "families" / f"families_{file:06d}.h5", partial(write_contacts, recipe, file), families, recipe.each)
             for file in range(count)]  # fmt: skip
    message = f"{options.families} families of {recipe.sequences} sequences, simulated"
    return command.Plan(recipe, jobs, _header(recipe, RESIDUES, "profile"), message, extra)


def _header(settings: Any, vocabulary: Sequence[str], baseline: str) -> dict[str, Any]:
    return {"vocabulary": list(vocabulary), "baseline": baseline, "row": settings.row, "most": settings.most}


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    row: int = option(512, "tokens of a row", type=command.positive)
    most: int = option(3, "sequences of a row, at most", type=command.positive)
    validation: float = command.fraction(0.05, "the sequences, by their hash")

    def mistakes(self) -> Iterator[str]:
        yield from command.check_fractions(self.validation, 0.0)
        if not 3 <= self.row < 1 << 15:
            yield f"--row {self.row}: expected 3 to {(1 << 15) - 1}"


def tokenize(text: str, smiles: bool) -> list[str]:
    """Return the tokens of a sequence. Raises DataError for unknown letters."""
    tokens = SMILES.findall(text) if smiles else list(text.upper().rstrip("*"))
    unknown = sorted(set(text) - set("".join(tokens))) or ["order"] if smiles else sorted(set(tokens) - set(RESIDUES))
    if (smiles and "".join(tokens) != text) or (not smiles and unknown):
        expected = "a SMILES" if smiles else f"residues {''.join(RESIDUES[len(SPECIAL):])}"
        raise DataError(f"unknown letters {' '.join(unknown[:5])}; expected {expected}")
    if not tokens:
        raise DataError("an empty sequence")
    return tokens


def is_smiles(path: Path) -> bool:
    return (path.with_suffix("") if path.suffix in documents.PACKED else path).suffix == ".smi"


def read_sequences(path: Path, source: Source) -> Iterator[tuple[str, bool, list[str] | DataError]]:
    """Yield the location of each sequence, whether it is of validation, and its tokens or the reason why it cannot be used."""
    if is_smiles(path):
        lines = enumerate((line for _, line in documents.read_lines(path)), 1)
        texts: Iterator[tuple[int, Any]] = ((number, line.decode("latin-1").split()[0]) for number, line in lines if line.strip())
    else:
        texts = documents.read_documents(documents.Piece(path, path.name), ())
    for number, text in texts:
        digest = hashlib.blake2b(str(text).encode(), digest_size=8).digest()
        held = int.from_bytes(digest, "little") < source.validation * 2**64
        try:
            if isinstance(text, DataError):
                raise text
            tokens = tokenize(text, is_smiles(path))
            if len(tokens) > source.row - 2:
                raise DataError(f"a sequence longer than a row of {source.row} tokens, with [CLS] and [SEP]; give --row")
            yield f"{path.name} {number}", held, tokens
        except DataError as problem:
            yield f"{path.name} {number}", held, problem


def convert_file(source: Source, vocabulary: Sequence[str], nats: Array, held: bool, origin: Path, path: Path) -> store.Refused:
    numbers, sequences, refused = {token: n for n, token in enumerate(vocabulary)}, [], list[tuple[str, str]]()
    for where, own, tokens in read_sequences(origin, source):
        if own == held and isinstance(tokens, DataError):
            refused.append((where, str(tokens)))
        elif own == held and not isinstance(tokens, DataError):
            letters = np.array([numbers.get(token, SPECIAL.index("[UNK]")) for token in tokens])
            sequences.append(_frame(letters - len(SPECIAL), nats[letters]))
    write_packed(path, sequences, source, {"kind": "converted"})
    return refused


def convert(options: argparse.Namespace) -> command.Plan:
    source, root = Source.from_options(options), options.source
    suffixes = {f"{kind}{packed}" for kind in (".fasta", ".fa", ".faa", ".a3m", ".smi") for packed in ("", *documents.PACKED)}
    files = command.data_files(root) if root.is_dir() else [root]
    paths = [path for path in files if any(path.name.endswith(suffix) for suffix in suffixes)]
    kinds = {is_smiles(path) for path in paths}
    if len(kinds) != 1:
        what = "both residues and SMILES; convert each into a folder of its own" if kinds else "no .fasta, .fa, .faa, .a3m or .smi"
        raise ConfigError(f"{root}: holds {what}")
    counts, lost = [Counter[str](), Counter[str]()], 0              # by training and validation
    for path in paths:
        for _, held, tokens in read_sequences(path, source):
            counts[held].update(() if isinstance(tokens, DataError) else tokens)
            lost += isinstance(tokens, DataError)
    if not counts[False]:
        raise DataError(f"{root}: no sequence can be used ({lost} cannot); see --row, and the letters of the files")
    vocabulary = (*SPECIAL, *sorted(counts[False])) if kinds == {True} else RESIDUES
    amounts = np.array([counts[False][token] for token in vocabulary]) + 0.5
    nats = -np.log(amounts / amounts.sum())
    contents = store.Contents(fields(source.row, source.most, len(vocabulary)), _measure, _merge)
    splits = ["train", *(["validation"] if counts[True] else [])]
    jobs = [store.Job(options.out / split / f"rows_{number:06d}.h5",
                      partial(convert_file, source, vocabulary, nats, split == "validation", path), contents)
            for split in splits for number, path in enumerate(paths)]  # fmt: skip
    recipe = {"kind": "convert", "row": source.row, "most": source.most, "validation": source.validation,
              "sources": command.fingerprint([path.name for path in paths])}  # fmt: skip
    unread = [(str(path), f"files {path.suffix} are not read") for path in files if path not in paths]
    message = f"{len(paths)} files, {sum(counts[False].values()):,} tokens of training, a vocabulary of {len(vocabulary)}"
    header = _header(source, vocabulary, "composition")
    return command.Plan(recipe, jobs, header, message, refused=unread)


# ---- MLPerf


@dataclass(frozen=True)
class MlperfSource(command.Settings):
    row: int = option(512, "tokens of a row", type=command.positive)
    most: int = option(3, "sequences of a row, at most", type=command.positive)
    vocabulary: int = option(30_522, "number of tokens", type=command.positive)
    skip_bad: bool = command.skip_bad()


def mlperf_fields(source: MlperfSource) -> store.Fields:
    masked = max_masked(source.row, source.most, 0.15)
    plain = fields(source.row, source.most, source.vocabulary)
    return {name: plain[name] for name in ("tokens", "lengths")} | {
        "types": Field("uint8", (source.row,), 0, 1), "next_sentence": Field("int8", (source.most,), -1, 1),
        "masked": Field("int16", (masked,), 0, source.row - 1), "targets": Field("int32", (masked,), -1, source.vocabulary - 1),
    }  # fmt: skip


def convert_mlperf(source: MlperfSource, origin: Path, path: Path) -> store.Refused:
    kinds, skipped, done = mlperf_fields(source), store.Skipped(source.skip_bad), 0
    about = {"kind": "converted", "origin": "MLPerf"}
    with ExitStack() as stack:
        stack.enter_context(parse_errors(origin, "copy or fetch it again"))
        stored = stack.enter_context(h5py.File(origin, "r"))
        file = stack.enter_context(store.create_file(path, len(stored["input_ids"]), kinds, about))
        for row in range(len(stored["input_ids"])):
            with skipped.catch(f"{origin}: row {row}"):
                values = {name: np.atleast_1d(stored[name][row]) for name in stored}
                tokens, ids = np.trim_zeros(values["input_ids"], "b"), values["masked_lm_ids"]
                lengths = values.get("packed_input_len", np.array([len(tokens)]))
                lengths, counted = lengths[lengths > 0], ids > 0
                fits = 0 < lengths.sum() == len(tokens) <= source.row and len(lengths) <= source.most
                if not fits or counted.sum() > kinds["masked"].shape[0]:
                    sizes = f"{len(lengths)} sequences of {lengths.sum()} tokens, {len(tokens)} tokens, {counted.sum()} masked"
                    raise DataError(f"{origin}: row {row}: {sizes}; expected those of --row {source.row} --most {source.most}")
                for name, array, fill in (
                    ("tokens", tokens, 0), ("lengths", lengths, 0), ("types", values["segment_ids"][: len(tokens)], 0),
                    ("next_sentence", values["next_sentence_labels"][: len(lengths)], -1), ("targets", ids[counted], -1),
                    ("masked", values["masked_lm_positions"][: len(ids)][counted], 0),
                ):  # fmt: skip
                    file[name][done] = np.pad(array, (0, kinds[name].shape[0] - len(array)), constant_values=fill)
                done += 1
        store.truncate_rows(file, done)
    return skipped


def mlperf(options: argparse.Namespace) -> command.Plan:
    source = MlperfSource.from_options(options)
    folders = command.source_folders(options.source, "*.hdf5 in each")
    paths = {split: sorted([*folder.glob("*.hdf5"), *folder.glob("*.h5")]) for split, folder in folders.items()}
    if not any(paths.values()):
        raise ConfigError(f"{options.source}: holds no *.hdf5 in train and validation; put the files of each split into one")
    contents = store.Contents(mlperf_fields(source), _measure, _merge)
    jobs = [store.Job(options.out / split / f"{path.stem}.h5", partial(convert_mlperf, source, path), contents)
            for split, files in paths.items() for path in files]  # fmt: skip
    recipe = {"kind": "mlperf", "row": source.row, "most": source.most, "vocabulary": source.vocabulary,
              "sources": {split: command.fingerprint([path.name for path in files]) for split, files in paths.items()}}  # fmt: skip
    header = {"vocabulary": source.vocabulary, "baseline": "", "row": source.row, "most": source.most}
    message = f"source files: {command.describe_sources(paths)}"
    return command.Plan(recipe, jobs, header, message, config="batch384")


def check_rows(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield rows whose lengths do not fit their tokens."""
    for path, row in command.subsample(prepared.locations, options.check_count):
        with h5py.File(path, "r") as file:
            tokens, total = file["tokens"][row], int(file["lengths"][row].sum())
        if not 0 < total <= len(tokens) or tokens[total:].any() or not tokens[:total].all():
            yield f"{path}: row {row}: lengths of {total} tokens, {np.count_nonzero(tokens)} are no padding; make the file again"


BUILDER = command.DatasetBuilder(
    "bert", "Packed rows of sequences for BERT.", "bert",
    command.Check("Files against index.json, lengths against tokens.", check_rows, ("rows", 64, "rows to verify")),
    (command.Simulate("Families of simulated proteins.", Recipe, ("families", 4), simulate, count_help="how many"),
     command.Convert("FASTA or SMILES to our files.", Source, convert, SOURCE),
     command.Convert("Packed rows of MLPerf to our files.", MlperfSource, mlperf, SOURCE, name="mlperf")),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
