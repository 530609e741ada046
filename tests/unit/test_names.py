"""One language, the field's: replaced names stay away, docstrings open with a verb or a noun, pages and output use its terms."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hpcai.dist.host import gc_disabled
from tests.reference_data import ROOT, load_json

DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/*.md"), *ROOT.glob("apps/*/README.md")]

DEFINED = load_json("names/replaced")
"""Modules, classes and functions that were renamed, by package."""

VARIABLES = {"told", "made", "found", "said", "whole", "one"}
"""No variable or parameter: each is named after its content."""

OPENINGS = re.compile(r"(What|Who|Whose|Which|Of|That which|Those|Where)\b")

TERMS = {
    r"eighths": "FP8",
    r"cop(y|ies) of (the|a) model": "replica",
    r"cut (over|along|into) (processes|ranks|GPUs)": "sharded over",
    r"(is|are) told": "is logged, is reported",
}
"""Words that were ours alone, for pages, docstrings and messages, and the field's."""


@cache
def sources() -> list[tuple[str, list[ast.AST]]]:
    """Return the name of each file, and its nodes that are read here."""
    paths = sorted(path for folder in ("hpcai", "apps", "data_prep", "tests") for path in (ROOT / folder).rglob("*.py"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Name, ast.arg, ast.Constant)
    with gc_disabled():
        trees = [(str(path.relative_to(ROOT)), ast.walk(ast.parse(path.read_text()))) for path in paths]
        return [(name, [node for node in nodes if type(node) in kinds]) for name, nodes in trees]


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Module | DEFINITIONS) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def test_replaced_names_do_not_come_back() -> None:
    back = []
    for path, nodes in sources():
        gone = {name for package, names in DEFINED.items() if path.startswith(package + "/") for name in names}
        back += [path] * (Path(path).stem in gone)
        back += [f"{path}:{n.lineno} {n.name}" for n in nodes if isinstance(n, DEFINITIONS) and n.name in gone]
    assert not back, f"{back}: these names were replaced; docs/glossary.md and CONTRIBUTING.md have today's"


def test_variables_are_named_after_their_content() -> None:
    back = []
    for path, nodes in sources():
        fields = {n.target for c in nodes if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.AnnAssign)}
        for node in {*nodes} - fields:  # of records, which may be keys of JSON
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
            if name in VARIABLES:
                back.append(f"{path}:{node.lineno} {name}")
    assert not back, f"{len(back)} variables say no content: {back[:20]}"


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    back = [f"{path}:{line} {text[:40]!r}" for path, nodes in sources() for line, text in docstrings(nodes) if OPENINGS.match(text)]
    assert not back, f"{len(back)} docstrings open with a relative clause: {back[:20]}"


@pytest.mark.parametrize("term", TERMS)
def test_pages_docstrings_and_messages_use_the_terms_of_the_field(term: str) -> None:
    pattern, back = re.compile(rf"\b{term}\b"), []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
        back += [f"{page.relative_to(ROOT)}: {match[0]!r}" for match in pattern.finditer(text)]
    for path, nodes in sources():
        strings = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if path != "tests/unit/test_names.py":
            back += [f"{path}:{n.lineno} {match[0]!r}" for n in strings for match in pattern.finditer(n.value)]
    assert not back, f"write {TERMS[term]}: {back[:20]}"
