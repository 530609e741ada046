"""Pages: their commands and the targets of their links exist."""

import pkgutil
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hpcai import cli, config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CHANGELOG.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
PAGES += [f"apps/{p.parent.name}/README.md" for p in (ROOT / "apps").glob("*/README.md")]
LAUNCHERS = re.compile(
    r"^(\w+=\S+ +)+(?=sbatch)|^(\w+=\S+ +)*((mpiexec|srun|torchrun|nice)( +-\S+( +\d+)?)*? +)?(?=python|hpcai|-m )"
)
OTHERS = (
    "git", "cd", "source", ".", "sbatch", "qsub", "make", "pip", "apptainer", "export", "module", "squeue", "scancel", "scontrol",
    "unshare", "bash", "tar", "tail",
)  # fmt: skip


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page's shell blocks, as text and as arguments."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s+&&\s+", re.sub(r"(^|\s)#.*", "", line).strip()):
                if part:
                    yield part, shlex.split(LAUNCHERS.sub("", part.replace(".venv/bin/", ""), count=1))


def check_command(args: list[str]) -> None:
    """Assert that the program, module, settings and options of a command exist."""
    name = args[args.index("-m") + 1] if "-m" in args else None
    if name is None and args[0] == "hpcai":
        assert args[1] in cli.COMMANDS
        if args[1] == "run" and len(args) > 3:
            file = f"apps/{args[2]}/configs/{args[3]}.yaml"
            check_settings(args[2], [file if (ROOT / file).is_file() else args[3], *args[4:]])
    elif name is None and args[0] == "python":
        assert (ROOT / args[1]).is_file()
    elif name is None:
        assert args[0] in OTHERS, f"{args[0]} is no command that a page may name"
        if args[0] == "make":
            targets = [arg for arg in args[1:] if "=" not in arg]
            assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in targets)
    elif name in ("pip", "venv"):
        pass
    elif name.startswith("data_prep."):
        options = args[args.index(name) + 1 :]
        if "..." not in options:
            import_module(name).parser().parse_args(options)
    else:
        check_settings(name.removeprefix("apps."), args[args.index(name) + 1 :])


def check_settings(app: str, args: list[str]) -> None:
    """Assert that a YAML file and overrides are settings of the app, or that the first argument is a command of it."""
    if args and args[0].endswith(".yaml"):
        config.load(import_module(f"apps.{app}.settings").Config, ROOT / args[0], args[1:])
    elif args and args[0] not in ("...", "--help", "--show"):
        assert f'{args[0]}="apps.{app}.{args[0]}"' in (ROOT / f"apps/{app}/__main__.py").read_text()
        assert callable(import_module(f"apps.{app}.{args[0]}").run)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_exist(page: str, capsys: pytest.CaptureFixture) -> None:
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
