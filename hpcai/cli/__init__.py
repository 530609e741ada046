"""The `hpcai` command. The module of a subcommand is imported when that subcommand runs, so that help is fast."""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

from hpcai import __version__
from hpcai.errors import HpcaiError, describe_unwritable
from hpcai.stop import end_in_one_line, ignore_broken_pipe, interrupt_imports

interrupt_imports("hpcai")

_TABLES = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
_TYPES = {"int": int, "float": float, "path": Path}
COMMANDS, DATA_COMMANDS, _ADVICE = (_TABLES[name] for name in ("hpcai", "data", "advice"))


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


def make_parser(command: str, text: str | None, options: str = "", **names: object) -> argparse.ArgumentParser:
    """Return the parser of ``hpcai COMMAND``, with its arguments in options.toml, or those of ``options`` there. Its description is
    ``text``, the docstring of a module, with its line breaks. ``names`` fill in help texts."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"hpcai {command}", description=text, formatter_class=formatter)
    tables = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
    for flags, kwargs in tables[options or command].items():
        kwargs |= {"type": _TYPES[kwargs["type"]]} if "type" in kwargs else {}
        parser.add_argument(*flags.split(), **kwargs | {"help": kwargs.get("help", "").format(**names) or None})
    return parser


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
