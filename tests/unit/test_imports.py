"""Imports between two files go one way, also those inside functions and those for type hints alone."""

import ast
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT = {  # others open these; then they leave this list
    ("hpcai.cli.doctor", "hpcai.cli.doctor.job"), ("hpcai.data.index", "hpcai.data.table"),
    ("hpcai.data.stage.copy", "hpcai.data.stage.job"),
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    files = [file for package in ("hpcai", "apps", "data_prep") for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(module: str) -> set[str]:
    """What ``module`` imports of ours; all imports in the repository are absolute."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules().keys() - {module}


def test_no_two_modules_import_each_other() -> None:
    imports = {module: imported(module) for module in modules()}
    circles = {(a, b) for a, b in combinations(sorted(imports), 2) if b in imports[a] and a in imports[b]}
    assert circles - LEFT == set()
    assert len(imports) > 300 and "hpcai.train.run" in imports["hpcai.train.loop"], "imports are found"
