"""Convolutions of maps and volumes.   B batch, C channels, O output channels, D H W the volume, P its voxels"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import is_transformed
from hpcai.kernels.triton_support import needs_plain_ops, on_cpu

# torch dispatches a convolution of one float32 volume to oneDNN only if B*C*D*H is larger than this (2.11 to 2.13), and otherwise
# unrolls it (im2col) into a matrix product that takes 1.5 to 6 times as long (docs/benchmarks.md).
_MAX_UNROLLED = 20480
# The gradients of one volume with no more voxels than this are matrix products with the unrolled volume, because oneDNN would spend
# its time on reordering the weights (both gradients, 320 channels at 4^3: 15 ms as products, 24 in halves; 256 at 8^3: 61, 41).
_MAX_MATMUL_VOXELS = 128
_WINOGRAD_BLOCK = 1 << 22  # transformed elements in memory at a time, so that they fit into a cache

Triple = tuple[int, ...]
Layer = nn.Conv2d | nn.ConvTranspose2d


def channels_last(x: Tensor) -> Tensor:
    """Return ``x`` [B, C, ...] in channels-last memory. A volume of one channel gets its strides too, since torch would otherwise
    treat it as contiguous. Under ``torch.func``, whose vmap does not support channels-last, return ``x`` itself."""
    if is_transformed():
        return x
    if x.ndim == 5 and x.shape[1] == 1 and x.is_contiguous():
        return x[:, 0, ..., None].permute(0, 4, 1, 2, 3)
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def conv3d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Triple = (1, 1, 1), padding: Triple = (0, 0, 0),
           dilation: Triple = (1, 1, 1), groups: int = 1) -> Tensor:  # fmt: skip
    """``F.conv3d`` that is also fast for a single small volume on a CPU, and correct for a shallow one in bfloat16.

    Shape: x [B, C, D, H, W] -> [B, O, D', H', W']
    """
    if _leaves_grad_weight_unwritten(x, weight):
        return _in_float32(F.conv3d, x, weight, bias, stride, padding, dilation, groups)
    if on_cpu(x) and x.ndim == 5 and groups == 1 and not needs_plain_ops():
        if weight.shape[2:].numel() == 1 and not any(padding) and x.is_contiguous(memory_format=torch.channels_last_3d):
            d, h, w = stride
            return F.linear(_channels_to_end(x[:, :, ::d, ::h, ::w]), weight.flatten(1), bias).permute(0, 4, 1, 2, 3)
        if _would_be_unrolled(x, weight):
            return _OneDNNConv3d.apply(channels_last(x), weight, bias, stride, padding, dilation)
    return F.conv3d(x, weight, bias, stride, padding, dilation, groups)


def conv_transpose3d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Triple = (1, 1, 1),
                     padding: Triple = (0, 0, 0), output_padding: Triple = (0, 0, 0), dilation: Triple = (1, 1, 1),
                     groups: int = 1) -> Tensor:  # fmt: skip
    """``F.conv_transpose3d``, as one matrix product if kernels do not overlap, on a CPU and in channels-last memory.

    Shape: x [B, C, D, H, W] -> [B, O, D', H', W']
    """
    kernel = tuple(weight.shape[2:])
    apart = on_cpu(x) and x.ndim == 5 and kernel == tuple(stride) and not any(padding) and not any(output_padding)
    apart = apart and set(dilation) == {1} and groups == 1
    if apart and not needs_plain_ops() and x.is_contiguous(memory_format=torch.channels_last_3d):
        (batch, _, *sizes), (a, b, c), outputs = x.shape, kernel, weight.shape[1]
        y = F.linear(_channels_to_end(x), _channels_to_end(weight).flatten(1).t(), None if bias is None else bias.repeat(a * b * c))
        y = y.view(batch, *sizes, a, b, c, outputs).permute(0, 1, 4, 2, 5, 3, 6, 7)
        return y.reshape(batch, sizes[0] * a, sizes[1] * b, sizes[2] * c, outputs).permute(0, 4, 1, 2, 3)
    return F.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation)


def _channels_to_end(x: Tensor) -> Tensor:
    """[B, C, D, H, W] -> [B, D, H, W, C]"""
    return x.permute(0, 2, 3, 4, 1)


def _leaves_grad_weight_unwritten(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN would leave the gradient of the weights unwritten: in bfloat16 on a CPU, for a volume that is less deep than
    the kernel (torch 2.13: depth 2 with kernel 3, depths 3 and 4 with kernel 5). Such small volumes are fast in float32 too."""
    return on_cpu(x) and x.shape[-3] < weight.shape[2] and _in_bfloat16(weight)


def _in_bfloat16(weight: Tensor) -> bool:
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return autocast or weight.dtype == torch.bfloat16


def _in_float32(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, *sizes: Any) -> Tensor:
    """Compute a bfloat16 convolution in float32, and round the result."""
    with torch.autocast("cpu", enabled=False):
        return convolve(x.float(), weight.float(), None if bias is None else bias.float(), *sizes).bfloat16()


def _would_be_unrolled(x: Tensor, weight: Tensor) -> bool:
    kernel, mkldnn = weight.shape[2:], torch.backends.mkldnn
    fits = x.dtype == weight.dtype == torch.float32 and x.shape[0] == 1 and x.shape[1:4].numel() <= _MAX_UNROLLED
    fits = fits and x.shape[1] == weight.shape[1] and kernel.numel() > 1 and not (kernel[1] > 3 and kernel[2] > 3)
    enabled = fits and not torch.is_autocast_enabled("cpu") and mkldnn.enabled and mkldnn.is_available()
    return bool(enabled and hasattr(torch, "mkldnn_convolution"))


class _OneDNNConv3d(torch.autograd.Function):
    """The convolution of one float32 volume by oneDNN, where torch would unroll it. The forward pass is an operation of torch; the
    backward pass, for which torch has none, is ``conv3d_gradients``. It has no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Triple, padding: Triple,
                dilation: Triple) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.conv_args = stride, padding, dilation
        return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.conv_args
        grads = conv3d_gradients(dy, x, weight, stride, padding, dilation, 1, ctx.needs_input_grad[:3])
        return *grads, None, None, None


def conv3d_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Triple, padding: Triple, dilation: Triple, groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of input, weight and bias of ``conv3d``, each if ``output_mask`` is set. For one float32 volume that
    torch would unroll they are computed as two samples or as matrix products."""
    need_input, need_weight, need_bias = output_mask
    if on_cpu(x) and groups == 1 and _would_be_unrolled(x, weight):
        dx = dweight = None
        if need_input or need_weight:
            method = _matmul_gradients if dy.shape[2] == 1 or dy.shape[2:].numel() <= _MAX_MATMUL_VOXELS else _halved_gradients
            dx, dweight = method(channels_last(dy), channels_last(x), weight, (stride, padding, dilation), need_input, need_weight)
        return dx, dweight, dy.sum((0, 2, 3, 4)) if need_bias else None
    bias_sizes = [weight.shape[0]] if need_bias else None
    conv_args = (stride, padding, dilation, False, (0, 0, 0), groups)
    grads: Any = torch.ops.aten.convolution_backward(dy, x, weight, bias_sizes, *conv_args, tuple(output_mask))
    return grads


def _matmul_gradients(dy: Tensor, x: Tensor, weight: Tensor, conv_args: tuple[Triple, Triple, Triple], need_input: bool,
                      need_weight: bool) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x and weight by matrix products, with the volume unrolled into [P', kernel * C]."""
    (stride, padding, dilation), kernel, channels = conv_args, weight.shape[2:], x.shape[1]
    pads = [p for n in reversed(padding) for p in (n, n)]
    rows = _channels_to_end(dy).reshape(-1, dy.shape[1])
    dx = dweight = None
    if need_weight:
        padded = _channels_to_end(F.pad(x, pads)).contiguous()
        steps = padded.stride()[1:4]
        strides = [s * n for s, n in zip(stride, steps)], [d * n for d, n in zip(dilation, steps)]
        columns = padded.as_strided((*dy.shape[2:], *kernel, channels), (*strides[0], *strides[1], 1))
        dweight = (rows.t() @ columns.reshape(len(rows), -1)).view(-1, *kernel, channels).permute(0, 4, 1, 2, 3)
    if need_input:
        dcolumns = (rows @ _channels_to_end(weight).reshape(len(weight), -1)).view(*dy.shape[2:], *kernel, channels)
        padded = x.new_zeros([n + 2 * p for n, p in zip(x.shape[2:], padding)] + [channels])
        for tap in product(*map(range, kernel)):
            read: Any = (..., *tap, slice(None))
            starts = [k * d for k, d in zip(tap, dilation)]
            write: Any = tuple(slice(a, a + s * (n - 1) + 1, s) for a, s, n in zip(starts, stride, dy.shape[2:]))
            padded[write] += dcolumns[read]
        dx = F.pad(padded.permute(3, 0, 1, 2)[None], [-p for p in pads])
    return dx, dweight


def _halved_gradients(dy: Tensor, x: Tensor, weight: Tensor, conv_args: tuple[Triple, Triple, Triple], need_input: bool,
                      need_weight: bool) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x and weight, with ``dy`` split along D into two samples, and x likewise with a halo: for two samples
    torch dispatches to oneDNN."""
    (stride, padding, dilation), half = conv_args, -(-dy.shape[2] // 2)
    if dy.shape[2] % 2:
        dy = channels_last(F.pad(dy, (0, 0, 0, 0, 0, 1)))
    first = half * stride[0]
    span = (half - 1) * stride[0] + dilation[0] * (weight.shape[2] - 1) + 1
    ends = padding[0], first + span - x.shape[2] - padding[0]
    padded = F.pad(x, (0, 0, 0, 0, *ends))
    both = channels_last(torch.cat((padded[:, :, :span], padded[:, :, first:])))
    pair = _channels_to_end(dy).view(2, half, *dy.shape[3:], dy.shape[1]).permute(0, 4, 1, 2, 3)  # halves of the memory
    rest = (stride, (0, *padding[1:]), dilation, False, (0, 0, 0), 1)
    dboth, dweight, _ = torch.ops.aten.convolution_backward(pair, both, weight, None, *rest, (need_input, need_weight, False))
    if not need_input:
        return None, dweight
    dx = torch.zeros_like(padded, memory_format=torch.channels_last_3d)
    dx[:, :, :span] = dboth[:1]
    dx[:, :, first:] += dboth[1:]
    return F.pad(dx, (0, 0, 0, 0, -ends[0], -ends[1])), dweight


class Conv3d(nn.Conv3d):
    """``nn.Conv3d`` by ``conv3d``. Values and gradients are the same."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, D, H, W] -> [B, O, D', H', W']"""
        if self.padding_mode == "zeros" and not isinstance(self.padding, str):
            return conv3d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if _leaves_grad_weight_unwritten(x, self.weight):
            return _in_float32(self._conv_forward, x, self.weight, self.bias)
        return super().forward(x)


class ConvTranspose3d(nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` by ``conv_transpose3d``. Values and gradients are the same."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """[B, C, D, H, W] -> [B, O, D', H', W']"""
        if output_size is not None or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(x, output_size)
        conv_args = (self.stride, self.padding, self.output_padding, self.dilation, self.groups)
        return conv_transpose3d(x, self.weight, self.bias, *conv_args)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d``; on a CPU in channels-last memory a 1 x 1 convolution is a matrix product, and a 3 x 3 convolution of many
    channels in float32 is computed by Winograd's method, with 4/9 of the multiplications.

    With one thread torch unrolls 1 x 1 convolutions, and oneDNN's gradient of weights with a stride aborts the process for some
    widths (torch 2.13: 8 channels to 16 in two maps of 48 x 72). Values and gradients are those of ``nn.Conv2d``. On a CPU dilated
    depthwise convolutions in bfloat16, and those of maps narrower than the kernel, are computed in float32: oneDNN leaves the
    gradient of the weights unwritten (torch 2.11 to 2.14).
    """

    def forward(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, /) -> Tensor:
        """``weight``: in place of the parameters, with ``bias``.   [B, C, H, W] -> [B, O, H', W']"""
        weight, bias = (self.weight, self.bias) if weight is None else (weight, bias)
        dilated, narrow = self.groups > 1 and self.dilation != (1, 1), x.shape[3] < self.kernel_size[1]
        if (dilated or narrow) and on_cpu(x) and _in_bfloat16(weight):
            return _in_float32(self._conv_forward, x, weight, bias)
        fast = _is_fast_layer(self, x)
        if not self._is_product(x):
            tile = _winograd_tile(x, weight, self.stride, self.padding) if fast and self.dilation == (1, 1) else 0
            fast = fast and (self.dilation != (1, 1) or tile > 0)
            return _FastConv.call(self, x, weight, bias, self.stride, tile) if fast else self._conv_forward(x, weight, bias)
        x = x[:, :, :: self.stride[0], :: self.stride[1]]
        if fast and 2 * x[:, 0].numel() >= max(weight.shape):
            return _FastConv.call(self, channels_last(x), weight, bias, (1, 1))
        return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)

    def _is_product(self, x: Tensor) -> bool:
        fits = on_cpu(x) and self.kernel_size == (1, 1) and self.padding == (0, 0) and self.groups == 1
        return fits and (is_transformed() or x.is_contiguous(memory_format=torch.channels_last))


class ConvTranspose2d(nn.ConvTranspose2d):
    """``nn.ConvTranspose2d``; on a CPU the gradient of the weights is computed in contiguous memory (``_FastConv``)."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """[B, C, H, W] -> [B, O, H', W']"""
        if output_size is None and _is_fast_layer(self, x):
            return _FastConv.call(self, x, self.weight, self.bias, self.stride)
        return super().forward(x, output_size)


def _is_fast_layer(conv: Layer, x: Tensor) -> bool:
    """Whether ``_FastConv`` supports a layer, which has enough output channels to gain from it."""
    fits = on_cpu(x) and x.dtype == conv.weight.dtype == torch.float32 and conv.groups == 1 and conv.out_channels >= 16
    fits = fits and conv.padding_mode == "zeros" and not isinstance(conv.padding, str) and not torch.is_autocast_enabled("cpu")
    fits = fits and not needs_plain_ops() and torch.autograd.forward_ad._current_level < 0
    fits = fits and x.is_contiguous(memory_format=torch.channels_last) and x.shape[1] == conv.in_channels
    return bool(fits and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())


class _FastConv(torch.autograd.Function):
    """A convolution with output and gradients in channels-last memory, each by the fastest method: Winograd's if ``tile`` is not 0.

    oneDNN's gradient of the weights is so slow in this memory that copies pay off for transposed convolutions (256 to 256 channels
    at 96 x 144: 0.22 s instead of 0.46 s) and for dilated ones (2,048 to 256 at 24 x 36: 0.15 s instead of 0.20 s).
    """

    @staticmethod
    def call(conv: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Triple, tile: int = 0) -> Tensor:
        transposed = isinstance(conv, nn.ConvTranspose2d)
        conv_args = (stride, conv.padding, conv.dilation, transposed, conv.output_padding, conv.groups)
        return _FastConv.apply(x, weight, bias, conv_args, tile)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv_args: tuple[Any, ...], tile: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        (stride, padding, dilation, transposed), ctx.conv_args = conv_args[:4], conv_args
        ctx.has_bias, ctx.tile = bias is not None, tile
        ctx.pointwise = not transposed and weight.shape[2:] == (1, 1) and (stride, padding) == ((1, 1), (0, 0))
        if ctx.pointwise:
            return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, 1)
        return _winograd(x, weight, bias, padding, tile) if tile else torch.convolution(x, weight, bias, *conv_args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x, weight), conv_args, dx, dweight = ctx.saved_tensors, ctx.conv_args, None, None
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: operations that have derivatives
            conv_args = *conv_args, [need_input, need_weight, ctx.has_bias and need_bias]
            return *torch.ops.aten.convolution_backward(dy, x, weight, [dy.shape[1]], *conv_args), None, None

        def gradients(memory_format: torch.memory_format, mask: list[bool]) -> Any:
            dy_, x_, weight_ = (t.contiguous(memory_format=memory_format) for t in (dy, x, weight))
            return torch.ops.aten.convolution_backward(dy_, x_, weight_, None, *conv_args, mask)

        dy = channels_last(dy)
        rows, x_rows = (t.permute(0, 2, 3, 1).flatten(0, 2) for t in (dy, x))
        if need_input and ctx.tile:
            dx = _winograd(dy, weight, None, [2 - p for p in conv_args[1]], ctx.tile, flipped=True)
        elif need_input and ctx.pointwise and len(rows) >= 2 * max(weight.shape):
            dx = torch.mkldnn_convolution(dy, weight.transpose(0, 1), None, (0, 0), (1, 1), (1, 1), 1)
        elif need_input and ctx.pointwise:
            dx = (rows @ weight.flatten(1)).view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)
        elif need_input:
            dx = gradients(torch.channels_last, [True, False, False])[0]
        if need_weight and ctx.tile:
            dweight = _winograd_grad_weight(dy, x, conv_args[1], ctx.tile)
        elif need_weight and ctx.pointwise:
            dweight = (rows.t() @ x_rows).view(weight.shape)
        elif need_weight:
            dweight = gradients(torch.contiguous_format, [False, True, False])[1]
        return dx, dweight, dy.sum((0, 2, 3)) if ctx.has_bias and need_bias else None, None, None


def _winograd_tile(x: Tensor, weight: Tensor, stride: Triple, padding: Any) -> int:
    """Return the size of Winograd's tiles if the method is fast, or 0: there are many channels, enough pixels to share the
    transformed weights, and a tile of 4 covers the map with little to spare. It was measured with one thread."""
    outputs, inputs, *kernel = weight.shape
    if kernel != [3, 3] or stride != (1, 1) or max(padding) > 2 or torch.get_num_threads() > 1:
        return 0
    (batch, _, height, width), channels = x.shape, min(inputs, outputs)
    sharing = batch * height * width * (1 / inputs + 1 / outputs)
    if channels >= 128 and sharing >= 8 and (height + -height % 4) * (width + -width % 4) <= 1.2 * height * width:
        return 4
    return 2 if channels >= 256 and sharing >= 4 else 0


def _winograd_matrices(points: Tensor) -> list[Tensor]:
    """Return A and B transposed, and G, of F(tile, 3) of Lavin and Gray 2016 (arXiv:1509.09308) in two dims, by Toom and Cook, with
    infinity as the last point."""
    sizes, unit = (len(points) - 1, len(points) + 1, 3), torch.ones_like(points[:1])
    powers = [torch.cat((torch.linalg.vander(points, N=n), F.pad(unit, (n - 1, 0))[None])) for n in sizes]
    return [torch.kron(m, m).float() for m in (powers[0].t(), powers[1].inverse().t(), powers[2])]


# By the size of tiles. The points of 4: Barabasz et al. 2020 (arXiv:1803.10986).
_WINOGRAD = {len(points) - 1: _winograd_matrices(torch.tensor(points, dtype=torch.float64, device="cpu"))
             for points in ((0, 1, -1), (0, 1, -1, 0.5, -2))}  # fmt: skip


def _winograd_blocks(x: Tensor, y: Tensor, padding: Sequence[int], tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the transformed input of blocks of T tiles [(tile + 2)^2, T, C], and their output [tile, tile, B, h, w, O], a view of y
    [B, O, H, W], whose sizes are multiples of ``tile``."""
    (h, w), (batch, outputs, height, width), span = padding, y.shape, tile + 2
    x = F.pad(x, (w, width + 2 - w - x.shape[3], h, height + 2 - h - x.shape[2]))
    pixels = _WINOGRAD_BLOCK * tile**2 // (span**2 * (x.shape[1] + outputs))
    images, rows = max(1, pixels // (height * width)), max(tile, pixels // width // tile * tile)
    for i, r in product(range(0, batch, images), range(0, height, rows)):
        tiles = x[i : i + images, :, r : r + rows + 2].unfold(2, span, tile).unfold(3, span, tile).permute(4, 5, 0, 2, 3, 1)
        out = y[i : i + images, :, r : r + rows].unfold(2, tile, tile).unfold(3, tile, tile).permute(4, 5, 0, 2, 3, 1)
        yield (_WINOGRAD[tile][1] @ tiles.reshape(span**2, -1)).view(span**2, -1, x.shape[1]), out


def _winograd(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], tile: int, flipped: bool = False) -> Tensor:
    """Return the convolution, or with ``flipped`` that by weights which are transposed and turned by 180 degrees."""
    a, _, g = _WINOGRAD[tile]
    weights = torch.matmul(g.flip(1) if flipped else g, weight.permute(0, 2, 3, 1).flatten(1, 2)).transpose(0, 1)
    weights = weights if flipped else weights.transpose(1, 2)  # [(tile + 2)^2, C, O]
    height, width = (n + 2 * p - 2 for n, p in zip(x.shape[2:], padding))
    shape = len(x), weights.shape[2], height + -height % tile, width + -width % tile
    y = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)
    for tiles, out in _winograd_blocks(x, y, padding, tile):
        products = torch.bmm(tiles, weights)
        if bias is not None:
            products[tile + 3] += bias  # of the point (1, 1), which counts once in each output
        out.copy_((a @ products.flatten(1)).view(out.shape))
    return y if y.shape[2:] == (height, width) else channels_last(y[:, :, :height, :width])


def _winograd_grad_weight(dy: Tensor, x: Tensor, padding: Sequence[int], tile: int) -> Tensor:
    (a, _, g), dy = _WINOGRAD[tile], F.pad(dy, (0, -dy.shape[3] % tile, 0, -dy.shape[2] % tile))
    dweights = x.new_zeros((tile + 2) ** 2, dy.shape[1], x.shape[1])
    for tiles, out in _winograd_blocks(x, dy, padding, tile):
        dweights.baddbmm_((a.t() @ out.reshape(tile**2, -1)).view(len(tiles), -1, dy.shape[1]).transpose(1, 2), tiles)
    return torch.matmul(g.t(), dweights.transpose(0, 1)).unflatten(1, (3, 3)).permute(0, 3, 1, 2)
