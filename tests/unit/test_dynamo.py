"""``disable_dynamo`` excludes a function from torch.compile without an import of the compiler."""

import subprocess
import sys

import torch
from torch._dynamo.utils import counters

from hpcai.dynamo import disable_dynamo

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "matplotlib", "mpi4py.MPI", "nvidia.dali", "PIL")

IMPORTS = f"""
import pkgutil, sys, torch
from importlib import import_module
for app in ("bert", "cosmoflow", "deepcam", "unet3d", "resnet", "retinanet", "rgat", "dlrm", "opencatalyst", "openfold", "llm",
            "diffusion"):
    for name in ("__main__", "data", "settings"):
        import_module(f"apps.{{app}}.{{name}}")
for package in ("hpcai.train", "hpcai.data", "hpcai.dist", "hpcai.parallel", "hpcai.nn", "hpcai.kernels"):
    for module in pkgutil.iter_modules(import_module(package).__path__):
        if not module.name.endswith("_triton"):
            import_module(f"{{package}}.{{module.name}}")
assert not torch.cuda.is_initialized()
print(*(name for name in {HEAVY} if name in sys.modules))
"""


def test_a_run_imports_neither_the_compiler_nor_mpi_nor_dali() -> None:
    """The compiler, sympy and distributed checkpoints of torch would be half of the files a process opens; CUDA stays unused."""
    process = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == []


def test_a_disabled_function_runs_eagerly_between_two_graphs() -> None:
    compiling: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    class Layer(torch.nn.Module):
        @disable_dynamo
        def apart(self, x: torch.Tensor) -> torch.Tensor:
            """Double the input."""
            return double(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apart(x + 1) + 1

    reference = type("Reference", (Layer,), {"apart": torch.compiler.disable(lambda self, x: double(x))})
    statistics = {}
    for kind in (Layer, reference):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(kind(), backend="eager")
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
        statistics[kind] = (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), len(counters["resumes"]))
    assert statistics[Layer] == statistics[reference] and statistics[Layer] == (2, 1, 1)
    assert compiling == [False] * 6
    assert Layer.apart.__name__ == "apart" and Layer.apart.__doc__ == "Double the input."
