"""The mesh: named axes over the processes of a job, always all there, of size 1 when unused."""

import copy
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as torch_dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from hpcai.errors import MeshError
from hpcai.settings import AXES, mesh_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_CUT = AXES[:-1]  # those of processes that do the same work, replicate first
_PATIENT: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(days=7)}  # between hosts, while GPUs go on
_ASIDE = "hpcai: channels aside"  # where a deep copy finds Mesh.aside


class Line:
    """Ranks of the job, one behind another, and the group through which they talk: ``group`` makes it when it is first asked for.

    ``purpose`` keeps groups of the same ranks apart. ``made`` is where a line enters itself once it has its group.
    """

    def __init__(
        self, ranks: Sequence[int], purpose: str = "", backend: str | None = None, timeout: timedelta | None = None,
        made: "list[Line] | None" = None,
    ) -> None:  # fmt: skip
        self.ranks, self.purpose = tuple(ranks), purpose
        self._backend, self._timeout, self._made = backend, timeout, made
        self._job = torch_dist.group.WORLD
        self._group: torch_dist.ProcessGroup | None = None

    @property
    def group(self) -> torch_dist.ProcessGroup:
        if self._group is None:
            self._group = self._join()
            if self._made is not None:
                self._made.append(self)
        return self._group

    def _join(self) -> Any:
        job = self._job
        if job is None or job is not torch_dist.group.WORLD:
            which = "no process group" if torch_dist.group.WORLD is None else "another process group than that of their mesh"
            raise MeshError(f"ranks {_short(self.ranks)} first talk within {which}; use a mesh within its own start()")
        if not self.purpose and len(self.ranks) == job.size():
            return job
        name = group_name(self.ranks, self.purpose)
        if (found := _named(name)) is not None:  # another mesh of this process group has made it
            return found
        # ``new_group`` with local synchronisation puts the number of groups that a process is in into the name, and members of one
        # line may be in different numbers of others: of a link, of lines of processes that only evaluate, of a person's own.
        backend, store = c10d._world.pg_map[job]
        me, words = self.ranks.index(torch_dist.get_rank()), {"timeout": self._timeout or default_pg_timeout}
        kind = c10d.Backend(self._backend or backend)
        group, _ = c10d._new_process_group_helper(len(self.ranks), me, list(self.ranks), kind, store, name, **words)
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(self.ranks)}
        return group


def group_name(ranks: Sequence[int], purpose: str = "") -> Any:
    """The name of a group: the same on all its members, whatever other groups they are in."""
    told = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"hpcai {purpose} {told}"


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _named(name: str) -> torch_dist.ProcessGroup | None:
    return next((group for group, known in c10d._world.pg_names.items() if known == name), None)


@dataclass(frozen=True)
class Axis:
    """One named direction of the mesh. ``rank`` and ``size`` count along it; ``of`` names the axis that it is a part of."""

    name: str
    size: int = 1
    rank: int = 0
    line: Line | None = None
    of: str = ""

    @property
    def group(self) -> torch_dist.ProcessGroup | None:
        """None when the size is 1. The first use makes the group, by the ranks of the axis alone, and waits for all of them: they
        come to their first uses in the same order. So it may not be where only some of them pass (a rank without neighbours, a
        branch), nor in a thread, nor while a graph is captured: whoever builds such a thing calls ``meet`` before."""
        return None if self.line is None else self.line.group

    def meet(self) -> "Axis":
        """This axis, with its group made."""
        if self.line is not None:
            _ = self.line.group
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Axis":
        """A model's copy works over the same ranks: through the same channel, or through one of its own (``Mesh.beside``)."""
        return memo[_ASIDE](self.name) if _ASIDE in memo and self.size > 1 else self


class Mesh:
    """Axes by name: ``mesh["replicate"]``. Callers never ask whether a run is distributed.

    The last axis varies fastest over the ranks, so that processes which exchange most share a node. ``rank`` of ``world`` and
    ``everyone`` concern the processes that do the same work (agreement, checkpoints); ``copy`` spans those that hold one copy of
    the model together, and so get the same samples.
    Groups are made when they are first used (``Axis.group``), and axes of the same ranks share one: they are for the main thread,
    which uses them in the same order on all ranks. ``made`` lists these lines. A thread beside it has channels of its own
    (``aside``, ``channel``). ``timeout``: how long ranks wait for one another in any of the shared ones.
    With ``evaluate`` the last processes of the job only evaluate (``trains`` is False): they have axes of their own, cut like those
    of the others. ``link`` joins each process of the first copy that trains with those that evaluate its part of the weights; its
    group is there at once, since they come to it at any time.
    Raises MeshError when the sizes do not multiply to the number of processes.
    """

    def __init__(
        self, sizes: Mapping[str, int], world: int = 1, rank: int = 0, device: torch.device | None = None,
        timeout: timedelta | None = None,
    ) -> None:  # fmt: skip
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise MeshError(f"mesh has no axis {unknown[0]!r}; it has {', '.join(AXES)}")
        self.device = device if device is not None else torch.device("cpu")
        if self.device.type == "cuda" and self.device.index is None:  # its number: a thread begins with the first GPU
            self.device = torch.device("cuda", torch.cuda.current_device())
        evaluate = sizes.get("evaluate", 0)
        shape, train = mesh_shape(sizes, world)
        within = math.prod(size for name, size in shape.items() if name != "replicate")
        self.trains = rank < train
        if not self.trains:
            shape |= {"replicate": evaluate // within}
        self.sizes = shape | {"evaluate": evaluate}
        self.world, self.rank = (train, rank) if self.trains else (evaluate, rank - train)
        self._ranks = np.arange(rank - self.rank, rank - self.rank + self.world).reshape(tuple(shape.values()))
        self._timeout = timeout
        self.made: list[Line] = []
        self._lines: dict[tuple[tuple[int, ...], str], Line] = {}
        self._known: dict[str, Axis] = {}
        self._devices: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._me = rank
        self.job = self._among("job", range(world))
        self._axes = {name: self._along((name,)) for name in _CUT}
        self.copy, self.everyone = self._along(_CUT[1:], "copy"), self._along(_CUT, "everyone")
        self.link = Axis("link")
        if evaluate and (rank < within or not self.trains):
            place = self.rank % within
            self.link = self._among("link", [place, *range(train + place, world, within)], "link", **_PATIENT).meet()

    def _along(self, names: tuple[str, ...], label: str = "") -> Axis:
        """The axis along ``names`` together."""
        places = np.unravel_index(self.rank, self._ranks.shape)
        line = self._ranks[tuple(slice(None) if name in names else place for name, place in zip(_CUT, places))]
        return self._among(label or " x ".join(names), line.flatten().tolist())

    def _among(self, label: str, ranks: Sequence[int], purpose: str = "", of: str = "", **words: Any) -> Axis:
        line = None
        if len(ranks) > 1:
            words = words or {"timeout": self._timeout, "made": self.made}
            line = self._lines.setdefault((tuple(ranks), purpose), Line(ranks, purpose, **words))
        axis = Axis(label, len(ranks), ranks.index(self._me), line, of)
        return self._known.setdefault(label, axis)

    @property
    def is_first(self) -> bool:
        """Whether this is the one process that speaks and writes for all."""
        return self.job.rank == 0

    def __getitem__(self, name: str) -> Axis:
        if name not in self._axes:
            raise MeshError(f"mesh has no axis {name!r}; it has {', '.join(self._axes)}")
        return self._axes[name]

    @property
    def used(self) -> tuple[Axis, ...]:
        """The axes of size > 1 along which processes do the same work, outermost first."""
        return tuple(axis for axis in self._axes.values() if axis.size > 1)

    def split(self, name: str, within: int, setting: str) -> tuple[Axis, Axis]:
        """The axis ``name`` as two, (between, within): ``within`` neighbouring ranks of it, such as those of one node, and the
        ranks with the same place among theirs; both are ``of`` it. Raises MeshError when ``within`` does not divide the axis of
        those that train; those that only evaluate are split where it divides theirs.
        """
        axis = self[name]
        if axis.size % within and self.trains:
            raise MeshError(
                f"mesh.{name} has {axis.size} ranks, which do not divide into groups of {within}; "
                f"set {setting} to a divisor of {axis.size}"
            )
        if within in (1, axis.size):
            alone = Axis(f"{name} alone", of=name)
            return (axis, alone) if within == 1 else (alone, axis)
        between, inner = f"{name} between {within}s", f"{name} within {within}s"
        if between not in self._known:
            divides = axis.line is not None and axis.size % within == 0  # any number of processes may only evaluate
            line, place, first = axis.line.ranks if axis.line else (), axis.rank % within, axis.rank // within * within
            self._among(between, line[place::within] if divides else [self._me], of=name)
            self._among(inner, line[first : first + within] if divides else [self._me], of=name)
        return self._known[between], self._known[inner]

    def some(self, name: str, ranks: Sequence[int]) -> Axis:
        """Those of ``ranks`` along the axis ``name`` as an axis, ``of`` it; for the others one of size 1."""
        axis, label = self[name], f"{name} at {', '.join(map(str, ranks))}"
        if axis.line is None or axis.rank not in ranks:
            return Axis(label, of=name)
        return self._among(label, [axis.line.ranks[rank] for rank in sorted(ranks)], of=name)

    def over(self, *names: str) -> Axis:
        """The axes ``names`` together as one, whose ranks are in the order of the mesh. Raises MeshError for an unknown name."""
        axes = {self[name].name for name in names}
        ordered = tuple(name for name in _CUT if name in axes)
        return self._known.get(" x ".join(ordered)) or self._along(ordered)

    def device_mesh(self, *axes: Axis) -> "DeviceMesh":
        """torch's DeviceMesh over ``axes``, outermost first, through their groups. All of their ranks call this together.
        Raises MeshError for an axis of size 1, which has no group, and for axes that have ranks in common."""
        if axes not in self._devices:
            from torch.distributed.device_mesh import DeviceMesh

            ranks, names = torch.tensor(self._me), tuple(axis.name for axis in axes)
            for axis in axes:
                if axis.line is None:
                    raise MeshError(f"a DeviceMesh over {axis.name}, which has size 1: leave it out")
                ranks = ranks.unsqueeze(-1) + torch.tensor(axis.line.ranks) - self._me  # a rank is linear in its places
            if not axes or ranks.unique().numel() < ranks.numel():
                raise MeshError(f"a DeviceMesh over {' and '.join(names) or 'no axis'}: give axes that have no direction in common")
            groups: list[Any] = [axis.group for axis in axes]
            self._devices[axes] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], self.device.type, mesh=ranks, mesh_dim_names=names
            )
        return self._devices[axes]

    def aside(self, name: str) -> Axis:
        """The ranks of any axis with a channel of their own between hosts, for a thread beside the training. The first call is made
        by every rank of the axis together, and makes the channel."""
        return self._apart(name, f"{name} aside")

    def channel(self, name: str) -> Axis:
        """``aside`` with a further channel at each call, for one thread more: all ranks of the axis call it in the same order."""
        line = self._known[name].line
        labels = (f"{name} channel {number}" for number in itertools.count())
        return self._apart(name, next(label for label in labels if line is None or _named(group_name(line.ranks, label)) is None))

    def among(self, purpose: str, ranks: Sequence[int]) -> Axis:
        """Some of the ranks that do the same work, with a channel of their own between hosts for ``purpose``, where they wait for
        each other as long as it takes. They call this together, and nobody else does."""
        job = [self._me - self.rank + rank for rank in ranks]
        label = group_name(job, purpose)
        return self._known.get(label) or self._among(label, job, purpose, **_PATIENT).meet()

    def _apart(self, name: str, label: str) -> Axis:
        if label in self._known:
            return self._known[label]
        axis = self._known[name]
        return self._among(label, axis.line.ranks if axis.line else [self._me], label, axis.of, backend="gloo").meet()

    def beside(self, model: T) -> T:
        """A copy of ``model`` for a thread beside the training, with memory of its own. What it sends goes aside: two threads that
        use one channel would get each other's messages. All processes that do the same work call this together."""
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
