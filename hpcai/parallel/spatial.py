"""Volumes and maps that are cut over processes: one sample on many GPUs.

    cut = spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, size=(128, 128, 128))
    y = model(cut.own(x))                                       # slabs in, slabs out

A dim of S places is cut at S*r/n, at every resolution of the network, so that the sizes of a level say what each rank holds.
Where a level has fewer than ``least`` places for each rank, every rank holds all of it. One rule makes all gradients right: the
losses of the ranks add up to the loss, so gradients are added, at seams and for parameters. What n ranks compute alike from a whole
level counts 1/n on each (``Once``). No learning rate is touched. B batch, C channels, D H W the volume, n the size of an axis.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.dist.collectives import sum_once, all_reduce
from hpcai.dist.mesh import Axis
from hpcai.errors import MeshError
from hpcai.kernels.triton_support import on_gpu
from hpcai.nn.batchnorm import BatchNorm
from hpcai.nn.doubled import Doubled
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.instancenorm import InstanceNorm
from hpcai.parallel.batchnorm import SumInPlace, use_ours
from hpcai.parallel.halo import Convolution, Exchange, How, Range, Route, Traffic
from hpcai.parallel.replicate import sum_over
from hpcai.untraced import untraced

Sizes = tuple[int, ...]  # of the whole, by dim: D, H, W
Inputs = Callable[[Sequence[int]], tuple[Any, ...]]

NAMES = ("depth", "height", "width")  # of the dims of a volume; a map has the last two


class Cut:
    """Which dims of a tensor are cut over which axes, and the sizes of the whole at each layer.

    ``least``: a level with fewer places for each rank is not cut. ``apart``: the interior of a slab is convolved while halos
    travel; None: on a GPU.
    """

    def __init__(self, axes: Mapping[int, Axis], least: int = 2, apart: bool | None = None) -> None:
        self.axes = {dim: axis for dim, axis in axes.items() if axis.size > 1}
        self.least, self.apart, self.active = least, apart, True
        self.traffic = Traffic()
        self.known: dict[str, dict[Sizes, Sizes]] = {}  # by layer: sizes of what this rank holds, and of the whole
        self.plans: dict[tuple[str, Sizes], Any] = {}  # by layer and size of the whole: what travels where

    @classmethod
    def over(cls, axes: Mapping[str, Axis], dims: int, **words: Any) -> "Cut":
        """The cut of a volume (3 ``dims``: D, H, W) or a map (H, W) over the axes of depth, height and width. Raises MeshError for
        an axis without a dim."""
        names = NAMES[-dims:]
        unknown = [name for name, axis in axes.items() if name not in names and axis.size > 1]
        if unknown:
            have = " and ".join(names)
            raise MeshError(f"mesh.{unknown[0]} is {axes[unknown[0]].size}, but there is only {have} to cut; set it to 1")
        return cls({names.index(name) + 2: axis for name, axis in axes.items() if name in names}, **words)

    def __deepcopy__(self, memo: dict) -> "Cut":
        """A model's copy has a state of its own, over the same processes; its plans name its own channels."""
        twin = Cut(copy.deepcopy(self.axes, memo), self.least, self.apart)
        twin.known, twin.active = self.known, self.active
        return twin

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model works as before the cut: every rank computes with whole volumes of its own."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def check(self, size: Sequence[int]) -> None:
        """Raise MeshError when a volume of ``size`` is too small for so many ranks."""
        for dim, axis in self.axes.items():
            n = size[dim - 2]
            if not self.is_cut(dim, n):
                raise MeshError(
                    f"mesh.{axis.name} is {axis.size}, but {n} places along {axis.name} are fewer than {self.least} for each rank; "
                    f"set mesh.{axis.name} to {max(n // self.least, 1)} or less"
                )

    def is_cut(self, dim: int, size: int) -> bool:
        return dim in self.axes and size >= self.axes[dim].size * self.least

    def range_of(self, dim: int, size: int, rank: int | None = None) -> Range:
        """Places of ``dim`` that a rank of its axis holds."""
        if not self.is_cut(dim, size):
            return 0, size
        return part(size, self.axes[dim].rank if rank is None else rank, self.axes[dim].size)

    def part(self, size: Sequence[int]) -> tuple[slice, ...]:
        """Where this rank's part of a volume lies: a slice for each of D, H, W."""
        return tuple(slice(*self.range_of(dim, n)) for dim, n in enumerate(size, 2))

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of a whole.   [B, C, D, H, W] -> [B, C, D/n, H/m, W]"""
        box: Any = (..., *self.part(x.shape[2:]))
        return x[box]

    def join(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """The whole on every rank, of ``size`` places.   [B, C, D/n, H/m, W] -> [B, C, D, H, W]"""
        for dim, n in enumerate(size, 2):
            if self.is_cut(dim, n):
                x = self.join_along(x, dim, n)
        return x

    def join_along(self, x: Tensor, dim: int, size: int) -> Tensor:
        """All ``size`` places of one dim, joined from the ranks' parts."""
        axis = self.axes[dim]
        have = tuple(part(size, r, axis.size) for r in range(axis.size))
        return Exchange.apply(x, Route(dim, axis, have, ((0, size),) * axis.size), self.traffic, 0.0)

    def cut_axes(self, size: Sequence[int]) -> tuple[Axis, ...]:
        """The axes over which a level of ``size`` is cut."""
        return tuple(self.axes[dim] for dim, n in enumerate(size, 2) if self.is_cut(dim, n))

    def held(self, size: Sequence[int], ranks: Mapping[int, int] | None = None) -> Sizes:
        """Sizes of the part of a whole that this rank holds, or the one at ``ranks`` (by dim)."""
        parts = [self.range_of(dim, n, None if ranks is None else ranks.get(dim)) for dim, n in enumerate(size, 2)]
        return tuple(end - first for first, end in parts)

    def whole(self, layer: str, held: Sequence[int]) -> Sizes:
        """Sizes of the whole, from those of the part that is a layer's input."""
        table = self.known.get(layer, {})
        if tuple(held) in table:
            return table[tuple(held)]
        sizes = " or ".join(" x ".join(map(str, s)) for s in table) or "nothing"
        raise MeshError(
            f"spatial: {layer} got a part of {' x '.join(map(str, held))} places; this rank holds {sizes} there of the volumes "
            "whose sizes were told; tell another with plan(model, cut, size), or give each rank cut.own(volume)"
        )

    def note(self, layer: str, size: Sizes) -> None:
        """Note that a layer sees a whole of ``size``. Raises MeshError, on all ranks, where a rank cannot tell it from another."""
        table = self.known.setdefault(layer, {})
        for other in set(table.values()) - {size}:
            for ranks in self._every_rank():
                if self.held(size, ranks) == self.held(other, ranks):
                    raise MeshError(
                        f"spatial: {layer} sees volumes of {size} and of {other}, of which a rank holds parts of one size; "
                        "cut each with a model of its own"
                    )
        table[self.held(size)] = size

    def _every_rank(self) -> Iterator[dict[int, int]]:
        found: list[dict[int, int]] = [{}]
        for dim, axis in self.axes.items():
            found = [{**ranks, dim: r} for ranks in found for r in range(axis.size)]
        yield from found


def part(size: int, rank: int, count: int) -> Range:
    """The places of ``size`` that ``rank`` of ``count`` holds."""
    return size * rank // count, size * (rank + 1) // count


def spatial(
    model: nn.Module, axes: Mapping[str, Axis], size: Sequence[int], *, channels: int | None = None, inputs: Inputs | None = None,
    kinds: Mapping[type[nn.Module], type["Layer"]] = MappingProxyType({}), least: int = 2, apart: bool | None = None,
) -> Cut:  # fmt: skip
    """Cut what ``model`` computes of a volume of ``size`` (D, H, W), or of a map (H, W), over the processes of ``axes``, in place.

    ``axes`` names the dims: depth, height, width. Afterwards the model takes this rank's part of its input and gives this rank's
    part of its output, equal to those of one process in value and gradient. Convolutions of any kernel, stride, dilation and zero
    or circular padding, transposed ones too, pooling and upsampling exchange the slices that they lack; instance, group and batch
    norms add up their moments. Parameters and their names stay; ``sum_axes`` says over which axes gradients are added.
    ``channels``: those of the input, where the first convolution has others. ``inputs(size)``: all that the model is called with,
    on the meta device, where that is more than a volume. ``kinds``: layers of the model's own, by class, and how each is cut.
    ``least``, ``apart``: see ``Cut``. The processes of a cut need the same random numbers where all of them hold a whole level.

    Raises MeshError for a size that cannot be cut so, for unknown layers, and for operations outside layers that mix places.
    """
    cut = Cut.over(axes, len(size), least=least, apart=apart)
    cut.check(size)
    if cut.axes:
        _swap(model, cut, {**_KINDS, **kinds})
        plan(model, cut, size, channels, inputs)
        for axis in cut.axes.values():
            sum_over(model, axis.init_group())  # a rank whose layers exchange nothing would not come to its first use
    return cut


def plan(
    model: nn.Module, cut: Cut, size: Sequence[int], channels: int | None = None, inputs: Inputs | None = None
) -> None:
    """Tell a cut model that volumes of ``size`` will come: it runs once, without memory or arithmetic, and each layer notes what
    it sees."""
    if not cut.axes:
        return
    given = (_volume(model, size, channels),) if inputs is None else inputs(size)
    state = {name: t.to("meta", copy=True) for name, t in (*model.named_parameters(), *model.named_buffers())}
    watch = _Watch()
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, Layer):
            handles += [layer.register_forward_pre_hook(watch.enter(name, cut)), layer.register_forward_hook(watch.leave)]
    training = {module: module.training for module in model.modules()}
    try:
        with cut.off(), torch.no_grad(), watch:
            torch.func.functional_call(model.eval(), state, given)
    finally:
        for handle in handles:
            handle.remove()
        for module, value in training.items():
            module.training = value


def _volume(model: nn.Module, size: Sequence[int], channels: int | None) -> Tensor:
    known = [getattr(m, "in_channels", 0) for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    if channels is None and not known:
        raise MeshError("spatial: the model has no convolution that tells the channels of its input; give channels")
    return torch.empty((1, channels or known[0], *size), device="meta", dtype=next(model.parameters()).dtype)


_MIXING = ("convolution", "pool", "upsample", "norm", "roll", "flip", "fft", "grid_sampler", "im2col", "cumsum")
_REDUCING = ("mean", "sum", "var", "var_mean", "amax", "amin", "max", "min", "prod", "std", "softmax", "_softmax", "_log_softmax")


class _Watch(TorchDispatchMode):
    """Refuses operations that mix places outside the layers that know how to."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[str] = []
        self._last = "its input"

    def enter(self, name: str, cut: Cut) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            cut.note(name, tuple(module.places(*args)))
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
                raise MeshError(
                    f"spatial: after {self._last} the model calls {name} itself, which mixes places of a cut volume; make it a "
                    "layer (nn.MaxPool3d for F.max_pool3d), or a seam"
                )
        return func(*args, **(kwargs or {}))


# ---- the layers


class Layer(nn.Module):
    """What each layer of a cut model has beside its own class."""

    cut: Cut
    name: str

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.cut.active:
            return super().forward(x, *args, **kwargs)
        return self._apart(x, *args, **kwargs)

    @untraced
    def _apart(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Messages between processes are not for a compiler's graph."""
        return self.over(x, self.cut.whole(self.name, self.places(x, *args, **kwargs)), *args, **kwargs)

    def places(self, x: Tensor, *args: Any, **kwargs: Any) -> Sequence[int]:
        """How many places of its input there are along each dim."""
        return x.shape[2:]

    def over(self, x: Tensor, size: Sizes, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's output, from its part ``x`` of a whole of ``size``."""
        raise NotImplementedError

    def planned(self, size: Sizes) -> Any:
        """``plan(size)``, which is made once."""
        key = self.name, size
        if key not in self.cut.plans:
            self.cut.plans[key] = self.plan(size)
        return self.cut.plans[key]

    def plan(self, size: Sizes) -> Any:
        """What travels where for a whole of ``size``."""
        raise NotImplementedError

    def check(self) -> str | None:
        """What about this layer cannot be cut, or None."""
        return None

    def brought(self, x: Tensor, routes: Sequence[Route], fill: float = 0.0) -> Tensor:
        """``x`` with what ``routes`` bring around it."""
        for route in routes:
            if not route.is_local:
                x = Exchange.apply(x, route, self.cut.traffic, fill)
        return x


def _route(
    cut: Cut, dim: int, size: int, out: int, reach: Callable[[Range], Range], wraps: bool = False
) -> tuple[Route, int] | None:
    """What ranks need along ``dim`` of ``size`` places to compute their part of ``out`` places, and how many of these this rank
    computes; None where nothing is cut. ``reach``: what a range of the output needs, which may go beyond the ends; ``wraps``:
    there it comes back at the other end."""
    axis = cut.axes.get(dim)
    if axis is None or not (cut.is_cut(dim, size) or cut.is_cut(dim, out)):
        return None
    # An output that is not cut is still computed in parts, if each rank gets a place, and then joined: that is less work for each
    # rank, and a smaller message than joining the input.
    outs = [part(out, r, axis.size) if out >= axis.size else (0, out) for r in range(axis.size)]
    reached = [reach(each) for each in outs]
    if wraps:
        have = tuple(cut.range_of(dim, size, r) for r in range(axis.size))
        first, end = outs[axis.rank]
        return Route(dim, axis, have, tuple(reached), period=size), end - first
    need = tuple((min(max(a, 0), size), max(min(b, size), 0)) for a, b in reached)
    have = tuple(cut.range_of(dim, size, r) for r in range(axis.size))
    a, b = reached[axis.rank]
    low, high = need[axis.rank]
    first, end = outs[axis.rank]
    return Route(dim, axis, have, need, max(low - a, 0), max(b - high, 0)), end - first


def _windows(n: int, k: int, s: int, p: int, d: int) -> tuple[int, Callable[[Range], Range]]:
    """Windows of ``k`` places, ``d`` apart, that begin every ``s`` places of ``n``, with ``p`` more at either end: how many there
    are, and what a range of them reaches."""
    return (n + 2 * p - d * (k - 1) - 1) // s + 1, lambda of: (of[0] * s - p, (of[1] - 1) * s - p + d * (k - 1) + 1)


def _transposed(n: int, k: int, s: int, p: int, d: int, more: int) -> tuple[int, Callable[[Range], Range]]:
    """The same for a transposed convolution, whose windows lie in its output."""
    return (n - 1) * s - 2 * p + d * (k - 1) + more + 1, lambda of: (-(-(of[0] + p - d * (k - 1)) // s), (of[1] - 1 + p) // s + 1)


def _settled(cut: Cut, y: Tensor, out: Sizes) -> Tensor:
    """``y``, computed in parts, joined along the dims in which a level of ``out`` is not cut."""
    for dim, n in enumerate(out, 2):
        if y.shape[dim] != n and not cut.is_cut(dim, n):
            y = cut.join_along(y, dim, n)
    return y


class _Convolution(Layer):
    """Also one that is given its weights in a call."""

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

    def check(self) -> str | None:
        if self.padding_mode not in ("zeros", "circular"):
            return f"padding_mode {self.padding_mode}; only zeros and circular can be cut"
        return f"padding {self.padding!r}; give numbers" if isinstance(self.padding, str) else None

    def wraps(self, dim: int) -> int:
        """How many places of the other end it sees beyond each end of ``dim``."""
        if self.padding_mode == "circular":
            return int(self.padding[dim - 2])
        return 1 if dim in getattr(self, "wrapped", ()) else 0

    def over(self, x: Tensor, size: Sizes, *given: Any) -> Tensor:
        routes, around, how, out = self.planned(size)
        if not routes:
            return _settled(self.cut, super(Layer, self).forward(x, *given), out)
        weight, bias = given or (self.weight, self.bias)
        for dim, count in around:
            x = torch.cat((x.narrow(dim, -count, count), x, x.narrow(dim, 0, count)), dim)
        if torch.is_autocast_enabled(x.device.type):
            narrow = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        apart = on_gpu(x) if self.cut.apart is None else self.cut.apart
        y = Convolution.apply(x, weight, bias, routes, how, self.cut.traffic, apart)
        return _settled(self.cut, y, out)

    def plan(self, size: Sizes) -> tuple[tuple[Route, ...], list[tuple[int, int]], How, Sizes]:
        """What travels where, which ends are put around what is there, the convolution, and the sizes of the whole output."""
        transposed, routes, around, kept, out = self.transposed, [], [], [], []
        padding, more = [int(p) for p in self.padding], [int(p) for p in self.output_padding]
        for i, n in enumerate(size):
            k, s, d, wraps = self.kernel_size[i], self.stride[i], self.dilation[i], self.wraps(i + 2)
            p = padding[i] if transposed else max(padding[i], wraps)
            o, reach = _transposed(n, k, s, p, d, more[i]) if transposed else _windows(n, k, s, p, d)
            out.append(o)
            found = _route(self.cut, i + 2, n, o, reach, wraps > 0)
            if found is None:
                if wraps:
                    around.append((i + 2, wraps))
                    padding[i] = p + wraps * s if transposed else 0
                continue
            route, count = found
            routes.append(route)
            if transposed:
                first = part(o, route.axis.rank, route.axis.size)[0] if count < o else 0
                skipped = first + p - (route.wanted[0] - route.before) * s
                places = (route.wanted[1] + route.after - route.wanted[0] + route.before - 1) * s + d * (k - 1) + 1
                if skipped or count != places:
                    kept.append((i + 2, skipped, count))
                more[i] = 0
            padding[i] = 0
        how = How(
            tuple(self.stride), tuple(padding), tuple(self.dilation), self.groups, tuple(more) if transposed else None, tuple(kept)
        )
        if all(route.is_local for route in routes) and not kept and not around and how.padding == tuple(self.padding):
            routes = []  # as without a cut
        return tuple(routes), around, how, tuple(out)


class _Pool(Layer):
    """Pooling over windows: the largest value or the mean."""

    def check(self) -> str | None:
        if self.ceil_mode:
            return "ceil_mode; only whole windows can be cut"
        if getattr(self, "return_indices", False):
            return "return_indices; places of a part are not those of the whole"
        if any(self._words("padding")) and not getattr(self, "count_include_pad", True):
            return "count_include_pad=False with padding"
        return None

    def _words(self, name: str) -> tuple[int, ...]:
        value: Any = getattr(self, name, 1)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,) * self.dims

    @property
    def dims(self) -> int:
        return 3 if isinstance(self, (nn.MaxPool3d, nn.AvgPool3d)) else 2

    def over(self, x: Tensor, size: Sizes) -> Tensor:
        largest = isinstance(self, (nn.MaxPool2d, nn.MaxPool3d))
        routes, padding, out = self.planned(size)
        x = self.brought(x, routes, -torch.inf if largest else 0.0)
        pool: Any = getattr(F, f"{'max' if largest else 'avg'}_pool{self.dims}d")
        words = {"dilation": self._words("dilation")} if largest else {"divisor_override": getattr(self, "divisor_override", None)}
        return _settled(self.cut, pool(x, self._words("kernel_size"), self._words("stride"), padding, **words), out)

    def plan(self, size: Sizes) -> tuple[list[Route], Sizes, Sizes]:
        padding, routes, out = list(self._words("padding")), [], []
        each = zip(*(self._words(name) for name in ("kernel_size", "stride", "padding", "dilation")))
        for i, (n, words) in enumerate(zip(size, each)):
            o, reach = _windows(n, *words)
            out.append(o)
            found = _route(self.cut, i + 2, n, o, reach)
            if found is not None:
                padding[i] = 0
                routes.append(found[0])
        return routes, tuple(padding), tuple(out)


class _Upsample(Layer):
    size: Any
    scale_factor: Any
    mode: str
    align_corners: bool | None

    def check(self) -> str | None:
        scale = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,)
        if self.size is not None or any(s is None or s != int(s) for s in scale):
            return "a size or a broken scale_factor; give whole factors"
        if self.mode not in ("nearest", "bilinear", "trilinear") or self.align_corners:
            return f"mode {self.mode} with align_corners {self.align_corners}; nearest, bilinear and trilinear without can be cut"
        return None

    def over(self, x: Tensor, size: Sizes) -> Tensor:
        routes, kept, out = self.planned(size)
        y = F.interpolate(self.brought(x, routes), scale_factor=tuple(float(s) for s in self._scale(len(size))), mode=self.mode)
        for dim, first, count in kept:
            y = y.narrow(dim, first, count)
        return _settled(self.cut, y, out)

    def _scale(self, dims: int) -> tuple[int, ...]:
        factor = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,) * dims
        return tuple(int(s) for s in factor)

    def plan(self, size: Sizes) -> tuple[list[Route], list[tuple[int, int, int]], Sizes]:
        routes, kept, scale, wide = [], [], self._scale(len(size)), 0 if self.mode == "nearest" else 1
        for i, (n, s) in enumerate(zip(size, scale)):

            def reach(of: Range, s: int = s, n: int = n) -> Range:
                # Beyond the ends of the whole interpolation itself repeats the edge.
                return max(of[0] // s - wide, 0), min((of[1] - 1) // s + 1 + wide, n)

            found = _route(self.cut, i + 2, n, n * s, reach)
            if found is not None:
                route, count = found
                routes.append(route)
                kept.append((i + 2, part(n * s, route.axis.rank, route.axis.size)[0] - route.wanted[0] * s, count))
        return routes, kept, tuple(n * s for n, s in zip(size, scale))


class _GlobalMean(Layer):
    def check(self) -> str | None:
        size: Any = self.output_size
        return None if set(size if isinstance(size, tuple) else (size,)) == {1} else f"output_size {size}; only 1 can be cut"

    def over(self, x: Tensor, size: Sizes) -> Tensor:
        own = x.sum(tuple(range(2, x.ndim)), keepdim=True)
        return all_reduce(own, *self.cut.cut_axes(size)) / torch.Size(size).numel()


class _Norm(Layer):
    """Instance, group and batch norms, whose ``total`` adds up moments over the axes over which the level is cut."""

    def over(self, x: Tensor, size: Sizes, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        whole = layer.total
        layer.total = SumInPlace(*whole.axes, *self.cut.cut_axes(size))  # one for this pass: its backward adds over the same axes
        try:
            return super(Layer, self).forward(x, *args, **kwargs)
        finally:
            layer.total = whole


class Join(nn.Module):
    """A seam where a model needs the whole volume on every rank; where nothing is cut it changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Join(Layer, Join):
    def over(self, x: Tensor, size: Sizes) -> Tensor:
        return self.cut.join(x, size)


class Once(nn.Module):
    """Stands where ranks have computed the same: what follows counts once, though each rank computes it."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        count = math.prod(axis.size for axis in self.cut.axes.values())
        return x if count == 1 or not self.cut.active else sum_once(x, count)


class SumOverCut(nn.Module):
    """Adds sums of parts of a volume over its ranks. All of these make the same loss or metric of them, which counts once: the
    gradient of a rank is that of its own sums."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, sums: Tensor) -> Tensor:
        return all_reduce(sums, *self.cut.axes.values(), identity_backward=True) if self.cut.active else sums


class Whole(nn.Module):
    """A whole volume of ``size``, on every rank, joined from the ranks' parts.   [B, C, D/n, H/m, W] -> [B, C, D, H, W]"""

    def __init__(self, cut: Cut, size: Sequence[int]) -> None:
        super().__init__()
        self.cut, self.size = cut, tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut.join(x, self.size) if self.cut.active else x


_KINDS: dict[type[nn.Module], type[Layer]] = {
    **dict.fromkeys((nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d, nn.AvgPool3d), _Pool),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), _GlobalMean),
    **dict.fromkeys((BatchNorm, InstanceNorm, GroupNorm), _Norm),
    nn.Upsample: _Upsample,
    Doubled: _Convolution,
    Join: _Join,
}
# Layers of torch that leave places where they are.
_LOCAL = (
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.Linear, nn.Embedding, nn.Flatten, nn.Sequential, nn.ModuleList,
    nn.ModuleDict,
)  # fmt: skip


def _swap(model: nn.Module, cut: Cut, kinds: Mapping[type[nn.Module], type[Layer]]) -> None:
    use_ours(model)
    for name, layer in model.named_modules():
        kind = _Convolution if isinstance(layer, nn.modules.conv._ConvNd) else kinds.get(type(layer))
        if kind is None:
            _refuse(name, layer)
            continue
        layer.__class__ = _joined(kind, type(layer))  # type: ignore[arg-type]  # mypy takes classes for not hashable
        layer.cut, layer.name = cut, name
        why = layer.check()
        if why is not None:
            raise MeshError(f"spatial: {name} has {why}")
        if kind is _Norm and not isinstance(layer.total, SumInPlace):
            layer.total = SumInPlace()


@cache
def _joined(kind: type[Layer], was: type[nn.Module]) -> type:
    """A class of layers that are still of the class that they were, so that they can do as before (``Cut.off``)."""
    return type(f"Cut{was.__name__}", (kind, was), {"__module__": __name__})


def _refuse(name: str, layer: nn.Module) -> None:
    theirs = type(layer).__module__.startswith("torch.nn.")
    pointwise = type(layer).__module__ == "torch.nn.modules.activation" and not isinstance(layer, nn.MultiheadAttention)
    if theirs and not pointwise and not isinstance(layer, _LOCAL):
        raise MeshError(f"spatial: {name} is a {type(layer).__name__}, and how to cut one is not known")
