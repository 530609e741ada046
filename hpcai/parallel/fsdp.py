"""Fully sharded data parallelism, and optimizers sharded over replicas: each rank updates its shard of the weights.

Rajbhandari et al., "ZeRO", SC20 (stages 1 and 2); the blocks of NVIDIA apex's distributed optimizers. Each bucket is
reduce-scattered during the backward pass, each rank updates its shard, and the new weights are all-gathered while the next forward
pass begins: 2 (G-1)/G of the parameters per step and rank, as in an all-reduce. In hybrid sharding weights are sharded within a
group (the ranks of one node) and replicated between groups.
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
from hpcai.nn.deferred_init import keep_attributes
from hpcai.nn.quantized import QuantizedLinear
from hpcai.parallel.data_parallel import Bucket, GradientReducer, broadcast_parameters
from hpcai.parallel.sharding import ALONE, FlatParameter, FlatShard, FlatView, flatten, replica_axes, shard_spec, subrange, sum_axes


class _ShardedBucket(Bucket):
    """A bucket that is sharded over ``shard_axis``; each rank updates its shard."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool, dtype: torch.dtype,
        replica_axes: tuple[Axis, ...], shard_axis: Axis,
    ) -> None:  # fmt: skip
        super().__init__(parameters, axes, decays, dtype, replica_axes, shards=shard_axis.size)
        self.shard_axis, size = shard_axis, len(self.weights) // shard_axis.size
        self.first, self.last = shard_axis.rank * size, (shard_axis.rank + 1) * size
        self.gradient_shard = torch.zeros(size, dtype=dtype, device=self.gradients.device)
        self.gather_work: Any = None

    def flat_parameter(self) -> FlatParameter:
        views = []
        for view in self.flat_views:
            begin, end = (min(max(i, self.first), self.last) for i in (view.flat_offset, view.flat_offset + view.length))
            param_offset = begin - view.flat_offset if begin < end else 0
            views.append(replace(view, param_offset=param_offset, length=end - begin, flat_offset=begin - self.first))
        local = self.weights[self.first : self.last]
        return FlatParameter(views, local, lambda: self.gradient_shard, self.decays, self.replica_axes, self.shard_axis, self.first)

    def launch(self) -> None:
        self.work = ReduceScatter(self.gradient_shard, self.gradients, self.shard_axis)

    def wait(self) -> None:
        self.work.wait()
        self.work = None
        for axis in self.axes:
            torch_dist.all_reduce(self.gradient_shard, group=axis.group)

    def assign_gradients(self) -> None:
        """Do nothing: no rank has full gradients."""

    def all_gather(self) -> None:
        local = self.weights[self.first : self.last]
        self.gather_work = all_gather(self.weights, local, self.shard_axis)

    def wait_gather(self) -> None:
        if self.gather_work is not None:
            self.gather_work.wait()
            self.gather_work = None


class ShardedReducer(GradientReducer):
    """A ``GradientReducer`` whose flat parameters are this rank's shards; ``all_gather_parameters()`` gathers the new weights.

    ``axes``: Hybrid sharding, replicate split into (between, within) by ``Mesh.split``: weights are sharded over the second. None:
    over all replicas. ``overlap``: Access to a parameter waits for its all-gather; otherwise ``all_gather_parameters()`` waits.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, bucket_mb: float = 25.0, decays: Collection[str] = (), float32_sums: bool = False,
        axes: tuple[Axis, Axis] | None = None, overlap: bool = True, matrices: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.replicate_axis, self.shard_axis = axes or (ALONE, mesh["replicate"])
        self.overlap, self._sharded = overlap, list[_ShardedBucket]()
        super().__init__(model, mesh, bucket_mb, decays, float32_sums, matrices=matrices)
        if overlap:
            bucket_of = {p: bucket for bucket in self._sharded for p in bucket.parameters}
            for module in model.modules():
                parameters = module.named_parameters(recurse=False, remove_duplicate=False)
                if buckets := {name: bucket_of[p] for name, p in parameters if p in bucket_of}:
                    module._parameters = _LazyParameters(module._parameters, buckets)

    def _bucket(self, parameters: dict[str, nn.Parameter], axes: tuple[Axis, ...], decays: bool) -> Bucket:
        first = next(iter(parameters.values()))
        if self.mesh["replicate"] not in axes:  # replicas hold different elements, such as experts: not sharded
            return super()._bucket(parameters, axes, decays)
        others = self._merge_axes(tuple(axis for axis in axes if axis.name != "replicate"))
        others = (self.replicate_axis, *others) if self.replicate_axis.size > 1 else others
        replicas = replica_axes(first, self.mesh, self.shard_axis, self.replicate_axis)
        self._sharded.insert(0, _ShardedBucket(parameters, others, decays, self._sum_dtype(first, axes), replicas, self.shard_axis))
        return self._sharded[0]

    def all_gather_parameters(self) -> None:
        for bucket in self._sharded:  # in the order of the forward pass
            bucket.all_gather()
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        for bucket in self._sharded:
            bucket.wait_gather()


class _LazyParameters(dict[str, Any]):
    """The parameters of a module by name. Access, which ``module.weight`` takes too, waits for the all-gather."""

    def __init__(self, parameters: dict[str, Any], buckets: dict[str, _ShardedBucket]) -> None:
        super().__init__(parameters)
        self._buckets = buckets

    def __getitem__(self, name: str) -> Any:
        if bucket := self._buckets.get(name):
            bucket.wait_gather()
        return super().__getitem__(name)

    def values(self) -> Any:
        return self._gathered().values()

    def items(self) -> Any:
        return self._gathered().items()

    def _gathered(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def __reduce__(self) -> Any:  # a copied module has its own weights, which are not gathered
        return dict, (self._gathered(),)


class FSDP:
    """torch's ``fully_shard`` with the interface of ``GradientReducer``: weights, gradients and optimizer state are sharded, and
    the weights of a block are gathered when it runs. For models whose weights do not fit; ``ShardedReducer`` is faster if they do.

    ``blocks`` are gathered one at a time, the rest of the model together. ``bf16``: Compute in bfloat16, and hold frozen weights in
    it, except in modules with the attribute ``wide``; gradients are summed in float32. Each rank initializes only its shard of
    deferred parameters (``deferred_init``). Weights in which replicas differ, such as experts, are not sharded further.
    """

    is_last_backward = True  # every backward pass reduces: there is no memory for full gradients

    def __init__(
        self, model: nn.Module, mesh: Mesh, decays: Collection[str] = (), blocks: Sequence[nn.Module] = (),
        axes: tuple[Axis, Axis] | None = None, bf16: bool = False,
    ) -> None:  # fmt: skip
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model, self.mesh = model, mesh
        self.buckets: list[Bucket] = []
        self.replicate_axis, self.shard_axis = axes or (ALONE, mesh["replicate"])
        named = dict(model.named_parameters())
        if quantized := next((name for name, part in model.named_modules() if isinstance(part, QuantizedLinear)), None):
            why = f"step.shard is weights, but {quantized} holds quantized weights (lora.base_dtype)"
            raise ConfigError(f"{why}; set step.shard=optimizer or none")
        broadcast_parameters(model, mesh)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.contiguous()  # as fully_shard requires
        float32 = {p for part in _wide_modules(model) for p in part.parameters()}
        for parameter in model.parameters():
            if bf16 and not parameter.requires_grad and parameter not in float32:  # it is never updated
                parameter.data = parameter.data.bfloat16()
        device_mesh = mesh.device_mesh(*(axis for axis in (self.replicate_axis, self.shard_axis) if axis.size > 1))
        dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
        policies = {each: MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False) for each in blocks}
        policies |= {each: MixedPrecisionPolicy(cast_forward_inputs=False) for each in _wide_modules(model)} if bf16 else {}
        policies[model] = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        policies = {part: policies[part] for part in reversed(list(model.modules())) if part in policies}  # inner first
        # fully_shard replaces parameters, and their attributes are lost.
        self._specs = {name: shard_spec(p) for name, p in named.items()}
        ignored = {p for p in named.values() if "replicate" in shard_spec(p).axis_names}
        pair = (self.shard_axis, self.replicate_axis)
        self._replicas = {name: replica_axes(p, mesh, *(() if p in ignored else pair)) for name, p in named.items()}
        traces = {name: p.init_trace for name, p in named.items() if p.is_meta}  # type: ignore[attr-defined]
        extra_sums = {name: tuple(a for a in sum_axes(p) if a.name not in shard_spec(p).axis_names) for name, p in named.items()}
        self._fsdp_modules = list(policies)
        for module, policy in policies.items():
            fully_shard(module, mesh=device_mesh, mp_policy=policy, ignored_params=ignored)
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # gradients are sums, not means
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # without operations that only NCCL has
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        if traces:
            with keep_attributes(model):
                model._apply(lambda x: torch.empty_like(x, device=mesh.device) if x.is_meta else x.to(mesh.device))
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._extra_sums = [(p, extra_sums[name]) for name, p in self._trainable.items() if extra_sums[name]]
        for name, p in model.named_parameters():
            if name in traces:
                first, *rest = self._specs[name].ranges
                traces[name].write(_local(p), (subrange(first, *self._local_range(p)), *rest))
        self.flat_parameters = [self._flat_parameter(name, p, name in decays) for name, p in self._trainable.items()]

    def _local_range(self, parameter: Tensor) -> tuple[int, int]:
        """Return the range of dim 0 of a parameter that this rank holds."""
        length, shard_size = parameter.shape[0], -(-parameter.shape[0] // self.shard_axis.size)
        if not hasattr(parameter, "to_local"):
            return 0, length
        return min(self.shard_axis.rank * shard_size, length), min((self.shard_axis.rank + 1) * shard_size, length)

    def _flat_parameter(self, name: str, parameter: Any, decays: bool) -> FlatParameter:
        length, (begin, end) = parameter.shape[0], self._local_range(parameter)
        inner = parameter.numel() // max(length, 1)
        view = FlatView(name, parameter, begin * inner, (end - begin) * inner, 0, self._specs[name])

        def gradient() -> Tensor | None:
            if parameter.grad is None:
                return None
            local = _local(parameter.grad)
            return flatten(local, local.contiguous())

        local, axis = _local(parameter), self.shard_axis if hasattr(parameter, "to_local") else ALONE
        return FlatParameter([view], flatten(local, local), gradient, decays, self._replicas[name], axis, begin * inner)

    def zero_grad(self) -> None:
        for parameter in self._trainable.values():
            parameter.grad = None

    def reduce(self) -> None:
        if not self.is_last_backward:  # after a pipeline schedule, which marks no backward pass as the last: reduce as it would
            from torch.distributed.pipelining import PipelineStage

            stage: Any = SimpleNamespace(submod=self.model)
            PipelineStage.perform_reduce_grad(stage, grad_scale_factor=1)
        for parameter, axes in self._extra_sums:
            for axis in axes:
                if parameter.grad is not None:
                    torch_dist.all_reduce(_local(parameter.grad), group=axis.group)

    def all_gather_parameters(self) -> None:
        """Free gathered weights of a forward pass without a backward pass: a block gathers its weights when it runs."""
        for module in self._fsdp_modules:
            module.reshard()  # type: ignore[operator]

    def wait(self) -> None:
        """Do nothing: no collective is running."""

    def frozen_shards(self) -> dict[str, FlatShard]:
        """Return this rank's shards of weights that are not trained."""
        flat_parameters = [self._flat_parameter(name, p, False) for name, p in self.model.named_parameters() if not p.requires_grad]
        return {row.views[0].name: FlatShard(row.views[0], row.weights, row.replica_axes) for row in flat_parameters}

    def replicated_tensors(self) -> list[tuple[str, Tensor, tuple[Axis, ...]]]:
        """``GradientReducer.replicated_tensors`` of this rank's shards, which all groups hold."""
        return [(name, _local(p), self._replicas[name]) for name, p in self.model.named_parameters()]


def _local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or a tensor that is not sharded."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _wide_modules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with the attribute ``wide``, which compute in float32."""
    return [module] if getattr(module, "wide", False) else [wide for child in module.children() for wide in _wide_modules(child)]
