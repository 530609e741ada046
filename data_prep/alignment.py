"""Tasks of the alignment of language models: prompts whose answers a program judges, demonstrations and pairs of answers.

    python -m data_prep.alignment arithmetic OUT    sums of two numbers of three digits
    python -m data_prep.alignment motifs OUT        sequences of amino acids with a motif and a composition

    OUT/train.jsonl, validation.jsonl               "prompt" and columns of the reward, apps.align.rewards.arithmetic or motifs
    OUT/demonstrations.jsonl                        "prompt", "answer": a share of the answers is wrong
    OUT/pairs.jsonl, validation-pairs.jsonl         "prompt", "chosen", "rejected": a right answer and a wrong one

A prompt is in one file only, but that those of validation-pairs.jsonl are of validation.jsonl. The files are a function of the
options.

An answer of arithmetic has the sums of columns from the right, each with the carried digit of the one before as tens, then the
result: ``347+586=`` has ``13 13 09 933``. In a demonstration a column is wrong with a probability, and later digits follow from it.
Numbers of carried digits, 0 to 3, are equally frequent. A demonstration of a motif has residues that differ from it, and too few of
those that the composition needs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apps.align import rewards
from data_prep import command, store
from data_prep.command import option
from hpcai.durable import locked_directory, replace_file
from hpcai.errors import ConfigError, HpcaiError, describe_unwritable
from hpcai.programs import command_of
from hpcai.stop import end_in_one_line

Row = dict[str, Any]
Random = np.random.Generator
CARRIES = 4                                     # numbers of carried digits of a sum of three columns, 0 to 3
COMPOSITIONS = {"hydrophobic>=40%": rewards.HYDROPHOBIC, "hydrophobic>=60%": rewards.HYDROPHOBIC,
                "charge>=+2": "KR", "charge>=+3": "KR", "charge<=-2": "DE", "charge<=-3": "DE"}     # and residues that help
FORGOTTEN = 0.5                                 # arithmetic: share of carried digits that a flawed answer leaves out
BIASES = 0.6, 0.2                               # motifs: share of residues for the composition, in right and in flawed sequences


@dataclass(frozen=True)
class AlignmentSettings(command.Settings):
    """Numbers of lines of the files."""

    prompts: int = option(4096, "training prompts", type=command.positive)
    validation: int = option(256, "held-out prompts, and as many held-out pairs", type=command.positive)
    demonstrations: int = option(4096, "prompts with an answer, for supervised fine-tuning", type=command.positive)
    pairs: int = option(4096, "prompts with a right answer and a wrong one", type=command.positive)
    seed: int = command.seed()


def count_carries(a: int, b: int) -> int:
    """Return the number of carried digits of a sum of two numbers of three digits."""
    return sum(a % base + b % base >= base for base in (10, 100, 1000))


def draw_sum(random: Random, number: int) -> Row:
    """Return a row with ``number % 4`` carried digits."""
    while count_carries(*(pair := random.integers(100, 1000, 2).tolist())) != number % CARRIES:
        pass
    return {"prompt": f"{pair[0]}+{pair[1]}=", "answer": str(sum(pair))}


def work_out(row: Row, random: Random, flaws: float) -> str:
    """Return sums of columns and the result. A sum is wrong with probability ``flaws``, and lacks the carried digit with 0.5."""
    a, b = row["prompt"][:-1].split("+")
    sums, digits, carry = list[str](), "", 0
    for x, y in zip(reversed(a), reversed(b)):
        total = int(x) + int(y) + carry * (not flaws or random.random() > FORGOTTEN)
        total = int(random.integers(20)) if random.random() < flaws else total
        carry, digits = total // 10, f"{total % 10}{digits}"
        sums.append(f"{total:02}")
    return " ".join((*sums, f"{carry or ''}{digits}"))


def draw_motif(random: Random, number: int) -> Row:
    """Return a row with a motif of four residues, of which the inner ones may be x."""
    acids = [*rewards.AMINO_ACIDS]
    motif = "-".join((random.choice(acids), *random.choice([*acids, *"xxxx"], 2), random.choice(acids)))
    composition = [*COMPOSITIONS][number % len(COMPOSITIONS)]
    return {"prompt": f"{composition:>{max(map(len, COMPOSITIONS))}} {motif}:", "motif": motif, "composition": composition}


def compose(row: Row, random: Random, flaws: float) -> str:
    """Return a sequence that begins with the motif. A residue of it is any one with probability ``flaws``."""
    acids, favoured, bias = rewards.AMINO_ACIDS, COMPOSITIONS[row["composition"]], BIASES[flaws > 0]
    choices = [acids if element == "x" or random.random() < flaws else element for element in row["motif"].split("-")]
    rest = random.choice(rewards.LENGTHS) - len(choices)
    choices += [favoured if random.random() < bias else acids for _ in range(rest)]
    return "".join(letters[random.integers(len(letters))] for letters in choices)


TASKS: dict[str, tuple[str, Callable[[Random, int], Row], Callable[[Row, Random, float], str], Callable[..., list[float]], float]] = {
    "arithmetic": ("Sums of two numbers of three digits.", draw_sum, work_out, rewards.arithmetic, 0.35),
    "motifs": ("Sequences of amino acids with a motif and a composition.", draw_motif, compose, rewards.motifs, 0.25),
}  # fmt: skip


def make_files(task: str, settings: AlignmentSettings) -> dict[str, list[Row]]:
    """Return the rows of each file."""
    _, draw, answer, reward, flaws = TASKS[task]
    random = store.generator(settings.seed, 0, 0)
    sizes = {"train": settings.prompts, "validation": settings.validation, "demonstrations": settings.demonstrations,
             "pairs": settings.pairs, "validation-pairs": settings.validation}  # fmt: skip
    rows = dict[str, Row]()
    while len(rows) < sum(sizes.values()):
        row = draw(random, len(rows))
        rows.setdefault(row["prompt"], row)
    unused = iter(rows.values())
    files = {name: [next(unused) for _ in range(size)] for name, size in sizes.items()}

    def judged(row: Row, share: float, wanted: float | None) -> str:
        while True:
            text = answer(row, random, share)
            columns = {name: [value] for name, value in row.items() if name != "prompt"}
            if wanted is None or reward([row["prompt"]], [text], **columns) == [wanted]:
                return text

    for name in ("pairs", "validation-pairs"):
        files[name] = [{"prompt": row["prompt"], "chosen": judged(row, 0, 1), "rejected": judged(row, flaws, 0)}
                       for row in files[name]]  # fmt: skip
    shown = files["demonstrations"]
    files["demonstrations"] = [{"prompt": row["prompt"], "answer": judged(row, flaws, None)} for row in shown]
    return files


def parser() -> argparse.ArgumentParser:
    description = "Tasks of the alignment of language models."
    top = argparse.ArgumentParser(prog="python -m data_prep.alignment", description=description, allow_abbrev=False)
    subparsers = top.add_subparsers(dest="task", required=True, metavar=" | ".join(TASKS))
    for name, (text, *_) in TASKS.items():
        kwargs: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
        each = subparsers.add_parser(name, help=text, description=text, **kwargs)
        each.add_argument("out", type=Path, metavar="OUT", help="folder; its files of these names are replaced")
        AlignmentSettings.add_options(each)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    name = f"{command_of('data_prep.alignment')} {options.task}"
    try:
        with end_in_one_line(name, "the same command makes all files again") if arguments is None else nullcontext():
            options.out.mkdir(parents=True, exist_ok=True)
            for file, rows in make_files(options.task, AlignmentSettings.from_options(options)).items():
                path = options.out / f"{file}.jsonl"
                replace_file(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
                print(f"{path}: {len(rows):,} lines, the first {json.dumps(rows[0])}")
    except (HpcaiError, OSError) as error:
        text = describe_unwritable(error, options.out) if isinstance(error, OSError) else str(error)
        print(f"error: {text}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
