"""The pages: their commands are ones that there are, their links lead somewhere, and they make a site that needs no network."""

import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

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
    """Each command of a page's shell blocks, as it stands and as words."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s+&&\s+", re.sub(r"(^|\s)#.*", "", line).strip()):
                if part:
                    yield part, shlex.split(LAUNCHERS.sub("", part.replace(".venv/bin/", ""), count=1))


def module(words: list[str]) -> str | None:
    """The module that is run."""
    return words[words.index("-m") + 1] if "-m" in words else None


def look(words: list[str]) -> None:
    """Fail where a command cannot be."""
    name = module(words)
    if name is None and words[0] == "hpcai":
        assert words[1] in cli.COMMANDS
        if words[1] == "run" and len(words) > 3:
            named = f"apps/{words[2]}/configs/{words[3]}.yaml"
            settings(words[2], [named if (ROOT / named).is_file() else words[3], *words[4:]])
    elif name is None and words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif name is None:
        assert words[0] in OTHERS, f"{words[0]} is no command that a page may name"
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in targets)
    elif name in ("pip", "venv"):
        pass
    elif name.startswith("data_prep."):
        given = words[words.index(name) + 1 :]
        if "..." not in given:
            import_module(name).parser().parse_args(given)
    else:
        settings(name.removeprefix("apps."), words[words.index(name) + 1 :])


def settings(app: str, given: list[str]) -> None:
    """A YAML file and words are settings of the app; another first word is one of its own commands."""
    if given and given[0].endswith(".yaml"):
        config.load(import_module(f"apps.{app}.settings").Config, ROOT / given[0], given[1:])
    elif given and given[0] not in ("...", "--help", "--show"):
        assert (ROOT / f"apps/{app}/{given[0]}.py").is_file() and f'"{given[0]}"' in (ROOT / f"apps/{app}/__main__.py").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_are_ones_that_there_are(page: str, capsys: pytest.CaptureFixture) -> None:
    for line, words in commands(page):
        if "ringdown" in line:  # the model that docs/new_model.md adds; tests/apps/test_new_model.py runs its lines
            continue
        try:
            look(words)
        except (AssertionError, SystemExit, Exception) as problem:
            raise AssertionError(f"{page}: {line}: {problem}{capsys.readouterr().err}") from problem


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
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


def test_every_page_is_in_the_site_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    about = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w./-]+\.md", yaml.safe_dump(about["nav"])))
    assert set(PAGES) <= named
    for page in named:
        (tmp_path / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / "pages" / page)
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(about | {"docs_dir": "pages", "site_dir": "site"}))
    made = subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "--strict"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for page in tmp_path.glob("site/**/*.html"):
        fetched = re.findall(r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="((?:https?:)?//[^"]+)"', page.read_text())
        assert not fetched, f"{page.name} asks the network for {fetched[0]}"
