"""Low-rank adapters of linear layers (Hu et al., "LoRA", 2021), sharded like their layers: y = W x + s B A x with frozen W."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError
from hpcai.nn.lm_head import LMHead
from hpcai.nn.quantized import QuantizedLinear
from hpcai.nn.weights import PretrainedMixin
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.sharding import ALONE, shard_spec, sum_axes
from hpcai.parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel, dequantize, quantize, row_parallel
from hpcai.settings import LoRAConfig, longest_end

Model = TypeVar("Model", bound=PretrainedMixin)
Cfg = TypeVar("Cfg", bound=LoRAConfig)


class Adapter(nn.Module):
    """The adapter s B A of a linear layer, added to its output, and sharded like the layer."""

    float8 = False  # matrices too small to gain from FP8

    def __init__(self, linear: nn.Linear, cfg: LoRAConfig) -> None:
        super().__init__()
        device = None if linear.weight.device.type == "meta" else linear.weight.device  # ``deferred`` draws them later, too
        kwargs: dict[str, Any] = {"device": device, "dtype": linear.weight.dtype, "bias": False}
        spec, reduced = shard_spec(linear.weight), sum_axes(linear.weight)
        outputs, inputs = spec.global_shape
        self.lora_A, self.lora_B = nn.Linear(inputs, cfg.rank, **kwargs), nn.Linear(cfg.rank, outputs, **kwargs)
        self.drop, self.scale = nn.Dropout(cfg.dropout), cfg.scale
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        for axis in reduced:
            sum_gradients_over(self, axis if not axis.parent else ALONE)  # subaxes are set when the layers are sharded
        if isinstance(linear, ColumnParallelLinear):
            over, groups = spec.axes[0] if spec.axes else ALONE, None
            if over.parent or over is ALONE:  # some ranks, or all, have the same outputs
                same = (axis for axis in reduced if axis.parent == over.parent and (axis.parent or axis.name) == linear.axis.name)
                groups = over, next(same)
            column_parallel(self.lora_B, linear.axis, sequence=linear.sequence, groups=groups)
        elif isinstance(linear, RowParallelLinear):
            parts = spec.ranges[1] if len(spec.ranges[1]) > 1 else ()
            row_parallel(self.lora_A, linear.axis, linear.sequence, [(last - first) * linear.axis.size for first, last in parts])

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.lora_B(self.lora_A(self.drop(x)))

    @property
    def delta_weight(self) -> Tensor:
        """s B A, the local shard.   [C', C]"""
        wide = torch.promote_types(self.lora_A.weight.dtype, torch.float32)
        return self.scale * (self.lora_B.weight.detach().to(wide) @ self.lora_A.weight.detach().to(wide))


def adapt(model: Model, cfg: LoRAConfig) -> Model:
    """Add adapters to the layers of ``cfg.targets``, in place, and freeze all other weights, in ``cfg.base_dtype``, but those of
    ``cfg.modules_to_save``. Collective over all ranks of a sharded model. Raises ConfigError for a name of no module, and if the
    model already has adapters."""
    if model.adapters is not None:
        raise ConfigError("the model has adapters; merge them before it gets others")
    heads = {name: x.weight for name, x in model.named_modules() if isinstance(x, LMHead)}
    linears = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear) and name not in heads}
    owners = [(name.rpartition(".")[0], parameter) for name, parameter in model.named_parameters()]  # a tied one has another name
    others = {owner for owner, p in owners if owner in heads or all(p is not x for x in heads.values())} - linears.keys()
    for field, modules in (("targets", linears), ("modules_to_save", others)):
        for name in getattr(cfg, field):
            if not any(longest_end(module, [name]) for module in modules):
                known = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
                raise ConfigError(f"{field} has {name}; expected some of {known}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(cfg.saves(name))
    for name, linear in linears.items():
        if (layer := cfg.for_layer(name)) is not None:
            adapter: Any = Adapter(linear, layer).train(model.training)
            linear.adapter, adapter.hook = adapter, linear.register_forward_hook(_add_adapter)
        if cfg.base_dtype != "as they are":
            quantize(linear, cfg.base_dtype)
    model.adapters = cfg
    return model


def merge(model: Model) -> Model:
    """Add the adapters to their weights and remove them; all parameters of the result require gradients.

    Quantized weights are dequantized, and keep the rounded values with which the adapters were trained. To add adapters to other
    weights, use ``load_adapter``.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "adapter")]
    dtypes = {layer.adapter.lora_A.weight.dtype for layer in layers}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            dequantize(module, *dtypes)
    for linear in layers:
        with torch.no_grad():
            linear.weight.copy_(linear.weight.to(linear.adapter.delta_weight.dtype) + linear.adapter.delta_weight)
        linear.adapter.hook.remove()
        del linear.adapter
    model.adapters = None
    return model.requires_grad_(True)


def load_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the tensors of ``state`` to the parameters of the same names, of a sharded one the local shard."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            for offsets, box in shard_spec(parameter).boxes([0] * parameter.ndim, parameter.shape) if name in state else ():
                sizes = parameter[box].shape
                parameter[box] = state[name][tuple(slice(a, a + n) for a, n in zip(offsets, sizes))].to(parameter)


def with_layers(cfg: Cfg, layers: Mapping[str, tuple[int, float]], names: Iterable[str]) -> Cfg:
    """Return ``cfg`` with rank and alpha of each layer. The last part of a name is a target if all ``names`` with it are layers."""
    others = {name.rpartition(".")[2] for name in names if name not in layers}
    rank, alpha = (Counter(each[n] for each in layers.values()).most_common(1)[0][0] for n in range(2))
    return cfg.model_copy(update={
        "rank": rank, "rank_pattern": {name: each for name, (each, _) in layers.items() if each != rank},
        "alpha": alpha, "alpha_pattern": {name: each for name, (_, each) in layers.items() if each != alpha},
        "targets": tuple(sorted({name if (end := name.rpartition(".")[2]) in others else end for name in layers})),
    })  # fmt: skip


def _add_adapter(linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter: Any = linear.adapter
    return output + adapter(args[0])
