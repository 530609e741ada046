"""Scripts of batch jobs: a template of slurm/ and what a site needs, with what was asked for, in one file that a person can read.

A site is a file of at most 30 lines in slurm/sites: lines for the scheduler (``#SBATCH --name=value`` or ``#PBS ...``), shell lines
that the script takes over, and facts that only ``hpcai job`` reads:

    #: account required      a job needs a project's name; likewise ``time`` and ``queue``
    #: queue --qos           what --queue is for this scheduler (--partition; -q of PBS)
    #: select system=name    what PBS asks of each node
    #: local /tmp /scratch   folders that each node has for itself
    #: power --gpu-power     the scheduler's own option for a cap on the power of the job's GPUs, in watts
    #: container name        --container names an image (``name``) and no file (``file``), or there are no flags for one (``none``)
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpcai
from hpcai.errors import ConfigError
from hpcai.programs import SUITE

_FACTS = {"account": "required", "time": "required", "queue": r"required|--[a-z-]+", "select": r"\S+", "local": r"/.*",
          "power": "--[a-z-]+", "container": "file|name|none"}  # fmt: skip
_SITE_MARK = "# hpcai job: the lines of the site stand here\n"


@dataclass(frozen=True)
class Site:
    """What a machine needs of a job: ``options`` of its scheduler, ``lines`` of the shell, and ``facts`` by name."""

    name: str
    pbs: bool
    options: Sequence[str]
    lines: str
    facts: Mapping[str, str]

    @property
    def per_node(self) -> int:
        """Processes on each node: one for each GPU."""
        found = re.search(r"^per_node=(\d+)", self.lines, re.M) if self.pbs else None
        found = found or re.search(r"^--ntasks-per-node=(\d+)", "\n".join(self.options), re.M)
        return int(found[1]) if found else 1

    def requires(self, fact: str) -> bool:
        return self.facts.get(fact) == "required"


def template_folder() -> Path:
    """Where the templates lie: beside the package in a checkout, within it where it was installed. Raises ConfigError."""
    places = [Path(hpcai.__file__).parents[1] / "slurm", SUITE / "slurm"]
    for place in places:
        if (place / "job.sh").is_file():
            return place
    raise ConfigError(
        f"the templates of batch scripts are missing: expected job.sh in {places[0]} (a checkout) or {places[1]} (an installed "
        "package); install hpcai again, or run from a checkout"
    )


def list_sites() -> list[str]:
    """The names of all site files."""
    return sorted(file.stem for file in (template_folder() / "sites").glob("*.sh"))


def find_site(name: str) -> Site:
    """The site of that name, or of a file of the user's own. Raises ConfigError."""
    own = "/" in name or name.endswith(".sh")
    file = Path(name) if own else template_folder() / "sites" / f"{name}.sh"
    if not own and name not in list_sites():
        raise ConfigError(f"there is no site {name!r}; expected one of {', '.join(list_sites())}, or a file of your own (./mine.sh)")
    try:
        return read_site(file.stem, file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"{file}: cannot be read ({problem}); expected a site file like {template_folder() / 'sites/generic.sh'}"
        ) from None


def read_site(name: str, text: str, where: str) -> Site:
    """The site that a file's ``text`` describes; ``where`` is the file's name. Raises ConfigError."""
    options: dict[str, list[str]] = {"#SBATCH ": [], "#PBS ": []}
    facts, lines = {}, []
    for number, line in enumerate(text.splitlines(), 1):
        mark = next((mark for mark in options if line.startswith(mark)), None)
        if mark:
            options[mark].append(line.removeprefix(mark).strip())
        elif line.startswith("#: "):
            key, _, value = line[3:].strip().partition(" ")
            if key not in _FACTS or not re.fullmatch(_FACTS[key], value):
                known = ", ".join(f"{fact} ({form})" for fact, form in _FACTS.items())
                raise ConfigError(f"{where}:{number}: {line!r} is no fact of a site; expected one of {known}")
            facts[key] = value
        else:
            lines.append(line)
    if all(options.values()) or not any(options.values()):
        found = "both" if all(options.values()) else "neither"
        raise ConfigError(f"{where}: expected lines for one scheduler, #SBATCH or #PBS, found {found}")
    pbs = bool(options["#PBS "])
    return Site(name, pbs, options["#PBS " if pbs else "#SBATCH "], "\n".join(lines).strip() + "\n", facts)


def render(site: Site, options: Iterable[str], lines: Sequence[str], command: str) -> str:
    """The whole script. ``options`` of the scheduler take the place of the site's, and these of the template's; ``lines`` of the
    shell stand before all others. ``command`` is what the script was written by."""
    template = (template_folder() / ("job.pbs" if site.pbs else "job.sh")).read_text()
    head, _, body = template.partition("\n\n")
    mark = "#PBS " if site.pbs else "#SBATCH "
    first, *own = head.splitlines()
    every: dict[str, str] = {}
    for option in [*(line.removeprefix(mark) for line in own if line.startswith(mark)), *site.options, *options]:
        every[_option_name(option)] = option
    before, after = body.split(_SITE_MARK)
    after = after[after.index("set -u\n") :]
    asked, command = "\n".join(lines) + "\n", command.replace("\n", " ")
    return "\n".join(
        [first, f"# {command}", *(mark + option for option in every.values()), "", asked + before + site.lines + after]
    )


def _option_name(option: str) -> str:
    """What an option sets: ``--nodes`` of ``--nodes=2``, ``-l walltime`` of ``-l walltime=1:00:00``, ``-q`` of ``-q prod``."""
    found = re.match(r"-l \w+|--?[\w-]+", option)
    return found[0] if found else option


def assign(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}"


def arguments_line(words: Sequence[str]) -> str:
    """The words of the program, one on each line."""
    return "set -- " + " \\\n  ".join(map(shlex.quote, words))
