"""GPUs and interconnects, by the data sheets of their vendors, and the efficiencies that are assumed.

Efficiencies are equal for all GPUs and networks, and were set before any plan was compared with a published run: large matrix
products in bfloat16 reach 0.7 of the peak rate, memory traffic 0.85 of the bandwidth, communication 0.8 of the link rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    host_launch: float = 0.0
    """seconds that the host needs to launch a kernel outside of a CUDA graph"""

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


def _gpu(
    name: str, float8: float | None, bf16: float, tf32: float, bandwidth: float, capacity: float, per_node: int, intra_node: float,
    inter_node: float,
) -> Machine:  # fmt: skip
    """Return a machine from data sheets: dense TFLOP/s in FP8, bfloat16 and TF32, memory (GB/s), memory (GB), links of a GPU
    (GB/s)."""
    sheet = {1: float8, 2: bf16, 4: tf32, 8: 60}
    return Machine(
        name, {width: _COMPUTE * rate * 1e12 for width, rate in sheet.items() if rate}, _MEMORY * bandwidth * 1e9, capacity * 1e9,
        per_node, Link(15e-6, _LINK * intra_node * 1e9), Link(20e-6, _LINK * inter_node * 1e9), host_launch=8e-6,
    )  # fmt: skip


MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("a100-40", None, 312, 156, 1555, 40, 4, 300, 25),  # Perlmutter: one Slingshot 11 of 200 Gb/s for each GPU
        _gpu("a100", None, 312, 156, 2039, 80, 4, 300, 25),
        _gpu("h100", 1979, 989, 495, 3352, 80, 8, 450, 50),  # Eos: one InfiniBand of 400 Gb/s for each GPU
        _gpu("h200", 1979, 989, 495, 4800, 141, 8, 450, 50),
        _gpu("gh200", 1979, 989, 495, 4000, 96, 4, 450, 25),  # Alps: one Slingshot 11 of 200 Gb/s for each module
        _gpu("b200", 4500, 2250, 1125, 8000, 180, 8, 900, 50),
    )
}


def find_machine(name: str, **changes: object) -> Machine:
    """Return the machine ``name`` with ``changes``. Raises ConfigError, with the list of machines, if it is unknown."""
    if name not in MACHINES:
        raise ConfigError(f"there is no machine {name!r}; expected one of {', '.join(MACHINES)}")
    return replace(MACHINES[name], **changes)  # type: ignore[arg-type]
