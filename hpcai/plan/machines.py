"""GPUs and interconnects, by the data sheets of their vendors (hpcai.dist.gpus), and the efficiencies that are assumed.

Efficiencies are equal for all GPUs and networks, and were set before any plan was compared with a published run: large matrix
products in bfloat16 reach 0.7 of the peak rate, memory traffic 0.85 of the bandwidth, communication 0.8 of the link rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcai.dist.gpus import SHEETS
from hpcai.errors import ConfigError

_COMPUTE, _MEMORY, _LINK = 0.7, 0.85, 0.8  # efficiencies


@dataclass(frozen=True)
class Link:
    """The link of a GPU: latency in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """A kind of GPU in a kind of node. Rates are per second, after efficiency."""

    name: str
    flops: dict[int, float]
    """FLOP of matrix products, by bytes of an element: 1 (FP8, if supported), 2 (bfloat16), 4 (float32, or TF32), 8 (float64)"""
    bandwidth: float
    """bytes read and written"""
    capacity: float
    """bytes of memory"""
    gpus_per_node: int
    """GPUs of a node"""
    intra_node: Link
    """between GPUs of a node"""
    inter_node: Link
    """between nodes, for each GPU"""
    kernel_overhead: float = 2e-6
    """seconds per kernel in a CUDA graph in addition to memory traffic and FLOP: its launch, and the tail of its last blocks"""
    slowdown: float = 1.0
    """measured factor by which kernels are slower than at these rates, without launches and communication"""

    def communication_time(self, name: str, size: int, ranks: Sequence[int]) -> tuple[float, float]:
        """Return seconds of a communication of ``size`` bytes (see ``Communication``), and bytes sent by each rank: the bounds of
        Thakur et al. ("Optimization of collective communication operations in MPICH", 2005). Each doubling of the nodes adds the
        latency once. A ring crosses from node to node once, on the links of all GPUs of a node together."""
        n, nodes = len(ranks), len({rank // self.gpus_per_node for rank in ranks})
        link = self.intra_node if nodes == 1 else self.inter_node
        around = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "reduce-scatter": n - 1}
        sent = size * (around[name] if name in around else {"all-to-all": (n - 1) / n, "receive": 0}.get(name, 1))
        rate = min(self.intra_node.bandwidth, link.bandwidth * n / nodes) if name in around else link.bandwidth
        return link.latency * (1 + math.log2(nodes)) + sent / rate, sent


def _machine(name: str, sheet: dict[str, Any]) -> Machine:
    widths = {"fp8": 1, "bf16": 2, "tf32": 4, "fp64": 8}
    flops = {widths[kind]: _COMPUTE * rate * 1e12 for kind, rate in {**sheet["tflops"], "fp64": 60}.items()}
    intra_node, inter_node = (_LINK * sheet[place] * 1e9 for place in ("intra_node", "inter_node"))
    return Machine(
        name, flops, _MEMORY * sheet["bandwidth"] * 1e9, sheet["capacity"] * 1e9, sheet["gpus_per_node"], Link(15e-6, intra_node),
        Link(20e-6, inter_node),
    )  # fmt: skip


MACHINES = {name: _machine(name, sheet) for name, sheet in SHEETS.items()}


def find_machine(name: str, **changes: object) -> Machine:
    """Return the machine ``name`` with ``changes``. Raises ConfigError, with the list of machines, if it is unknown."""
    if name not in MACHINES:
        raise ConfigError(f"there is no machine {name!r}; expected one of {', '.join(MACHINES)}")
    return replace(MACHINES[name], **changes)  # type: ignore[arg-type]
