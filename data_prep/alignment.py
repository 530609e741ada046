"""Tasks of the alignment of language models: prompts whose answers a program judges, demonstrations and pairs of answers.

    python -m data_prep.alignment arithmetic OUT    sums of two numbers of three digits
    python -m data_prep.alignment motifs OUT        sequences of amino acids with a motif and a composition

    OUT/train.jsonl, validation.jsonl               "prompt", and the columns of a reward of apps.align.rewards of the same name
    OUT/demonstrations.jsonl                        "prompt", "answer", for supervised fine-tuning; most answers are wrong
    OUT/pairs.jsonl, validation-pairs.jsonl         "prompt", "chosen", "rejected": a right answer and a wrong one

No prompt occurs twice, in one file or in two. The files are a function of the options.

An answer of arithmetic has the sum of each column, from the right, with the digit carried from the column before, then the result:
``347+586=`` has ``13 13 09 933``. Its flaws are random sums, and carried digits that are not added. Numbers of carried digits, 0 to
3, and compositions are equally frequent. Flawed sequences have other residues in the motif, or too few that the composition needs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apps.align import rewards
from data_prep import command, store
from hpcai.durable import replace_file
from hpcai.errors import HpcaiError
from hpcai.programs import command_of
from hpcai.stop import end_in_one_line

Row = dict[str, Any]
Random = np.random.Generator
FILES = "train", "validation", "demonstrations", "pairs", "validation-pairs"
MAX_PROMPTS = 300_000
COMPOSITIONS = {"hydrophobic>=40%": rewards.HYDROPHOBIC, "hydrophobic>=60%": rewards.HYDROPHOBIC,
                "charge>=+2": "KR", "charge>=+3": "KR", "charge<=-2": "DE", "charge<=-3": "DE"}     # and residues that help
FORGOTTEN = 0.5                                 # arithmetic: share of carried digits that a flawed answer leaves out
BIASES = 0.6, 0.2                               # motifs: share of residues for the composition, in right and in flawed sequences


@dataclass(frozen=True)
class AlignmentSettings(command.Settings):
    """Numbers of lines of the files."""

    prompts: int = command.option(4096, "training prompts", type=command.positive)
    validation: int = command.option(256, "held-out prompts, and as many held-out pairs", type=command.positive)
    demonstrations: int = command.option(4096, "prompts with an answer, for supervised fine-tuning", type=command.positive)
    pairs: int = command.option(4096, "prompts with a right answer and a wrong one", type=command.positive)
    seed: int = command.seed()

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.prompts, self.validation, self.demonstrations, self.pairs, self.validation

    def mistakes(self) -> Iterator[str]:
        if (total := sum(self.sizes)) > MAX_PROMPTS:
            yield f"{total:,} prompts in all files, expected at most {MAX_PROMPTS:,}, of about as many that differ; ask for fewer"


def draw_sum(random: Random, number: int) -> Row:
    """Return a sum with ``number % 4`` carried digits."""
    carries = -1
    while carries != number % 4:
        a, b = random.integers(100, 1000, 2).tolist()
        carries = sum(a % base + b % base >= base for base in (10, 100, 1000))
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


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


class Task(NamedTuple):
    help: str
    draw: Callable[[Random, int], Row]
    answer: Callable[[Row, Random, float], str]
    reward: Callable[..., list[float]]
    flaws: float                                # share in demonstrations and rejected answers


TASKS = {
    "arithmetic": Task("sums of two numbers of three digits", draw_sum, work_out, rewards.arithmetic, 0.35),
    "motifs": Task("sequences of amino acids with a motif and a composition", draw_motif, compose, rewards.motifs, 0.25),
}


def make_files(task: str, settings: AlignmentSettings) -> dict[str, list[Row]]:
    """Return the rows of each file, in which those of all kinds take turns."""
    _, draw, answer, reward, flaws = TASKS[task]
    random = store.generator(settings.seed, 0, 0)
    rows = dict[str, Row]()
    while len(rows) < sum(settings.sizes):
        row = draw(random, len(rows))
        rows.setdefault(row["prompt"], row)
    unused = iter(rows.values())
    files = {name: [next(unused) for _ in range(size)] for name, size in zip(FILES, settings.sizes)}

    def draw_judged(row: Row, flaws: float, wanted: float) -> str:
        columns = {f"{name}s" if name == "prompt" else name: [value] for name, value in row.items()}
        while reward(completions=[text := answer(row, random, flaws)], **columns) != [wanted]:
            pass
        return text

    for name in ("pairs", "validation-pairs"):
        files[name] = [{"prompt": row["prompt"], "chosen": draw_judged(row, 0, 1), "rejected": draw_judged(row, flaws, 0)}
                       for row in files[name]]  # fmt: skip
    files["demonstrations"] = [{"prompt": row["prompt"], "answer": answer(row, random, flaws)} for row in files["demonstrations"]]
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    kwargs: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    top = argparse.ArgumentParser(prog="python -m data_prep.alignment", description="Tasks of alignment.", allow_abbrev=False)
    subparsers = top.add_subparsers(dest="task", required=True, metavar=" | ".join(TASKS))
    for name, task in TASKS.items():
        parser = subparsers.add_parser(name, help=task.help, description=task.help, **kwargs)
        parser.add_argument("out", type=Path, metavar="OUT", help="folder, in which files of these names are replaced")
        AlignmentSettings.add_options(parser)
    options = top.parse_args(arguments)
    try:
        with end_in_one_line(command_of("data_prep.alignment")) if arguments is None else nullcontext():
            for name, rows in make_files(options.task, AlignmentSettings.from_options(options)).items():
                path = options.out / f"{name}.jsonl"
                replace_file(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
                print(f"{path}: {len(rows):,} lines, the first {json.dumps(rows[0])}")
    except (HpcaiError, OSError) as error:
        text = f"{options.out}: {error.strerror}; choose another OUT" if isinstance(error, OSError) else error
        print(f"error: {text}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
