"""Split a model into pipeline stages: each rank keeps its own blocks, under their names in the full model."""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.nn.deferred_init import record_names
from hpcai.parallel.sharding import mark_exclusive


class StageOutput(nn.Module):
    """A placeholder for a module of another stage: returns its first argument."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


class Stages:
    """The stages of ``model``, which is split in place: a sequence of modules ``first``, the list ``blocks`` and modules ``last``.

    Rank ``rank_of[stage]`` holds ``stage``; ``local_stages`` are those of this rank. Modules of other ranks become ``StageOutput``.
    Modules outside the sequence stay on all ranks. Their gradients, and those of weights that several ranks share, are summed over
    the ranks that hold them. Ranks take stages in turns, ``per_rank`` each; with ``v_shaped`` every second turn is reversed.
    ``sizes``: Blocks of each stage, by default ``balanced_split``. Raises ConfigError for an unknown name or for sizes that do not
    fit.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, blocks: str, first: Sequence[str], last: Sequence[str], per_rank: int, v_shaped: bool,
        sizes: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.model, axis = model, mesh["pipeline"]
        modules = dict(model.named_modules(remove_duplicate=False))
        if unknown := [name for name in (blocks, *first, *last) if name not in modules]:
            names = ", ".join(list(modules)[1:20])
            raise ConfigError(f"pipeline: {type(model).__name__} has no module {unknown[0]!r}; it has {names}")
        turns = [list(range(axis.size))[:: -1 if v_shaped and turn % 2 else 1] for turn in range(per_rank)]
        self.rank_of = [rank for turn in turns for rank in turn] if axis.size > 1 else [0]
        self.local_stages = [stage for stage, rank in enumerate(self.rank_of) if rank == axis.rank]
        block_names = [f"{blocks}.{name}" for name, _ in modules[blocks].named_children()]
        ends = [0, *accumulate(_sizes(sizes, len(block_names), len(self.rank_of), bool(first), bool(last)))]
        units = [block_names[a:b] for a, b in pairwise(ends)]
        units[0], units[-1] = [*first, *units[0]], [*units[-1], *last]
        self._stage_of = {unit: stage for stage, each in enumerate(units) for unit in each}
        self._stage_models: dict[int, list[tuple[nn.Module, nn.Module]]] = {}
        if axis.size > 1:
            self._split(mesh)

    def module(self, stage: int) -> nn.Module:
        """Return the model for one of this rank's stages: the same parameters, without the modules of other stages. It is created
        on first use, so that it includes earlier changes of the model."""
        if stage not in self._stage_models:
            self._stage_models[stage] = []
            _copy_without(self.model, {unit for unit, other in self._stage_of.items() if other != stage}, self._stage_models[stage])
        for copied, original in self._stage_models[stage]:
            copied.training = original.training
        return self._stage_models[stage][0][0]

    def _split(self, mesh: Mesh) -> None:
        axis, holders = mesh["pipeline"], dict[Tensor, set[int]]()
        record_names(self.model)
        parameters = self.model.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *self.model.named_buffers(remove_duplicate=False)):
            ranks = {self.rank_of[stage] for unit, stage in self._stage_of.items() if name.startswith(f"{unit}.")}
            holders.setdefault(tensor, set()).update(ranks or range(axis.size))
        local = {tensor for tensor, ranks in holders.items() if axis.rank in ranks}
        for unit, stage in self._stage_of.items():
            if stage not in self.local_stages:
                parent, _, name = unit.rpartition(".")
                names = _keep_names(self.model.get_submodule(unit), local)
                self.model.get_submodule(parent)._modules[name] = StageOutput() if names is None else names
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            holding = sorted(holders[tensor])
            shared = axis if len(holding) == axis.size else mesh.subset("pipeline", holding)
            if shared is not axis:
                mark_exclusive(tensor, axis)
            if shared.size > 1 and isinstance(tensor, nn.Parameter):
                tensor.sum_axes = (*getattr(tensor, "sum_axes", ()), shared)  # type: ignore[attr-defined]


def balanced_split(blocks: int, stages: int) -> list[int]:
    """Return the number of blocks of each stage, as even as possible: the last stage has the fewest, then the first."""
    order = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0))
    return [blocks // stages + (order.index(stage) < blocks % stages) for stage in range(stages)]


def _sizes(sizes: Sequence[int] | None, blocks: int, stages: int, first: bool, last: bool) -> list[int]:
    sizes = balanced_split(blocks, stages) if sizes is None else sizes
    minimum = [0 if (stage == 0 and first) or (stage == stages - 1 and last) else 1 for stage in range(stages)]
    if len(sizes) != stages or sum(sizes) != blocks or any(n < m for n, m in zip(sizes, minimum)):
        raise ConfigError(
            f"pipeline: {blocks} blocks cannot be split into {stages} stages of {list(sizes)}; expected {stages} sizes with a sum "
            f"of {blocks}, and no 0 for a stage without other modules: choose fewer stages (mesh.pipeline) or other sizes"
        )
    return list(sizes)


def _keep_names(module: nn.Module, kept: Collection[Tensor]) -> nn.Module | None:
    """Return a module with only the names of tensors of ``kept`` in ``module``, or None if there are none: a weight that several
    stages share has all its checkpoint names on each of them."""
    holder = nn.Module()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor in kept:
            setattr(holder, name, tensor) if isinstance(tensor, nn.Parameter) else holder.register_buffer(name, tensor)
    for name, child in module.named_children():
        if (inner := _keep_names(child, kept)) is not None:
            holder.add_module(name, inner)
    return holder if any(True for _ in (*holder.parameters(), *holder.buffers())) else None


def _copy_without(module: nn.Module, units: Collection[str], copies: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """Return a shallow copy of ``module`` in which ``units`` are ``StageOutput``. ``copies`` collects (copy, original) of each
    copied module, outer first."""
    copied = object.__new__(type(module))
    copied.__dict__ = module.__dict__ | {"_modules": dict(module._modules)}
    copies.append((copied, module))
    for name, child in module._modules.items():
        inner = [unit.removeprefix(f"{name}.") for unit in units if unit.startswith(f"{name}.")]
        if name in units:
            copied._modules[name] = StageOutput()
        elif inner and child is not None:
            copied._modules[name] = _copy_without(child, inner, copies)
    return copied
