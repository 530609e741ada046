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

_AXES = AXES[:-1]  # those of processes that do the same work, replicate first
_LONG_TIMEOUT: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(days=7)}  # between hosts, while GPUs go on
_MEMO_KEY = "hpcai: channels aside"  # where a deep copy finds Mesh.aside


class Dimension:
    """Ranks of the job, one behind another, and the group through which they talk: ``group`` makes it when it is first asked for.

    ``purpose`` keeps groups of the same ranks apart. ``made`` is where a line enters itself once it has its group.
    """

    def __init__(
        self, ranks: Sequence[int], purpose: str = "", backend: str | None = None, timeout: timedelta | None = None,
        created: "list[Dimension] | None" = None,
    ) -> None:  # fmt: skip
        self.ranks, self.purpose = tuple(ranks), purpose
        self._backend, self._timeout, self._created = backend, timeout, created
        self._job = torch_dist.group.WORLD
        self._group: torch_dist.ProcessGroup | None = None

    @property
    def group(self) -> torch_dist.ProcessGroup:
        if self._group is None:
            self._group = self._create_group()
            if self._created is not None:
                self._created.append(self)
        return self._group

    def _create_group(self) -> Any:
        job = self._job
        if job is None or job is not torch_dist.group.WORLD:
            state = "no process group" if torch_dist.group.WORLD is None else "another process group than that of their mesh"
            raise MeshError(f"ranks {_format_ranks(self.ranks)} first talk within {state}; use a mesh within its own start()")
        if not self.purpose and len(self.ranks) == job.size():
            return job
        name = group_name(self.ranks, self.purpose)
        if (group := _find_group(name)) is not None:  # another mesh of this process group has made it
            return group
        # ``new_group`` with local synchronisation puts the number of groups that a process is in into the name, and members of one
        # line may be in different numbers of others: of a link, of lines of processes that only evaluate, of a person's own.
        backend, store = c10d._world.pg_map[job]
        me, kwargs = self.ranks.index(torch_dist.get_rank()), {"timeout": self._timeout or default_pg_timeout}
        kind = c10d.Backend(self._backend or backend)
        group, _ = c10d._new_process_group_helper(len(self.ranks), me, list(self.ranks), kind, store, name, **kwargs)
        c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(self.ranks)}
        return group


def group_name(ranks: Sequence[int], purpose: str = "") -> Any:
    """The name of a group: the same on all its members, whatever other groups they are in."""
    digest = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"hpcai {purpose} {digest}"


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _find_group(name: str) -> torch_dist.ProcessGroup | None:
    return next((group for group, known in c10d._world.pg_names.items() if known == name), None)


@dataclass(frozen=True)
class Axis:
    """One named direction of the mesh. ``rank`` and ``size`` count along it; ``of`` names the axis that it is a part of."""

    name: str
    size: int = 1
    rank: int = 0
    dimension: Dimension | None = None
    parent: str = ""

    @property
    def group(self) -> torch_dist.ProcessGroup | None:
        """None when the size is 1. The first use makes the group, by the ranks of the axis alone, and waits for all of them: they
        come to their first uses in the same order. So it may not be where only some of them pass (a rank without neighbours, a
        branch), nor in a thread, nor while a graph is captured: whoever builds such a thing calls ``meet`` before."""
        return None if self.dimension is None else self.dimension.group

    def init_group(self) -> "Axis":
        """This axis, with its group made."""
        if self.dimension is not None:
            _ = self.dimension.group
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Axis":
        """A model's copy works over the same ranks: through the same channel, or through one of its own (``Mesh.beside``)."""
        return memo[_MEMO_KEY](self.name) if _MEMO_KEY in memo and self.size > 1 else self


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
        model_size = math.prod(size for name, size in shape.items() if name != "replicate")
        self.trains = rank < train
        if not self.trains:
            shape |= {"replicate": evaluate // model_size}
        self.sizes = shape | {"evaluate": evaluate}
        self.world, self.rank = (train, rank) if self.trains else (evaluate, rank - train)
        self._ranks = np.arange(rank - self.rank, rank - self.rank + self.world).reshape(tuple(shape.values()))
        self._timeout = timeout
        self.created: list[Dimension] = []
        self._dimensions: dict[tuple[tuple[int, ...], str], Dimension] = {}
        self._axes_by_label: dict[str, Axis] = {}
        self._device_meshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._job_rank = rank
        self.job = self._axis_over("job", range(world))
        self._axes = {name: self._axis_along((name,)) for name in _AXES}
        self.model_parallel, self.peers = self._axis_along(_AXES[1:], "model_parallel"), self._axis_along(_AXES, "peers")
        self.link = Axis("link")
        if evaluate and (rank < model_size or not self.trains):
            position = self.rank % model_size
            self.link = self._axis_over(
                "link", [position, *range(train + position, world, model_size)], "link", **_LONG_TIMEOUT
            ).init_group()

    def _axis_along(self, names: tuple[str, ...], label: str = "") -> Axis:
        """The axis along ``names`` together."""
        position = np.unravel_index(self.rank, self._ranks.shape)
        ranks = self._ranks[tuple(slice(None) if name in names else place for name, place in zip(_AXES, position))]
        return self._axis_over(label or " x ".join(names), ranks.flatten().tolist())

    def _axis_over(self, label: str, ranks: Sequence[int], purpose: str = "", parent: str = "", **kwargs: Any) -> Axis:
        dimension = None
        if len(ranks) > 1:
            kwargs = kwargs or {"timeout": self._timeout, "created": self.created}
            dimension = self._dimensions.setdefault((tuple(ranks), purpose), Dimension(ranks, purpose, **kwargs))
        axis = Axis(label, len(ranks), ranks.index(self._job_rank), dimension, parent)
        return self._axes_by_label.setdefault(label, axis)

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
            single = Axis(f"{name} alone", parent=name)
            return (axis, single) if within == 1 else (single, axis)
        between, inner = f"{name} between {within}s", f"{name} within {within}s"
        if between not in self._axes_by_label:
            divides = axis.dimension is not None and axis.size % within == 0  # any number of processes may only evaluate
            ranks, offset, first = axis.dimension.ranks if axis.dimension else (), axis.rank % within, axis.rank // within * within
            self._axis_over(between, ranks[offset::within] if divides else [self._job_rank], parent=name)
            self._axis_over(inner, ranks[first : first + within] if divides else [self._job_rank], parent=name)
        return self._axes_by_label[between], self._axes_by_label[inner]

    def subset(self, name: str, ranks: Sequence[int]) -> Axis:
        """Those of ``ranks`` along the axis ``name`` as an axis, ``of`` it; for the others one of size 1."""
        axis, label = self[name], f"{name} at {', '.join(map(str, ranks))}"
        if axis.dimension is None or axis.rank not in ranks:
            return Axis(label, parent=name)
        return self._axis_over(label, [axis.dimension.ranks[rank] for rank in sorted(ranks)], parent=name)

    def flatten(self, *names: str) -> Axis:
        """The axes ``names`` together as one, whose ranks are in the order of the mesh. Raises MeshError for an unknown name."""
        axes = {self[name].name for name in names}
        ordered = tuple(name for name in _AXES if name in axes)
        return self._axes_by_label.get(" x ".join(ordered)) or self._axis_along(ordered)

    def device_mesh(self, *axes: Axis) -> "DeviceMesh":
        """torch's DeviceMesh over ``axes``, outermost first, through their groups. All of their ranks call this together.
        Raises MeshError for an axis of size 1, which has no group, and for axes that have ranks in common."""
        if axes not in self._device_meshes:
            from torch.distributed.device_mesh import DeviceMesh

            ranks, names = torch.tensor(self._job_rank), tuple(axis.name for axis in axes)
            for axis in axes:
                if axis.dimension is None:
                    raise MeshError(f"a DeviceMesh over {axis.name}, which has size 1: leave it out")
                ranks = ranks.unsqueeze(-1) + torch.tensor(axis.dimension.ranks) - self._job_rank  # a rank is linear in its places
            if not axes or ranks.unique().numel() < ranks.numel():
                raise MeshError(f"a DeviceMesh over {' and '.join(names) or 'no axis'}: give axes that have no direction in common")
            groups: list[Any] = [axis.group for axis in axes]
            self._device_meshes[axes] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], self.device.type, mesh=ranks, mesh_dim_names=names
            )
        return self._device_meshes[axes]

    def background_axis(self, name: str) -> Axis:
        """The ranks of any axis with a channel of their own between hosts, for a thread beside the training. The first call is made
        by every rank of the axis together, and makes the channel."""
        return self._separate_axis(name, f"{name} aside")

    def new_background_axis(self, name: str) -> Axis:
        """``aside`` with a further channel at each call, for one thread more: all ranks of the axis call it in the same order."""
        dimension = self._axes_by_label[name].dimension
        labels = (f"{name} channel {number}" for number in itertools.count())
        return self._separate_axis(
            name, next(label for label in labels if dimension is None or _find_group(group_name(dimension.ranks, label)) is None)
        )

    def subgroup(self, purpose: str, ranks: Sequence[int]) -> Axis:
        """Some of the ranks that do the same work, with a channel of their own between hosts for ``purpose``, where they wait for
        each other as long as it takes. They call this together, and nobody else does."""
        job_ranks = [self._job_rank - self.rank + rank for rank in ranks]
        label = group_name(job_ranks, purpose)
        return self._axes_by_label.get(label) or self._axis_over(label, job_ranks, purpose, **_LONG_TIMEOUT).init_group()

    def _separate_axis(self, name: str, label: str) -> Axis:
        if label in self._axes_by_label:
            return self._axes_by_label[label]
        axis = self._axes_by_label[name]
        return self._axis_over(
            label, axis.dimension.ranks if axis.dimension else [self._job_rank], label, axis.parent, backend="gloo"
        ).init_group()

    def background_copy(self, model: T) -> T:
        """A copy of ``model`` for a thread beside the training, with memory of its own. What it sends goes aside: two threads that
        use one channel would get each other's messages. All processes that do the same work call this together."""
        memo: dict[Any, Any] = {_MEMO_KEY: self.background_axis}
        return copy.deepcopy(model, memo)

    def check_axes(self, model: str, *names: str) -> None:
        """Raise MeshError when an axis is used that ``model`` cannot be cut along: its ranks would repeat one another's work."""
        for name, size in self.sizes.items():
            if size > 1 and name not in (*names, "evaluate"):
                supported = ", ".join(names) or "no axis"
                raise MeshError(f"mesh.{name} is {size}, but {model} can be spread over {supported} only; set mesh.{name}=1")

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{n} {s}" for n, s in self.sizes.items() if s > (n != "evaluate")) + ")"
