"""Spatial parallelism: a volume or map is sharded over ranks, one sample on many GPUs.

    partition = parallelize_spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, size=(128, 128, 128))
    y = model(partition.take_shard(x))                          # slabs in, slabs out

A dim of S voxels is split at S*r/n, at every resolution of the network: the size of a level determines the range of each rank. A
level with fewer than ``min_size`` voxels per rank is replicated. The losses of the ranks add up to the loss, so gradients are
summed, at seams and for parameters. Results that n ranks compute from a replicated level count 1/n on each
(``hpcai.parallel.axial.ReplicatedOnce``). The learning rate is unchanged. B batch, C channels, D H W the volume, n the size of an
axis.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.dist.collectives import all_reduce
from hpcai.dist.mesh import Axis, Mesh
from hpcai.dynamo import disable_dynamo
from hpcai.errors import MeshError
from hpcai.kernels.triton_support import on_gpu
from hpcai.nn.batchnorm import BatchNorm
from hpcai.nn.groupnorm import GroupNorm, InstanceNorm
from hpcai.nn.upsample_conv import UpsampleConv
from hpcai.parallel.batchnorm import AllReduce, replace_norms
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.halo import ConvArgs, HaloConvolution, HaloExchange, HaloPlan, Range

Sizes = tuple[int, ...]  # by dim: D, H, W
Inputs = Callable[[Sequence[int]], tuple[Any, ...]]

NAMES = ("depth", "height", "width")  # of the dims of a volume; a map has the last two


class SpatialPartition:
    """The mesh axis over which each dim is sharded, and the full size at each layer. ``min_size``: A level with fewer voxels per
    rank is replicated. ``overlap``: Convolve the interior of a slab during the halo exchange; None: on a GPU."""

    def __init__(self, axes: Mapping[int, Axis], min_size: int = 2, overlap: bool | None = None) -> None:
        self.axes = {dim: axis for dim, axis in axes.items() if axis.size > 1}
        self.min_size, self.overlap, self.active = min_size, overlap, True
        self.full_sizes: dict[str, dict[Sizes, Sizes]] = {}  # layer -> local size -> full size
        self.plans: dict[tuple[str, Sizes], Any] = {}  # (layer, full size) -> plan

    @classmethod
    def from_axes(cls, axes: Mapping[str, Axis], dims: int, **kwargs: Any) -> "SpatialPartition":
        """Return the partition of a volume (3 ``dims``: D, H, W) or map (H, W) over axes depth, height and width. Raises MeshError
        for an axis without a dim."""
        names = NAMES[-dims:]
        unknown = [name for name, axis in axes.items() if name not in names and axis.size > 1]
        if unknown:
            available = " and ".join(names)
            raise MeshError(f"mesh.{unknown[0]} is {axes[unknown[0]].size}, but there is only {available} to shard; set it to 1")
        return cls({names.index(name) + 2: axis for name, axis in axes.items() if name in names}, **kwargs)

    @classmethod
    def from_mesh(cls, mesh: Mesh, dims: int = 3) -> "SpatialPartition":
        """Return the partition of a volume, or a map, over the axes depth and height of ``mesh``."""
        return cls.from_axes({name: mesh[name] for name in ("depth", "height")}, dims)

    def __deepcopy__(self, memo: dict) -> "SpatialPartition":
        """A copied model has its own state over the same ranks; its plans use its own communication channels."""
        clone = SpatialPartition(copy.deepcopy(self.axes, memo), self.min_size, self.overlap)
        clone.full_sizes, clone.active = self.full_sizes, self.active
        return clone

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context manager: the model computes on full local volumes, as if it was not parallelized."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def check_size(self, size: Sequence[int]) -> None:
        """Raise MeshError if a volume of ``size`` is too small for the number of ranks."""
        for dim, axis in self.axes.items():
            n = size[dim - 2]
            if not self.is_sharded(dim, n):
                fault = f"mesh.{axis.name} is {axis.size}, but {n} voxels along {axis.name} are fewer than {self.min_size} per rank"
                raise MeshError(f"{fault}; set mesh.{axis.name} to {max(n // self.min_size, 1)} or less")

    def is_sharded(self, dim: int, size: int) -> bool:
        return dim in self.axes and size >= self.axes[dim].size * self.min_size

    def local_range(self, dim: int, size: int, rank: int | None = None) -> Range:
        """Return the range of ``dim`` that a rank of its axis holds, by default this one."""
        if not self.is_sharded(dim, size):
            return 0, size
        return shard_range(size, self.axes[dim].rank if rank is None else rank, self.axes[dim].size)

    def local_slices(self, size: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of D, H, W that this rank holds."""
        return tuple(slice(*self.local_range(dim, n)) for dim, n in enumerate(size, 2))

    def take_shard(self, x: Tensor) -> Tensor:
        """Select this rank's shard.   [B, C, D, H, W] -> [B, C, D/n, H/m, W]"""
        box: Any = (..., *self.local_slices(x.shape[2:]))
        return x[box]

    def gather(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """All-gather the full volume of ``size``.   [B, C, D/n, H/m, W] -> [B, C, D, H, W]"""
        for dim, n in enumerate(size, 2):
            if self.is_sharded(dim, n):
                x = self.gather_dim(x, dim, n)
        return x

    def gather_dim(self, x: Tensor, dim: int, size: int) -> Tensor:
        """All-gather one dim, of ``size`` voxels."""
        axis = self.axes[dim]
        held = tuple(shard_range(size, r, axis.size) for r in range(axis.size))
        return HaloExchange.apply(x, HaloPlan(dim, axis, held, ((0, size),) * axis.size), 0.0)

    def sharded_axes(self, size: Sequence[int]) -> tuple[Axis, ...]:
        """Return the axes over which a level of ``size`` is sharded."""
        return tuple(self.axes[dim] for dim, n in enumerate(size, 2) if self.is_sharded(dim, n))

    def local_size(self, size: Sequence[int], ranks: Mapping[int, int] | None = None) -> Sizes:
        """Return the size of the shard of this rank, or of the one at ``ranks`` (by dim)."""
        parts = [self.local_range(dim, n, None if ranks is None else ranks.get(dim)) for dim, n in enumerate(size, 2)]
        return tuple(end - first for first, end in parts)

    def full_size(self, layer: str, local: Sequence[int]) -> Sizes:
        """Return the full size of a layer's input from its local size."""
        table = self.full_sizes.get(layer, {})
        if tuple(local) in table:
            return table[tuple(local)]
        sizes = " or ".join(" x ".join(map(str, s)) for s in table) or "nothing"
        raise MeshError(
            f"spatial: {layer} got a shard of {' x '.join(map(str, local))} voxels; the planned volumes have {sizes} there on this "
            "rank; plan another size with plan_size(model, partition, size), or pass partition.take_shard(volume)"
        )

    def record_size(self, layer: str, size: Sizes) -> None:
        """Record a full input size of a layer. Raises MeshError, on all ranks, if shards of two sizes are equal on any rank."""
        table = self.full_sizes.setdefault(layer, {})
        for other in set(table.values()) - {size}:
            for place in product(*(range(axis.size) for axis in self.axes.values())):
                ranks = dict(zip(self.axes, place))
                if self.local_size(size, ranks) == self.local_size(other, ranks):
                    fault = f"spatial: {layer} has inputs of {size} and of {other}, whose shards on a rank have the same size"
                    raise MeshError(f"{fault}; parallelize a model for each")
        table[self.local_size(size)] = size


def shard_range(size: int, rank: int, count: int) -> Range:
    """Return the range of ``size`` indices that ``rank`` of ``count`` holds."""
    return size * rank // count, size * (rank + 1) // count


def parallelize_spatial(
    model: nn.Module, axes: Mapping[str, Axis], size: Sequence[int], *, inputs: Inputs | None = None,
    kinds: Mapping[type[nn.Module], type["SpatialLayer"]] = MappingProxyType({}), min_size: int = 2, overlap: bool | None = None,
) -> SpatialPartition:  # fmt: skip
    """Shard the computation of ``model`` on a volume (D, H, W) or map (H, W) of ``size`` over ranks, in place.

    The model then maps this rank's shard of the input to its shard of the output, with the values and gradients of one process.
    Convolutions (any kernel, stride and dilation, zero or circular padding, transposed), pooling and upsampling exchange halos;
    instance, group and batch norms reduce their moments. Parameters and their names are kept; their ``sum_axes`` are the axes over
    which gradients are summed. Ranks of a sample need the same random state where a level is replicated.

    ``axes``: The mesh axis of each dim: depth, height, width. ``inputs``: ``inputs(size)`` returns all arguments of the model on
    the meta device, if there are more than a volume with the channels of the first convolution.
    ``kinds``: The model's layer classes, and the ``SpatialLayer`` that shards each. ``min_size``, ``overlap``: See the partition.
    Raises MeshError for a size that cannot be sharded, unknown layers, and operations outside layers that mix voxels.
    """
    partition = SpatialPartition.from_axes(axes, len(size), min_size=min_size, overlap=overlap)
    partition.check_size(size)
    if partition.axes:
        replace_norms(model)
        kinds = {**_KINDS, **kinds}
        for name, layer in model.named_modules():
            origin = type(layer).__module__
            kind = _Convolution if isinstance(layer, nn.modules.conv._ConvNd) else kinds.get(type(layer))
            if kind is None:
                is_pointwise = origin == "torch.nn.modules.activation" and not isinstance(layer, nn.MultiheadAttention)
                if origin.startswith("torch.nn.") and not is_pointwise and not isinstance(layer, _LOCAL):
                    raise MeshError(f"spatial: {name} is a {type(layer).__name__}, which cannot be sharded")
                continue
            layer.__class__ = _spatial_class(kind, type(layer))  # type: ignore[arg-type]  # mypy takes classes for not hashable
            layer.partition, layer.name = partition, name
            problem = layer.find_unsupported()
            if problem is not None:
                raise MeshError(f"spatial: {name} has {problem}")
            if kind is _Norm and not isinstance(layer.all_reduce, AllReduce):
                layer.all_reduce = AllReduce()
        plan_size(model, partition, size, inputs)
        for axis in partition.axes.values():
            sum_gradients_over(model, axis.init_group())  # now: a rank whose layers exchange nothing has no first use
    return partition


def plan_size(model: nn.Module, partition: SpatialPartition, size: Sequence[int], inputs: Inputs | None = None) -> None:
    """Plan a parallelized model for volumes of ``size``: run it once on the meta device, and record the size at each layer."""
    if not partition.axes:
        return
    if inputs is None:
        in_channels = [getattr(m, "in_channels", 0) for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        if not in_channels:
            raise MeshError("spatial: the model has no convolution to take the number of input channels from; give inputs")
        shape = (1, in_channels[0], *size)
    args = (torch.empty(shape, device="meta", dtype=next(model.parameters()).dtype),) if inputs is None else inputs(size)
    state = {name: t.to("meta", copy=True) for name, t in (*model.named_parameters(), *model.named_buffers())}
    check = _OpCheck()
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, SpatialLayer):
            handles += [layer.register_forward_pre_hook(check.enter(name, partition)), layer.register_forward_hook(check.leave)]
    training = {module: module.training for module in model.modules()}
    try:
        with partition.disabled(), torch.no_grad(), check:
            torch.func.functional_call(model.eval(), state, args)
    finally:
        for handle in handles:
            handle.remove()
        for module, value in training.items():
            module.training = value


_MIXING = ("convolution", "pool", "upsample", "norm", "roll", "flip", "fft", "grid_sampler", "im2col", "cumsum")
_REDUCING = ("mean", "sum", "var", "var_mean", "amax", "amin", "max", "min", "prod", "std", "softmax", "_softmax", "_log_softmax")


class _OpCheck(TorchDispatchMode):
    """Raises MeshError for operations outside spatial layers that mix voxels."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[str] = []
        self._last = "its input"

    def enter(self, name: str, partition: SpatialPartition) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            partition.record_size(name, tuple(module.spatial_shape(*args)))
            self._inside.append(name)

        return hook

    def leave(self, *_: Any) -> None:
        self._last = self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._inside and args and isinstance(args[0], Tensor) and args[0].ndim >= 4:
            mixes = any(word in name for word in _MIXING)
            if name in _REDUCING:
                over = args[1] if len(args) > 1 else None
                dims = [over] if isinstance(over, int) else over
                mixes = dims is None or any(dim % args[0].ndim >= 2 for dim in dims)
            if mixes:
                fault = f"spatial: after {self._last} the model calls {name} itself, which mixes voxels of a sharded volume"
                raise MeshError(f"{fault}; make it a layer (nn.MaxPool3d for F.max_pool3d), or a seam")
        return func(*args, **(kwargs or {}))


# ---- the layers


class SpatialLayer(nn.Module):
    """Base of the layers of a parallelized model, mixed into the class of each layer."""

    partition: SpatialPartition
    name: str

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.partition.active:
            return super().forward(x, *args, **kwargs)
        return self._forward_sharded(x, *args, **kwargs)

    @disable_dynamo
    def _forward_sharded(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Untraced, since communication cannot be compiled."""
        return self.forward_shard(x, self.partition.full_size(self.name, self.spatial_shape(x, *args, **kwargs)), *args, **kwargs)

    def spatial_shape(self, x: Tensor, *args: Any, **kwargs: Any) -> Sequence[int]:
        """Return the local size of the input along each dim."""
        return x.shape[2:]

    def forward_shard(self, x: Tensor, size: Sizes, *args: Any, **kwargs: Any) -> Tensor:
        """Return this rank's shard of the output, from the shard ``x`` of an input of full ``size``."""
        raise NotImplementedError

    def cached_plan(self, size: Sizes) -> Any:
        """Return ``plan(size)``, computed once."""
        key = self.name, size
        if key not in self.partition.plans:
            self.partition.plans[key] = self.plan(size)
        return self.partition.plans[key]

    def plan(self, size: Sizes) -> Any:
        """Return the halo plans for an input of full ``size``."""
        raise NotImplementedError

    def find_unsupported(self) -> str | None:
        """Return the property of the layer that cannot be sharded, or None."""
        return None

    def exchange(self, x: Tensor, plans: Sequence[HaloPlan], fill: float = 0.0) -> Tensor:
        """Return ``x`` with its halos."""
        for plan in plans:
            if not plan.is_local:
                x = HaloExchange.apply(x, plan, fill)
        return x


def _plan_halo(
    partition: SpatialPartition, dim: int, size: int, out: int, field: Callable[[Range], Range], wraps: bool = False
) -> tuple[HaloPlan, int] | None:
    """Plan the halos along ``dim``, of ``size`` voxels, for an output of ``out`` voxels. Return the plan and the number of output
    voxels that this rank computes, or None if neither is sharded. ``field``: The input range of an output range (its receptive
    field), which may exceed the ends; ``wraps``: there it continues at the other end."""
    axis = partition.axes.get(dim)
    if axis is None or not (partition.is_sharded(dim, size) or partition.is_sharded(dim, out)):
        return None
    # A replicated output with a voxel for each rank is still computed in shards and gathered: that is less work per rank, and less
    # communication than gathering the input.
    outs = [shard_range(out, r, axis.size) if out >= axis.size else (0, out) for r in range(axis.size)]
    fields = [field(out_range) for out_range in outs]
    held = tuple(partition.local_range(dim, size, r) for r in range(axis.size))
    first, end = outs[axis.rank]
    if wraps:
        return HaloPlan(dim, axis, held, tuple(fields), period=size), end - first
    needed = tuple((min(max(a, 0), size), max(min(b, size), 0)) for a, b in fields)
    (a, b), (low, high) = fields[axis.rank], needed[axis.rank]
    return HaloPlan(dim, axis, held, needed, max(low - a, 0), max(b - high, 0)), end - first


def _conv_windows(n: int, k: int, s: int, p: int, d: int) -> tuple[int, Callable[[Range], Range]]:
    """Return the output size of a convolution or pooling (size, kernel, stride, padding, dilation), and its receptive field."""
    return (n + 2 * p - d * (k - 1) - 1) // s + 1, lambda of: (of[0] * s - p, (of[1] - 1) * s - p + d * (k - 1) + 1)


def _transposed_windows(n: int, k: int, s: int, p: int, d: int, extra: int) -> tuple[int, Callable[[Range], Range]]:
    """Return the same for a transposed convolution, whose windows lie in its output."""
    return (n - 1) * s - 2 * p + d * (k - 1) + extra + 1, lambda of: (-(-(of[0] + p - d * (k - 1)) // s), (of[1] - 1 + p) // s + 1)


def _gather_output(partition: SpatialPartition, y: Tensor, out: Sizes) -> Tensor:
    """Gather ``y`` along the dims that are sharded in it and replicated at the size ``out``."""
    for dim, n in enumerate(out, 2):
        if y.shape[dim] != n and not partition.is_sharded(dim, n):
            y = partition.gather_dim(y, dim, n)
    return y


class _Convolution(SpatialLayer):
    """Any convolution; weight and bias may be passed in the call."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    padding_mode: str
    weight: Tensor
    bias: Tensor | None

    def find_unsupported(self) -> str | None:
        if self.padding_mode not in ("zeros", "circular"):
            return f"padding_mode {self.padding_mode}; only zeros and circular can be sharded"
        return f"padding {self.padding!r}; give integers" if isinstance(self.padding, str) else None

    def wrap_size(self, dim: int) -> int:
        """Return the number of voxels that wrap around at each end of ``dim``."""
        if self.padding_mode == "circular":
            return int(self.padding[dim - 2])
        return 1 if dim in getattr(self, "circular_dims", ()) else 0

    def forward_shard(self, x: Tensor, size: Sizes, *params: Any) -> Tensor:
        plans, wraps, conv, out = self.cached_plan(size)
        if not plans:
            return _gather_output(self.partition, super(SpatialLayer, self).forward(x, *params), out)
        weight, bias = params or (self.weight, self.bias)
        for dim, count in wraps:
            x = torch.cat((x.narrow(dim, -count, count), x, x.narrow(dim, 0, count)), dim)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        overlap = on_gpu(x) if self.partition.overlap is None else self.partition.overlap
        y = HaloConvolution.apply(x, weight, bias, plans, conv, overlap)
        return _gather_output(self.partition, y, out)

    def plan(self, size: Sizes) -> tuple[tuple[HaloPlan, ...], list[tuple[int, int]], ConvArgs, Sizes]:
        """Return halo plans, wraps (dim, size) of unsharded periodic dims, the convolution, and the full output size."""
        transposed, plans, local_wraps, crops, out = self.transposed, [], [], [], []
        padding, output_padding = [int(p) for p in self.padding], [int(p) for p in self.output_padding]
        for i, n in enumerate(size):
            k, s, d, wraps = self.kernel_size[i], self.stride[i], self.dilation[i], self.wrap_size(i + 2)
            p = padding[i] if transposed else max(padding[i], wraps)
            o, field = _transposed_windows(n, k, s, p, d, output_padding[i]) if transposed else _conv_windows(n, k, s, p, d)
            out.append(o)
            halo = _plan_halo(self.partition, i + 2, n, o, field, wraps > 0)
            if halo is None:
                if wraps:
                    local_wraps.append((i + 2, wraps))
                    padding[i] = p + wraps * s if transposed else 0
                continue
            plan, count = halo
            plans.append(plan)
            if transposed:
                first = shard_range(o, plan.axis.rank, plan.axis.size)[0] if count < o else 0
                skipped = first + p - (plan.needed[0] - plan.pad_before) * s
                computed = (plan.needed[1] + plan.pad_after - plan.needed[0] + plan.pad_before - 1) * s + d * (k - 1) + 1
                if skipped or count != computed:
                    crops.append((i + 2, skipped, count))
                output_padding[i] = 0
            padding[i] = 0
        conv = ConvArgs(
            tuple(self.stride), tuple(padding), tuple(self.dilation), self.groups,
            tuple(output_padding) if transposed else None, tuple(crops),
        )
        if all(plan.is_local for plan in plans) and not crops and not local_wraps and conv.padding == tuple(self.padding):
            plans = []  # nothing is exchanged
        return tuple(plans), local_wraps, conv, tuple(out)


class _Pool(SpatialLayer):
    """Max and average pooling."""

    def find_unsupported(self) -> str | None:
        if self.ceil_mode:
            return "ceil_mode; only full windows can be sharded"
        if getattr(self, "return_indices", False):
            return "return_indices; indices into a shard are not those of the full volume"
        if any(self._tuple("padding")) and not getattr(self, "count_include_pad", True):
            return "count_include_pad=False with padding"
        return None

    def _tuple(self, name: str) -> tuple[int, ...]:
        value: Any = getattr(self, name, 1)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,) * self.dims

    @property
    def dims(self) -> int:
        return 3 if isinstance(self, (nn.MaxPool3d, nn.AvgPool3d)) else 2

    def forward_shard(self, x: Tensor, size: Sizes) -> Tensor:
        is_max = isinstance(self, (nn.MaxPool2d, nn.MaxPool3d))
        plans, padding, out = self.cached_plan(size)
        x = self.exchange(x, plans, -torch.inf if is_max else 0.0)
        pool: Any = getattr(F, f"{'max' if is_max else 'avg'}_pool{self.dims}d")
        kwargs = {"dilation": self._tuple("dilation")} if is_max else {"divisor_override": getattr(self, "divisor_override", None)}
        return _gather_output(self.partition, pool(x, self._tuple("kernel_size"), self._tuple("stride"), padding, **kwargs), out)

    def plan(self, size: Sizes) -> tuple[list[HaloPlan], Sizes, Sizes]:
        padding, plans, out = list(self._tuple("padding")), [], []
        windows = zip(*(self._tuple(name) for name in ("kernel_size", "stride", "padding", "dilation")))
        for i, (n, window) in enumerate(zip(size, windows)):
            o, field = _conv_windows(n, *window)
            out.append(o)
            halo = _plan_halo(self.partition, i + 2, n, o, field)
            if halo is not None:
                padding[i] = 0
                plans.append(halo[0])
        return plans, tuple(padding), tuple(out)


class _Upsample(SpatialLayer):
    size: Any
    scale_factor: Any
    mode: str
    align_corners: bool | None

    def find_unsupported(self) -> str | None:
        scale = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,)
        if self.size is not None or any(s is None or s != int(s) for s in scale):
            return "a size or a fractional scale_factor; give integer factors"
        if self.mode not in ("nearest", "bilinear", "trilinear") or self.align_corners:
            return f"mode {self.mode} with align_corners {self.align_corners}; nearest, bilinear and trilinear without can be"
        return None

    def forward_shard(self, x: Tensor, size: Sizes) -> Tensor:
        plans, crops, out = self.cached_plan(size)
        y = F.interpolate(self.exchange(x, plans), scale_factor=tuple(float(s) for s in self._scale(len(size))), mode=self.mode)
        for dim, first, count in crops:
            y = y.narrow(dim, first, count)
        return _gather_output(self.partition, y, out)

    def _scale(self, dims: int) -> tuple[int, ...]:
        factor = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,) * dims
        return tuple(int(s) for s in factor)

    def plan(self, size: Sizes) -> tuple[list[HaloPlan], list[tuple[int, int, int]], Sizes]:
        plans, crops, scale, overlap = [], [], self._scale(len(size)), 0 if self.mode == "nearest" else 1
        for i, (n, s) in enumerate(zip(size, scale)):

            def field(of: Range, s: int = s, n: int = n) -> Range:
                # Beyond the ends of the full dim interpolation itself repeats the edge.
                return max(of[0] // s - overlap, 0), min((of[1] - 1) // s + 1 + overlap, n)

            halo = _plan_halo(self.partition, i + 2, n, n * s, field)
            if halo is not None:
                plan, count = halo
                plans.append(plan)
                crops.append((i + 2, shard_range(n * s, plan.axis.rank, plan.axis.size)[0] - plan.needed[0] * s, count))
        return plans, crops, tuple(n * s for n, s in zip(size, scale))


class _GlobalMean(SpatialLayer):
    def find_unsupported(self) -> str | None:
        size: Any = self.output_size
        return None if set(size if isinstance(size, tuple) else (size,)) == {1} else f"output_size {size}; only 1 can be sharded"

    def forward_shard(self, x: Tensor, size: Sizes) -> Tensor:
        local_sum = x.sum(tuple(range(2, x.ndim)), keepdim=True)
        return all_reduce(local_sum, *self.partition.sharded_axes(size)) / torch.Size(size).numel()


class _Norm(SpatialLayer):
    """Instance, group and batch norms, whose ``all_reduce`` reduces moments over the axes over which the level is sharded."""

    def forward_shard(self, x: Tensor, size: Sizes, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        before = layer.all_reduce
        layer.all_reduce = AllReduce(*before.axes, *self.partition.sharded_axes(size))  # the backward pass sums over the same axes
        try:
            return super(SpatialLayer, self).forward(x, *args, **kwargs)
        finally:
            layer.all_reduce = before


class _PartitionSeam(nn.Module):
    def __init__(self, partition: SpatialPartition) -> None:
        super().__init__()
        self.partition = partition


class SpatialSum(_PartitionSeam):
    """Sum over ranks of sums over shards. All ranks compute the same loss or metric from it, which counts once: the gradient on
    each rank is that of its local sums."""

    def forward(self, sums: Tensor) -> Tensor:
        return all_reduce(sums, *self.partition.axes.values(), identity_backward=True) if self.partition.active else sums


class GatherFull(_PartitionSeam):
    """All-gather the full volume of ``size``.   [B, C, D/n, H/m, W] -> [B, C, D, H, W]"""

    def __init__(self, partition: SpatialPartition, size: Sequence[int]) -> None:
        super().__init__(partition)
        self.size = tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.partition.gather(x, self.size) if self.partition.active else x


_KINDS: dict[type[nn.Module], type[SpatialLayer]] = {
    **dict.fromkeys((nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d, nn.AvgPool3d), _Pool),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), _GlobalMean),
    **dict.fromkeys((BatchNorm, InstanceNorm, GroupNorm), _Norm),
    nn.Upsample: _Upsample,
    UpsampleConv: _Convolution,
}
# Layers of torch that do not mix voxels.
_LOCAL = (
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.Linear, nn.Embedding, nn.Flatten, nn.Sequential, nn.ModuleList,
    nn.ModuleDict,
)  # fmt: skip


@cache
def _spatial_class(kind: type[SpatialLayer], base: type[nn.Module]) -> type:
    """Return a subclass of the layer's class, which can still compute as before (``SpatialPartition.disabled``)."""
    return type(f"Spatial{base.__name__}", (kind, base), {"__module__": __name__})
