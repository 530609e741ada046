"""The optimizer and its state cut over the copies of a model: each rank updates its share of the weights.

Rajbhandari et al., "ZeRO", SC20 (stage 1 and 2); the blocks of NVIDIA apex's distributed optimizers. Per bucket: the gradients are
scattered as sums while the backward pass goes on, each rank updates its share, and the new weights are gathered while the next
forward pass begins. On the wire: 2 (G-1)/G of the parameters per step and rank, as an all-reduce alone would need.
With ``within`` (the ranks of one node) shares are held within that group and summed between the groups.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.collectives import ReduceScatter, all_gather
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError
from hpcai.nn.frozen import Frozen
from hpcai.parallel.replicate import Bucket, GradientSums, start_equal
from hpcai.parallel.rows import ALONE, Part, Row, Share, alike, place_of, row_of, sum_axes, within


class _CutBucket(Bucket):
    """A bucket that is cut into one share for each rank of ``cut``; each rank updates its own."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool, dtype: torch.dtype,
        copies: tuple[Axis, ...], cut: Axis,
    ) -> None:  # fmt: skip
        super().__init__(parameters, axes, decays, dtype, copies, pieces=cut.size)
        self.cut, size = cut, len(self.weights) // cut.size
        self.first, self.last = cut.rank * size, (cut.rank + 1) * size
        self.own = torch.zeros(size, dtype=dtype, device=self.flat.device)
        self.coming: Any = None

    def row(self) -> Row:
        parts = []
        for part in self.parts:
            begin, end = (min(max(at, self.first), self.last) for at in (part.start, part.start + part.length))
            first = begin - part.start if begin < end else 0
            parts.append(replace(part, begin=first, length=end - begin, start=begin - self.first))
        own = self.weights[self.first : self.last]
        return Row(parts, own, lambda: self.own, self.decays, self.copies, self.cut, self.first)

    def launch(self) -> None:
        self.work = ReduceScatter(self.own, self.flat, self.cut)

    def wait(self) -> None:
        if self.work is None:
            raise RuntimeError("a gradient bucket was waited for before its sum was started")
        self.work.wait()
        self.work = None
        for axis in self.axes:
            torch_dist.all_reduce(self.own, group=axis.group)

    def show(self) -> None:
        """No rank has the sum of whole gradients."""

    def spread(self) -> None:
        own = self.weights[self.first : self.last]
        self.coming = all_gather(self.weights, own, self.cut)

    def arrive(self) -> None:
        if self.coming is not None:
            self.coming.wait()
            self.coming = None


class ShardedSums(GradientSums):
    """``GradientSums`` whose rows are this rank's shares; ``spread()`` gathers the new weights.

    ``axes``: replicate as two axes, (between, within); the ranks of the second hold the shares (``Mesh.split``). None: all copies
    hold them. ``overlap``: who asks a module for a weight waits until it has come; otherwise ``spread()`` returns when all are
    there.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, bucket_mb: float = 25.0, decays: Collection[str] = (), wide: bool = False,
        axes: tuple[Axis, Axis] | None = None, overlap: bool = True,
    ) -> None:  # fmt: skip
        self.between, self.cut = axes or (ALONE, mesh["replicate"])
        self.overlap, self._cut = overlap, list[_CutBucket]()
        super().__init__(model, mesh, bucket_mb, decays, wide)
        if overlap:
            bucket_of = {p: bucket for bucket in self._cut for p in bucket.parameters}
            for module in model.modules():
                own = module.named_parameters(recurse=False, remove_duplicate=False)
                if needed := {name: bucket_of[p] for name, p in own if p in bucket_of}:
                    module._parameters = _Arriving(module._parameters, needed)

    def _bucket(self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool) -> Bucket:
        first = next(iter(parameters.values()))
        if self.mesh["replicate"] not in axes:  # each copy has its own, such as its experts: there are no shares
            return super()._bucket(parameters, axes, decays)
        others = self._together(tuple(axis for axis in axes if axis.name != "replicate"))
        others = (self.between, *others) if self.between.size > 1 else others
        copies = alike(first, self.mesh, self.cut, self.between)
        self._cut.insert(0, _CutBucket(parameters, others, decays, self._dtype(first, axes), copies, self.cut))
        return self._cut[0]

    def spread(self) -> None:
        for bucket in self._cut:  # in the order of the forward pass
            bucket.spread()
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        for bucket in self._cut:
            bucket.arrive()


class _Arriving(dict[str, Any]):
    """A module's parameters, by name: who asks for one waits until its numbers have come. ``module.weight`` asks here."""

    def __init__(self, parameters: dict[str, Any], buckets: dict[str, _CutBucket]) -> None:
        super().__init__(parameters)
        self._buckets = buckets

    def __getitem__(self, name: str) -> Any:
        if bucket := self._buckets.get(name):
            bucket.arrive()
        return super().__getitem__(name)

    def values(self) -> Any:
        return self._all().values()

    def items(self) -> Any:
        return self._all().items()

    def _all(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def __reduce__(self) -> Any:  # a copy has numbers of its own, which do not come from elsewhere
        return dict, (self._all(),)


class FullySharded:
    """torch's ``fully_shard`` behind the interface of ``GradientSums``: weights, gradients and optimizer state are all cut, and a
    block's weights are gathered when it runs. For models whose weights do not fit; ``ShardedSums`` is faster where they do.

    ``blocks`` are gathered one by one, the rest of the model together. ``narrow``: it computes in bfloat16, and frozen weights are
    held so, except for modules that say they are ``wide``; sums are float32. Of parameters without memory (``nn.deferred``) each
    process draws its share alone.
    """

    last = True  # gradients are summed after each backward pass, since there is no room for whole ones

    def __init__(
        self, model: nn.Module, mesh: Mesh, decays: Collection[str] = (), blocks: Sequence[nn.Module] = (),
        axes: tuple[Axis, Axis] | None = None, narrow: bool = False,
    ) -> None:  # fmt: skip
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model, self.mesh = model, mesh
        self.buckets: list[Bucket] = []
        self.between, self.cut = axes or (ALONE, mesh["replicate"])
        named = dict(model.named_parameters())
        if held := next((name for name, part in model.named_modules() if isinstance(part, Frozen)), None):
            why = f"step.shard is weights, but {held} holds weights that are not trained in fewer bits (lora.frozen)"
            raise ConfigError(f"{why}; set step.shard=optimizer or none")
        start_equal(model, mesh)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.contiguous()  # fully_shard takes no other order
        if own := [name for name, p in named.items() if "replicate" in place_of(p).directions]:
            raise ConfigError(f"step.shard is weights, but each copy has a {own[0]} of its own; set step.shard=optimizer or none")
        full = {p for part in _wide(model) for p in part.parameters()}
        for parameter in model.parameters():
            if narrow and not parameter.requires_grad and parameter not in full:  # there is no update that would need more
                parameter.data = parameter.data.bfloat16()
        devices = mesh.device_mesh(*(axis for axis in (self.between, self.cut) if axis.size > 1))
        dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if narrow else {}
        policies = {each: MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False) for each in blocks}
        policies |= {each: MixedPrecisionPolicy(cast_forward_inputs=False) for each in _wide(model)} if narrow else {}
        policies[model] = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        # What was recorded of a parameter is gone with it.
        self._places = {name: place_of(p) for name, p in named.items()}
        self._copies = {name: alike(p, mesh, self.cut, self.between) for name, p in named.items()}
        notes = {name: p.deferred for name, p in named.items() if p.is_meta}  # type: ignore[attr-defined]
        added = {name: tuple(a for a in sum_axes(p) if a.name not in place_of(p).directions) for name, p in named.items()}
        self._parts = list(policies)  # from within outwards
        for module, policy in policies.items():
            fully_shard(module, mesh=devices, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # gradients are sums, as everywhere here
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # the sum uses no operation that only NCCL has
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        if notes:
            model._apply(lambda x: torch.empty_like(x, device=mesh.device) if x.is_meta else x.to(mesh.device))
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._axes = [(p, added[name]) for name, p in self._named.items() if added[name]]
        for name, p in model.named_parameters():
            if name in notes:
                first, *rest = self._places[name].stretches
                notes[name].write(p.detach().to_local(), (within(first, *self._share(p)), *rest), None)  # type: ignore[attr-defined]
        self.rows = [self._row(name, p, name in decays) for name, p in self._named.items()]

    def _share(self, parameter: Tensor) -> tuple[int, int]:
        """The first and last + 1 of what this process has of a parameter, along dim 0."""
        length, step = parameter.shape[0], -(-parameter.shape[0] // self.cut.size)
        return min(self.cut.rank * step, length), min((self.cut.rank + 1) * step, length)

    def _row(self, name: str, parameter: Any, decays: bool) -> Row:
        length, (begin, end) = parameter.shape[0], self._share(parameter)
        inner = parameter.numel() // max(length, 1)
        part = Part(name, parameter, begin * inner, (end - begin) * inner, 0, self._places[name])

        def gradient() -> Tensor | None:
            if parameter.grad is None:
                return None
            local = parameter.grad.to_local()
            return row_of(local, local.contiguous())

        local = parameter.to_local().detach()
        return Row([part], row_of(local, local), gradient, decays, self._copies[name], self.cut, begin * inner)

    def zero(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def finish(self) -> None:
        if not self.last:  # a pipeline's schedule is over, in which no backward pass was known to be the last
            _sum_what_is_left(self.model)
        for parameter, axes in self._axes:
            for axis in axes:
                if parameter.grad is not None:
                    torch_dist.all_reduce(parameter.grad.to_local(), group=axis.group)  # type: ignore[attr-defined]

    def spread(self) -> None:
        """Forget gathered weights that a forward pass without a backward one left: a block gathers its weights when it runs."""
        for module in self._parts:
            module.reshard()  # type: ignore[operator]

    def settle(self) -> None:
        """Nothing is under way."""

    def idle(self) -> dict[str, Share]:
        """What this process has of weights that are not trained."""
        rows = [self._row(name, p, False) for name, p in self.model.named_parameters() if not p.requires_grad]
        return {row.parts[0].name: Share(row.parts[0], row.weights, row.copies) for row in rows}

    def alike(self) -> list[tuple[str, Tensor, tuple[Axis, ...]]]:
        """``GradientSums.alike`` of this process's shares: the groups that divide the weights hold the same."""
        named: Any = self.model.named_parameters()
        return [(name, p.detach().to_local(), self._copies[name]) for name, p in named]


def _sum_what_is_left(module: nn.Module) -> None:
    """Add the gradients of backward passes without sums, as torch's own pipeline schedules do at their end."""
    from torch.distributed.pipelining import PipelineStage

    stage: Any = SimpleNamespace(submod=module)
    PipelineStage.perform_reduce_grad(stage, grad_scale_factor=1)


def _wide(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that say they are ``wide``."""
    return [module] if getattr(module, "wide", False) else [found for child in module.children() for found in _wide(child)]
