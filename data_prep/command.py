"""Command line of the data sets: options, distribution over ranks and workers, resumption, checks.

    python -m data_prep.NAME simulate OUT ...           simulate a data set
    python -m data_prep.NAME convert SOURCE OUT ...     convert files of another format; refused items are counted by reason
    python -m data_prep.NAME check OUT                  compare files with index.json, verify some samples, draw a picture

A data set is a module. It declares its datasets (``store.Field``: type, shape, range, unit), its settings (a dataclass of
``Settings`` or ``Recipe``, whose fields are ``option``), and functions:

    plan(options) -> Plan                           the files, and how each is written; one for simulate, one for convert
    check_samples(prepared, options) -> mistakes    of some samples, which are computed again

A ``DatasetBuilder`` joins them, and its ``main`` is that of the module. Each file is written once and atomically, by any rank and
worker; a stopped run resumes; index.json, statistics.json and skipped.json are written; all files are checked against the declared
fields as by ``hpcai data check``; and the last line of a conversion has the number of refused items, with the commonest reasons.
"""

import argparse
import errno
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from data_prep import picture, store
from hpcai.durable import locked_directory, write_json
from hpcai.errors import ConfigError, DataError, HpcaiError, describe_unwritable
from hpcai.host_limits import raise_file_limit
from hpcai.programs import command_of, command_of_app
from hpcai.stop import end_in_one_line

R = TypeVar("R", bound="Recipe")
SKIPPED = store.SKIPPED
DOCUMENTATION = {".idx", ".lst", ".txt", ".md", ".json", ".yaml"}       # suffixes of files that users keep beside data
WARNINGS = ("leak", "duplicate", "constant")    # findings of a check that are printed, and do not fail it


# ---- options


def option_type(name: str, parse: Callable[[str], Any], valid: Callable[[Any], bool] = lambda value: True) -> Callable[[str], Any]:
    """Return a type for argparse that rejects invalid values; ``name`` describes the valid ones in error messages."""

    def convert(text: str) -> Any:
        value = parse(text)
        if not valid(value):
            raise ValueError
        return value

    convert.__name__ = name
    return convert


def within(low: float, high: float, parse: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """Return a type for argparse: a number of a range."""
    return option_type(f"number from {low:g} to {high:g}", parse, lambda value: low <= value <= high)


positive = option_type("whole number of 1 or more", int, lambda value: value >= 1)
natural = option_type("whole number of 0 or more", int, lambda value: value >= 0)
workers = option_type("whole number of 1 or more, or cores", lambda x: store.count_cores() if x == "cores" else positive(x))


def option(default: Any, text: str, name: str | None = None, **kwargs: Any) -> Any:
    """Return a field of ``Settings`` that is also a command-line option, under its own name or ``name``."""
    defaults = {} if {"action", "choices"} & kwargs.keys() else {"metavar": "N"}
    return field(default=default, metadata={"kwargs": {"help": text, **defaults, **kwargs}, "name": name})


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of a file, as fields of a frozen dataclass. Raises ConfigError with all mistakes."""

    def __post_init__(self) -> None:
        if mistakes := list(self.mistakes()):
            raise ConfigError("\n".join(mistakes))

    def mistakes(self) -> Iterator[str]:
        """Yield a message for each invalid setting."""
        yield from ()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for setting in fields(cls):
            if kwargs := setting.metadata.get("kwargs"):
                flag = setting.metadata["name"] or setting.name
                parser.add_argument(f"--{flag.replace('_', '-')}", dest=setting.name, default=setting.default, **kwargs)

    @classmethod
    def from_options(cls, options: argparse.Namespace, **extra: Any) -> Self:
        """Return the settings of parsed options; ``extra`` has the fields that are no options."""
        values = {item.name: getattr(options, item.name) for item in fields(cls) if hasattr(options, item.name)} | extra
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    @property
    def json_text(self) -> str:
        return json.dumps(asdict(self), default=str)

    @property
    def json_dict(self) -> dict[str, Any]:
        """The settings after a round trip through JSON: tuples are lists."""
        return dict(json.loads(self.json_text))


class Recipe(Settings):
    """The settings of a simulation. A sample is a pure function of the settings and of its number: ranks, cores,
    interruptions and a later extension of the set change nothing in it."""

    seed: int
    validation: float
    test: float

    def __post_init__(self) -> None:
        if mistakes := [*check_fractions(self.validation, self.test), *self.mistakes()]:
            raise ConfigError("\n".join(mistakes))

    def generator(self, stream: int, number: int) -> np.random.Generator:
        return store.generator(self.seed, stream, number)

    def split(self, number: int) -> str:
        return store.split_of(number, self.seed, self.validation, self.test)

    def numbers_by_split(self, count: int) -> dict[str, list[int]]:
        splits = [self.split(number) for number in range(count)]
        return {split: [number for number, own in enumerate(splits) if own == split] for split in store.SPLITS}


def seed() -> Any:
    return option(1, "of everything", type=natural)


def fraction(default: float, of: str) -> Any:
    return option(default, f"fraction of {of}", metavar="F", type=float)


def skip_bad() -> Any:
    return option(False, "leave out and list items that cannot be used; otherwise the first one is an error", action="store_true")


def check_fractions(validation: float, test: float) -> Iterator[str]:
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        yield f"--validation {validation} and --test {test}: expected fractions of 0 or more that sum to less than 1"


def require_splits(splits: Iterable[str], options: argparse.Namespace, request: str) -> None:
    for split, share in (("train", 1.0), ("validation", options.validation), ("test", options.test)):
        if share > 0 and split not in splits:
            raise ConfigError(f"{request}: none is left for {split}; ask for more, or change the fractions")


# ---- sources


def print_rank_0(text: str) -> None:
    if store.rank_and_size()[0] == 0:
        print(text, flush=True)


def digest(names: Sequence[str]) -> str:
    """Return a hash of a list of source files."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def fingerprint(names: Sequence[str], label: str = "files, names") -> str:
    """Return the number of names and their digest, as text."""
    return f"{len(names)} {label} {digest(names)}"


def source_folders(root: Path, contents: str) -> dict[str, Path]:
    """Return the existing folders of splits in SOURCE. Raises ConfigError if there is no SOURCE; ``contents`` describes it."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; SOURCE holds the folders train, validation, test, or {contents}")
    return {split: root / split for split in store.SPLITS if (root / split).is_dir()}


def data_files(folder: Path) -> list[Path]:
    """Return the files of a folder at any depth, sorted, without hidden ones and those of ``DOCUMENTATION``."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in DOCUMENTATION)
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def describe_sources(sources: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{len(files)} for {split}" for split, files in sources.items())


def batched(items: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    return (tuple(items[start : start + size]) for start in range(0, len(items), size))


# ---- plans and commands


@dataclass(frozen=True)
class Plan:
    """The files of a data set, and the metadata that describe it."""

    recipe: Recipe | dict[str, Any]             # settings of a simulation, or the identity of a conversion
    jobs: Sequence[store.Job]
    header: dict[str, Any]                      # entries of the index besides files and fields
    summary: str                                # printed before the work
    extra_jobs: Sequence[store.Job] = ()        # files outside the splits, written last
    refused: store.Refused = ()                 # items that went into no file
    unlisted: int = 0                           # number of further refused items, too many to list
    filtered: store.Refused = ()                # items that the options exclude
    accepted: int | None = None                 # items that went into files; default: the rows of the splits
    finalize: Callable[[Path], None] | None = None      # called on rank 0 when all files are written
    config: str = "small"                       # a configuration of the app that fits the data


@dataclass(frozen=True)
class PreparedDataset:
    """The files of a prepared data set, for checks."""

    out: Path

    @cached_property
    def files(self) -> list[tuple[Path, dict[str, Any], dict[str, Any]]]:
        """(path, entry in the index, index) of each file of the splits."""
        splits = [split for split in store.SPLITS if (self.out / split).is_dir()]
        if not splits:
            raise DataError(f"{self.out}: holds no folder train, validation or test; simulate or convert into it first")
        indexes = {split: store.read_json(self.out / split / "index.json") for split in splits}
        return [(self.out / split / entry["name"], entry, index) for split, index in indexes.items() for entry in index["files"]]

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return store.read_json(self.out / "recipe.json")

    @property
    def paths(self) -> list[Path]:
        return [path for path, _, _ in self.files]

    @property
    def locations(self) -> list[tuple[Path, int]]:
        """(path, row) of every sample."""
        return [(path, row) for path, entry, _ in self.files for row in range(entry["rows"])]

    @property
    def index(self) -> dict[str, Any]:
        return self.files[0][2]

    def simulation_settings(self, kind: type[R]) -> R | None:
        """Return the settings of a simulation, or None for a conversion."""
        settings = {key: value for key, value in self.recipe.items() if key != "kind"}
        return kind.from_options(argparse.Namespace(**settings)) if self.recipe.get("kind") == "simulate" else None

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Statistics by split."""
        return dict(store.read_json(self.out / "statistics.json")["splits"])


@dataclass(frozen=True)
class Simulate:
    """The command ``simulate``. ``count``: name and default of the number of samples. ``plan``: None if nothing is to do."""

    help: str
    settings: type[Recipe]
    count: tuple[str, int]
    plan: Callable[[argparse.Namespace], Plan | None]
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None    # options that are no settings
    count_help: str = "how many; a later run may ask for more"
    name = "simulate"


@dataclass(frozen=True)
class Convert:
    """A command that converts files of another format."""

    help: str
    settings: type[Settings]
    plan: Callable[[argparse.Namespace], Plan | None]
    source: str | None                          # help of SOURCE; None: ``add_arguments`` adds the sources
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None    # options that are no settings
    name: str = "convert"


@dataclass(frozen=True)
class Check:
    """The command ``check``. ``option`` is the option with the number of samples to verify: name, default and help."""

    help: str
    check_samples: Callable[[PreparedDataset, argparse.Namespace], Iterator[str]]   # yields mistakes
    option: tuple[str, int, str] | None         # None: all samples
    picture: Callable[[Sequence[tuple[Path, int]], dict[str, Any], Path], None] | None = picture.draw   # of some samples
    describe: Callable[[Path, bool], None] | None = None    # instead, without an index: prints the content, raises DataError
    name = "check"


@dataclass(frozen=True)
class DatasetBuilder:
    """The commands of a data set, ``python -m data_prep.<name>``, for the app ``app``."""

    name: str
    description: str
    app: str
    check: Check
    commands: tuple[Simulate | Convert, ...]

    def parser(self) -> argparse.ArgumentParser:
        top = argparse.ArgumentParser(prog=f"python -m data_prep.{self.name}", description=self.description, allow_abbrev=False)
        commands = (*self.commands, self.check)
        names = " | ".join(each.name for each in commands)
        subparsers = top.add_subparsers(dest="command", required=True, metavar=names)
        for each in commands:
            kwargs: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
            parser = subparsers.add_parser(each.name, help=each.help, description=each.help, **kwargs)
            if isinstance(each, Convert):
                if each.source:
                    parser.add_argument("source", type=Path, metavar="SOURCE", help=each.source)
                each.add_arguments(parser)
            parser.add_argument("out", type=Path, metavar="OUT", help="folder; finished files of a stopped run are kept")
            if isinstance(each, Simulate):
                name, count = each.count
                parser.add_argument(f"--{name}", metavar="N", type=positive, default=count, help=each.count_help)
                parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="check at the end")
            if isinstance(each, Check):
                parser.set_defaults(run=self.run_check)
                if self.check.option:
                    name, count, text = self.check.option
                    parser.add_argument(f"--{name}", dest="check_count", metavar="N", type=natural, default=count, help=text)
                if self.check.picture:
                    help_text = f"draw OUT/{picture.NAME}"
                    parser.add_argument("--picture", action=argparse.BooleanOptionalAction, default=True, help=help_text)
            else:
                each.settings.add_options(parser)
                parser.add_argument("--workers", metavar="N", type=workers, default="cores", help="processes of this rank")
                parser.set_defaults(run=self.run, spec=each, check_count=self.check.option and self.check.option[1], picture=True)
            if isinstance(each, Simulate):
                each.add_arguments(parser)
        return top

    def main(self, arguments: Sequence[str] | None = None) -> int:
        try:
            options = self.parser().parse_args(arguments)
            raise_file_limit()
            name, is_check = f"{command_of(f'data_prep.{self.name}')} {options.command}", options.command == Check.name
            advice = "nothing was changed" if is_check else "the same command resumes after the finished files"
            with end_in_one_line(name, advice) if arguments is None else nullcontext():
                return int(options.run(options))
        except (HpcaiError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENOSPC:           # HDF5's own text is a paragraph
                error = OSError(errno.ENOSPC, "", str(options.out))
            if isinstance(error, OSError) and error.filename:
                with suppress(OSError):                                 # of another kind
                    error = DataError(f"{describe_unwritable(error, '')}; finished files are kept")
            print(f"error: {error}", file=sys.stderr)
        return 2

    def run(self, options: argparse.Namespace) -> int:
        """Write the missing files of this rank. Rank 0 then writes index and statistics, and checks all files."""
        if not isinstance(options.spec, Simulate):
            for source in (value for value in vars(options).values() if isinstance(value, Path)):
                if source is not options.out and source.resolve() == options.out.resolve():
                    raise ConfigError(f"{options.out}: SOURCE and OUT are the same folder; choose another OUT")
        plan: Plan | None = options.spec.plan(options)
        if plan is None:
            return 0
        print_rank_0(plan.summary)
        advice, recipe, jobs = "choose a new folder", plan.recipe, plan.jobs
        if isinstance(recipe, Recipe):
            name = options.spec.count[0]
            advice = f"ask for at least as many as it holds (--{name} is {getattr(options, name)}), or {advice}"
            recipe = {"kind": "simulate", **recipe.json_dict}
        store.claim_folder(options.out, recipe)
        with nullcontext() if store.rank_and_size()[0] else locked_directory(options.out, "choose another OUT"):
            store.refuse_unplanned_files(options.out, [*jobs, *plan.extra_jobs], advice)
            return self._write(options, plan, recipe)

    def _write(self, options: argparse.Namespace, plan: Plan, recipe: dict[str, Any]) -> int:
        (rank, size), begin, simulates = store.rank_and_size(), time.monotonic(), isinstance(options.spec, Simulate)
        all_jobs, local_groups = [*plan.jobs, *plan.extra_jobs], [plan.jobs[rank::size], plan.extra_jobs[rank::size]]
        if finished := sum(store.is_finished(job) for group in local_groups for job in group):
            print_rank_0(f"{finished} of {sum(map(len, local_groups))} files are finished and are kept")
        for group in local_groups:
            missing = [job for job in group if not store.is_finished(job)]
            store.run_parallel(missing, store.write_file, options.workers, options.command)
        if rank:
            return 0
        store.wait_for(all_jobs, store.is_finished, lambda job: job.path)
        total_bytes, rows, refused = store.finalize(options.out, all_jobs, plan.header, recipe)
        seconds, processes = time.monotonic() - begin, f"ranks: {size}, processes of each: {options.workers}"
        print(f"{len(all_jobs)} files, {total_bytes / 1e6:,.1f} MB in {options.out}, {seconds:.1f} s ({processes})", flush=True)
        if plan.finalize:
            plan.finalize(options.out)
        if simulates and options.check and (status := self.run_check(options)):
            return status
        if not simulates:
            print_statistics(PreparedDataset(options.out))
        print(f"next: {command_of_app(self.app, plan.config)} data.directory={shlex.quote(str(options.out))}", flush=True)
        if not simulates:
            report_refused(options.out, plan, refused, rows)
        return 0

    def run_check(self, options: argparse.Namespace) -> int:
        """Return 0, or print the mistakes and return 1. Raises DataError if the folder cannot be read."""
        prepared, check = PreparedDataset(options.out), self.check
        if check.describe:
            check.describe(options.out, True)
            return 0
        errors = check_index(prepared)
        print_statistics(prepared)
        if not errors:
            errors += check.check_samples(prepared, options)
        if check.picture and options.picture and not errors:
            path = options.out / picture.NAME
            check.picture(prepared.locations, prepared.index, path)
            print(f"picture: {path}")
        for text in errors[:20]:
            print(f"wrong: {text}")
        if len(errors) > 20:
            print(f"and {len(errors) - 20} more")
        return int(bool(errors))


# ---- output


def check_index(prepared: PreparedDataset) -> list[str]:
    """Compare every file with index.json and the declared fields, and return the mistakes."""
    from hpcai.cli.check.examination import check_dataset  # pydantic, which --help does not need
    from hpcai.cli.check.findings import Options

    rows = sum(entry["rows"] for _, entry, _ in prepared.files)
    outcome = check_dataset(prepared.out, Options(seconds=0))
    errors = [finding for finding in outcome.findings if finding.severity == "error" and finding.code not in WARNINGS]
    for finding in [finding for finding in outcome.findings if finding.code in WARNINGS][: store.MAX_REASONS]:
        print(f"warning: {finding.path}: {finding.text}")
    verdict = f"mistakes: {len(errors)}" if errors else "equal"
    print(f"{len(prepared.files)} files, {rows} samples against index.json: {verdict}", flush=True)
    return [f"{error.path}: {f'{error.dataset!r} ' if error.dataset else ''}{error.text}" for error in errors]


def print_statistics(prepared: PreparedDataset) -> None:
    """Print the statistics of each split, one line per dataset."""
    for split, statistics in prepared.statistics.items():
        print(f"{split}: " + ", ".join(f"{name} {_format(x)}" for name, x in statistics.items() if not isinstance(x, dict)))
        for name, value in statistics.items():
            if isinstance(value, dict) and value:
                print(f"  {name}: {_format(value)}")


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(item)}" for name, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_format, value[:4])) + (" ..." if len(value) > 4 else "")
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def write_skipped(out: Path, unusable: store.Refused, filtered: store.Refused = ()) -> None:
    write_json(out / SKIPPED, {"unusable": dict(unusable), "filtered": dict(filtered)})


def report_refused(out: Path, plan: Plan, refused: Sequence[Sequence[str]], rows: int) -> None:
    """Write skipped.json, and print the number of items that were refused, by reason."""
    unusable = [(where, why) for where, why in (*plan.refused, *refused)]
    write_skipped(out, unusable, plan.filtered)
    if plan.filtered:
        print(f"excluded by the options: {len(plan.filtered)}, {store.count_by_reason(plan.filtered)}")
    count, accepted = len(unusable) + plan.unlisted, rows if plan.accepted is None else plan.accepted
    why = f": {store.count_by_reason(unusable)}; listed in {out / SKIPPED}" if count else ""
    print(f"refused: {count or 'none'} of {accepted + count} items{why}", flush=True)


def subsample(items: Sequence[Any], count: int) -> Sequence[Any]:
    """Return at most ``count`` of the items, evenly spaced."""
    return items[:: max(1, -(-len(items) // max(1, count)))] if count else []
