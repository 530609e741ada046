"""What runs in every step makes no tensor of numbers of the host and indexes with no list: each is a copy that the host waits for
on a GPU, and that a captured step refuses. Read in the source, since a machine without a GPU does not notice."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hpcai"
PARTS = "models/**/*", "nn/*", "kernels/*", "parallel/*", "train/step", "train/optim", "train/weight_averaging", "train/metrics"
MAKERS = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "FloatTensor", "LongTensor"}
BEGIN = {
    "forward", "backward", "loss", "zero_grad", "reduce", "all_gather_parameters", "wait", "sums", "__call__", "_update",
    "all_reduce",
}  # fmt: skip
"""Where a step enters these folders, beside every function of the kernels; with them goes each function that they name, and so on.
Names alone are compared, which finds too many rather than too few; ``__init__`` is left out."""
ALLOWED = {
    "models/cosmoflow/load.py: from_keras": "reads a file of weights",
    "models/cosmoflow/model.py: _to_tensor": "takes the arrays of a person",
    "models/cosmoflow/model.py: to_physical": "gives a person what the network found",
    "models/deepcam/model.py: segment": "takes the arrays of a person",
    "models/dimenet/formats.py: _tensors": "reads files",
    "models/dimenet/graph.py: collate": "joins samples, before a batch goes to the device",
    "models/diffusion/model.py: _per_channel": "gives a person what the network made",
    "models/llm/generation.py: sample_tokens": "tokens are given to the host one by one",
    "models/openfold/folding.py: prepare_features": "takes the arrays of a person",
    "models/openfold/device_cache.py: to_device": "keeps what it made",
    "models/unet3d/model.py: segment": "takes the arrays of a person",
    "models/unet3d/objective.py: slices": "pictures, which the host reads",
    "models/unet3d/volume.py: resample": "takes the arrays of a person",
    "nn/init_trace.py: _row_starts": "where the elements of a new weight begin",
    "nn/weights.py: load_state": "reads a file of weights",
}
"""These run once, or never on the device in a step."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> dict[str, list[Function]]:
    found: dict[str, list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Function):
            found.setdefault(node.name, []).append(node)
    return found


def without_types(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for annotations."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                yield child
                yield from without_types(child)


def named(function: Function) -> set[str]:
    nodes = list(without_types(function))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def is_list(node: ast.AST) -> bool:
    return any(isinstance(part, ast.List | ast.ListComp) for part in (node.elts if isinstance(node, ast.Tuple) else [node]))


def problems(function: Function, lists: set[str]) -> Iterator[tuple[int, str]]:
    for node in without_types(function):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in MAKERS and ast.unparse(called.value) != "np":
            yield called.lineno, ast.unparse(node)
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if is_list(node.slice) or any(isinstance(part, ast.Name) and part.id in lists for part in parts):
                yield node.lineno, ast.unparse(node)


def found_in(sources: dict[str, str]) -> list[str]:
    """``path: function: what`` for each place that a step comes to."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    known: dict[str, list[tuple[str, Function]]] = {}
    for path, tree in trees.items():
        for name, each in functions(tree).items():
            known.setdefault(name, []).extend((path, function) for function in each)
    lists = {
        path: {target.id for node in tree.body if isinstance(node, ast.Assign) and is_list(node.value)
               for target in node.targets if isinstance(target, ast.Name)} for path, tree in trees.items()
    }  # fmt: skip
    kernels = {name for name, each in known.items() for path, _ in each if path.startswith("kernels/")}
    reached, ahead = set[str](), BEGIN | kernels - {"__init__"}
    while ahead:
        name = ahead.pop()
        reached.add(name)
        for _, function in known.get(name, ()):
            ahead |= {other for other in named(function) if other in known} - reached - {"__init__"}
    return sorted({
        f"{path}: {name}: {what} (line {line})" for name in reached for path, function in known.get(name, ())
        for line, what in problems(function, lists[path])
    })  # fmt: skip


def sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for part in PARTS for path in sorted(ROOT.glob(f"{part}.py"))}


def test_no_step_makes_a_tensor_of_numbers_of_the_host() -> None:
    found = found_in(sources())
    assert [line for line in found if not line.startswith(tuple(f"{name}: " for name in ALLOWED))] == []
    assert {": ".join(line.split(": ")[:2]) for line in found} == ALLOWED.keys(), "one that is no longer needed goes"


@pytest.mark.parametrize("place", [
    "torch.tensor(TABLE)", "x.new_tensor([1.0])", "torch.as_tensor([0, 1], device=x.device)", "torch.from_numpy(TABLE)",
    "x[..., [0, 2]]", "x[[i for i in range(3)]]", "x[:, ROWS]",
])  # fmt: skip
def test_such_a_place_is_found_wherever_a_forward_pass_leads(place: str) -> None:
    text = (
        f"ROWS = [0, 1]\nclass A:\n    def forward(self, x: Callable[[int], int]):\n        return further(x[0], x[1:])\n"
        f"def further(x, y):\n    return torch.full((2,), 1.0), {place}\ndef once():\n    return torch.tensor([1])\n"
    )
    assert found_in({"models/a.py": text}) == [f"models/a.py: further: {place} (line 6)"]
