"""Text for language models: documents to tokens, shuffled, in rows.

    python -m data_prep.text convert SOURCE ... OUT --tokenizer FILE|bytes|train:2048    files and folders: see data_prep.documents
    python -m data_prep.text python OUT         the standard library of the Python that runs: 8 to 10 MB, no network needed
    python -m data_prep.text check OUT          files against their index, every row and document looked at, some shown

    OUT/{train,validation}/*.h5, R rows of a stream of documents, each of which ends with a token that says so
        "tokens" uint16 [R, T + 1]; uint32 where the vocabulary is larger   a row's last token is the first of the next row, so
                                                                            that each is once what is to be said next
        "bytes" int32 [R]       UTF-8 bytes of what is to be said in a row: tokens 1 to T, where there are answers those of them
        "documents" int32 [R]   how many "ends" follow          "ends" int32 [*]        of documents, exclusive, 1 to T + 1
        "answers" int32 [R]     how many "spans" follow         "spans" int32 [*, 2]    begin and end of answers, within 1 to T + 1;
                                                                                        both only with --chat or --prompt, --answer
    OUT/tokenizer.json, tokenizer_config.json     with which the rows were made
    OUT/text.json                   sequence (T), identity of the tokenizer, vocabulary, counts of each split, sources with SHA-256
    OUT/skipped.json                documents that cannot be used: where, and why
    OUT/.work                       tokens of each part of the sources, which a run that was stopped goes on from; may be deleted

What is held out is told by a hash of the group of a document: its file, with --group folder the folder of that, for lines and rows
the field that --group names, or the document itself. So more files move nothing from one split to the other, and copies of a line
or row are in one. Documents are shuffled by a permutation of their index, a function of the seed: memory grows with the documents
(some 100 bytes each), not with the text. Everything is a pure function of sources and options; ranks, processes and stops change
nothing.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

import hpcai
from data_prep import command, documents, store
from data_prep.command import option
from data_prep.documents import Bad, NotTextError, Piece
from data_prep.packing import Array, Stretch, fields, loaded, measure, merge, pack, share_path, spans_of, type_of
from hpcai.data.index import commit_file, write_json
from hpcai.errors import ConfigError, DataError
from hpcai.models.llm.tokenizer import BYTES, CONTENT, Tokenizer

WORK, ABOUT = ".work", "text.json"
PART = 1 << 26                                  # bytes of text that a stop may lose, at most
FILE = 1 << 25                                  # bytes of the tokens of a file
SAMPLE = 1 << 26                                # bytes of text that a tokenizer is trained on, at most
MOST_PARTS = 32                                 # of a packed file, which each of them unpacks from the beginning
FILES = 1000                                    # of a part, at most
LOOKED = 64                                     # files whose sizes one process looks at
TOLD = 1000                                     # documents of a part that skipped.json lists, at most
SPLITS, FOLDER = store.SPLITS[:2], "folder"
# Besides what is installed and tests: tables of characters, the manual as one text, and what was made for Python 2.
NOT_PYTHON = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "turtledemo")


# ---- options


fraction = command.taking("fraction of 0 to 1", float, lambda value: 0 <= value <= 1)
long = command.taking("whole number from 2 to 2^30", int, lambda value: 2 <= value <= 1 << 30)
@dataclass(frozen=True)
class Library(command.Settings):
    """How rows are made of documents of the standard library."""

    tokenizer: str = option("train:2048", f"tokenizer.json, its folder, {BYTES}, or train:N", metavar="FILE")
    sequence: int = option(256, "tokens of a row that are said next", metavar="T", type=long)
    held_out: float = option(0.05, "fraction of the files for validation", metavar="F", type=float)
    seed: int = option(0, "of the order", type=command.natural)
    each: int | None = option(None, "rows of a file; without it 32 MB of them", type=command.positive)


@dataclass(frozen=True)
class Reading(Library):
    """Settings of every kind of documents."""

    tokenizer: str = option(None, f"tokenizer.json, its folder, {BYTES}, or train:2048", metavar="FILE", required=True)
    sequence: int = option(1024, "tokens of a row that are said next", metavar="T", type=long)
    held_out: float = option(None, "fraction of the groups for validation; without it 0.02", metavar="F", type=float)
    field: str = option(None, "of lines and rows; without it text, with --chat messages", metavar="NAME")
    group: str | None = option(None, f"field of what is held out together, or {FOLDER}: files of one are", metavar="NAME")
    chat: bool = option(False, "the field holds messages, of which what the assistant says is learned", action="store_true")
    prompt: str | None = option(None, "field of a question, which is not learned", metavar="NAME")
    answer: str | None = option(None, "field of its answer, which is", metavar="NAME")

    @property
    def answers(self) -> bool:
        return self.chat or self.prompt is not None

    @property
    def columns(self) -> list[str]:
        named = [self.prompt, self.answer] if self.prompt else [self.field]
        return [name for name in dict.fromkeys([*named, self.group]) if name]

    def values(self, record: Mapping[str, Any]) -> list[Any] | Bad:
        """Return the text of a line or row, and after it the name of its group."""
        missing = [name for name in self.columns if name not in record]
        if missing:
            has = ", ".join(map(str, [*record][:12])) or "none"
            option = next(key for key, value in asdict(self).items() if value == missing[0])
            return Bad(f"no field '{missing[0]}'; it has {has}: name one with --{option}")
        found = [record[name] for name in self.columns]
        texts = found if self.group is None else found[:-1]
        texts = [] if self.chat else ["" if text is None else text for text in texts]
        if odd := [text for text in texts if not isinstance(text, str)]:
            return Bad(f"a {type(odd[0]).__name__} in {', '.join(self.columns)}, expected text")
        group = json.dumps(found if self.group is None else record[self.group], sort_keys=True, default=str)
        return [*(texts or found[:1]), group]

    def of_file(self, piece: Piece) -> str:
        """The group of what is no line or row: its file, or the folder that this is in."""
        return piece.name.rpartition("/")[0] or piece.name if self.group == FOLDER else piece.name

    def split(self, group: str, piece: Piece) -> str:
        if piece.split is not None:
            return piece.split
        drawn = int.from_bytes(hashlib.blake2b(group.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        return SPLITS[drawn < self.held_out * 2**64]


def add_source(made: argparse.ArgumentParser) -> None:
    made.add_argument("source", type=Path, nargs="+", metavar="SOURCE", help="files, and folders of any depth")
    made.add_argument("--only", metavar="GLOB", action="append", default=[], help="files of folders, as '*.md'; more than once")
    made.add_argument("--validation", metavar="PATH", type=Path, action="append", default=[], help="what is held out, not by hash")
    made.add_argument("--bad", metavar="F", type=fraction, default=0.01, help="fraction of documents that may be unusable")


# ---- sources


@dataclass(frozen=True)
class Source:
    """A file, as it is called within what was named."""

    path: Path
    name: str
    root: int                                   # number of what was named
    split: str | None = None


def gathered(roots: Sequence[Path], held_out: Sequence[Path], only: Sequence[str], out: Path) -> list[Source]:
    """All files of ``roots``, and of ``held_out``, which are for validation."""
    found: list[Source] = []
    for number, root in enumerate([*roots, *held_out]):
        split = None if not held_out else SPLITS[number >= len(roots)]
        if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"{out}: OUT lies within SOURCE {root}; choose another OUT")
        if root.is_file():
            found.append(Source(root, root.name, number, split))
        elif root.is_dir():
            names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
            seen = [name for name in names if not any(part.startswith((".", "__pycache__")) for part in name.split("/"))]
            kept = [name for name in seen if not only or any(fnmatch(name.rpartition("/")[2], one) for one in only)]
            if not kept:
                fits = f" that fits --only {' '.join(only)}" if only else ""
                raise ConfigError(f"{root}: holds no file{fits}; name another SOURCE")
            found += [Source(root / name, name, number, split) for name in kept]
        else:
            raise ConfigError(f"{root}: no such file or folder; name files or folders of text")
    return found


def library() -> list[Source]:
    """The source of the standard library, without tests and what was installed."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [Source(root / name, name.as_posix(), 0) for name in names if not set(name.parts) & set(NOT_PYTHON)]


def look(sources: Sequence[Source]) -> dict[str, Any]:
    """Sizes and digests of files, of which packed ones are read to their end."""
    return {"files": [documents.size(source.path) for source in sources]}


@dataclass(frozen=True)
class Share:
    """What one process makes tokens of at a time."""

    pieces: tuple[Piece, ...]
    weight: int                                 # bytes of text


def shares_of(sources: Sequence[Source], units: Sequence[int], weights: Sequence[int]) -> list[Share]:
    """Large files in pieces, small ones together."""
    shares: list[Share] = []
    held: list[Piece] = []
    weight, most = 0, min(PART, max(PART // 16, sum(weights) // 64))     # small sets are shared out too

    def close() -> None:
        nonlocal weight
        if held:
            shares.append(Share(tuple(held), weight))
        held.clear()
        weight = 0

    for source, many, size in zip(sources, units, weights):
        kind = documents.kind(source.path)
        count = 1 if kind == "text" else max(1, -(-size // most))
        limit = many or 1 if kind == "table" else MOST_PARTS if source.path.suffix in documents.PACKED else count
        count = min(count, limit)
        if count > 1 or weight + size > most or len(held) == FILES:
            close()
        for begin, end in pairwise(many * number // count for number in range(count + 1)):
            held.append(Piece(source.path, source.name, begin, end, source.split))
            weight += size // count
            if count > 1:
                close()
    close()
    return shares


# ---- documents to tokens


Coded = Iterator[tuple[list[int], list[int] | None]]    # ids, and which of them are an answer


def coded(found: Any, piece: Piece, reading: Reading, tokenizer: Tokenizer) -> tuple[str, Coded] | Bad | None:
    """Split and tokens of what was read, or why it cannot be used; None where it says nothing."""
    if isinstance(found, Bad):
        return found
    if isinstance(found, Mapping):
        values = reading.values(found)
        if isinstance(values, Bad):
            return values
        *texts, group = values
    else:
        texts, group = [iter([found]) if isinstance(found, str) else found], reading.of_file(piece)
        if reading.answers:
            return Bad("no field of anything, expected .jsonl or .parquet with --chat, --prompt and --answer")
    split = reading.split(group, piece)
    if reading.chat:
        return split, _conversation(texts[0], tokenizer)
    if reading.answers:
        prompt, answer = texts
        return (split, _answer(prompt, answer, tokenizer)) if any(texts) else None
    parts = iter([texts[0]]) if isinstance(texts[0], str) else texts[0]
    first = next(parts, "")
    return (split, _plain(first, parts, tokenizer)) if first else None


def _plain(first: str, others: Iterable[str], tokenizer: Tokenizer) -> Coded:
    yield tokenizer.prefix, None
    yield tokenizer.encode(first), None
    for text in others:
        yield tokenizer.encode(text), None
    yield tokenizer.end_tokens, None


def _answer(prompt: str, answer: str, tokenizer: Tokenizer) -> Coded:
    ids = [*tokenizer.prefix, *tokenizer.encode(prompt)]
    yield ids, [0] * len(ids)
    ids = [*tokenizer.encode(answer), *tokenizer.end_tokens]
    yield ids, [1] * len(ids)


def _conversation(messages: Any, tokenizer: Tokenizer) -> Coded:
    ids, mask = tokenizer.chat(messages)
    yield ids, mask
    if ids[-len(tokenizer.end_tokens) :] != tokenizer.end_tokens:
        yield tokenizer.end_tokens, [0] * len(tokenizer.end_tokens)


def encode(share: Share, reading: Reading, raw: Path) -> dict[str, Any]:
    """Writes the tokens of a share. Gives of each document how many they are, whether it is held out, how many answers it has and
    where; and what cannot be used."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"          # processes are the parallelism here
    tokenizer = loaded(reading.tokenizer)
    kept: list[dict[str, Any]] = []
    bad: list[tuple[str, str]] = []
    counts = {"bad": 0, "empty": 0}
    raw.parent.mkdir(parents=True, exist_ok=True)
    partial = raw.with_name(f".{raw.name}.partial")
    with partial.open("wb") as file:
        for piece in share.pieces:
            for line, item in documents.read(piece, reading.columns):
                begin = file.tell()
                found = _written(item, piece, reading, tokenizer, file)
                if isinstance(found, dict):
                    kept.append(found)
                    continue
                file.seek(begin)
                file.truncate()
                counts["bad" if found else "empty"] += 1
                if found and len(bad) < TOLD:
                    bad.append((_where(piece, line), found.reason))
    commit_file(partial, raw)
    columns = {name: [one[name] for one in kept] for name in ("tokens", "held", "answers")}
    return {**columns, "spans": [span for one in kept for span in one["spans"]], "bad": bad, "counts": counts}


def _where(piece: Piece, line: int) -> str:
    unit = {"text": None, "table": "row"}.get(documents.kind(piece.path), "line")
    return f"{piece.path}: {unit} {documents.before(piece) + line}" if unit else str(piece.path)


def _written(item: Any, piece: Piece, reading: Reading, tokenizer: Tokenizer, file: IO[bytes]) -> dict[str, Any] | Bad | None:
    """A document as it is noted, after its tokens; or why it cannot be used, perhaps after some of them; None where it is empty."""
    kind, tokens, masks = np.dtype(type_of(tokenizer)).newbyteorder("<"), 0, list[int]()
    try:
        found = coded(item, piece, reading, tokenizer)
        if not isinstance(found, tuple):
            return found
        split, parts = found
        for ids, mask in parts:
            file.write(np.array(ids, kind).tobytes())
            tokens += len(ids)
            masks += mask or ()
    except NotTextError as problem:
        return Bad(str(problem).removeprefix(f"{piece.path}: "))
    except DataError as problem:
        if not isinstance(item, Mapping | str):
            raise
        return Bad(str(problem))
    spans = spans_of(np.array(masks, bool))
    if reading.answers and not len(spans):
        return Bad("nothing that is an answer")
    return {"tokens": tokens, "held": int(split == SPLITS[1]), "answers": len(spans), "spans": spans.tolist()}


# ---- a tokenizer


def trained(size: int, shares: Sequence[Share], reading: Reading) -> Tokenizer:
    """A tokenizer of the beginnings of all shares, without what is held out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"          # the same on any machine, and no threads before processes are made
    share = min(1.0, SAMPLE / max(1, sum(one.weight for one in shares)))
    return Tokenizer.train(_beginnings(shares, share, reading), size)


def _beginnings(shares: Sequence[Share], part: float, reading: Reading) -> Iterator[str]:
    for share in shares:
        left = share.weight * part
        items = ((piece, item) for piece in share.pieces for _, item in documents.read(piece, reading.columns))
        for text in (text for piece, item in items for text in _said(item, piece, reading)):
            yield text
            left -= len(text)
            if left < 0:
                break


def _said(item: Any, piece: Piece, reading: Reading) -> Iterator[str]:
    """The texts of a document for training; none where it cannot be used."""
    group = reading.of_file(piece)
    if isinstance(item, Mapping):
        values = reading.values(item)
        item, group = (values[:-1], values[-1]) if isinstance(values, list) else ([], "")
    parts = [item] if isinstance(item, str) else item
    if isinstance(item, Bad) or reading.split(group, piece) != SPLITS[0]:
        return
    try:
        yield from (part for part in parts if part.isascii() or part == part.encode("utf-8", "replace").decode())
    except NotTextError:
        return                                  # told when it is its turn


# ---- convert


def convert(options: argparse.Namespace) -> command.Plan:
    sources = gathered(options.source, options.validation, options.only, options.out)
    return _planned(options, sources, [*options.source, *options.validation])


def python(options: argparse.Namespace) -> command.Plan:
    vars(options).update(field="text", group=None, chat=False, prompt=None, answer=None, bad=0.0, validation=[])
    return _planned(options, library(), [Path(f"Python {'.'.join(map(str, sys.version_info[:3]))}")])


def _planned(options: argparse.Namespace, sources: Sequence[Source], roots: Sequence[Path]) -> command.Plan:
    loaded.cache_clear()
    reading, tokenizer, size = _asked(options)
    out, work = options.out, options.out / WORK
    told = [f"{source.root} {source.split} {source.name} {source.path.stat().st_size}" for source in sources]
    named = {"tokenizer": options.tokenizer if tokenizer is None else tokenizer.identity, "frame": tokenizer and _frame(tokenizer)}
    recipe = {"kind": "convert", **reading.told, **named, "sources": command.listed(told, "files, names and sizes")}
    store.claim(out, recipe)
    looks = {work / f"sizes_{number:06d}.json": partial(look, some)
             for number, some in enumerate(command.parts_of(sources, LOOKED))}  # fmt: skip
    sizes = [each for result in store.gather(looks, options.workers, "sizes") for each in result["files"]]
    shares = shares_of(sources, *([size[n] for size in sizes] for n in (0, 1)))
    if tokenizer is None:
        # Other versions of the library may train another one.
        tokenizer = Tokenizer.load(out) if (out / CONTENT).is_file() else trained(size, shares, reading)
    tokenizer.save(out)
    reading = replace(reading, tokenizer=str(out))
    paths = [share_path(work, number) for number in range(len(shares))]
    tasks = {path: partial(encode, share, reading, path.with_suffix(".tokens")) for path, share in zip(paths, shares)}
    columns: list[list[Array]] = []             # of each share
    refused, bad, empty = list[tuple[str, str]](), 0, 0
    for one in store.gather(tasks, options.workers, "tokens"):
        columns.append([np.array(one[name], np.int64) for name in ("tokens", "held", "answers")])
        refused += [(where, why) for where, why in one["bad"]]
        bad, empty = bad + one["counts"]["bad"], empty + one["counts"]["empty"]
    good = sum(len(tokens) for tokens, _, _ in columns)
    if bad > options.bad * (good + bad):
        command.list_refused(out, refused)
        where, why = refused[0]
        raise DataError(f"{bad} of {good + bad} documents cannot be used, listed in {out / command.SKIPPED}; the first: {where}: "
                        f"{why}; more than --bad {options.bad:g}: mend them, or allow more")  # fmt: skip
    if empty:
        command.print_once(f"{empty} documents are empty and left out")
    plan, about = _plan(work, columns, options, tokenizer)
    contents = store.Contents(fields(options.sequence, tokenizer, reading.answers), measure, merge)
    files = [store.Job(path, partial(pack, stretch, str(out), reading.answers), contents, stretch.rows) for path, stretch in plan]
    header = {"sequence": options.sequence, "vocabulary": tokenizer.size, "tokenizer": tokenizer.identity}
    whole = {
        "format": 1, "version": hpcai.__version__, **header, "type": type_of(tokenizer), "answers": reading.answers,
        "seed": options.seed, "before": tokenizer.prefix, "ending": tokenizer.end_tokens, "splits": about, "unusable": bad,
        "sources": _told_sources(roots, sources, sizes),
    }  # fmt: skip
    told_first = f"vocabulary {tokenizer.size:,} (tokenizer {tokenizer.identity[:12]}), rows of {options.sequence} + 1 tokens"
    return command.Plan(recipe, files, header, told_first, refused=refused, unlisted=bad - len(refused), kept=good,
                        after=partial(_write_about, whole))  # fmt: skip


def _write_about(whole: dict[str, Any], out: Path) -> None:
    for split, part in command.Prepared(out).statistics.items():
        whole["splits"][split] |= {key: part[key] for key in ("rows", "bytes")}
        print(f"{split}: {part['bytes'] / part['tokens']:.3f} bytes of UTF-8 {'in answers ' if whole['answers'] else ''}per token")
    write_json(out / ABOUT, whole)


def _asked(options: argparse.Namespace) -> tuple[Reading, Tokenizer | None, int]:
    """What to read, and the tokenizer, or the size of one that is to be trained."""
    if (options.prompt is None) != (options.answer is None):
        raise ConfigError("--prompt and --answer: expected both, the fields of a question and of its answer")
    if options.chat and options.prompt is not None:
        raise ConfigError("--chat and --prompt: expected one of them")
    if options.validation and options.held_out is not None:
        raise ConfigError("--validation and --held-out: expected one of them")
    options.held_out = (0.0 if options.validation else 0.02) if options.held_out is None else options.held_out
    if not 0 <= options.held_out < 1:
        raise ConfigError(f"--held-out {options.held_out:g}: expected a fraction of 0 or more and less than 1")
    options.field = options.field or ("messages" if options.chat else "text")
    reading = Reading.of(options)
    name, _, size = options.tokenizer.partition(":")
    if name == "train" and size:
        if not size.isdigit() or not 257 <= int(size) < 1 << 32:
            raise ConfigError(f"--tokenizer {options.tokenizer}: expected train: and a size from 257 to 2^32, such as train:2048")
        if options.chat:
            raise ConfigError("--chat: a tokenizer that is trained here has no template of chats; name the file of one that has")
        return reading, None, int(size)
    tokenizer = Tokenizer.load(options.tokenizer)
    _ = tokenizer.end_tokens                        # refused before the work
    if options.chat and not tokenizer.has_generation_blocks:
        raise ConfigError(f"--chat: {options.tokenizer} has no template of chats that tells answers by {{% generation %}} blocks; "
                          "put such a template into its tokenizer_config.json")  # fmt: skip
    return reading, tokenizer, tokenizer.size


def _frame(tokenizer: Tokenizer) -> list[Any]:
    """What else decides the tokens of a document."""
    template = json.dumps(tokenizer.config.get("chat_template"))
    return [tokenizer.prefix, tokenizer.end_tokens, hashlib.sha256(template.encode()).hexdigest()[:16]]


def _plan(
    work: Path, columns: Sequence[Sequence[Array]], options: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[list[tuple[Path, Stretch]], dict[str, dict[str, int]]]:
    """The files of rows with their documents, and counts of each split."""
    tokens, held, answers = (np.concatenate(parts) for parts in zip(*columns))
    share = np.repeat(np.arange(len(columns), dtype=np.int32), [len(part[0]) for part in columns])
    begin, span = (np.concatenate([np.cumsum(part[which]) - part[which] for part in columns]) for which in (0, 2))
    sequence, files, about = options.sequence, list[tuple[Path, Stretch]](), dict[str, dict[str, int]]()
    each = options.each or max(1, FILE // ((sequence + 1) * np.dtype(type_of(tokenizer)).itemsize))
    for number, split in enumerate(SPLITS):
        of = np.flatnonzero(held == number)
        order = of[store.generator(options.seed, 1, number).permutation(len(of))]
        ends = np.cumsum(tokens[order])
        total = int(ends[-1]) if len(ends) else 0
        rows = max(total - 1, 0) // sequence
        if not rows and (split == "train" or options.held_out or options.validation):
            found = f"{split}: {total:,} tokens of {len(of)} documents, not one row of {sequence + 1:,}"
            advice = "take a smaller --sequence, or more text" if number == 0 or len(of) else (
                "raise --held-out, name other files by --validation PATH, or give --held-out 0")
            raise DataError(f"{found}; {advice}")
        if not rows:
            continue
        about[split] = {"documents": len(of), "tokens": total, "left_over": total - rows * sequence - 1}
        for at in range(0, rows, each):
            last = min(at + each, rows)
            first_token, end = at * sequence, last * sequence + 1
            part = slice(int(np.searchsorted(ends, first_token, "right")), int(np.searchsorted(ends, end, "left")) + 1)
            some = order[part]
            before = first_token - int(ends[part.start] - tokens[some[0]])
            one, two, three, four, five = (column[some] for column in (share, begin, tokens, span, answers))
            stretch = Stretch(work, one, two, three, four, five, before, last - at, sequence)
            files.append((options.out / split / f"rows_{at // each:06d}.h5", stretch))
        command.print_once(f"{split}: {rows:,} rows of {len(of):,} documents, {about[split]['left_over']} tokens left over")
    return files, about


def _told_sources(roots: Sequence[Path], sources: Sequence[Source], sizes: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Of each that was named: its files, bytes of text, and SHA-256, that of a folder of those of its files."""
    told = []
    for number, root in enumerate(roots):
        these = [n for n, source in enumerate(sources) if source.root == number]
        each = [sizes[n][2] for n in these]
        names = "".join(f"{one}  {sources[n].name}\n" for one, n in zip(each, these))
        whole = each[0] if len(each) == 1 and root.is_file() else hashlib.sha256(names.encode()).hexdigest()
        told.append({"name": str(root), "files": len(these), "bytes": sum(sizes[n][1] for n in these), "sha256": whole})
    return told


# ---- check


def check(prepared: command.Prepared, options: argparse.Namespace) -> Iterator[str]:
    """Yield the faults of rows and tokenizer, and print documents of validation that are in train too, and some rows."""
    out, about, tokenizer = prepared.out, store.read_json(prepared.out / ABOUT), Tokenizer.load(prepared.out)
    for name, told in {out / ABOUT: about, **{path.parent / "index.json": index for path, _, index in prepared.files}}.items():
        if told["tokenizer"] != tokenizer.identity:
            other = f"made with the tokenizer {told['tokenizer'][:12]}, that of the folder is {tokenizer.identity[:12]}"
            yield f"{name}: {other}; put the right one there"
    seen: dict[str, Array] = {}
    for split in about["splits"]:
        paths = sorted(path for path in prepared.paths if path.parent.name == split)
        seen[split] = yield from _walk(paths, about, tokenizer)
        if copies := len(seen[split]) - len(np.unique(seen[split])):
            print(f"{split}: {copies} of {len(seen[split])} documents are copies of others")
    if len(seen) == 2 and (both := int(np.isin(seen["validation"], seen["train"]).sum())):
        print(f"warning: {both} documents of validation are in train too")
    for path, row in command.spread(prepared.places, options.some):
        with h5py.File(path, "r") as file:
            text = tokenizer.decode(file["tokens"][row].tolist())
        print(f"{path.parent.name}/{path.name} row {row}: {text[:300]!r}")


def _walk(paths: Sequence[Path], about: dict[str, Any], tokenizer: Tokenizer) -> Generator[str, None, Array]:
    """Yield the faults of the rows of a split, and return a hash of each document."""
    sequence, again = about["sequence"], "delete the file and make it again"
    whole: list[int] = []
    last, running = None, hashlib.blake2b(digest_size=8)
    for path in paths:
        with h5py.File(path, "r") as file:
            tokens, told = file["tokens"][...], {name: file[name][...] for name in file if name != "tokens"}
        flow = np.append(tokens[:-1, -1] != tokens[1:, 0], False)
        if flow.any() or last not in (None, tokens[0, 0]):
            at = int(np.argmax(flow)) + 1 if flow.any() else 0
            yield f"{path}: row {at} does not begin with the last token of the row before; {again}"
        row, ends = np.repeat(np.arange(len(tokens)), told["documents"]), told["ends"].astype(np.int64)
        if len(row) != len(ends):
            yield f"{path}: {len(ends)} ends, 'documents' says {len(row)}; {again}"
            continue
        rising = np.diff(row * (sequence + 2) + ends, prepend=0) > 0
        if not rising.all():
            yield f"{path}: row {row[np.argmin(rising)]}: ends do not rise; {again}"
            continue
        if (odd := tokens[row, ends - 1] != about["ending"][-1]).any():
            yield f"{path}: row {row[np.argmax(odd)]}: a document ends with another token than {about['ending'][-1]}; {again}"
        said = tokenizer.byte_lengths[tokens[:, 1:]]
        counts = (said * _masks(told, sequence) if about["answers"] else said).sum(1)
        for at in np.flatnonzero(counts != told["bytes"])[:1]:
            yield f"{path}: row {at}: 'bytes' is {told['bytes'][at]}, expected {counts[at]}; {again}"
        last, flat, at = tokens[-1, -1], tokens[:, :-1].ravel(), 0
        for end in (row * sequence + ends)[ends <= sequence].tolist():
            running.update(flat[at:end].tobytes())
            whole.append(int.from_bytes(running.digest(), "big"))
            running, at = hashlib.blake2b(digest_size=8), end
        running.update(flat[at:].tobytes())
    return np.array(whole, np.uint64)


def _masks(told: Mapping[str, Array], sequence: int) -> Array:
    """Which tokens of rows, but the first, are answers.   [R, T]"""
    mask = np.zeros((len(told["answers"]), sequence + 1), bool)
    for row, (begin, end) in zip(np.repeat(np.arange(len(mask)), told["answers"]), told["spans"]):
        mask[row, begin:end] = True
    return mask[:, 1:]


MAKER = command.Maker(
    "text", "Text for language models: documents to tokens, shuffled, in rows.", "llm",
    command.Check("Files against index.json, every row and document looked at.", check, ("rows", 2, "how many are shown"), False),
    (command.Convert(f"Text, {', '.join(documents.KINDS)}, all but tables also {' or '.join(documents.PACKED)}.", Reading, convert,
                     add_source),
     command.Convert("The standard library of the Python that runs.", Library, python, lambda made: None, "python")),
)  # fmt: skip
main, parser = MAKER.main, MAKER.parser

if __name__ == "__main__":
    sys.exit(main())
