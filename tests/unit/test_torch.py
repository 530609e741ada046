"""Private names of torch exist in each supported version."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.reference_data import load_json

ROOT = Path(__file__).resolve().parents[2]
NAMES = load_json("names/torch")
_PRIVATE = re.compile(r"\._(?!_)")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of torch with a private part."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if _PRIVATE.search(node.module) else [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        yield from (name for name in names if name.startswith("torch.") and _PRIVATE.search(name) and "(" not in name)


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_private_names_of_torch_exist_or_have_a_fall_back() -> None:
    used: dict[str, str] = {}
    for folder in ("hpcai", "apps", "data_prep"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= dict.fromkeys(private_names(ast.parse(path.read_text())), str(path.relative_to(ROOT)))
    # A module in the lists allows all of its names.
    allowed = {*NAMES["required"], *NAMES["optional"]}
    new = {name: path for name, path in used.items() if not any(name == each or name.startswith(f"{each}.") for each in allowed)}
    prefixes = {name for name in new if any(each.startswith(f"{name}.") for each in used)}
    assert not new.keys() - prefixes, f"new private names of torch {torch.__version__}; find a public one, or test its presence"
    assert not {each for each in allowed if not any(name == each or name.startswith(f"{each}.") for name in used)}, "no longer used"
    absent = sorted(name for name in NAMES["required"] if not exists(name))
    assert not absent, f"torch {torch.__version__} has no {', '.join(absent)}"
