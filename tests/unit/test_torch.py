"""Whatever torch is installed, of those that we promise, and for whatever it was built."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# Old names that torch's own pages and other libraries use, and operations of its own optimizers and kernels.
HELD = {
    "torch._C.DisableTorchFunction", "torch._foreach_add", "torch._foreach_add_", "torch._foreach_mul",
    "torch._foreach_norm", "torch._foreach_sub", "torch._fused_adam_", "torch._fused_adamw_", "torch._fused_sgd_",
    "torch._scaled_mm", "torch._dynamo.config.recompile_limit", "torch._dynamo.reset", "torch._dynamo.utils",
    "torch._inductor.config", "torch._subclasses.fake_tensor", "torch.ops.aten._convolution",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.ops.aten._softmax_backward_data", "torch.ops.aten._unsafe_view", "torch.utils._python_dispatch", "torch.utils._pytree",
}  # fmt: skip
# Behind a test of their presence, or an exception: what is done without them is there.
TESTED = {
    "torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool", "torch._C._dynamo.eval_frame", "torch._dynamo",
    "torch._dynamo.convert_frame",
}  # fmt: skip
_PRIVATE = re.compile(r"\._(?!_)")


def used(tree: ast.AST) -> Iterator[str]:
    """Dotted names of torch that have a private part."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if _PRIVATE.search(node.module) else [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        yield from (name for name in names if name.startswith("torch.") and _PRIVATE.search(name) and "(" not in name)


def present(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


FORKED = """
import os, sys
from types import SimpleNamespace
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
if sys.argv[1] == "as tests begin":
    from tests import conftest
    conftest.pytest_configure(SimpleNamespace(args=["tests/unit"], workerinput={}))
def learn():
    (x := torch.ones(3, requires_grad=True)).square().sum().backward()
    return x.grad.sum().item()
with FakeTensorMode():
    torch.ones(2)
learn()
if (child := os.fork()) == 0:
    try:
        os._exit(int(learn()))
    except RuntimeError:
        os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_of_the_tests_can_learn_whatever_torch_is_built_for() -> None:
    def ends(how: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", FORKED, how]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    assert ends("as tests begin") == "6"
    assert ends("without") == ("1" if torch.version.cuda else "6"), "torch no longer needs this"


def test_every_private_name_of_torch_is_there_or_has_a_fall_back() -> None:
    found: dict[str, str] = {}
    for folder in ("hpcai", "apps", "data_prep"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= dict.fromkeys(used(ast.parse(path.read_text())), str(path.relative_to(ROOT)))
    # A module that is named stands for all that is taken from it.
    known = {*HELD, *TESTED}
    strange = {name: path for name, path in found.items() if not any(name == one or name.startswith(f"{one}.") for one in known)}
    prefixes = {name for name in strange if any(one.startswith(f"{name}.") for one in found)}
    assert not strange.keys() - prefixes, f"new private names of torch {torch.__version__}; find a public one, or test its presence"
    assert not {one for one in known if not any(name == one or name.startswith(f"{one}.") for name in found)}, "no longer used"
    absent = sorted(name for name in HELD if not present(name))
    assert not absent, f"torch {torch.__version__} has no {', '.join(absent)}"
