"""Throughput in the units of a workload, and model FLOPs utilization (MFU)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hpcai.dist.gpus import find_peak_flops
from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig


@dataclass(frozen=True)
class SampleCost:
    """The cost of a sample, which a workload declares for the reports of a training.

    ``counts``: Its units by name, such as {"tokens": 4096}, which are reported per second. ``flops``: The FLOPs of its forward and
    backward pass, without recomputation, which are reported as MFU (Chowdhery et al., "PaLM", 2022): as a fraction of the peak rate
    of all GPUs. ``convention``: How they are counted, for readers.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    flops: float | None = None
    convention: str = ""

    def rates(self, samples_per_second: float, peak: float | None) -> dict[str, float]:
        """Return the fields of a report at this rate; ``peak``: FLOP/s of all GPUs, if it is known."""
        rates = {f"{name}_per_second": count * samples_per_second for name, count in self.counts.items()}
        return rates if self.flops is None or peak is None else rates | {"mfu": self.flops * samples_per_second / peak}


def peak_flops(cfg: StepConfig, mesh: Mesh) -> float | None:
    """Return the peak FLOP/s of the matrix products of a step on all GPUs that train, or None on a CPU, for an unknown GPU, and
    for float64 and float32 without TF32."""
    precision = {"bf16": "bf16", "bf16-params": "bf16", "fp32": "tf32" if cfg.tf32 is True else ""}.get(cfg.precision, "")
    if mesh.device.type != "cuda":
        return None
    peak = find_peak_flops(torch.cuda.get_device_name(mesh.device), "fp8" if cfg.matmul == "fp8" else precision)
    return None if peak is None else peak * mesh.world
