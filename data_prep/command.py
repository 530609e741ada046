"""The command line that the data sets share: options, the making of files by ranks and workers, and how errors are told."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep import store
from hpcai.errors import ConfigError, HpcaiError

Add = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


# ---- options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def workers(text: str) -> int:
    return store.cores() if text == "cores" else positive(text)


positive.__name__, natural.__name__ = "whole number of 1 or more", "whole number of 0 or more"
workers.__name__ = "whole number of 1 or more, or cores"


def wrong_fractions(validation: float, test: float) -> Iterator[str]:
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        yield f"--validation {validation} and --test {test}: expected fractions of 0 or more that sum to less than 1"


def parser(name: str, text: str) -> tuple[argparse.ArgumentParser, Add]:
    """The parser of ``python -m data_prep.<name>``, and what adds a command to it: its name, a text, the function that it runs."""
    top = argparse.ArgumentParser(prog=f"python -m data_prep.{name}", description=text, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="simulate | check | convert")

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


def add_making(made: argparse.ArgumentParser) -> None:
    made.add_argument("--seed", metavar="N", type=natural, default=1, help="of everything")
    made.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="check at the end")
    add_workers(made)


def add_checking(made: argparse.ArgumentParser, picture: str) -> None:
    made.add_argument("out", type=Path, metavar="OUT")
    made.add_argument("--picture", action=argparse.BooleanOptionalAction, default=True, help=f"draw OUT/{picture}")


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
    options: argparse.Namespace, jobs: Sequence[store.Job], make: Callable[[Any], None], recipe: dict[str, Any],
    header: dict[str, Any], contents: store.Contents, advice: str, beside: Sequence[store.Job] = (),
    make_beside: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    """Makes what is missing of this rank's share, of ``beside`` when its part of ``jobs`` is done; rank 0 then writes index and
    statistics for all."""
    rank, size = store.launched()
    every = [*jobs, *beside]
    begin, planned = time.monotonic(), [job.path for job in every]
    store.claim(options.out, recipe)
    store.refuse_strangers(options.out, every, advice)
    mine = [[job for job in some[rank::size] if not store.finished(job)] for some in (jobs, beside)]
    kept = len(jobs[rank::size]) + len(beside[rank::size]) - sum(map(len, mine))
    if kept:
        print_once(f"{kept} of {kept + sum(map(len, mine))} files are there and are kept")
    for missing, act in zip(mine, (make, make_beside or make)):
        store.make(missing, act, options.workers, options.command, rank == 0)
    if rank == 0:
        store.wait_for(every, True)
        size_of_all = store.finish(options.out, planned, header, recipe, contents)
        took = time.monotonic() - begin
        means = f"ranks: {size}, processes of each: {options.workers}"
        print(f"{len(planned)} files, {size_of_all / 1e6:,.1f} MB in {options.out}, {took:.1f} s ({means})", flush=True)


def refuse_empty(splits: Sequence[str], options: argparse.Namespace, asked: str) -> None:
    for split, fraction in (("train", 1.0), ("validation", options.validation), ("test", options.test)):
        if fraction > 0 and split not in splits:
            raise ConfigError(f"{asked}: none is left for {split}; ask for more, or change the fractions")


def conclude(app: str, options: argparse.Namespace, check: Callable[[], int] | None = None) -> int:
    """Check the whole on rank 0, and say how to go on."""
    if store.launched()[0] != 0:
        return 0
    verdict = check() if check else 0
    if verdict == 0 and (Path(__file__).parents[1] / "apps" / app).is_dir():
        print(f"next: python -m apps.{app} apps/{app}/configs/small.yaml data.directory={options.out}", flush=True)
    return verdict


def against_index(out: Path, mistakes: Callable[..., Iterator[str]] = store.mistakes) -> tuple[list[Any], list[str]]:
    """Every file as ``store.indexed`` has it, and what is wrong with them; says how many there are."""
    files = list(store.indexed(out))
    wrong = [f"{out / split / name}: {text}" for split, name, entry, index in files
             for text in mistakes(out / split / name, entry, index)]  # fmt: skip
    samples = sum(entry["rows"] for _, _, entry, _ in files)
    verdict = f"mistakes: {len(wrong)}" if wrong else "equal"
    print(f"{len(files)} files, {samples} samples against index.json: {verdict}", flush=True)
    return files, wrong


def settings_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings as JSON gives them back, in which tuples are lists."""
    return dict(json.loads(json.dumps(recipe)))


def told(wrong: Sequence[str]) -> int:
    """Prints mistakes, the first twenty; 0 if there is none, otherwise 1."""
    for text in wrong[:20]:
        print(f"wrong: {text}")
    if len(wrong) > 20:
        print(f"and {len(wrong) - 20} more")
    return 1 if wrong else 0


def main(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (HpcaiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the finished files", file=sys.stderr)
        return 130
    return 2
