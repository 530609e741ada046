"""A model cut into stages along the axis pipeline: each rank keeps its own blocks, under the names of the whole model."""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.nn.deferred import tell_names
from hpcai.parallel.rows import set_apart


class Passed(nn.Module):
    """In place of a module that another stage has: gives its first argument back."""

    def forward(self, hidden: Any, *others: Any, **words: Any) -> Any:
        return hidden


class Stages:
    """The stages of ``model``, which is cut in place: modules ``first``, the list ``blocks`` and modules ``last``, one behind
    another, of which the rank ``rank_of[stage]`` keeps those of ``stage``. ``own``: the stages of this rank.

    Modules of other ranks become ``Passed``. What is in none of these modules stays on all ranks; its gradients, and those of a
    weight that several ranks share, are added over the ranks that hold it. There are ``per_rank`` stages on each rank, one for
    each turn around the axis, or, with ``back``, for the way there and back. ``sizes``: how many blocks each stage has; by default
    as even as can be, and where they are not, the last stage has fewest, then the first. Raises ConfigError for a name that is not
    in the model, and for sizes that do not fit.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, blocks: str, first: Sequence[str], last: Sequence[str], per_rank: int, back: bool,
        sizes: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.model, axis = model, mesh["pipeline"]
        found = dict(model.named_modules(remove_duplicate=False))
        if unknown := [name for name in (blocks, *first, *last) if name not in found]:
            names = ", ".join(list(found)[1:20])
            raise ConfigError(f"pipeline: {type(model).__name__} has no module {unknown[0]!r}; it has {names}")
        turns = [list(range(axis.size))[:: -1 if back and turn % 2 else 1] for turn in range(per_rank)]
        self.rank_of = [rank for turn in turns for rank in turn] if axis.size > 1 else [0]
        self.own = [stage for stage, rank in enumerate(self.rank_of) if rank == axis.rank]
        numbers = [f"{blocks}.{name}" for name, _ in found[blocks].named_children()]
        ends = [0, *accumulate(_sizes(sizes, len(numbers), len(self.rank_of), bool(first), bool(last)))]
        units = [numbers[a:b] for a, b in pairwise(ends)]
        units[0], units[-1] = [*first, *units[0]], [*units[-1], *last]
        self._stage_of = {unit: stage for stage, each in enumerate(units) for unit in each}
        self._twins: dict[int, list[tuple[nn.Module, nn.Module]]] = {}
        if axis.size > 1:
            self._cut(mesh)

    def module(self, stage: int) -> nn.Module:
        """The model as one of this rank's stages sees it: the same parameters, without the modules of its other stages. It is made
        on first use, so that it has what was done to the model until then."""
        if stage not in self._twins:
            self._twins[stage] = []
            _without(self.model, {unit for unit, other in self._stage_of.items() if other != stage}, self._twins[stage])
        for twin, of in self._twins[stage]:
            twin.training = of.training
        return self._twins[stage][0][0]

    def _cut(self, mesh: Mesh) -> None:
        axis, holders = mesh["pipeline"], dict[Tensor, set[int]]()
        tell_names(self.model)
        parameters = self.model.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *self.model.named_buffers(remove_duplicate=False)):
            within = {self.rank_of[stage] for unit, stage in self._stage_of.items() if name.startswith(f"{unit}.")}
            holders.setdefault(tensor, set()).update(within or range(axis.size))
        held = {tensor for tensor, ranks in holders.items() if axis.rank in ranks}
        for unit, stage in self._stage_of.items():
            if stage not in self.own:
                parent, _, name = unit.rpartition(".")
                names = _names(self.model.get_submodule(unit), held)
                self.model.get_submodule(parent)._modules[name] = Passed() if names is None else names
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            ranks = sorted(holders[tensor])
            shared = axis if len(ranks) == axis.size else mesh.subset("pipeline", ranks)
            if shared is not axis:
                set_apart(tensor, axis)
            if shared.size > 1 and isinstance(tensor, nn.Parameter):
                tensor.sum_axes = (*getattr(tensor, "sum_axes", ()), shared)  # type: ignore[attr-defined]


def evenly(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage where nobody says how many: the last one has fewest, then the first."""
    fullest = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0))
    return [blocks // stages + (fullest.index(stage) < blocks % stages) for stage in range(stages)]


def _sizes(sizes: Sequence[int] | None, blocks: int, stages: int, first: bool, last: bool) -> list[int]:
    """Blocks of each stage."""
    sizes = evenly(blocks, stages) if sizes is None else sizes
    least = [0 if (stage == 0 and first) or (stage == stages - 1 and last) else 1 for stage in range(stages)]
    if len(sizes) != stages or sum(sizes) != blocks or any(n < m for n, m in zip(sizes, least)):
        raise ConfigError(
            f"pipeline: {blocks} blocks cannot be divided among {stages} stages as {list(sizes)}; expected {stages} sizes with a "
            f"sum of {blocks}, none of them 0 where a stage has nothing else: choose fewer stages (mesh.pipeline) or other sizes"
        )
    return list(sizes)


def _names(module: nn.Module, held: Collection[Tensor]) -> nn.Module | None:
    """The names that tensors of ``held`` have within ``module``, with nothing else, or None where there are none: a weight that
    several stages share has all its names on each of them, as in a checkpoint."""
    found = nn.Module()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor in held:
            setattr(found, name, tensor) if isinstance(tensor, nn.Parameter) else found.register_buffer(name, tensor)
    for name, child in module.named_children():
        if (inner := _names(child, held)) is not None:
            found.add_module(name, inner)
    return found if any(True for _ in (*found.parameters(), *found.buffers())) else None


def _without(module: nn.Module, units: Collection[str], made: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """``module`` with the same submodules and parameters, but for ``units`` of it, which pass on what they are given. ``made``
    lists what had to be made for that, from without inwards, each with that of which it is a twin."""
    twin = object.__new__(type(module))
    twin.__dict__ = module.__dict__ | {"_modules": dict(module._modules)}
    made.append((twin, module))
    for name, child in module._modules.items():
        inner = [unit.removeprefix(f"{name}.") for unit in units if unit.startswith(f"{name}.")]
        if name in units:
            twin._modules[name] = Passed()
        elif inner and child is not None:
            twin._modules[name] = _without(child, inner, made)
    return twin
