"""A function that torch.compile leaves as it is, marked without importing the compiler."""

import os
import subprocess
import sys

import torch
from torch._dynamo.utils import counters

from hpcai.dynamo import disable_dynamo

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "matplotlib")

IMPORTS = f"""
import pkgutil, sys
from importlib import import_module
for app in ("cosmoflow", "deepcam", "unet3d", "opencatalyst", "openfold", "llm", "diffusion"):
    for name in ("__main__", "data", "settings"):
        import_module(f"apps.{{app}}.{{name}}")
for package in ("hpcai.train", "hpcai.data", "hpcai.dist", "hpcai.parallel", "hpcai.nn", "hpcai.kernels"):
    for found in pkgutil.iter_modules(import_module(package).__path__):
        if not found.name.endswith(("_triton", "dali", "gds")):
            import_module(f"{{package}}.{{found.name}}")
print(*(name for name in {HEAVY} if name in sys.modules))
"""


def test_what_a_run_imports_is_what_it_uses() -> None:
    """The compiler, its algebra and torch's own checkpoints are half of all files that a process would open."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_it_runs_as_it_is_between_two_compiled_parts() -> None:
    seen: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x * 2

    class Layer(torch.nn.Module):
        @disable_dynamo
        def apart(self, x: torch.Tensor) -> torch.Tensor:
            """Its name and text stay."""
            return noted(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apart(x + 1) + 1

    theirs = type("Theirs", (Layer,), {"apart": torch.compiler.disable(lambda self, x: noted(x))})
    found = {}
    for kind in (Layer, theirs):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(kind(), backend="eager")
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
        found[kind] = (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), len(counters["resumes"]))
    assert found[Layer] == found[theirs] and found[Layer] == (2, 1, 1)
    assert seen == [False] * 6
    assert Layer.apart.__name__ == "apart" and Layer.apart.__doc__ == "Its name and text stay."
