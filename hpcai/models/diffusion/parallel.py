"""A diffusion model over the mesh. Samples of a U-Net are cut along their places: maps over ``height``, volumes over ``depth`` and
``height``. Heads of DiT and Flux, and channels of their feed-forward parts, are cut over ``tensor``.

Of a cut sample each process has its own places, at every resolution, and the whole of what it is conditioned on. All ranks along
``tensor`` have all tokens between layers, and modulations whole, which they compute alike.
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
from hpcai.models.diffusion.unet import UNet, pixel_shuffle, pixel_unshuffle
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.spatial import Sizes, SpatialLayer, SpatialPartition, parallelize_spatial, plan_size
from hpcai.parallel.tensor import column_parallel, row_parallel

Model = TypeVar("Model", Diffusion, UNet, DiT, Flux)
_OUTPUTS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "net.0.proj")
_INPUTS = ("to_out.0", "to_add_out", "net.2")


def parallelize(model: Model, mesh: Mesh, size: Sequence[int] = ()) -> Model:
    """``model``, or its network alone, in place, cut over the mesh. ``size``: the places of a sample, where the settings do not say
    them. Raises MeshError for a mesh that does not fit."""
    network: Any = model.network if isinstance(model, Diffusion) else model
    if isinstance(network, UNet):
        _shard_pixels(network, mesh, size or getattr(model.cfg, "size", ())[1:])  # of a U-Net alone the settings say none
    else:
        _shard_heads(network, mesh)
    return model


# ---- places


class Slabs(Grid):
    """The places of a U-Net's samples that a process holds: whole patches, as many as others have, or one more.

    S/n of S places along each dim
    """

    def __init__(self, cfg: UNetConfig, mesh: Mesh) -> None:
        self._patch, self._divisor = cfg.patch, cfg.patch * 2 ** (len(cfg.channels) - 1)
        self.cut = SpatialPartition.from_axes({name: mesh[name] for name in ("depth", "height")}, cfg.dims)
        self._sizes: dict[Sizes, Sizes] = {}  # of whole samples, by what this process holds of them
        self._network: UNet | None = None

    def shard_network(self, network: UNet, size: Sequence[int]) -> None:
        """Cut ``network``, whose samples have ``size`` places. Raises MeshError where that cannot be."""
        patches = self._patches(size)
        for part in network.modules():
            if isinstance(part, Upsample):
                part.is_sharded = True
        axes = {axis.name: axis for axis in self.cut.axes.values()}
        self.cut = parallelize_spatial(network, axes, patches, inputs=partial(_meta_inputs, network), kinds={SpatialAttention: _ShardedSpatialAttention})
        network.grid, self._network = self, network
        self._sizes[self._local_size(size)] = tuple(size)

    def expect(self, size: Sequence[int]) -> None:
        if self._local_size(size) not in self._sizes and self._network is not None:
            plan_size(self._network, self.cut, self._patches(size), inputs=partial(_meta_inputs, self._network))
            self._sizes[self._local_size(size)] = tuple(size)

    def full_size(self, held: Sequence[int]) -> tuple[int, ...]:
        return self._sizes[tuple(held)] if self.cut.active else super().full_size(held)

    def box(self, size: Sequence[int]) -> tuple[slice, ...]:
        if not self.cut.active:
            return super().box(size)
        parts = self.cut.local_slices([n // self._patch for n in size])
        return tuple(slice(self._patch * part.start, self._patch * part.stop) for part in parts)

    def shard(self, x: Tensor) -> Tensor:
        box: Any = (..., *self.box(x.shape[2:]))
        return x[box]

    def gather(self, x: Tensor) -> Tensor:
        patches = self._patches(self.full_size(x.shape[2:]))
        return pixel_shuffle(self.cut.gather(pixel_unshuffle(x, self._patch), patches), self._patch) if self.cut.active else x

    def mean(self, x: Tensor) -> Tensor:
        share = x.shape[2:].numel() / torch.Size(self.full_size(x.shape[2:])).numel()
        own = super().mean(x) * share
        return all_reduce(own, *self.cut.axes.values(), identity_backward=True) if self.cut.active else own

    def std(self, x: Tensor) -> Tensor:
        count, each = x.shape[1] * torch.Size(self.full_size(x.shape[2:])).numel(), (-1, *(1,) * (x.ndim - 1))
        around = x - self.mean(x).view(each)
        return (self.mean(around.square()) * (count / (count - 1))).sqrt().view(each)

    def _local_size(self, size: Sequence[int]) -> Sizes:
        return tuple(part.stop - part.start for part in self.box(size))

    def _patches(self, size: Sequence[int]) -> Sizes:
        """Places of the first level. Raises MeshError for a size that the levels do not halve."""
        if any(n % self._divisor for n in size):
            sides, axis = " x ".join(map(str, size)), next(iter(self.cut.axes.values()))
            raise MeshError(
                f"mesh.{axis.name} is {axis.size}, and samples have {sides} places; a cut needs multiples of {self._divisor}, which "
                f"all levels of the network halve; take other samples, or set mesh.{axis.name} to 1"
            )
        return tuple(n // self._patch for n in size)


def _meta_inputs(network: UNet, size: Sequence[int]) -> tuple[Any, ...]:
    """All that a network is called with, of one sample of ``size`` patches, without memory."""
    cfg, dtype = network.cfg, network.conv_in.weight.dtype
    empty = partial(torch.empty, device="meta", dtype=dtype)
    places = [cfg.patch * n for n in size]
    given: dict[str, Tensor | None] = {
        "classes": torch.empty(1, device="meta", dtype=torch.long) if cfg.classes else None,
        "parameters": empty(1, cfg.parameters) if cfg.parameters else None,
        "tokens": empty(1, 1, cfg.tokens) if cfg.tokens else None,
        "field": empty(1, cfg.field, *places) if cfg.field else None,
    }
    return empty(1, cfg.inputs, *places), empty(1), Condition(**given)


class _ShardedSpatialAttention(SpatialLayer):
    """Queries of this rank's places; keys and values of all, which are joined in one exchange."""

    def spatial_shape(self, x: Tensor, *args: Any, **kwargs: Any) -> Sequence[int]:
        sizes: Sequence[int] = args[2]
        return sizes

    def forward_shard(self, x: Tensor, size: Sizes, *args: Any, **kwargs: Any) -> Tensor:
        k, v, sizes = args
        both = to_tokens(self.partition.gather(from_tokens(torch.cat((k, v), -1), sizes), size))
        found: Tensor = super(SpatialLayer, self).forward(x, *both.chunk(2, -1), size)
        return found


def _shard_pixels(network: UNet, mesh: Mesh, size: Sequence[int]) -> None:
    mesh.check_axes("UNet", "replicate", "depth", "height")
    grid = Slabs(network.cfg, mesh)
    if not grid.cut.axes:
        return
    axis = next(iter(grid.cut.axes.values()))
    if not size:
        raise MeshError(f"mesh.{axis.name} is {axis.size}: give the size of the samples that are cut")
    if network.cfg.dropout:
        raise MeshError(
            f"mesh.{axis.name} is {axis.size} and model.unet.dropout {network.cfg.dropout:g}, which would leave out the same "
            f"places of each part; set dropout to 0, or mesh.{axis.name} to 1"
        )
    grid.shard_network(network, size)


# ---- heads


def _shard_heads(network: Any, mesh: Mesh) -> None:
    mesh.check_axes(type(network).__name__, "replicate", "tensor")
    tensor, cfg = mesh["tensor"], network.cfg
    if cfg.heads % tensor.size:
        raise MeshError(f"mesh.tensor is {tensor.size}, which does not divide {cfg.heads} heads; take a divisor of them")
    for name, part in network.named_modules():
        if name.endswith(_OUTPUTS):
            column_parallel(part, tensor)
        elif name.endswith(_INPUTS):
            row_parallel(part, tensor)
        elif isinstance(part, SingleStreamBlock):  # its last layer reads attention beside a feed-forward part
            row_parallel(part.proj_out, tensor, sizes=(cfg.width, 4 * cfg.width))
        elif isinstance(part, RMSNorm):  # of some of the heads
            sum_gradients_over(part, tensor)
