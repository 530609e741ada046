"""The mesh: named axes over the processes of a job, always all there, of size 1 when unused."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from hpcai.errors import MeshError
from hpcai.settings import AXES

T = TypeVar("T")

_CUT = AXES[:-1]  # those of processes that do the same work, replicate first
_ASIDE = "hpcai: channels aside"  # where a deep copy finds Mesh.aside


@dataclass(frozen=True)
class Axis:
    """One named direction of the mesh. ``rank`` and ``size`` count along it; ``group`` is None when the size is 1."""

    name: str
    size: int = 1
    rank: int = 0
    group: torch_dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Axis":
        """A model's copy works over the same ranks: through the same channel, or through one of its own (``Mesh.beside``)."""
        return memo[_ASIDE](self.name) if _ASIDE in memo and self.size > 1 else self


class Mesh:
    """Axes by name: ``mesh["replicate"]``. Callers never ask whether a run is distributed.

    The last axis varies fastest over the ranks, so that processes which exchange most share a node. ``rank`` of ``world`` and
    ``everyone`` concern the processes that do the same work (agreement, checkpoints); ``copy`` spans those that hold one copy of
    the model together, and so get the same samples.
    With ``evaluate`` the last processes of the job only evaluate (``trains`` is False): they have axes of their own, cut like those
    of the others. ``link`` joins each process of the first copy that trains with those that evaluate its part of the weights.
    Raises MeshError when the sizes do not multiply to the number of processes.
    """

    def __init__(self, sizes: Mapping[str, int], world: int = 1, rank: int = 0, device: torch.device | None = None) -> None:
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise MeshError(f"mesh has no axis {unknown[0]!r}; it has {', '.join(AXES)}")
        self.device = device if device is not None else torch.device("cpu")
        cut = {name: sizes.get(name, 1) for name in _CUT}
        evaluate = sizes.get("evaluate", 0)
        if evaluate >= world and evaluate:
            raise MeshError(f"mesh.evaluate is {evaluate}, which leaves no process to train; {world} were started")
        parts = [_fill(cut, world - evaluate)]
        if evaluate:
            within = math.prod(size for name, size in parts[0].items() if name != "replicate")
            if evaluate % within:
                raise MeshError(f"mesh.evaluate is {evaluate}, but a copy of the model takes {within}; give a multiple of {within}")
            parts.append(parts[0] | {"replicate": evaluate // within})
        self.trains = rank < world - evaluate
        self.sizes = parts[0 if self.trains else 1] | {"evaluate": evaluate}
        self.job = Axis("job", world, rank, torch_dist.group.WORLD if world > 1 else None)
        self.world, self.rank = (world - evaluate, rank) if self.trains else (evaluate, rank - world + evaluate)
        first, shapes = 0, []
        for part in parts:
            count = math.prod(part.values())
            shapes.append(torch.arange(first, first + count).reshape([part[name] for name in _CUT]))
            first += count
        self._ranks = shapes
        self._lines: dict[str, list[list[int]]] = {}  # by axis: ranks of the job that are one behind another along it
        self._axes = {name: self._axis(name, (name,)) for name in _CUT}
        self.copy, self.everyone = self._axis("copy", _CUT[1:]), self._axis("everyone", _CUT)
        self.link = self._link() if evaluate else Axis("link")
        self._aside: dict[str, Axis] = {}
        self._split: dict[tuple[str, int], tuple[Axis, Axis]] = {}

    def _axis(self, label: str, names: tuple[str, ...], **words: Any) -> Axis:
        """The axis along ``names`` together. All processes of the job make the groups of all, in the same order."""
        dims = [AXES.index(name) for name in names]
        lines: list[list[int]] = []
        for ranks in self._ranks:
            count = math.prod(ranks.shape[d] for d in dims)
            lines += ranks.movedim(dims, list(range(-len(dims), 0))).reshape(-1, count).tolist()
        return self._among(label, lines, **words)

    def _among(self, label: str, lines: list[list[int]], **words: Any) -> Axis:
        self._lines[label] = lines
        mine = next((line for line in lines if self.job.rank in line), [self.job.rank])
        lines = [line for line in lines if len(line) > 1]
        if lines == [list(range(self.job.size))] and not words:
            group = self.job.group
        elif lines:
            group, _ = torch_dist.new_subgroups_by_enumeration(lines, **words)
        else:
            group = None
        return Axis(label, len(mine), mine.index(self.job.rank), group if len(mine) > 1 else None)

    def _link(self) -> Axis:
        train, evaluate = (ranks.flatten(1).T.tolist() for ranks in self._ranks)  # [place in a copy, copy]
        lines = [[ours[0], *theirs] for ours, theirs in zip(train, evaluate)]
        return self._among("link", lines, backend="gloo", timeout=timedelta(days=7))  # between hosts, while GPUs go on

    @property
    def is_first(self) -> bool:
        """Whether this is the one process that speaks and writes for all."""
        return self.job.rank == 0

    def __getitem__(self, name: str) -> Axis:
        if name not in self._axes:
            raise MeshError(f"mesh has no axis {name!r}; it has {', '.join(self._axes)}")
        return self._axes[name]

    def split(self, name: str, within: int, setting: str) -> tuple[Axis, Axis]:
        """The axis ``name`` as two, (between, within): ``within`` neighbouring ranks of it, such as those of one node, and the
        ranks with the same place among theirs. Every process of the job calls this together. Raises MeshError when it does not
        divide the axis of those that train; those that only evaluate are split where it divides theirs.
        """
        axis = self[name]
        if axis.size % within and self.trains:
            raise MeshError(
                f"mesh.{name} has {axis.size} ranks, which do not divide into groups of {within}; "
                f"set {setting} to a divisor of {axis.size}"
            )
        if within in (1, axis.size):
            alone = Axis(f"{name} alone")
            return (axis, alone) if within == 1 else (alone, axis)
        if (name, within) not in self._split:
            dim = AXES.index(name)
            inner: list[list[int]] = []
            outer: list[list[int]] = []
            for ranks in self._ranks:
                if ranks.shape[dim] % within:
                    continue  # any number of processes may only evaluate
                lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim] // within, within)
                inner += lines.flatten(0, 1).tolist()
                outer += lines.transpose(1, 2).flatten(0, 1).tolist()
            labels = f"{name} between {within}s", f"{name} within {within}s"
            self._split[name, within] = self._among(labels[0], outer), self._among(labels[1], inner)
        return self._split[name, within]

    def aside(self, name: str) -> Axis:
        """The ranks of any axis with a channel of their own between hosts, for a thread beside the training. The first call is made
        by every process of the job together."""
        if name not in self._aside:
            self._aside[name] = self._among(f"{name} aside", self._lines[name], backend="gloo")
        return self._aside[name]

    def beside(self, model: T) -> T:
        """A copy of ``model`` for a thread beside the training, with memory of its own. What it sends goes aside: two threads that
        use one channel would get each other's messages. Every process of the job calls this together."""
        memo: dict[Any, Any] = {_ASIDE: self.aside}
        return copy.deepcopy(model, memo)

    def only(self, model: str, *names: str) -> None:
        """Raise MeshError when an axis is used that ``model`` cannot be cut along: its ranks would repeat one another's work."""
        for name, size in self.sizes.items():
            if size > 1 and name not in (*names, "evaluate"):
                can = ", ".join(names) or "no axis"
                raise MeshError(f"mesh.{name} is {size}, but {model} can be spread over {can} only; set mesh.{name}=1")

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{n} {s}" for n, s in self.sizes.items() if s > (n != "evaluate")) + ")"


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
