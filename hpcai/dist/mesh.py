"""The mesh: named axes over the processes of a job. Every axis exists, with size 1 if it is unused."""

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

_AXES = AXES[:-1]  # all but `evaluate`; replicate first
_LONG_TIMEOUT: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(days=7)}  # for host transfers beside the training
_MEMO_KEY = "hpcai: background axis"  # key of Mesh.background_axis in the memo of a deep copy


class Dimension:
    """An ordered set of ranks of the job, and their process group, which the first use of ``group`` creates.

    ``purpose`` distinguishes groups of the same ranks. A dimension appends itself to the list ``created`` with its group.
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
            few = len(self.ranks) < 9
            ranks = ", ".join(map(str, self.ranks)) if few else f"{self.ranks[0]}, {self.ranks[1]} .. {self.ranks[-1]}"
            raise MeshError(f"ranks {ranks} first communicate within {state}; use it within its own start()")
        if not self.purpose and len(self.ranks) == job.size():
            return job
        name = group_name(self.ranks, self.purpose)
        if (group := _find_group(name)) is not None:  # created by another mesh of this process group
            return group
        # ``new_group`` with local synchronisation puts the number of groups of the process into the name. Members of one dimension
        # may be in different numbers of groups: links, dimensions of evaluating processes, groups of the user's own code.
        backend, store = c10d._world.pg_map[job]
        me, kwargs = self.ranks.index(torch_dist.get_rank()), {"timeout": self._timeout or default_pg_timeout}
        kind = c10d.Backend(self._backend or backend)
        group, _ = c10d._new_process_group_helper(len(self.ranks), me, list(self.ranks), kind, store, name, **kwargs)
        c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(self.ranks)}
        return group


def group_name(ranks: Sequence[int], purpose: str = "") -> Any:
    """Return the name of a group, the same on all its members, independent of their other groups."""
    digest = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"hpcai {purpose} {digest}"


def _find_group(name: str) -> torch_dist.ProcessGroup | None:
    return next((group for group, known in c10d._world.pg_names.items() if known == name), None)


@dataclass(frozen=True)
class Axis:
    """A named axis of the mesh, and the ``rank`` of this process along it. ``parent``: The axis of which it is a part, by name."""

    name: str
    size: int = 1
    rank: int = 0
    dimension: Dimension | None = None
    parent: str = ""

    @property
    def group(self) -> torch_dist.ProcessGroup | None:
        """The process group, or None if the size is 1. The first use creates it, a collective of its ranks, which create
        their groups in the same order. In a branch that not all of them take, in a thread and during the capture of a CUDA graph
        the group must exist already: call ``init_group`` before."""
        return None if self.dimension is None else self.dimension.group

    def init_group(self) -> "Axis":
        """Create the group, and return the axis."""
        if self.dimension is not None:
            _ = self.dimension.group
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Axis":
        """Return the same axis, or within ``Mesh.background_copy`` its background axis."""
        return memo[_MEMO_KEY](self.name) if _MEMO_KEY in memo and self.size > 1 else self


class Mesh:
    """Axes by name, such as ``mesh["replicate"]``. Code for many processes and for one is the same.

    The last axis varies fastest over the ranks, so that processes with the most communication share a node. ``peers`` spans all
    processes that train (or all that only evaluate), with ``rank`` of ``world``. ``model_parallel`` spans the processes of one
    replica of the model, which get the same samples. ``job`` spans all processes.

    Groups are created on first use (``Axis.group``), and axes of the same ranks share one. They are for the main thread, which
    uses them in the same order on all ranks; ``created`` lists them. Another thread needs groups of its own (``background_axis``,
    ``new_background_axis``). ``timeout`` is that of collectives in shared groups.

    With ``evaluate`` the last processes of the job only evaluate (``trains`` is False). They have axes of their own, with equal
    sizes of replicas. ``link`` connects each process of the first training replica to the evaluating ones with the same shard of
    the weights. Its group is created at once, because they use it at any time.

    ``expert`` is no axis of its own, but the size of neighbouring groups along ``replicate`` (``split``).

    Raises MeshError if the product of the sizes is not the number of processes.
    """

    def __init__(
        self, sizes: Mapping[str, int], world: int = 1, rank: int = 0, device: torch.device | None = None,
        timeout: timedelta | None = None,
    ) -> None:  # fmt: skip
        unknown = sorted(set(sizes) - {*AXES, "expert"})
        if unknown:
            raise MeshError(f"mesh has no axis {unknown[0]!r}; it has {', '.join(AXES)} and expert")
        self.device = device if device is not None else torch.device("cpu")
        if self.device.type == "cuda" and self.device.index is None:  # a new thread would use the first GPU
            self.device = torch.device("cuda", torch.cuda.current_device())
        evaluate = sizes.get("evaluate", 0)
        shape, train = mesh_shape(sizes, world)
        model_size = math.prod(size for name, size in shape.items() if name != "replicate")
        self.trains = rank < train
        if not self.trains:
            shape |= {"replicate": evaluate // model_size}
        self.sizes = shape | {"expert": sizes.get("expert", 1), "evaluate": evaluate}
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
        """Whether this is rank 0 of the job, which prints and writes."""
        return self.job.rank == 0

    def __getitem__(self, name: str) -> Axis:
        if name not in self._axes:
            raise MeshError(f"mesh has no axis {name!r}; it has {', '.join(self._axes)}")
        return self._axes[name]

    @property
    def used(self) -> tuple[Axis, ...]:
        """The axes of size > 1, outermost first."""
        return tuple(axis for axis in self._axes.values() if axis.size > 1)

    def split(self, name: str, within: int, setting: str) -> tuple[Axis, Axis]:
        """Split the axis ``name``, the ``parent``, into (between, within): ``within`` spans so many neighbouring ranks, such as a
        node, and ``between`` the ranks at the same position of each group. Raises MeshError if ``within`` does not divide the axis;
        processes that only evaluate then get two axes of size 1."""
        axis = self[name]
        if axis.size % within and self.trains:
            advice = f"set {setting} to a divisor of {axis.size}"
            raise MeshError(f"mesh.{name} has {axis.size} ranks, which do not divide into groups of {within}; {advice}")
        if within in (1, axis.size):
            single = Axis(f"{name} alone", parent=name)
            return (axis, single) if within == 1 else (single, axis)
        divides = axis.dimension is not None and axis.size % within == 0  # always, on training ranks
        ranks, offset, first = axis.dimension.ranks if axis.dimension else (), axis.rank % within, axis.rank // within * within
        outer, inner = (ranks[offset::within], ranks[first : first + within]) if divides else ([self._job_rank], [self._job_rank])
        between = self._axis_over(f"{name} between {within}s", outer, parent=name)
        return between, self._axis_over(f"{name} within {within}s", inner, parent=name)

    def subset(self, name: str, ranks: Sequence[int]) -> Axis:
        """Return an axis of some ``ranks`` of the axis ``name``, its ``parent``; on other ranks one of size 1."""
        axis, label = self[name], f"{name} at {', '.join(map(str, ranks))}"
        if axis.dimension is None or axis.rank not in ranks:
            return Axis(label, parent=name)
        return self._axis_over(label, [axis.dimension.ranks[rank] for rank in sorted(ranks)], parent=name)

    def flatten(self, *names: str) -> Axis:
        """Return the product of the axes ``names``, with ranks in the order of the mesh. Raises MeshError for an unknown name."""
        axes = {self[name].name for name in names}
        ordered = tuple(name for name in _AXES if name in axes)
        return self._axes_by_label.get(" x ".join(ordered)) or self._axis_along(ordered)

    def device_mesh(self, *axes: Axis) -> "DeviceMesh":
        """Return torch's DeviceMesh of ``axes``, outermost first, with their groups: a collective of all their ranks.
        Raises MeshError for an axis of size 1, which has no group, and for axes that have ranks in common."""
        if axes not in self._device_meshes:
            from torch.distributed.device_mesh import DeviceMesh

            ranks, names = torch.tensor(self._job_rank), tuple(axis.name for axis in axes)
            for axis in axes:
                if axis.dimension is None:
                    raise MeshError(f"a DeviceMesh over {axis.name}, which has size 1; leave it out")
                ranks = ranks.unsqueeze(-1) + torch.tensor(axis.dimension.ranks) - self._job_rank  # linear in coordinates
            if not axes or ranks.unique().numel() < ranks.numel():
                raise MeshError(f"a DeviceMesh over {' and '.join(names) or 'no axis'}: give disjoint axes")
            groups: list[Any] = [axis.group for axis in axes]
            self._device_meshes[axes] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], self.device.type, mesh=ranks, mesh_dim_names=names
            )
        return self._device_meshes[axes]

    def background_axis(self, name: str) -> Axis:
        """Return the axis with a gloo group of its own, for a background thread. The first call is a collective of its ranks."""
        return self._separate_axis(name, f"{name} background")

    def new_background_axis(self, name: str) -> Axis:
        """Like ``background_axis``, with a new group in each call, for a further thread. It is a collective of the axis."""
        dimension = self._axes_by_label[name].dimension
        labels = (f"{name} channel {number}" for number in itertools.count())
        new = (label for label in labels if dimension is None or _find_group(group_name(dimension.ranks, label)) is None)
        return self._separate_axis(name, next(new))

    def subgroup(self, purpose: str, ranks: Sequence[int]) -> Axis:
        """Return an axis of some ``ranks`` of ``peers``, with a gloo group of its own for ``purpose`` and a timeout of 7 days.
        It is a collective of these ranks only."""
        job_ranks = [self._job_rank - self.rank + rank for rank in ranks]
        label = group_name(job_ranks, purpose)
        return self._axes_by_label.get(label) or self._axis_over(label, job_ranks, purpose, **_LONG_TIMEOUT).init_group()

    def _separate_axis(self, name: str, label: str) -> Axis:
        axis = self._axes_by_label[name]
        return self._axis_over(
            label, axis.dimension.ranks if axis.dimension else [self._job_rank], label, axis.parent, backend="gloo"
        ).init_group()

    def background_copy(self, model: T) -> T:
        """Return a deep copy of ``model`` for a background thread, a collective of ``peers``. Its axes are background axes: two
        threads in one group would receive each other's data."""
        memo: dict[Any, Any] = {_MEMO_KEY: self.background_axis}
        return copy.deepcopy(model, memo)

    def check_axes(self, model: str, *names: str) -> None:
        """Raise MeshError if an axis not in ``names`` is used: ``model`` cannot be sharded on it, and ranks would repeat work."""
        for name, size in self.sizes.items():
            if size > 1 and name not in (*names, "evaluate"):
                supported = ", ".join(names) or "no axis"
                raise MeshError(f"mesh.{name} is {size}, but {model} can be sharded over {supported} only; set mesh.{name}=1")

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{n} {s}" for n, s in self.sizes.items() if s > (n != "evaluate")) + ")"
