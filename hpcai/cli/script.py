"""Batch scripts: a template of slurm/, the lines of a site and the options of a job, rendered to one readable file.

A site is a file of at most 30 lines in slurm/sites: lines for the scheduler (``#SBATCH --name=value`` or ``#PBS ...``), shell lines
that are copied into the script, and facts that only ``hpcai job`` reads (``#: name value``, docs/cluster.md).
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpcai
from hpcai.dist.gpus import SHEETS
from hpcai.errors import ConfigError
from hpcai.programs import SUITE

_FACTS = {"account": "required", "time": "required", "queue": r"required|--[a-z-]+", "select": r"\S+", "local": r"/.*",
          "cpus": r"\d+", "power": "--[a-z-]+", "container": "file|name|none", "gpu": "|".join(SHEETS),
          "page": r"https://\S+ 20\d\d-\d\d-\d\d"}  # fmt: skip
_REQUIRED = {"account": "a project's name", "time": "a limit such as 1:00:00", "queue": "the name of a queue"}
_SITE_MARK = "# hpcai job: the lines of the site stand here\n"


@dataclass(frozen=True)
class Site:
    """The requirements of a machine: ``options`` of its scheduler, ``lines`` of the shell, ``facts`` by name, and the
    ``pages`` that they are from, each with the date on which it was read."""

    name: str
    pbs: bool
    options: Sequence[str]
    lines: str
    facts: Mapping[str, str]
    pages: Sequence[tuple[str, str]] = ()

    @property
    def per_node(self) -> int:
        """Processes per node: one for each GPU."""
        match = re.search(r"^per_node=(\d+)", self.lines, re.M) if self.pbs else None
        match = match or re.search(r"^--ntasks-per-node=(\d+)", "\n".join(self.options), re.M)
        return int(match[1]) if match else 1

    def access_options(self, account: str | None, queue: str | None) -> list[str]:
        """Return the scheduler's options for an account and a queue."""
        fact = self.facts.get("queue", "required")
        names = ("-A ", "-q ") if self.pbs else ("--account=", f"{'--partition' if fact == 'required' else fact}=")
        return [name + value for name, value in zip(names, (account, queue)) if value]

    def image(self, container: str) -> str:
        """Return the name of a container, or the absolute path of its file."""
        return container if self.facts.get("container") == "name" else str(Path(container).absolute())

    def check_options(self, given: Mapping[str, str | None]) -> list[str]:
        """Return an error for each option that the site requires and ``given`` lacks, and for a container without flags."""
        known = {} if self.pbs else {"account": os.environ.get("SBATCH_ACCOUNT")}
        problems = [f"site {self.name} takes no job without --{name}; give {_REQUIRED[name]}"
                    for name in given if self.facts.get(name) == "required" and not (given[name] or known.get(name))]  # fmt: skip
        if (container := given["container"]) and self.facts.get("container") == "none":
            problems.append(
                f"--container {container}: the file of site {self.name} has no flags for containers; add them to a copy of it "
                "(container=(apptainer exec --nv \"$HPCAI_IMAGE\")) and give that as --site FILE"
            )  # fmt: skip
        return problems


def template_folder() -> Path:
    """Return the folder of the templates: next to the package in a checkout, inside it if installed. Raises ConfigError."""
    candidates = [Path(hpcai.__file__).parents[1] / "slurm", SUITE / "slurm"]
    for candidate in candidates:
        if (candidate / "job.sh").is_file():
            return candidate
    raise ConfigError(
        f"the templates of batch scripts are missing: expected job.sh in {candidates[0]} (a checkout) or {candidates[1]} (an "
        "installed package); install hpcai again, or run from a checkout"
    )


def list_sites() -> list[str]:
    return sorted(file.stem for file in (template_folder() / "sites").glob("*.sh"))


def find_site(name: str) -> Site:
    """Return the site of that name, or of a user's file. Raises ConfigError."""
    is_path = "/" in name or name.endswith(".sh")
    file = Path(name) if is_path else template_folder() / "sites" / f"{name}.sh"
    if not is_path and name not in list_sites():
        raise ConfigError(f"there is no site {name!r}; expected one of {', '.join(list_sites())}, or your own file (./mine.sh)")
    try:
        return read_site(file.stem, file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as problem:
        expected = f"a site file like {template_folder() / 'sites/generic.sh'}"
        raise ConfigError(f"{file}: cannot be read ({problem}); expected {expected}") from None


def read_site(name: str, text: str, where: str) -> Site:
    """Return the site described by ``text``; ``where`` is the file's name. Raises ConfigError."""
    options: dict[str, list[str]] = {"#SBATCH ": [], "#PBS ": []}
    facts: dict[str, str] = {}
    pages: list[tuple[str, str]] = []
    lines: list[str] = []
    for line_number, line in enumerate(text.splitlines(), 1):
        prefix = next((prefix for prefix in options if line.startswith(prefix)), None)
        if prefix:
            options[prefix].append(line.removeprefix(prefix).strip())
        elif line.startswith("#: "):
            key, _, value = line[3:].strip().partition(" ")
            if key not in _FACTS or not re.fullmatch(_FACTS[key], value):
                known = ", ".join(f"{fact} ({pattern})" for fact, pattern in _FACTS.items())
                raise ConfigError(f"{where}:{line_number}: {line!r} is no fact of a site; expected one of {known}")
            if key == "page":
                page, _, date = value.partition(" ")
                pages.append((page, date))
            elif key in facts:
                raise ConfigError(f"{where}:{line_number}: {key} is a fact of line {line!r} and of one before; leave one out")
            else:
                facts[key] = value
        else:
            lines.append(line)
    if all(options.values()) or not any(options.values()):
        present = "both" if all(options.values()) else "neither"
        raise ConfigError(f"{where}: expected lines for one scheduler, #SBATCH or #PBS, found {present}")
    pbs = bool(options["#PBS "])
    return Site(name, pbs, options["#PBS " if pbs else "#SBATCH "], "\n".join(lines).strip() + "\n", facts, pages)


def render(site: Site, options: Iterable[str], lines: Sequence[str], command: str) -> str:
    """Return the complete script. ``options`` of the scheduler override the site's, and these the template's; ``lines`` of the
    shell come before all others. ``command`` is the command line that the script was generated by."""
    template = (template_folder() / ("job.pbs" if site.pbs else "job.sh")).read_text()
    head, _, body = template.partition("\n\n")
    prefix = "#PBS " if site.pbs else "#SBATCH "
    first, *template_lines = head.splitlines()
    named: dict[str, str] = {}
    for option in [*(line.removeprefix(prefix) for line in template_lines if line.startswith(prefix)), *site.options, *options]:
        match = re.match(r"-l \w+|--?[\w-]+", option)  # --nodes of --nodes=2, -l walltime of -l walltime=1:00:00, -q of -q x
        named[match[0] if match else option] = option
    before, after = body.split(_SITE_MARK)
    after = after[after.index("set -u\n") :]
    shell_lines, command = "\n".join(lines) + "\n", command.replace("\n", " ")
    opening = [first, f"# {command}", *(prefix + option for option in named.values())]
    return "\n".join([*opening, "", shell_lines + before + site.lines + after])


def assign(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}"
