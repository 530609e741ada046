"""The command line that the data sets share: options, the making of files by ranks and workers, checks, and how errors are told."""

import argparse
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import store
from hpcai.errors import ConfigError, HpcaiError
from hpcai.programs import start_app

Add = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]
Check = Callable[[Path, int, bool], int]        # OUT, samples that are looked at, whether to draw


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


def parser(name: str, text: str, has: str = "simulate | check | convert") -> tuple[argparse.ArgumentParser, Add]:
    """The parser of ``python -m data_prep.<name>``, and what adds a command to it: its name, a text, the function that it runs."""
    top = argparse.ArgumentParser(prog=f"python -m data_prep.{name}", description=text, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar=has)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        formatter = argparse.ArgumentDefaultsHelpFormatter
        made = commands.add_parser(name, help=text, description=text, formatter_class=formatter, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    return top, add


def add_out(made: argparse.ArgumentParser) -> None:
    made.add_argument("out", type=Path, metavar="OUT", help="folder; what a stopped run finished there is kept")


def add_workers(made: argparse.ArgumentParser) -> None:
    made.add_argument("--workers", metavar="N", type=workers, default="cores", help="processes of this rank")


def add_fractions(made: argparse.ArgumentParser, validation: float, test: float, of: str) -> None:
    made.add_argument("--validation", metavar="F", type=float, default=validation, help=f"fraction of {of}")
    made.add_argument("--test", metavar="F", type=float, default=test, help=f"fraction of {of}")


def add_making(made: argparse.ArgumentParser) -> None:
    made.add_argument("--seed", metavar="N", type=natural, default=1, help="of everything")
    made.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="check at the end")
    add_workers(made)


def add_check(add: Add, text: str, check: Check, picture: str, option: str, most: int, of_option: str) -> None:
    """The command ``check``; ``option`` tells how many samples are looked at anew."""

    def run(options: argparse.Namespace) -> int:
        return check(options.out, options.some, options.picture)

    made = add("check", f"{text}, and OUT/{picture}.", run)
    made.add_argument("out", type=Path, metavar="OUT")
    made.add_argument("--picture", action=argparse.BooleanOptionalAction, default=True, help=f"draw OUT/{picture}")
    made.add_argument(option, dest="some", metavar="N", type=natural, default=most, help=of_option)


# ---- settings


def wrong_fractions(validation: float, test: float) -> Iterator[str]:
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        yield f"--validation {validation} and --test {test}: expected fractions of 0 or more that sum to less than 1"


class Settings:
    """All that decides the content of a simulated file, besides its number, and where it lies. A base of frozen dataclasses, whose
    fields are written to the files in their order. Raises ConfigError for settings that are wrong."""

    seed: int
    validation: float
    test: float

    def __post_init__(self) -> None:
        wrong = [*wrong_fractions(self.validation, self.test), *self.mistakes()]
        if wrong:
            raise ConfigError("\n".join(wrong))

    def mistakes(self) -> Iterator[str]:
        """What is wrong, besides the fractions."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    def generator(self, stream: int, number: int) -> np.random.Generator:
        return store.generator(self.seed, stream, number)

    def split(self, number: int) -> str:
        return store.split_of(number, self.seed, self.validation, self.test)


# ---- the work


def print_once(text: str) -> None:
    if store.launched()[0] == 0:
        print(text, flush=True)


def digest(names: Sequence[str]) -> str:
    """Tells one list of source files from another."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def refuse_same(source: Path, out: Path) -> None:
    if source.resolve() == out.resolve():
        raise ConfigError(f"{out}: SOURCE and OUT are the same folder; choose another OUT")


def work(
    options: argparse.Namespace, jobs: Sequence[store.Job], recipe: dict[str, Any], header: dict[str, Any],
    advice: str = "choose a new folder", beside: Sequence[store.Job] = (),
) -> None:  # fmt: skip
    """Makes what is missing of this rank's share, of ``beside`` when its part of ``jobs`` is done; rank 0 then writes index and
    statistics for all."""
    rank, size = store.launched()
    begin, every = time.monotonic(), [*jobs, *beside]
    store.claim(options.out, recipe)
    store.refuse_strangers(options.out, every, advice)
    mine = [*jobs[rank::size], *beside[rank::size]]
    if kept := sum(map(store.finished, mine)):
        print_once(f"{kept} of {len(mine)} files are there and are kept")
    for some in (jobs, beside):
        store.make_share(some, options.workers, options.command)
    if rank == 0:
        store.wait_for(every)
        size_of_all = store.finish(options.out, every, header, recipe)
        took = time.monotonic() - begin
        means = f"ranks: {size}, processes of each: {options.workers}"
        print(f"{len(every)} files, {size_of_all / 1e6:,.1f} MB in {options.out}, {took:.1f} s ({means})", flush=True)


def simulate(
    app: str, options: argparse.Namespace, recipe: Settings, jobs: Sequence[store.Job], header: dict[str, Any], what: str,
    check: Callable[[Path], int], beside: Sequence[store.Job] = (), config: str = "small",
) -> int:  # fmt: skip
    """Makes the files of a recipe; ``what`` names the option that tells how many of it there are, ``config`` the app's settings."""
    advice = f"ask for at least as many as it holds (--{what} is {getattr(options, what)}), or choose a new folder"
    known = [replace(job, recipe=recipe.text) for job in jobs]
    work(options, known, {"kind": "simulate", **settings_of(recipe)}, header, advice, beside)
    return conclude(app, options, check if options.check else None, config)


def refuse_empty(splits: Sequence[str], options: argparse.Namespace, asked: str) -> None:
    for split, fraction in (("train", 1.0), ("validation", options.validation), ("test", options.test)):
        if fraction > 0 and split not in splits:
            raise ConfigError(f"{asked}: none is left for {split}; ask for more, or change the fractions")


def conclude(
    app: str, options: argparse.Namespace, check: Callable[[Path], int | None] | None = None, config: str = "small",
) -> int:  # fmt: skip
    """Looks at the whole on rank 0, and says how to go on."""
    if store.launched()[0] != 0:
        return 0
    verdict = check(options.out) or 0 if check else 0
    if verdict == 0:
        folder = shlex.quote(str(options.out))
        print(f"next: {start_app(app, config)} data.directory={folder}", flush=True)
    return verdict


def settings_of(recipe: Any) -> dict[str, Any]:
    """The settings as JSON gives them back, in which tuples are lists."""
    return dict(json.loads(json.dumps(asdict(recipe))))


def source_folders(root: Path, holds: str) -> dict[str, Path]:
    """The folders of splits in SOURCE, as far as there are some."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; SOURCE holds the folders train, validation, test, or {holds}")
    return {split: root / split for split in store.SPLITS if (root / split).is_dir()}


def told_sources(sources: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{len(files)} for {split}" for split, files in sources.items())


def parts_of(items: Sequence[Any], each: int) -> Iterator[tuple[Any, ...]]:
    return (tuple(items[start : start + each]) for start in range(0, len(items), each))


# ---- checks


def against_index(out: Path, mistakes: Callable[..., Iterator[str]] = store.mistakes) -> tuple[list[Any], list[str]]:
    """Every file as ``store.indexed`` has it, and what is wrong with them; says how many there are."""
    files = list(store.indexed(out))
    wrong = [f"{path}: {text}" for path, entry, index in files for text in mistakes(path, entry, index)]
    samples = sum(entry["rows"] for _, entry, _ in files)
    verdict = f"mistakes: {len(wrong)}" if wrong else "equal"
    print(f"{len(files)} files, {samples} samples against index.json: {verdict}", flush=True)
    return files, wrong


def places_of(files: Sequence[Any]) -> list[tuple[Path, int]]:
    """File and row of every sample."""
    return [(path, row) for path, entry, _ in files for row in range(entry["rows"])]


def spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most ``most`` of the items, evenly chosen."""
    return items[:: max(1, -(-len(items) // most))]


@contextmanager
def picture(path: Path, size: tuple[float, float], dpi: int) -> Iterator[Any]:
    """A figure of so many inches, which is written as a whole when it is drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=dpi, format="png")
    partial.replace(path)
    print(f"picture: {path}")


def told(wrong: Sequence[str]) -> int:
    """Prints mistakes, the first twenty; 0 if there is none, otherwise 1."""
    for text in wrong[:20]:
        print(f"wrong: {text}")
    if len(wrong) > 20:
        print(f"and {len(wrong) - 20} more")
    return 1 if wrong else 0


def main(parser: Callable[[], argparse.ArgumentParser], arguments: Sequence[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
        return int(options.run(options))
    except (HpcaiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the finished files", file=sys.stderr)
        return 130
    return 2
