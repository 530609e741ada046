"""Parallel diffusion models. Samples of a U-Net are sharded along space: maps over ``height``, volumes over ``depth`` and
``height``. Heads of DiT, Flux and SD3, and channels of their feed-forward layers, are sharded over ``tensor``.

Each rank has its pixels of a sharded sample at every resolution, and the full condition. All ranks along ``tensor`` have all tokens
between layers, and replicated modulations.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcai.dist.collectives import all_reduce
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.diffusion.blocks import SpatialAttention, Upsample, from_tokens, to_tokens
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import UNetConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux, SingleStreamBlock
from hpcai.models.diffusion.grid import Grid
from hpcai.models.diffusion.model import Diffusion
from hpcai.models.diffusion.sd3 import SD3
from hpcai.models.diffusion.unet import UNet, pixel_shuffle, pixel_unshuffle
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.spatial import Sizes, SpatialLayer, SpatialPartition, parallelize_spatial, plan_size
from hpcai.parallel.tensor import column_parallel, row_parallel

Model = TypeVar("Model", Diffusion, UNet, DiT, Flux, SD3)
_OUTPUTS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "net.0.proj")
_INPUTS = ("to_out.0", "to_add_out", "net.2")


def parallelize(model: Model, mesh: Mesh, size: Sequence[int] = ()) -> Model:
    """Shard a model, or its network alone, over the mesh, in place. ``size``: sides of a sample, if the settings do not have them.
    Raises MeshError if the mesh does not fit."""
    network: Any = model.network if isinstance(model, Diffusion) else model
    if isinstance(model, Diffusion) and model.mean is not None:
        parallelize(model.mean, mesh, size)
    if isinstance(network, UNet):
        _shard_pixels(network, mesh, size or getattr(model.cfg, "size", ())[1:])  # the settings of a U-Net alone have none
    else:
        _shard_heads(network, mesh)
    return model


class Slabs(Grid):
    """Slab decomposition of the samples of a U-Net, in whole patches; some ranks may have one patch more.   S/n of S pixels each"""

    def __init__(self, cfg: UNetConfig, mesh: Mesh) -> None:
        self._patch, self._divisor = cfg.patch, cfg.patch * 2 ** (len(cfg.channels) - 1)
        self.cut = SpatialPartition.from_axes({name: mesh[name] for name in ("depth", "height")}, cfg.dims)
        self._sizes: dict[Sizes, Sizes] = {}  # local size -> full size
        self._network: UNet | None = None

    def shard_network(self, network: UNet, size: Sequence[int]) -> None:
        """Shard ``network`` for samples with sides ``size``. Raises MeshError if they are not divisible."""
        patches = self._patches(size)
        for module in network.modules():
            if isinstance(module, Upsample):
                module.is_sharded = True
        axes = {axis.name: axis for axis in self.cut.axes.values()}
        inputs = partial(_example, network)
        self.cut = parallelize_spatial(network, axes, patches, inputs=inputs, kinds={SpatialAttention: _ShardedAttention})
        network.grid, self._network = self, network
        self._sizes[self._local_size(size)] = tuple(size)

    def expect(self, size: Sequence[int]) -> None:
        if self._local_size(size) not in self._sizes and self._network is not None:
            plan_size(self._network, self.cut, self._patches(size), inputs=partial(_example, self._network))
            self._sizes[self._local_size(size)] = tuple(size)

    def full_size(self, local: Sequence[int]) -> tuple[int, ...]:
        return self._sizes[tuple(local)] if self.cut.active else super().full_size(local)

    def box(self, size: Sequence[int]) -> tuple[slice, ...]:
        if not self.cut.active:
            return super().box(size)
        ranges = self.cut.local_slices([n // self._patch for n in size])
        return tuple(slice(self._patch * patches.start, self._patch * patches.stop) for patches in ranges)

    def shard(self, x: Tensor) -> Tensor:
        box: Any = (..., *self.box(x.shape[2:]))
        return x[box]

    def gather(self, x: Tensor) -> Tensor:
        patches = self._patches(self.full_size(x.shape[2:]))
        return pixel_shuffle(self.cut.gather(pixel_unshuffle(x, self._patch), patches), self._patch) if self.cut.active else x

    def mean(self, x: Tensor) -> Tensor:
        fraction = x.shape[2:].numel() / torch.Size(self.full_size(x.shape[2:])).numel()
        local = super().mean(x) * fraction
        return all_reduce(local, *self.cut.axes.values(), identity_backward=True) if self.cut.active else local

    def std(self, x: Tensor) -> Tensor:
        count, shape = x.shape[1] * torch.Size(self.full_size(x.shape[2:])).numel(), (-1, *(1,) * (x.ndim - 1))
        centred = x - self.mean(x).view(shape)
        return (self.mean(centred.square()) * (count / (count - 1))).sqrt().view(shape)

    def _local_size(self, size: Sequence[int]) -> Sizes:
        return tuple(dim.stop - dim.start for dim in self.box(size))

    def _patches(self, size: Sequence[int]) -> Sizes:
        """Return the number of patches along each dim. Raises MeshError for sides that not all levels can halve."""
        if any(n % self._divisor for n in size):
            sides, axis = " x ".join(map(str, size)), next(iter(self.cut.axes.values()))
            raise MeshError(
                f"mesh.{axis.name} is {axis.size}, and samples have {sides} pixels; sharding needs multiples of {self._divisor}, "
                f"which all levels of the network halve; take other samples, or set mesh.{axis.name} to 1"
            )
        return tuple(n // self._patch for n in size)


def _example(network: UNet, size: Sequence[int]) -> tuple[Any, ...]:
    """Return example inputs of a network, one sample of ``size`` patches, on the meta device."""
    cfg, dtype = network.cfg, network.conv_in.weight.dtype
    empty = partial(torch.empty, device="meta", dtype=dtype)
    sides = [cfg.patch * n for n in size]
    condition: dict[str, Tensor | None] = {
        "classes": torch.empty(1, device="meta", dtype=torch.long) if cfg.classes else None,
        "parameters": empty(1, cfg.parameters) if cfg.parameters else None,
        "tokens": empty(1, 1, cfg.tokens) if cfg.tokens else None,
        "field": empty(1, cfg.field, *sides) if cfg.field else None,
        "fine": empty(1, cfg.fine, *sides) if cfg.fine else None,
        "pooled": empty(1, cfg.pooled) if cfg.pooled else None,
        "sizes": empty(1, 6) if cfg.sizes else None,
    }
    return empty(1, cfg.inputs, *sides), empty(1), Condition(**condition)


class _ShardedAttention(SpatialLayer):
    """Attention of local queries to all keys and values, which are gathered in one all-gather."""

    def spatial_shape(self, x: Tensor, *args: Any, **kwargs: Any) -> Sequence[int]:
        return args[2]

    def forward_shard(self, x: Tensor, size: Sizes, *args: Any, **kwargs: Any) -> Tensor:
        k, v, sizes = args
        kv = to_tokens(self.partition.gather(from_tokens(torch.cat((k, v), -1), sizes), size))
        return super(SpatialLayer, self).forward(x, *kv.chunk(2, -1), size)


def _shard_pixels(network: UNet, mesh: Mesh, size: Sequence[int]) -> None:
    mesh.check_axes("UNet", "replicate", "depth", "height")
    grid = Slabs(network.cfg, mesh)
    if not grid.cut.axes:
        return
    axis = next(iter(grid.cut.axes.values()))
    if not size:
        raise MeshError(f"mesh.{axis.name} is {axis.size}: give the size of the samples to shard")
    if network.cfg.dropout:
        raise MeshError(
            f"mesh.{axis.name} is {axis.size} and model.unet.dropout {network.cfg.dropout:g}, which would drop the same "
            f"pixels of each shard; set dropout to 0, or mesh.{axis.name} to 1"
        )
    grid.shard_network(network, size)


def _shard_heads(network: Any, mesh: Mesh) -> None:
    mesh.check_axes(type(network).__name__, "replicate", "tensor")
    tensor, cfg = mesh["tensor"], network.cfg
    if cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {cfg.heads} heads; take a divisor of them")
    for name, module in network.named_modules():
        if name.endswith(_OUTPUTS):
            column_parallel(module, tensor)
        elif name.endswith(_INPUTS):
            row_parallel(module, tensor)
        elif isinstance(module, SingleStreamBlock):  # inputs of its last layer: attention and feed-forward layer, concatenated
            row_parallel(module.proj_out, tensor, sizes=(cfg.width, 4 * cfg.width))
        elif isinstance(module, RMSNorm):  # applied to the local heads
            sum_gradients_over(module, tensor)
