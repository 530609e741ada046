"""The mesh: named axes over the processes of a job, always all there, of size 1 when unused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh

from hpcai.errors import MeshError

AXES = ("replicate", "axial", "depth", "tensor", "pipeline", "expert", "context", "evaluate")


@dataclass(frozen=True)
class Axis:
    """One named direction of the mesh. ``rank`` and ``size`` count along it; ``group`` is None when the size is 1."""

    name: str
    size: int = 1
    rank: int = 0
    group: torch_dist.ProcessGroup | None = None


class Mesh:
    """Axes by name: ``mesh["replicate"]``. Callers never ask whether a run is distributed.

    The last axis varies fastest over the ranks, so that processes which exchange most share a node.
    ``everyone`` spans all processes, for what concerns the job as a whole (agreement, checkpoints); ``copy`` spans those that
    hold one copy of the model together, and so get the same samples.
    Raises MeshError when the sizes do not multiply to the number of processes.
    """

    def __init__(self, sizes: Mapping[str, int], world: int = 1, rank: int = 0, device: torch.device | None = None) -> None:
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise MeshError(f"mesh has no axis {unknown[0]!r}; it has {', '.join(AXES)}")
        self.world, self.rank = world, rank
        self.device = device if device is not None else torch.device("cpu")
        self.sizes = _fill({name: sizes.get(name, 1) for name in AXES}, world)
        self._axes = {name: Axis(name) for name in AXES}
        self.everyone, self.copy = Axis("everyone"), Axis("copy")
        if world > 1:
            self.everyone = Axis("everyone", world, rank, torch_dist.group.WORLD)
            used = {name: size for name, size in self.sizes.items() if size > 1}
            devices = init_device_mesh(self.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
            for name, size in used.items():
                part = devices[name]
                self._axes[name] = Axis(name, size, part.get_local_rank(), part.get_group())
            within = tuple(name for name in used if name not in ("replicate", "evaluate"))
            if within:
                part = devices[within]._flatten("copy") if len(within) > 1 else devices[within[0]]
                self.copy = Axis("copy", part.size(), part.get_local_rank(), part.get_group())

    @property
    def is_first(self) -> bool:
        """The one process that speaks and writes for all."""
        return self.rank == 0

    def __getitem__(self, name: str) -> Axis:
        if name not in self._axes:
            raise MeshError(f"mesh has no axis {name!r}; it has {', '.join(self._axes)}")
        return self._axes[name]

    def only(self, model: str, *names: str) -> None:
        """Raise MeshError when an axis is used that ``model`` cannot be cut along: its ranks would repeat one another's work."""
        for name, size in self.sizes.items():
            if size > 1 and name not in names:
                can = ", ".join(names) or "no axis"
                raise MeshError(f"mesh.{name} is {size}, but {model} can be spread over {can} only; set mesh.{name}=1")

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{n} {s}" for n, s in self.sizes.items() if s > 1) + ")"


def _fill(sizes: dict[str, int], world: int) -> dict[str, int]:
    fixed = math.prod(size for size in sizes.values() if size > 0)
    free = [name for name, size in sizes.items() if size < 0]
    if len(free) > 1:
        raise MeshError(f"mesh: {' and '.join(free)} are both -1; only one axis can take the rest of the processes")
    if world % fixed or (not free and world != fixed):
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "of size 1"
        need = f"a multiple of {fixed} processes" if free else f"{fixed} process{'es' if fixed > 1 else ''}"
        verb = "was" if world == 1 else "were"
        raise MeshError(f"mesh {shape} needs {need}, but {world} {verb} started")
    return {name: (world // fixed if size < 0 else size) for name, size in sizes.items()}
