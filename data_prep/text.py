"""Text for language models: tokenized, shuffled documents, packed into rows.

    python -m data_prep.text convert SOURCE ... OUT --tokenizer FILE|bytes|train:2048    files and folders: see data_prep.documents
    python -m data_prep.text python OUT         the standard library of this Python: 8 to 10 MB, without a network
    python -m data_prep.text check OUT          verify all files, rows and documents, and print some rows

    OUT/{train,validation}/*.h5, R rows of a stream of documents, each with an end token
        "tokens" uint16 [R, T + 1]; uint32 if the vocabulary is larger      the last token of a row is the first of the next row, so
                                                                            that each token is a target once
        "bytes" int32 [R]       UTF-8 bytes of the targets of a row (tokens 1 to T), or of the answers among them
        "documents" int32 [R]   number of "ends" of the row     "ends" int32 [*]        of documents, exclusive, 1 to T + 1
        "answers" int32 [R]     number of "spans" of the row    "spans" int32 [*, 2]    begin and end of answers, within 1 to T + 1;
                                                                                        both only with --chat or --prompt, --answer
    OUT/tokenizer.json, tokenizer_config.json     the tokenizer of the rows
    OUT/text.json                   sequence (T), identity of the tokenizer, vocabulary, counts of each split, sources with SHA-256
    OUT/skipped.json                location and reason for each unusable document
    OUT/.work                       tokenizer, and tokens of each shard of the sources, by settings, for resumption; may be deleted

docs/data.md ("Text") describes documents, splits and answers. The output is a pure function of sources and options; ranks,
processes and interruptions do not change it.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

import hpcai
from data_prep import command, documents, packing, store
from data_prep.command import option
from data_prep.documents import Piece, UnusableError
from data_prep.packing import Array, FilePlan, load_tokenizer, make_fields, measure, merge, pack, shard_path, to_spans, token_dtype
from hpcai.durable import commit_file, write_json
from hpcai.errors import ConfigError, DataError
from hpcai.models.llm import chats
from hpcai.models.llm.tokenizer import BYTES, CONTENT, Tokenizer

METADATA = "text.json"
FEW_FILES = 10                                  # fewer files may be divided in two splits each
SHARD_BYTES = 1 << 26                           # text of a shard: an interruption loses so many bytes at most
FILE_BYTES = 1 << 25                            # tokens of a file
TOKENIZER_BYTES = 1 << 26                       # text on which a tokenizer is trained, at most
MAX_PACKED_PARTS = 32                           # pieces of a compressed file, each of which decompresses it from the beginning
MAX_FILES = 1000                                # files of a shard
FILES_PER_TASK = 64                             # files whose sizes one task measures
MAX_LISTED = 1000                               # documents of a shard that skipped.json lists
SPLITS, FOLDER = store.SPLITS[:2], "folder"
# Excluded besides installed packages and tests: tables of characters, the manual as one text, code for Python 2.
EXCLUDED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "turtledemo")


# ---- options


sequence_length = command.option_type("whole number from 2 to 2^30", int, lambda value: 2 <= value <= 1 << 30)
@dataclass(frozen=True)
class LibrarySettings(command.Settings):
    """Settings of rows of the standard library."""

    tokenizer: str = option("train:2048", f"tokenizer.json, its folder, {BYTES}, or train:N", metavar="FILE")
    sequence: int = option(256, "targets of a row, in tokens", metavar="T", type=sequence_length)
    held_out: float = option(0.05, "fraction of the files for validation", metavar="F", type=float)
    seed: int = option(0, "of the order", type=command.natural)
    each: int | None = option(None, "rows of a file; without it 32 MB of them", type=command.positive)


@dataclass(frozen=True)
class TextSettings(LibrarySettings):
    """Settings of rows of any kind of document."""

    tokenizer: str = option(None, f"tokenizer.json, its folder, {BYTES}, or train:2048", metavar="FILE", required=True)
    sequence: int = option(1024, "targets of a row, in tokens", metavar="T", type=sequence_length)
    held_out: float = option(None, "fraction of the groups for validation; without it 0.02", metavar="F", type=float)
    field: str = option(None, "of lines and rows; without it text, with --chat messages", metavar="NAME")
    group: str | None = option(None, f"field whose equal values are held out together, or {FOLDER}", metavar="NAME")
    chat: bool = option(False, "the field holds messages; those of the assistant are learned", action="store_true")
    prompt: str | None = option(None, "field of a question, which is not learned", metavar="NAME")
    answer: str | None = option(None, "field of its answer, which is learned", metavar="NAME")

    @property
    def has_answers(self) -> bool:
        return self.chat or self.prompt is not None

    @property
    def columns(self) -> list[str]:
        named = [self.prompt, self.answer] if self.prompt else [self.field]
        return [name for name in dict.fromkeys([*named, self.group]) if name]

    def values(self, record: Mapping[str, Any]) -> list[Any]:
        """Return the texts of a line or row, and last the name of its group. Raises UnusableError."""
        missing = [name for name in self.columns if name not in record]
        if missing:
            has = ", ".join(map(str, [*record][:12])) or "none"
            option = next(key for key, value in asdict(self).items() if value == missing[0])
            raise UnusableError(f"no field '{missing[0]}'; it has {has}: name one with --{option}")
        values = [record[name] for name in self.columns]
        texts = values if self.group is None else values[:-1]
        texts = [] if self.chat else ["" if text is None else text for text in texts]
        if odd := [text for text in texts if not isinstance(text, str)]:
            raise UnusableError(f"a {type(odd[0]).__name__} in {', '.join(self.columns)}, expected text")
        group = json.dumps(values if self.group is None else record[self.group], sort_keys=True, default=str)
        return [*(texts or values[:1]), group]

    def draw(self, group: str, piece: Piece) -> float:
        """Return a number of a group, which is held out if it is below ``held_out``; -1 or 2 if the split is given."""
        if piece.split is not None:
            return 2.0 if piece.split == SPLITS[0] else -1.0
        return int.from_bytes(hashlib.blake2b(group.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2**64


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, nargs="+", metavar="SOURCE", help="files, and folders of any depth")
    parser.add_argument("--only", metavar="GLOB", action="append", default=[], help="files of folders, as '*.md'; more than once")
    parser.add_argument("--validation", metavar="PATH", type=Path, action="append", default=[], help="held out, instead of by hash")
    share = command.within(0, 1)
    parser.add_argument("--bad", metavar="F", type=share, default=0.01, help="fraction of documents that may be unusable")


# ---- sources


def find_sources(roots: Sequence[Path], held_out: Sequence[Path], only: Sequence[str], out: Path) -> list[Piece]:
    """Return all files of ``roots``, and of ``held_out``, which are for validation."""
    sources: list[Piece] = []
    for number, root in enumerate([*roots, *held_out]):
        split = None if not held_out else SPLITS[number >= len(roots)]
        if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"{out}: OUT lies within SOURCE {root}; choose another OUT")
        if root.is_file():
            sources.append(Piece(root, root.name, split=split, root=number))
        elif root.is_dir():
            names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
            visible = [name for name in names if not any(part.startswith((".", "__pycache__")) for part in name.split("/"))]
            selected = [name for name in visible if not only or any(fnmatch(name.rpartition("/")[2], glob) for glob in only)]
            if not selected:
                condition = f" that fits --only {' '.join(only)}" if only else ""
                raise ConfigError(f"{root}: holds no file{condition}; name another SOURCE")
            sources += [Piece(root / name, name, split=split, root=number) for name in selected]
        else:
            raise ConfigError(f"{root}: no such file or folder; name files or folders of text")
    return sources


def library_sources() -> list[Piece]:
    """Return the source files of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [Piece(root / name, name.as_posix()) for name in names if not set(name.parts) & set(EXCLUDED)]


def file_sizes(sources: Sequence[Piece]) -> dict[str, Any]:
    """Return the sizes and digests of files. Compressed files are read to their end."""
    return {"files": [documents.file_size(source.path) for source in sources]}


def hold_out_ends(
    sources: Sequence[Piece], sizes: Sequence[Sequence[Any]], settings: TextSettings
) -> tuple[Sequence[Piece], Sequence[Sequence[Any]]]:
    """Split few files in two parts, if the hashes of their names leave one split without a file."""
    splits = {settings.draw(source.name, source) < settings.held_out for source in sources}
    by_file = {documents.file_kind(source.path) for source in sources} <= {"text", "sequences", "aligned"}
    if settings.group or not settings.held_out or len(sources) >= FEW_FILES or len(splits) == 2 or not by_file:
        return sources, sizes
    fraction = min(max(settings.held_out, 8 * (settings.sequence + 1) / max(1, sum(size[1] for size in sizes))), 0.5)
    parts: list[tuple[Piece, Sequence[Any]]] = []
    for source, (_, length, digest) in zip(sources, sizes):
        cut = documents.find_cut(source.path, length, int(length * fraction))
        parts += [(replace(source, split=split, begin=begin), (end - begin, end - begin, digest))
                  for split, begin, end in ((SPLITS[0], 0, cut), (SPLITS[1], cut, length)) if begin < end]  # fmt: skip
    command.print_rank_0(f"validation: the last {fraction:.1%} of {sources[0].name if len(sources) == 1 else 'each file'}")
    return tuple(zip(*parts))


@dataclass(frozen=True)
class Shard:
    """The unit of work of a process: pieces of text that it tokenizes."""

    pieces: tuple[Piece, ...]
    weight: int                                 # bytes of text


def make_shards(sources: Sequence[Piece], units: Sequence[int], weights: Sequence[int]) -> list[Shard]:
    """Split large files into pieces, and join small ones."""
    shards: list[Shard] = []
    pieces: list[Piece] = []
    weight, limit_bytes = 0, min(SHARD_BYTES, max(SHARD_BYTES // 16, sum(weights) // 64))     # small sets are distributed too

    def close() -> None:
        nonlocal weight
        if pieces:
            shards.append(Shard(tuple(pieces), weight))
        pieces.clear()
        weight = 0

    for source, unit_count, size in zip(sources, units, weights):
        kind = documents.file_kind(source.path)
        count = 1 if kind in documents.WHOLE else max(1, -(-size // limit_bytes))
        limit = unit_count or 1 if kind == "table" else MAX_PACKED_PARTS if documents.compression(source.path) else count
        count = min(count, limit)
        if count > 1 or weight + size > limit_bytes or len(pieces) == MAX_FILES:
            close()
        for begin, end in pairwise(unit_count * number // count for number in range(count + 1)):
            pieces.append(replace(source, begin=source.begin + begin, end=source.begin + end))
            weight += size // count
            if count > 1:
                close()
    close()
    return shards


# ---- documents to tokens


Chunks = Iterator[tuple[list[int], list[int] | None]]       # token ids, and the mask of answers


def read_texts(document: Any, piece: Piece, settings: TextSettings) -> tuple[float, list[Any]]:
    """Return the number drawn for a document, and its texts, which may be chunks. Raises UnusableError."""
    if isinstance(document, UnusableError):
        raise document
    if isinstance(document, Mapping):
        *texts, group = settings.values(document)
        return settings.draw(group, piece), texts
    if settings.has_answers:
        raise UnusableError("has no fields, expected .jsonl, .json, .csv or .parquet with --chat, --prompt and --answer")
    folder = piece.name.rpartition("/")[0] if settings.group == FOLDER else ""
    return settings.draw(folder or piece.name, piece), [iter([document]) if isinstance(document, str) else document]


def tokenize(document: Any, piece: Piece, settings: TextSettings, tokenizer: Tokenizer) -> tuple[float, Chunks] | None:
    """Return the number drawn for a document, and its tokens, or None if it is empty. Raises UnusableError."""
    drawn, texts = read_texts(document, piece, settings)
    if settings.chat:
        ids, mask = tokenizer.chat(texts[0])
        end = [] if ids[-len(tokenizer.end_tokens) :] == tokenizer.end_tokens else tokenizer.end_tokens
        return drawn, iter([(ids, mask), (end, [0] * len(end))])
    if settings.has_answers:
        prompt, answer = [*tokenizer.prefix, *tokenizer.encode(texts[0])], [*tokenizer.encode(texts[1]), *tokenizer.end_tokens]
        return (drawn, iter([(prompt, [0] * len(prompt)), (answer, [1] * len(answer))])) if any(texts) else None
    parts = iter([texts[0]]) if isinstance(texts[0], str) else texts[0]
    first = next(parts, "")
    chunks = chain([tokenizer.prefix], map(tokenizer.encode, chain([first], parts)), [tokenizer.end_tokens])
    return (drawn, ((ids, None) for ids in chunks)) if first else None


def encode_shard(shard: Shard, settings: TextSettings, path: Path) -> dict[str, Any]:
    """Write the tokens of a shard. Return tokens, drawn number, answers and their spans of each document, and the unusable."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"          # processes run in parallel instead
    tokenizer = load_tokenizer(settings.tokenizer)
    records: list[dict[str, Any]] = []
    bad: list[tuple[str, str]] = []
    counts = {"bad": 0, "empty": 0}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for piece in shard.pieces:
            for line, item in documents.read_documents(piece, settings.columns):
                begin = file.tell()
                record = _write_document(item, piece, settings, tokenizer, file)
                if isinstance(record, dict):
                    records.append(record)
                    continue
                file.seek(begin)
                file.truncate()
                counts["bad" if record else "empty"] += 1
                if record and len(bad) < MAX_LISTED:
                    unit = {"text": None, "table": "row", "array": "document"}.get(documents.file_kind(piece.path), "line")
                    where = f"{piece.path}: {unit} {documents.count_before(piece) + line}" if unit else str(piece.path)
                    bad.append((where, record))
    commit_file(partial, path)
    columns = {name: [record[name] for record in records] for name in ("tokens", "drawn", "answers")}
    return {**columns, "spans": [span for record in records for span in record["spans"]], "bad": bad, "counts": counts}


def _write_document(
    item: Any, piece: Piece, settings: TextSettings, tokenizer: Tokenizer, file: IO[bytes]
) -> dict[str, Any] | str | None:
    """Write the tokens of a document. Return its record, the reason why it is unusable (perhaps after some tokens), or None."""
    dtype, tokens, masks = np.dtype(token_dtype(tokenizer)).newbyteorder("<"), 0, list[int]()
    try:
        result = tokenize(item, piece, settings, tokenizer)
        if result is None:
            return None
        drawn, parts = result
        for ids, mask in parts:
            file.write(np.array(ids, dtype).tobytes())
            tokens += len(ids)
            masks += mask or ()
    except UnusableError as problem:
        return str(problem).removeprefix(f"{piece.path}: ")
    except DataError as problem:
        if not isinstance(item, Mapping | str):
            raise
        return str(problem)
    spans = to_spans(np.array(masks, bool))
    if settings.has_answers and not len(spans):
        return "nothing that is an answer"
    return {"tokens": tokens, "drawn": drawn, "answers": len(spans), "spans": spans.tolist()}


# ---- a tokenizer


def train_tokenizer(size: int, shards: Sequence[Shard], settings: TextSettings) -> Tokenizer:
    """Train a tokenizer on the beginnings of all shards, without documents that are held out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"          # equal results on any machine, and no threads before processes start
    fraction = min(1.0, TOKENIZER_BYTES / max(1, sum(shard.weight for shard in shards)))
    special = chats.ROLE_TOKENS if settings.chat else ()
    return _with_template(Tokenizer.train(_training_texts(shards, fraction, settings), size, special), settings)


def _with_template(tokenizer: Tokenizer, settings: TextSettings) -> Tokenizer:
    """Return a tokenizer; for chats one without a chat template gets that of this project."""
    if settings.chat and tokenizer.chat_template is None:
        tokenizer.config["chat_template"] = ("{{- bos_token }}" if tokenizer.prefix else "") + chats.TEMPLATE
        command.print_rank_0(f"{tokenizer.where}: without a chat template; it gets one, with {', '.join(chats.ROLE_TOKENS)}")
    return tokenizer


def _training_texts(shards: Sequence[Shard], fraction: float, settings: TextSettings) -> Iterator[str]:
    for shard in shards:
        remaining = shard.weight * fraction
        items = ((piece, item) for piece in shard.pieces for _, item in documents.read_documents(piece, settings.columns))
        for text in (text for piece, item in items for text in _document_texts(item, piece, settings)):
            yield text
            remaining -= len(text)
            if remaining < 0:
                break


def _document_texts(item: Any, piece: Piece, settings: TextSettings) -> Iterator[str]:
    """Yield the texts of a document for training; none if it is unusable or held out."""
    try:
        drawn, texts = read_texts(item, piece, settings)
        if drawn < settings.held_out:
            return
        parts: Iterator[Any] = chain.from_iterable([text] if isinstance(text, str) else text for text in texts)
        parts = (chats.to_text(message)["content"] for message in parts) if settings.chat else parts
        yield from (part for part in parts if part.isascii() or part == part.encode("utf-8", "replace").decode())
    except (DataError, TypeError):
        return                                  # reported when the document is tokenized


# ---- convert


def convert(options: argparse.Namespace) -> command.Plan:
    sources = find_sources(options.source, options.validation, options.only, options.out)
    return _make_plan(options, sources, [*options.source, *options.validation])


def python(options: argparse.Namespace) -> command.Plan:
    vars(options).update(field="text", group=None, chat=False, prompt=None, answer=None, bad=0.0, validation=[])
    return _make_plan(options, library_sources(), [Path(f"Python {'.'.join(map(str, sys.version_info[:3]))}")])


def _make_plan(options: argparse.Namespace, sources: Sequence[Piece], roots: Sequence[Path]) -> command.Plan:
    load_tokenizer.cache_clear()
    settings, tokenizer, size = _parse_options(options)
    out = options.out
    names = [f"{source.root} {source.split} {source.name} {source.path.stat().st_size}" for source in sources]
    named: dict[str, Any] = {"tokenizer": options.tokenizer, "frame": None}
    if tokenizer is not None:                   # the tokens of a document depend on special tokens and the chat template too
        template = hashlib.sha256(json.dumps(tokenizer.config.get("chat_template")).encode()).hexdigest()[:16]
        named = {"tokenizer": tokenizer.identity, "frame": [tokenizer.prefix, tokenizer.end_tokens, template]}
    if endings := Counter(source.path.suffix for source in sources if documents.file_kind(source.path) == "text"):
        counts_by_ending = ", ".join(f"{count:,} {ending or 'files'}" for ending, count in endings.most_common())
        command.print_rank_0(f"read as one text each: {counts_by_ending}")
    recipe = {"kind": "convert", **settings.json_dict, **named, "sources": command.fingerprint(names, "files, names and sizes")}
    store.claim_folder(out, recipe)
    work = out / store.WORK / command.digest([json.dumps(recipe), "2"])         # format of the files there
    size_tasks = {work / f"sizes_{number:06d}.json": partial(file_sizes, batch)
             for number, batch in enumerate(command.batched(sources, FILES_PER_TASK))}  # fmt: skip
    sizes = [size for result in store.all_gather_results(size_tasks, options.workers, "sizes") for size in result["files"]]
    parts, part_sizes = hold_out_ends(sources, sizes, settings)
    shards = make_shards(parts, *([size[n] for size in part_sizes] for n in (0, 1)))
    if tokenizer is None:
        # Another version of the library may train another tokenizer.
        trained = [folder for folder in (out, work) if (folder / CONTENT).is_file()]
        tokenizer = Tokenizer.load(trained[0]) if trained else train_tokenizer(size, shards, settings)
    tokenizer.save(work)
    settings = replace(settings, tokenizer=str(work))
    paths = [shard_path(work, number) for number in range(len(shards))]
    tasks = {path: partial(encode_shard, share, settings, path.with_suffix(".tokens")) for path, share in zip(paths, shards)}
    columns: list[list[Array]] = []             # of each shard
    refused, bad, empty = list[tuple[str, str]](), 0, 0
    for result in store.all_gather_results(tasks, options.workers, "tokens"):
        columns.append([np.array(result[name], float if name == "drawn" else np.int64) for name in ("tokens", "drawn", "answers")])
        refused += [(where, why) for where, why in result["bad"]]
        bad, empty = bad + result["counts"]["bad"], empty + result["counts"]["empty"]
    good = sum(len(tokens) for tokens, _, _ in columns)
    if bad > options.bad * (good + bad):
        command.write_skipped(out, refused)
        where, why = refused[0]
        raise DataError(f"{bad} of {good + bad} documents cannot be used, listed in {out / command.SKIPPED}; the first: {where}: "
                        f"{why}; more than --bad {options.bad:g}: repair them, or allow more")  # fmt: skip
    if empty:
        command.print_rank_0(f"{empty} documents are empty and left out")
    file_plans, counts = _plan_files(work, columns, options, tokenizer)
    contents = store.Contents(make_fields(options.sequence, tokenizer, settings.has_answers), measure, merge)
    kind = (settings.has_answers, settings.chat)
    files = [store.Job(path, partial(pack, plan, str(work), *kind), contents, plan.rows) for path, plan in file_plans]
    header = {"sequence": options.sequence, "vocabulary": tokenizer.size, "tokenizer": tokenizer.identity}
    metadata = {
        "format": 1, "version": hpcai.__version__, **header, "type": token_dtype(tokenizer), "answers": settings.has_answers,
        "seed": options.seed, "before": tokenizer.prefix, "ending": tokenizer.end_tokens, "splits": counts, "unusable": bad,
        "sources": _describe_sources(roots, sources, sizes),
    }  # fmt: skip
    summary = f"vocabulary {tokenizer.size:,} (tokenizer {tokenizer.identity[:12]}), rows of {options.sequence} + 1 tokens"
    return command.Plan(recipe, files, header, summary, refused=refused, unlisted=bad - len(refused), accepted=good,
                        finalize=partial(_write_metadata, metadata, tokenizer))  # fmt: skip


def _write_metadata(metadata: dict[str, Any], tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(out)
    for split, part in command.PreparedDataset(out).statistics.items():
        metadata["splits"][split] |= {key: part[key] for key in ("rows", "bytes")}
        print(f"{split}: {part['bytes'] / part['tokens']:.3f} UTF-8 bytes {'in answers ' if metadata['answers'] else ''}per token")
    write_json(out / METADATA, metadata)


def _parse_options(options: argparse.Namespace) -> tuple[TextSettings, Tokenizer | None, int]:
    """Return the settings, the tokenizer or None, and the vocabulary size of a tokenizer to train."""
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
    settings = TextSettings.from_options(options)
    name, _, size = options.tokenizer.partition(":")
    if name == "train" and size:
        if not size.isdigit() or not 257 <= int(size) < 1 << 32:
            raise ConfigError(f"--tokenizer {options.tokenizer}: expected train: and a size from 257 to 2^32, such as train:2048")
        return settings, None, int(size)
    tokenizer = _with_template(Tokenizer.load(options.tokenizer), settings)
    _ = tokenizer.end_tokens                        # raises before the work
    return settings, tokenizer, tokenizer.size


def _plan_files(
    work: Path, columns: Sequence[Sequence[Array]], options: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[list[tuple[Path, FilePlan]], dict[str, dict[str, int]]]:
    """Return the files of rows with their documents, and counts of each split."""
    tokens, drawn, answers = (np.concatenate(parts) for parts in zip(*columns))
    held = drawn < options.held_out
    if options.held_out and tokens[held].sum() <= options.sequence:
        order = np.argsort(drawn)
        limit = drawn[order[np.searchsorted(np.cumsum(tokens[order]), options.sequence + 1) :][:1]]
        if len(limit) and limit[0] < min(drawn.max(), 1):
            held = drawn <= limit[0]
            command.print_rank_0(f"validation: held out more than {options.held_out:g} of the documents, to fill a row")
    shard = np.repeat(np.arange(len(columns), dtype=np.int32), [len(part[0]) for part in columns])
    begin, span = (np.concatenate([np.cumsum(part[which]) - part[which] for part in columns]) for which in (0, 2))
    sequence, files, counts = options.sequence, list[tuple[Path, FilePlan]](), dict[str, dict[str, int]]()
    rows_per_file = options.each or max(1, FILE_BYTES // ((sequence + 1) * np.dtype(token_dtype(tokenizer)).itemsize))
    for number, split in enumerate(SPLITS):
        members = np.flatnonzero(held == number)
        order = members[store.generator(options.seed, 1, number).permutation(len(members))]
        ends = np.cumsum(tokens[order])
        total = int(ends[-1]) if len(ends) else 0
        rows = max(total - 1, 0) // sequence
        if not rows and (split == "train" or options.held_out or options.validation):
            actual = f"{split}: {total:,} tokens of {len(members)} documents, not one row of {sequence + 1:,}"
            advice = ", or --held-out 0: then a run trains without validation" if number else ""
            raise DataError(f"{actual}; take a smaller --sequence, or more text{advice}")
        if not rows:
            continue
        counts[split] = {"documents": len(members), "tokens": total, "left_over": total - rows * sequence - 1}
        for at in range(0, rows, rows_per_file):
            last = min(at + rows_per_file, rows)
            first_token, end = at * sequence, last * sequence + 1
            part = slice(int(np.searchsorted(ends, first_token, "right")), int(np.searchsorted(ends, end, "left")) + 1)
            selected = order[part]
            offset = first_token - int(ends[part.start] - tokens[selected[0]])
            shards, begins, lengths, spans, answered = (column[selected] for column in (shard, begin, tokens, span, answers))
            file_plan = FilePlan(work, shards, begins, lengths, spans, answered, offset, last - at, sequence)
            files.append((options.out / split / f"rows_{at // rows_per_file:06d}.h5", file_plan))
        command.print_rank_0(f"{split}: {rows:,} rows of {len(members):,} documents, {counts[split]['left_over']} tokens left over")
    return files, counts


def _describe_sources(roots: Sequence[Path], sources: Sequence[Piece], sizes: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the number of files, bytes of text and SHA-256 of each source. That of a folder is the hash of those of its files."""
    entries = []
    for number, root in enumerate(roots):
        members = [n for n, source in enumerate(sources) if source.root == number]
        digests = [sizes[n][2] for n in members]
        names = "".join(f"{sha256}  {sources[n].name}\n" for sha256, n in zip(digests, members))
        digest = digests[0] if len(digests) == 1 and root.is_file() else hashlib.sha256(names.encode()).hexdigest()
        entries.append({"name": str(root), "files": len(members), "bytes": sum(sizes[n][1] for n in members), "sha256": digest})
    return entries


# ---- check


def check(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the faults of rows and tokenizer. Print the number of duplicates and of documents in both splits, and some rows."""
    out, metadata, tokenizer = prepared.out, store.read_json(prepared.out / METADATA), Tokenizer.load(prepared.out)
    for path, entry in {out / METADATA: metadata, **{file.parent / "index.json": x for file, _, x in prepared.files}}.items():
        if entry["tokenizer"] != tokenizer.identity:
            text = f"written with the tokenizer {entry['tokenizer'][:12]}, that of the folder is {tokenizer.identity[:12]}"
            yield f"{path}: {text}; restore the right one"
    hashes: dict[str, Array] = {}
    for split in metadata["splits"]:
        paths = sorted(path for path in prepared.paths if path.parent.name == split)
        widths = packing.token_bytes(tokenizer, prepared.recipe.get("chat", False))
        hashes[split] = yield from _check_rows(paths, metadata, widths)
        if copies := len(hashes[split]) - len(np.unique(hashes[split])):
            print(f"{split}: {copies} of {len(hashes[split])} documents are duplicates")
    if len(hashes) == 2 and (shared := int(np.isin(hashes["validation"], hashes["train"]).sum())):
        print(f"warning: {shared} documents of validation are in train too")
    for path, row in command.subsample(prepared.locations, options.check_count):
        with h5py.File(path, "r") as file:
            text = tokenizer.decode(file["tokens"][row].tolist())
        print(f"{path.parent.name}/{path.name} row {row}: {text[:300]!r}")


def _check_rows(paths: Sequence[Path], metadata: dict[str, Any], widths: Array) -> Generator[str, None, Array]:
    """Yield the faults of the rows of a split, and return a hash of each document. ``widths``: The bytes of each token."""
    sequence, advice = metadata["sequence"], "delete the file and convert again"
    hashes: list[int] = []
    last, running = None, hashlib.blake2b(digest_size=8)
    for path in paths:
        with h5py.File(path, "r") as file:
            tokens, columns = file["tokens"][...], {name: file[name][...] for name in file if name != "tokens"}
        breaks = np.append(tokens[:-1, -1] != tokens[1:, 0], False)
        if breaks.any() or last not in (None, tokens[0, 0]):
            at = int(np.argmax(breaks)) + 1 if breaks.any() else 0
            yield f"{path}: row {at} does not begin with the last token of the row before; {advice}"
        row, ends = np.repeat(np.arange(len(tokens)), columns["documents"]), columns["ends"].astype(np.int64)
        if len(row) != len(ends):
            yield f"{path}: {len(ends)} ends, expected {len(row)} by 'documents'; {advice}"
            continue
        rising = np.diff(row * (sequence + 2) + ends, prepend=0) > 0
        if not rising.all():
            yield f"{path}: row {row[np.argmin(rising)]}: ends do not rise; {advice}"
            continue
        if (odd := tokens[row, ends - 1] != metadata["ending"][-1]).any():
            yield f"{path}: row {row[np.argmax(odd)]}: a document ends with another token than {metadata['ending'][-1]}; {advice}"
        lengths = widths[tokens]
        if metadata["answers"]:
            mask = np.zeros(tokens.shape, bool)
            for number, (begin, end) in zip(np.repeat(np.arange(len(mask)), columns["answers"]), columns["spans"]):
                mask[number, begin:end] = True
            lengths = lengths * mask
        counts = lengths[:, 1:].sum(1).clip(0)
        for at in np.flatnonzero(counts != columns["bytes"])[:1]:
            yield f"{path}: row {at}: 'bytes' is {columns['bytes'][at]}, expected {counts[at]}; {advice}"
        last, flat, at = tokens[-1, -1], tokens[:, :-1].ravel(), 0
        for end in (row * sequence + ends)[ends <= sequence].tolist():
            running.update(flat[at:end].tobytes())
            hashes.append(int.from_bytes(running.digest(), "big"))
            running, at = hashlib.blake2b(digest_size=8), end
        running.update(flat[at:].tobytes())
    return np.array(hashes, np.uint64)


BUILDER = command.DatasetBuilder(
    "text", "Text for language models: tokenized, shuffled documents, packed into rows.", "llm",
    command.Check("Verify files, rows and documents.", check, ("rows", 2, "rows to print"), None),
    (command.Convert(f"Text, {', '.join(documents.KINDS)}, all but tables also {' or '.join(documents.PACKED)}.", TextSettings,
                     convert, None, add_source),
     command.Convert("The standard library of the Python that runs.", LibrarySettings, python, None, name="python")),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
