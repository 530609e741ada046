"""Apptainer definition files, parsed strictly: lines that Apptainer ignores silently are errors."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests import shellcheck

HEADERS = ("bootstrap", "from", "stage")
SECTIONS = ("arguments", "files", "post", "environment", "labels", "runscript", "test", "help")
SCRIPTS = ("post", "environment", "runscript", "test")


class Stage(NamedTuple):
    """A stage of a build: its header, the text of its sections, and the earlier stage of its files."""

    header: dict[str, str]
    sections: dict[str, str]
    source: str | None


class DefinitionError(Exception):
    """A definition is invalid; the message begins with FILE:LINE."""


def read_stages(path: Path) -> list[Stage]:
    """Return the stages of a definition with its arguments substituted. Raises DefinitionError."""
    parsed: list[Stage] = []
    section: str | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        location = f"{path}:{number}"
        if match := re.match(r"(\w+):\s*(.*)$", line):
            key = match[1].lower()
            if key not in HEADERS:
                raise DefinitionError(f"{location}: unknown header {match[1]}; expected one of {', '.join(HEADERS)}")
            if key == "bootstrap":
                parsed.append(Stage({}, {}, None))
            if not parsed or (section is not None and key != "bootstrap"):
                raise DefinitionError(f"{location}: {match[1]} outside of a header, which begins with Bootstrap")
            section, parsed[-1].header[key] = None, match[2]
        elif match := re.match(r"%(\S+)\s*(.*)$", line):
            section = match[1]
            if section not in SECTIONS or not parsed:
                raise DefinitionError(f"{location}: unknown section %{section}; expected one of %{', %'.join(SECTIONS)}")
            if section in parsed[-1].sections:
                raise DefinitionError(f"{location}: %{section} occurs twice in a stage")
            parsed[-1].sections[section] = ""
            if match[2]:
                earlier = [stage.header.get("stage") for stage in parsed[:-1]]
                if section != "files" or match[2].removeprefix("from ") not in earlier:
                    raise DefinitionError(f"{location}: %{section} {match[2]}; expected 'from' and one of {earlier}")
                parsed[-1] = parsed[-1]._replace(source=match[2].removeprefix("from "))
        elif section is not None:
            parsed[-1].sections[section] += f"{line}\n"
        elif line.strip() and not line.startswith("#"):
            raise DefinitionError(f"{location}: {line!r} is neither a header nor in a section")
    return [_check_stage(path, stage) for stage in parsed]


def _check_stage(path: Path, stage: Stage) -> Stage:
    if missing := [key for key in HEADERS if key not in stage.header]:
        raise DefinitionError(f"{path}: a stage has no {missing[0]}")
    arguments = dict(line.split("=", 1) for line in stage.sections.get("arguments", "").split())

    def substitute(text: str) -> str:
        for name in re.findall(r"\{\{\s*(\w+)\s*\}\}", text):
            if name not in arguments:
                raise DefinitionError(f"{path}: {{{{ {name} }}}} is not among %arguments of stage {stage.header['stage']}")
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: arguments[match[1]], text)

    header = {key: substitute(value) for key, value in stage.header.items()}
    sections = {name: substitute(text) for name, text in stage.sections.items()}
    for name in SCRIPTS:
        _check_script(f"{path}: stage {header['stage']}, %{name}", sections.get(name, ""))
    return Stage(header, sections, stage.source)


def _check_script(location: str, script: str) -> None:
    """Check a script that Apptainer runs by sh."""
    result = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True)
    if problem := result.stderr.strip() or shellcheck.shellcheck_warnings(script, "--shell=sh"):
        raise DefinitionError(f"{location}: {problem}")
