"""Apptainer's definitions, read strictly: what Apptainer passes over in silence is an error here."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests import shellcheck

HEADERS = ("bootstrap", "from", "stage")
SECTIONS = ("arguments", "files", "post", "environment", "labels", "runscript", "test", "help")
SCRIPTS = ("post", "environment", "runscript", "test")


class Stage(NamedTuple):
    """A stage of a build: its header, the text of its sections, and which earlier stage its files come from."""

    header: dict[str, str]
    sections: dict[str, str]
    source: str | None


class DefinitionError(Exception):
    """FILE:LINE: what is wrong."""


def stages(path: Path) -> list[Stage]:
    """The stages of a definition, with the values of its arguments put in. Raises DefinitionError."""
    found: list[Stage] = []
    section: str | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path}:{number}"
        if match := re.match(r"(\w+):\s*(.*)$", line):
            key = match[1].lower()
            if key not in HEADERS:
                raise DefinitionError(f"{where}: unknown header {match[1]}; expected one of {', '.join(HEADERS)}")
            if key == "bootstrap":
                found.append(Stage({}, {}, None))
            if not found or (section is not None and key != "bootstrap"):
                raise DefinitionError(f"{where}: {match[1]} outside of a header, which begins with Bootstrap")
            section, found[-1].header[key] = None, match[2]
        elif match := re.match(r"%(\S+)\s*(.*)$", line):
            section = match[1]
            if section not in SECTIONS or not found:
                raise DefinitionError(f"{where}: unknown section %{section}; expected one of %{', %'.join(SECTIONS)}")
            if section in found[-1].sections:
                raise DefinitionError(f"{where}: %{section} stands twice in a stage")
            found[-1].sections[section] = ""
            if match[2]:
                earlier = [stage.header.get("stage") for stage in found[:-1]]
                if section != "files" or match[2].removeprefix("from ") not in earlier:
                    raise DefinitionError(f"{where}: %{section} {match[2]}; expected 'from' and one of {earlier}")
                found[-1] = found[-1]._replace(source=match[2].removeprefix("from "))
        elif section is not None:
            found[-1].sections[section] += f"{line}\n"
        elif line.strip() and not line.startswith("#"):
            raise DefinitionError(f"{where}: {line!r} is neither a header nor in a section")
    return [_checked(path, stage) for stage in found]


def _checked(path: Path, stage: Stage) -> Stage:
    if missing := [key for key in HEADERS if key not in stage.header]:
        raise DefinitionError(f"{path}: a stage has no {missing[0]}")
    given = dict(line.split("=", 1) for line in stage.sections.get("arguments", "").split())

    def filled(text: str) -> str:
        for name in re.findall(r"\{\{\s*(\w+)\s*\}\}", text):
            if name not in given:
                raise DefinitionError(f"{path}: {{{{ {name} }}}} is not among %arguments of stage {stage.header['stage']}")
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: given[match[1]], text)

    header = {key: filled(value) for key, value in stage.header.items()}
    sections = {name: filled(text) for name, text in stage.sections.items()}
    for name in SCRIPTS:
        _look(f"{path}: stage {header['stage']}, %{name}", sections.get(name, ""))
    return Stage(header, sections, stage.source)


def _look(where: str, script: str) -> None:
    """Apptainer runs scripts by sh."""
    told = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True)
    if problem := told.stderr.strip() or shellcheck.shellcheck_warnings(script, "--shell=sh"):
        raise DefinitionError(f"{where}: {problem}")
