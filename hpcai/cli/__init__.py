"""The `hpcai` command. A subcommand's module is imported when that subcommand runs, so that help costs nothing."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from hpcai import __version__
from hpcai.errors import HpcaiError
from hpcai.stop import show_to_reader

COMMANDS = {
    "run": "APP CONFIG ...     train an app, as python -m apps.APP does, also without a checkout",
    "prepare": "NAME ...        make the files that an app reads, as python -m data_prep.NAME does",
    "report": "RUN [RUN ...]  draw a run's directory as one page, RUN/report.html, and its plots; or several runs on one page",
    "data": "check | stage   look a data set over, or copy it to node-local disks",
    "checkpoint": "show | export   what is in a run's checkpoints and whether it is whole, or their weights for people",
    "bench": "NAME ...        measure one part on this machine",
    "ablate": "APP ...         measure what each optimisation brings an app on this machine",
    "job": "APP ...            the batch script of a training for a cluster, to read or to submit",
    "plan": "APP ...           what a training will take on GPUs that are not here: minutes, memory, messages",
    "verify-resume": "APP ...  kill an app's run at random instants and compare it with one that nobody killed",
    "replay": "RUN/failure-... make the step in which a run failed again, and name the first module that is not finite",
    "doctor": "[--ranks]      show what this installation finds, or behind srun what a whole job does: ranks, links, file systems",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; 0 is success, 2 a refusal whose reason is on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    try:
        return show_to_reader(lambda: run_command("hpcai", COMMANDS, words)) or 0
    except HpcaiError as error:
        print(f"hpcai {words[0]}: {error}", file=sys.stderr)
        return 2


def run_command(name: str, commands: Mapping[str, str], words: Sequence[str]) -> int:
    """Calls the ``main`` of the module that bears the name of the first word, or shows what ``commands`` there are."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(f"hpcai {__version__}: scientific AI training for supercomputers\n\nusage: {name} COMMAND ...\n")
        print("\n".join(f"  {command:<13} {text}" for command, text in commands.items()) + "\n")
        print(f"{name} COMMAND --help says more. An app is trained with hpcai run APP CONFIG key=value ...")
        return 0
    if words[0] not in commands:
        print(f"{name}: there is no command {words[0]!r}; expected one of {', '.join(commands)}", file=sys.stderr)
        return 2
    return import_module(f"hpcai.cli.{words[0].replace('-', '_')}").main(words[1:]) or 0
