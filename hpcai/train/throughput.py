"""Throughput in the units of a workload, and model FLOPs utilization (MFU)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcai.dist.gpus import SHEETS
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

    def facts(self, peak: float | None) -> dict[str, Any]:
        """Return the fields of the start of a run that explain its MFU."""
        facts = {"flops_per_sample": self.flops, "flops_convention": self.convention, "peak_flops": peak}
        return {} if self.flops is None or peak is None else facts


def peak_flops(cfg: StepConfig, mesh: Mesh) -> float | None:
    """Return the peak FLOP/s of the matrix products of a step on all GPUs that train, or None on a CPU, for an unknown GPU, and
    for float64 and float32 without TF32."""
    if mesh.device.type != "cuda":
        return None
    kinds = {"bf16": "bf16", "bf16-params": "bf16", "fp32": "tf32" if cfg.tf32 is True else "fp32"}
    kind, name = "fp8" if cfg.matmul == "fp8" else kinds.get(cfg.precision), torch.cuda.get_device_name(mesh.device)
    rates = [sheet["tflops"].get(kind) for sheet in SHEETS.values() if name in sheet["names"]]
    return rates[0] * 1e12 * mesh.world if rates and rates[0] else None
