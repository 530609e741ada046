"""Pages: their commands and the targets of their links exist."""

import contextlib
import pkgutil
import re
import runpy
import shlex
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcai import cli, config
from tests.reference_data import ROOT

PAGES = ["README.md", "CHANGELOG.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
PAGES += [f"apps/{p.parent.name}/README.md" for p in (ROOT / "apps").glob("*/README.md")]
LAUNCHERS = re.compile(
    r"^(\w+=\S+ +)+(?=sbatch)|^(\w+=\S+ +)*((mpiexec|srun|torchrun|nice)( +-\S+( +\d+)?)*? +)?(?=python|hpcai|-m )"
)
OTHERS = (
    "git", "cd", "source", ".", "sbatch", "qsub", "make", "pip", "apptainer", "export", "module", "squeue", "scancel", "scontrol",
    "unshare", "bash", "tar", "tail", "pre-commit", "eb", "spack",
)  # fmt: skip


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page's shell blocks, as text and as arguments."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s+&&\s+", re.sub(r"(^|\s)#.*", "", line).strip()):
                if part:
                    yield part, shlex.split(LAUNCHERS.sub("", part.replace(".venv/bin/", ""), count=1))


class Parsed(BaseException):
    """A program has accepted its command line."""


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop programs with ``Parsed`` after their parser, or their settings, have read the command line."""

    def stop(parse: Callable[..., Any], *args: Any) -> None:
        parse(*args)
        raise Parsed

    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(ArgumentParser, name)
        monkeypatch.setattr(ArgumentParser, name, lambda parser, args=None, parse=parse: stop(parse, parser, args))
    monkeypatch.setattr(config, "_run", lambda schema, _, files, words, show: stop(config.load, schema, (*files, None)[0], words))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(ROOT)


def check_command(args: list[str]) -> None:
    """Assert that a command exists, and that programs of this repository accept its words."""
    args = [arg for arg in args if arg != "..."]
    inner = [n for n, arg in enumerate(args) if arg == "hpcai" or arg.startswith(("apps.", "data_prep."))]
    if inner and (args[0] in ("apptainer", "hpcai", "sbatch") or "-m" in args):
        name, *words = sys.argv = args[inner[0] :]
        with contextlib.suppress(Parsed), warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # modules run twice
            code = cli.main(words) if name == "hpcai" else runpy.run_module(name, run_name="__main__")
            assert "--help" in words, f"the program has not read its command line, and ended with {code}"
    elif args[0] == "python":
        assert args[1:3] in (["-m", "pip"], ["-m", "venv"]) or (ROOT / args[1]).is_file()
    else:
        assert args[0] in OTHERS, f"{args[0]} is no command that a page may name"
        if args[0] == "make":
            targets = [arg for arg in args[1:] if "=" not in arg]
            assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in targets)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md"])
def test_programs_accept_the_commands_of_pages(page: str, parsers: None, capsys: pytest.CaptureFixture[str]) -> None:
    for line, args in commands(page):
        if "ringdown" in line:  # the model that docs/new_model.md adds; tests/apps/test_new_model.py runs its lines
            continue
        try:
            check_command(args)
        except (AssertionError, SystemExit, Exception) as problem:
            raise AssertionError(f"{page}: {line}: {problem}{capsys.readouterr().err}") from problem


@pytest.mark.parametrize("page", PAGES)
def test_link_targets_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_modules_functions_and_files_that_pages_name_exist(page: str) -> None:
    text = re.sub(r"\S*ringdown\S*|\S*NAME\S*", "", (ROOT / page).read_text())
    for name in set(re.findall(r"(?<![\w/-])hpcai(?:\.[a-zA-Z]\w+)+", text)):
        pkgutil.resolve_name(name)
    files = r"(?<![\w/])(?:tests|hpcai|apps|data_prep|slurm|containers)/[\w/.*-]*\w\.(?:py|yaml|sh|pbs|def)"
    missing = {name for name in re.findall(files, text) if not [*ROOT.glob(name)]}
    assert missing <= {"apps/openfold/stalls.py"}, missing  # of the history
