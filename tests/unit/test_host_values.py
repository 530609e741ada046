"""Code of a training step creates no tensor from host values and indexes with no list: each is a synchronizing copy to the GPU,
and an error in a captured step. The test reads the source, since a machine without a GPU does not detect it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference_data import load_json

ROOT = Path(__file__).parents[2] / "hpcai"
PATTERNS = "models/**/*", "nn/*", "kernels/*", "parallel/*", "train/step", "train/optim", "train/weight_averaging", "train/metrics"
CONSTRUCTORS = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "FloatTensor", "LongTensor"}
ENTRY_POINTS = {
    "forward", "backward", "loss", "zero_grad", "reduce", "all_gather_parameters", "wait", "sums", "__call__", "_update",
    "all_reduce",
}  # fmt: skip
"""Entry points of a step in these folders, besides all functions of the kernels. Every function that one of them names is included,
recursively. Functions are compared by name, which includes too many rather than too few; ``__init__`` is omitted."""
ALLOWED = load_json("host_values")
"""Functions that run once, or outside of a step."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def descendants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all descendants but annotations and decorators."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                yield child
                yield from descendants(child)


def referenced_names(function: Function) -> set[str]:
    nodes = list(descendants(function))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def has_list(node: ast.AST) -> bool:
    return any(isinstance(part, ast.List | ast.ListComp) for part in (node.elts if isinstance(node, ast.Tuple) else [node]))


def host_values(function: Function, lists: set[str]) -> Iterator[tuple[int, str]]:
    for node in descendants(function):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CONSTRUCTORS and ast.unparse(called.value) != "np":
            yield called.lineno, ast.unparse(node)
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if has_list(node.slice) or any(isinstance(part, ast.Name) and part.id in lists for part in parts):
                yield node.lineno, ast.unparse(node)


def find_host_values(sources: dict[str, str]) -> list[str]:
    """Return ``path: function: expression`` for each tensor from host values that is reached from a step."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    functions: dict[str, list[tuple[str, Function]]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                functions.setdefault(node.name, []).append((path, node))
    lists = {
        path: {target.id for node in tree.body if isinstance(node, ast.Assign) and has_list(node.value)
               for target in node.targets if isinstance(target, ast.Name)} for path, tree in trees.items()
    }  # fmt: skip
    kernels = {name for name, each in functions.items() for path, _ in each if path.startswith("kernels/")}
    visited, pending = set[str](), ENTRY_POINTS | kernels - {"__init__"}
    while pending:
        name = pending.pop()
        visited.add(name)
        for _, function in functions.get(name, ()):
            pending |= {other for other in referenced_names(function) if other in functions} - visited - {"__init__"}
    return sorted({
        f"{path}: {name}: {expression} (line {line})" for name in visited for path, function in functions.get(name, ())
        for line, expression in host_values(function, lists[path])
    })  # fmt: skip


def test_no_step_creates_a_tensor_from_host_values() -> None:
    paths = [path for part in PATTERNS for path in sorted(ROOT.glob(f"{part}.py"))]
    lines = find_host_values({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    assert [line for line in lines if not line.startswith(tuple(f"{name}: " for name in ALLOWED))] == []
    assert {": ".join(line.split(": ")[:2]) for line in lines} == ALLOWED.keys(), "delete entries that are no longer needed"


@pytest.mark.parametrize("expression", [
    "torch.tensor(TABLE)", "x.new_tensor([1.0])", "torch.as_tensor([0, 1], device=x.device)", "torch.from_numpy(TABLE)",
    "x[..., [0, 2]]", "x[[i for i in range(3)]]", "x[:, ROWS]",
])  # fmt: skip
def test_a_tensor_from_host_values_is_found_in_any_function_of_a_forward_pass(expression: str) -> None:
    text = (
        f"ROWS = [0, 1]\nclass A:\n    def forward(self, x: Callable[[int], int]):\n        return further(x[0], x[1:])\n"
        f"def further(x, y):\n    return torch.full((2,), 1.0), {expression}\ndef once():\n    return torch.tensor([1])\n"
    )
    assert find_host_values({"models/a.py": text}) == [f"models/a.py: further: {expression} (line 6)"]
