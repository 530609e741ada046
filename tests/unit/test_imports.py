"""No two modules import each other, also inside functions and for type hints. Errors of missing packages name the right extra."""

import ast
import re
import tomllib
from functools import cache
from itertools import combinations
from pathlib import Path

from tests.reference_data import ROOT

KNOWN_CYCLES = {  # to be broken; then delete the entry
    ("hpcai.cli.doctor", "hpcai.cli.doctor.job"), ("hpcai.data.index", "hpcai.data.table"),
    ("hpcai.data.stage.copy", "hpcai.data.stage.job"),
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    files = [file for package in ("hpcai", "apps", "data_prep") for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported_modules(module: str) -> set[str]:
    """Return the modules of the repository that ``module`` imports; all imports are absolute."""
    names = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & modules().keys() - {module}


def test_no_two_modules_import_each_other() -> None:
    imports = {module: imported_modules(module) for module in modules()}
    cycles = {(a, b) for a, b in combinations(sorted(imports), 2) if b in imports[a] and a in imports[b]}
    assert cycles - KNOWN_CYCLES == set()
    assert len(imports) > 300 and "hpcai.train.run" in imports["hpcai.train.loop"], "imports are found"


def test_a_missing_package_is_in_the_extra_that_its_error_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras["opencatalyst"] += ["scipy"]  # which ASE needs
    pattern = r'import_optional[(,] *f?"(\w+)[^"]*", f?"[^"]*", "([\w-]+)"\)'
    calls = {call for path in modules().values() for call in re.findall(pattern, path.read_text())}
    assert len(calls) > 15 and ("scipy", "deepcam") in calls and ("gemmi", "openfold") in calls
    for module, extra in calls:
        package = "protobuf" if module == "google" else module.replace("_", "-")
        assert any(re.match(rf"{package}\b", each.replace("_", "-")) for each in extras[extra]), f"{module} is not in {extra}"
