"""The frame of all data sets: what a maker declares, and what it need not know of: command line, ranks, going on, checks.

    python -m data_prep.NAME simulate OUT ...           Settings, whose fields are options, to files
    python -m data_prep.NAME convert SOURCE OUT ...     files of others to ours; what could not be used is counted by reason
    python -m data_prep.NAME check OUT                  files against index.json, samples looked at anew, a picture

A maker is a module. It declares its datasets (``store.Field``: type, shape, range, unit), its settings (a dataclass of ``Settings``
or ``Recipe``, whose fields are ``option``), and functions:

    plan(options) -> Plan                   which files there are, and how each is made; one for simulate, one for convert
    look(prepared, options) -> mistakes     of some samples, made or counted again

and puts them together as a ``Maker``, whose ``main`` is the module's. The frame does the rest: each file is written once and
atomically, by any rank and worker; a stopped run goes on; index.json, statistics.json and skipped.json are written; all is checked
against the declared fields by what ``hpcai data check`` does; and the last line of a conversion says how many items were refused,
with the commonest reasons.
"""

import argparse
import hashlib
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from data_prep import picture, store
from hpcai.cli.check import Options, check_dataset
from hpcai.data.index import write_json
from hpcai.errors import ConfigError, HpcaiError
from hpcai.programs import command_of_app

R = TypeVar("R", bound="Recipe")
SKIPPED = "skipped.json"
COPIES = ("leak", "duplicate", "constant")      # findings of a check that are told, and are no mistake of a maker
TOLD = 3                                        # reasons of a refusal that are told


# ---- options


def taking(name: str, kind: Callable[[str], Any], good: Callable[[Any], bool] = lambda value: True) -> Callable[[str], Any]:
    """The type of an option whose values must be good; ``name`` tells users what it takes."""

    def value(text: str) -> Any:
        found = kind(text)
        if not good(found):
            raise ValueError
        return found

    value.__name__ = name
    return value


positive = taking("whole number of 1 or more", int, lambda value: value >= 1)
natural = taking("whole number of 0 or more", int, lambda value: value >= 0)
workers = taking("whole number of 1 or more, or cores", lambda text: store.cores() if text == "cores" else positive(text))


def option(default: Any, text: str, name: str | None = None, **words: Any) -> Any:
    """A field of settings that is an option of the command line, by its own name or another one."""
    usual = {} if {"action", "choices"} & words.keys() else {"metavar": "N"}
    return field(default=default, metadata={"words": {"help": text, **usual, **words}, "name": name})


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of a file, as fields of a frozen dataclass. Raises ConfigError with all mistakes."""

    def __post_init__(self) -> None:
        if wrong := list(self.mistakes()):
            raise ConfigError("\n".join(wrong))

    def mistakes(self) -> Iterator[str]:
        """Yield the mistakes."""
        yield from ()

    @classmethod
    def add_options(cls, made: argparse.ArgumentParser) -> None:
        for one in fields(cls):
            if words := one.metadata.get("words"):
                flag = one.metadata["name"] or one.name
                made.add_argument(f"--{flag.replace('_', '-')}", dest=one.name, default=one.default, **words)

    @classmethod
    def of(cls, options: argparse.Namespace, **others: Any) -> Self:
        """The settings that options ask for; ``others`` are of fields that are none."""
        found = {one.name: getattr(options, one.name) for one in fields(cls) if hasattr(options, one.name)} | others
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), default=str)

    @property
    def told(self) -> dict[str, Any]:
        """The settings as JSON gives them back, in which tuples are lists."""
        return dict(json.loads(self.text))


class Recipe(Settings):
    """Settings of a simulation, which have ``seed``, ``validation`` and ``test``. A sample is a pure function of these and its
    number."""

    seed: int
    validation: float
    test: float

    def __post_init__(self) -> None:
        if wrong := [*wrong_fractions(self.validation, self.test), *self.mistakes()]:
            raise ConfigError("\n".join(wrong))

    def generator(self, stream: int, number: int) -> np.random.Generator:
        return store.generator(self.seed, stream, number)

    def split(self, number: int) -> str:
        return store.split_of(number, self.seed, self.validation, self.test)

    def by_split(self, count: int) -> dict[str, list[int]]:
        """The numbers of each split."""
        found: dict[str, list[int]] = {split: [] for split in store.SPLITS}
        for number in range(count):
            found[self.split(number)].append(number)
        return found


def seed() -> Any:
    return option(1, "of everything", type=natural)


def fraction(default: float, of: str) -> Any:
    return option(default, f"fraction of {of}", metavar="F", type=float)


def wrong_fractions(validation: float, test: float) -> Iterator[str]:
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        yield f"--validation {validation} and --test {test}: expected fractions of 0 or more that sum to less than 1"


def refuse_empty(splits: Iterable[str], options: argparse.Namespace, asked: str) -> None:
    for split, share in (("train", 1.0), ("validation", options.validation), ("test", options.test)):
        if share > 0 and split not in splits:
            raise ConfigError(f"{asked}: none is left for {split}; ask for more, or change the fractions")


# ---- sources


def print_once(text: str) -> None:
    if store.launched()[0] == 0:
        print(text, flush=True)


def digest(names: Sequence[str]) -> str:
    """Tells one list of source files from another."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def listed(names: Sequence[str], what: str = "files, names") -> str:
    """How many names there are, and their digest."""
    return f"{len(names)} {what} {digest(names)}"


def source_folders(root: Path, holds: str) -> dict[str, Path]:
    """The folders of splits in SOURCE, as far as there are some."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; SOURCE holds the folders train, validation, test, or {holds}")
    return {split: root / split for split in store.SPLITS if (root / split).is_dir()}


def told_sources(sources: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{len(files)} for {split}" for split, files in sources.items())


def parts_of(items: Sequence[Any], each: int) -> Iterator[tuple[Any, ...]]:
    return (tuple(items[start : start + each]) for start in range(0, len(items), each))


# ---- what is made


@dataclass(frozen=True)
class Plan:
    """The files of a data set, those ``beside`` its splits too, which are made last."""

    recipe: Recipe | dict[str, Any]             # settings of a simulation, or what a conversion is told apart by
    jobs: Sequence[store.Job]
    header: dict[str, Any]                      # what the index says besides files and fields
    told: str                                   # is printed before the work
    beside: Sequence[store.Job] = ()
    refused: store.Refused = ()                 # items that went into no file
    unlisted: int = 0                           # more of them, too many to list
    filtered: store.Refused = ()                # items that the options leave out
    kept: int | None = None                     # items that went into files; without it the rows of the splits
    after: Callable[[Path], None] | None = None     # what is written and told when all files are there, on rank 0
    config: str = "small"                       # the settings of the app that fit


@dataclass(frozen=True)
class Prepared:
    """A data set that is checked."""

    out: Path

    @cached_property
    def files(self) -> list[tuple[Path, dict[str, Any], dict[str, Any]]]:
        """(path, entry, index) of each."""
        return list(store.indexed(self.out))

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return store.read_json(self.out / "recipe.json")

    @property
    def paths(self) -> list[Path]:
        return [path for path, _, _ in self.files]

    @property
    def places(self) -> list[tuple[Path, int]]:
        """File and row of every sample."""
        return [(path, row) for path, entry, _ in self.files for row in range(entry["rows"])]

    @property
    def index(self) -> dict[str, Any]:
        return self.files[0][2]

    def simulated(self, kind: type[R]) -> R | None:
        """The settings of a simulation; None for what was converted."""
        settings = {key: value for key, value in self.recipe.items() if key != "kind"}
        return kind.of(argparse.Namespace(**settings)) if self.recipe.get("kind") == "simulate" else None

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """The statistics of each split."""
        return dict(store.read_json(self.out / "statistics.json")["splits"])


@dataclass(frozen=True)
class Simulate:
    """The command that makes data; ``count`` is the option that tells how many, with its default and help. Its plan may be None:
    all was done."""

    text: str
    settings: type[Recipe]
    count: tuple[str, int, str]
    plan: Callable[[argparse.Namespace], Plan | None]
    add: Callable[[argparse.ArgumentParser], None] = lambda made: None      # options that are no settings
    name = "simulate"


@dataclass(frozen=True)
class Convert:
    """A command that makes our files of others."""

    text: str
    settings: type[Settings]
    plan: Callable[[argparse.Namespace], Plan]
    add: Callable[[argparse.ArgumentParser], None]          # the sources, and options that are no settings
    name: str = "convert"


@dataclass(frozen=True)
class Check:
    """The command that looks at a data set; ``option`` tells how many samples are looked at anew, with its default and help."""

    text: str
    look: Callable[[Prepared, argparse.Namespace], Iterator[str]]           # mistakes
    option: tuple[str, int, str] | None                                     # None: all are
    picture: bool = True
    name = "check"


@dataclass(frozen=True)
class Maker:
    """``python -m data_prep.<name>``."""

    name: str
    text: str
    app: str
    check: Check
    makes: tuple[Simulate | Convert, ...]

    def parser(self) -> argparse.ArgumentParser:
        top = argparse.ArgumentParser(prog=f"python -m data_prep.{self.name}", description=self.text, allow_abbrev=False)
        every = (*self.makes, self.check)
        names = " | ".join(each.name for each in every)
        commands = top.add_subparsers(dest="command", required=True, metavar=names)
        for each in every:
            words: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
            made = commands.add_parser(each.name, help=each.text, description=each.text, **words)
            if isinstance(each, Convert):
                each.add(made)
            made.add_argument("out", type=Path, metavar="OUT", help="folder; what a stopped run finished there is kept")
            if isinstance(each, Simulate):
                name, many, text = each.count
                made.add_argument(f"--{name}", metavar="N", type=positive, default=many, help=text)
                made.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="check at the end")
            if isinstance(each, Check):
                made.set_defaults(run=self.run_check)
                self._add_check(made)
            else:
                each.settings.add_options(made)
                made.add_argument("--workers", metavar="N", type=workers, default="cores", help="processes of this rank")
                made.set_defaults(run=self.run, made=each, some=self.check.option and self.check.option[1], picture=True)
            if isinstance(each, Simulate):
                each.add(made)
        return top

    def _add_check(self, made: argparse.ArgumentParser) -> None:
        if self.check.option:
            name, many, text = self.check.option
            made.add_argument(f"--{name}", dest="some", metavar="N", type=natural, default=many, help=text)
        if self.check.picture:
            drawn = f"draw OUT/{picture.NAME}"
            made.add_argument("--picture", action=argparse.BooleanOptionalAction, default=True, help=drawn)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        try:
            options = self.parser().parse_args(arguments)
            return int(options.run(options))
        except (HpcaiError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from the finished files", file=sys.stderr)
            return 130
        return 2

    def run(self, options: argparse.Namespace) -> int:
        """Makes what is missing of this rank's share; rank 0 then writes index and statistics for all, looks at the whole, and says
        how to go on."""
        simulates = isinstance(options.made, Simulate)
        if not simulates:
            for source in (value for value in vars(options).values() if isinstance(value, Path)):
                if source is not options.out and source.resolve() == options.out.resolve():
                    raise ConfigError(f"{options.out}: SOURCE and OUT are the same folder; choose another OUT")
        plan: Plan | None = options.made.plan(options)
        if plan is None:
            return 0
        print_once(plan.told)
        advice, recipe, jobs = "choose a new folder", plan.recipe, plan.jobs
        if isinstance(recipe, Recipe):
            name = options.made.count[0]
            advice = f"ask for at least as many as it holds (--{name} is {getattr(options, name)}), or {advice}"
            recipe = {"kind": "simulate", **recipe.told}
        (rank, size), every, begin = store.launched(), [*jobs, *plan.beside], time.monotonic()
        store.claim(options.out, recipe)
        store.refuse_strangers(options.out, every, advice)
        mine = [*jobs[rank::size], *plan.beside[rank::size]]
        if kept := sum(map(store.finished, mine)):
            print_once(f"{kept} of {len(mine)} files are there and are kept")
        for some in (jobs, plan.beside):
            store.make_share(some, options.workers, options.command)
        if rank:
            return 0
        store.wait_for(every)
        bytes_of_all, rows, refused = store.finish(options.out, every, plan.header, recipe)
        took, means = time.monotonic() - begin, f"ranks: {size}, processes of each: {options.workers}"
        print(f"{len(every)} files, {bytes_of_all / 1e6:,.1f} MB in {options.out}, {took:.1f} s ({means})", flush=True)
        if plan.after:
            plan.after(options.out)
        if simulates and options.check and (verdict := self.run_check(options)):
            return verdict
        if not simulates:
            tell(Prepared(options.out))
        print(f"next: {command_of_app(self.app, plan.config)} data.directory={shlex.quote(str(options.out))}", flush=True)
        if not simulates:
            tell_refused(options.out, plan, refused, rows)
        return 0

    def run_check(self, options: argparse.Namespace) -> int:
        """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
        prepared, check = Prepared(options.out), self.check
        wrong = examined(prepared)
        tell(prepared)
        if not wrong:
            wrong += check.look(prepared, options)
        if check.picture and options.picture and not wrong:
            path = options.out / picture.NAME
            picture.draw(list(spread(prepared.places, picture.SAMPLES)), prepared.index, path)
            print(f"picture: {path}")
        for text in wrong[:20]:
            print(f"wrong: {text}")
        if len(wrong) > 20:
            print(f"and {len(wrong) - 20} more")
        return int(bool(wrong))


# ---- what is told


def examined(prepared: Prepared) -> list[str]:
    """Every file against index.json and its fields: what is wrong."""
    rows = sum(entry["rows"] for _, entry, _ in prepared.files)
    outcome = check_dataset(prepared.out, Options(seconds=0))
    wrong = [each for each in outcome.findings if each.severity == "error" and each.code not in COPIES]
    for each in [each for each in outcome.findings if each.code in COPIES][:TOLD]:
        print(f"warning: {each.path}: {each.text}")
    verdict = f"mistakes: {len(wrong)}" if wrong else "equal"
    print(f"{len(prepared.files)} files, {rows} samples against index.json: {verdict}", flush=True)
    return [f"{each.path}: {f'{each.dataset!r} ' if each.dataset else ''}{each.text}" for each in wrong]


def tell(prepared: Prepared) -> None:
    """The statistics of each split, a line for each dataset."""
    for split, part in prepared.statistics.items():
        print(f"{split}: " + ", ".join(f"{name} {_short(value)}" for name, value in part.items() if not isinstance(value, dict)))
        for name, value in part.items():
            if isinstance(value, dict) and value:
                print(f"  {name}: {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(_short, value[:4])) + (" ..." if len(value) > 4 else "")
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def list_refused(out: Path, unusable: store.Refused, filtered: store.Refused = ()) -> None:
    write_json(out / SKIPPED, {"unusable": dict(unusable), "filtered": dict(filtered)})


def tell_refused(out: Path, plan: Plan, refused: Sequence[Sequence[str]], rows: int) -> None:
    """Lists what a conversion has left out, and counts it by reason in its last line."""
    unusable = [(where, why) for where, why in (*plan.refused, *refused)]
    list_refused(out, unusable, plan.filtered)
    if plan.filtered:
        print(f"left out by the options: {len(plan.filtered)}, {_by_reason(plan.filtered)}")
    many, kept = len(unusable) + plan.unlisted, rows if plan.kept is None else plan.kept
    why = f": {_by_reason(unusable)}; listed in {out / SKIPPED}" if many else ""
    print(f"refused: {many or 'none'} of {kept + many} items{why}", flush=True)


def _by_reason(items: store.Refused) -> str:
    """The commonest reasons, each with its count and an example; those that differ in numbers are one."""
    kinds = Counter(_kind(reason) for _, reason in items)
    examples = {_kind(reason): f"{where}: {reason}" for where, reason in reversed(items)}
    told = [f"{count} such as {examples[kind]}" for kind, count in kinds.most_common(TOLD)]
    return " | ".join(told + ([f"and {len(kinds) - TOLD} other reasons"] if len(kinds) > TOLD else []))


def _kind(reason: str) -> str:
    return re.sub(r"\d[\d.,]*", "N", reason)


def reason(problem: Exception, where: object) -> tuple[str, str]:
    """An item that is refused."""
    return str(where), str(problem).removeprefix(f"{where}: ")


def spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most ``most`` of the items, evenly chosen."""
    return items[:: max(1, -(-len(items) // max(1, most)))] if most else []
