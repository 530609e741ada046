"""The `hpcai` command. The module of a subcommand is imported when that subcommand runs, so that help is fast."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module

from hpcai import __version__
from hpcai.errors import HpcaiError, describe_unwritable
from hpcai.stop import end_in_one_line, ignore_broken_pipe, interrupt_imports

interrupt_imports("hpcai")

COMMANDS = {
    "run": "APP CONFIG ...     train an app, as python -m apps.APP does, also without a checkout",
    "prepare": "NAME ...        make the files that an app reads, as python -m data_prep.NAME does",
    "new": "NAME            write a model of your own with its app, data and test, as a start that works",
    "report": "RUN [RUN ...]  render a run's directory as one page, RUN/report.html, with its plots; or compare several runs",
    "data": "check | stage   validate a data set, or copy it to node-local disks",
    "checkpoint": "show | export   list and verify a run's checkpoints, or export the weights of the newest",
    "bench": "NAME ...        benchmark an app or a component on this machine",
    "ablate": "APP ...         measure the gain of each optimisation of an app on this machine",
    "job": "APP ...            write or submit the batch script of a training for a cluster",
    "plan": "APP ...           predict time, memory and communication of a training on GPUs that this machine does not have",
    "verify-resume": "APP ...  kill an app's run at random instants and compare it with an uninterrupted run",
    "replay": "RUN/failure-... repeat the step in which a run failed, and name the first module with a non-finite output",
    "doctor": "[--ranks]      describe this installation, or behind srun check a job: ranks, network, file systems",
}
DATA_COMMANDS = {
    "check": "DIR             validate files against their index, values, duplicates, and the read rate of the disk; --index",
    "stage": "SOURCE TARGET   copy to node-local disks; behind mpiexec or srun each byte is read once from the source",
}
_ADVICE = {
    "check": "nothing was left behind",
    "stage": "the same command keeps the files that are complete",
    "report": "pages that were written before are unchanged",
}
"""Advice after an interruption, by command; apps and data sets have advice of their own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return 0 on success, and 2 if it is refused, with the reason on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        print(__version__)
        return 0
    words = ["hpcai", *args[: 2 if args[:1] == ["data"] else 1]]
    with end_in_one_line(" ".join(words), _ADVICE.get(words[-1], "")) if argv is None else nullcontext():
        try:
            return ignore_broken_pipe(lambda: run_command("hpcai", COMMANDS, args)) or 0
        except HpcaiError as error:
            print(f"hpcai {args[0]}: {error}", file=sys.stderr)
        except OSError as error:
            print(f"hpcai {args[0]}: {describe_unwritable(error, 'its files')}", file=sys.stderr)
        return 2


def make_parser(command: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``hpcai COMMAND``. Its description is ``text``, the docstring of a module, with its line breaks."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"hpcai {command}", description=text, formatter_class=formatter)


def run_command(name: str, commands: Mapping[str, str], args: Sequence[str]) -> int:
    """Call ``main`` of the module named by the first argument, or print the list of ``commands``."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(f"hpcai {__version__}: scientific AI training for supercomputers\n\nusage: {name} COMMAND ...\n")
        print("\n".join(f"  {command:<13} {text}" for command, text in commands.items()) + "\n")
        print(f"{name} COMMAND --help shows details. Train an app with hpcai run APP CONFIG key=value ...")
        return 0
    if args[0] not in commands:
        print(f"{name}: there is no command {args[0]!r}; expected one of {', '.join(commands)}", file=sys.stderr)
        return 2
    if args[0] == "data":
        return run_command("hpcai data", DATA_COMMANDS, args[1:])
    return import_module(f"hpcai.cli.{args[0].replace('-', '_')}").main(args[1:]) or 0
