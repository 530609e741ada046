"""U-Nets of maps and volumes: memory, periodic dims, conditions, errors."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.errors import DataError
from hpcai.models.diffusion import UNCONDITIONAL, Condition, UNet, UNetConfig
from hpcai.models.diffusion.blocks import FORMATS, resize
from tests.unit.models.operation_checks import saved_tensor_bytes

BATCH = 3
SMALL: dict[str, Any] = {
    "inputs": 2, "outputs": 2, "channels": (8, 12), "heads": (2, 3), "groups": 4, "blocks": 1, "tokens": None, "zero": False,
}  # fmt: skip


def new_unet(dims: int = 2, kind: str = "self", **overrides: Any) -> UNet:
    torch.manual_seed(0)
    context = {"tokens": 6} if kind == "cross" else {}
    return UNet(UNetConfig(**{**SMALL, "dims": dims, "attention": (kind, kind), "middle": kind, **context, **overrides})).double()


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def text_condition(net: UNet) -> Condition:
    return Condition(tokens=randn(BATCH, 5, 6)) if net.cfg.tokens else UNCONDITIONAL


TIMES = torch.tensor([0, 500, 999])


# ---- memory


class CopyCounter(TorchDispatchMode):
    """A mode that counts copies of activations: tensors whose first dim is the batch, or the batch and the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("clone", "_to_copy", "contiguous", "copy_"):
            self.counts[name] += any(x.ndim > 1 and x.shape[0] % BATCH == 0 for x in args if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def count_copies(net: UNet, sides: tuple[int, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Count the copies of the forward and of the backward pass, in float32: on a CPU torch's volumes of float64 are contiguous."""
    x = randn(BATCH, 2, *sides).float().contiguous(memory_format=FORMATS[net.cfg.dims]).requires_grad_()
    net, condition = net.float(), Condition(tokens=randn(BATCH, 5, 6).float() if net.cfg.tokens else None)
    with CopyCounter() as forward:
        y = net(x, TIMES, condition)
    with CopyCounter() as backward:
        y.square().mean().backward()
    return dict(+forward.counts), dict(+backward.counts)


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("sides", [(8, 16), (4, 8, 8)])
def test_forward_and_backward_copy_no_activation(kind: str, sides: tuple[int, ...]) -> None:
    net = new_unet(len(sides), kind, channels=(8, 16), heads=(2, 2))
    assert count_copies(net, sides) == ({}, {})


@pytest.mark.parametrize("kind, dropout", [("self", 0.1), ("cross", 0.0)])
def test_recomputation_keeps_gradients_bitwise_and_saves_fewer_bytes(kind: str, dropout: float) -> None:
    gradients, saved = {}, {}
    for recompute in ("none", "selective", "layers"):
        net, x = new_unet(kind=kind, dropout=dropout, recompute=recompute), randn(BATCH, 2, 16, 16).requires_grad_()
        with saved_tensor_bytes(net) as sizes:
            y = net(x, TIMES, text_condition(net))
        y.square().mean().backward()
        gradients[recompute], saved[recompute] = [x.grad, *(p.grad for p in net.parameters())], sum(sizes.values())
    assert all(map(torch.equal, gradients["selective"] + gradients["layers"], 2 * gradients["none"]))
    assert saved["selective"] < 0.9 * saved["none"] and saved["layers"] < 0.25 * saved["none"], saved


# ---- space


@pytest.mark.parametrize("sides, shift, periodic", [
    ((8, 12), (2, -4), (True, True)), ((8, 8), (2, 0), (True, False)), ((4, 8, 4), (2, 4, -2), (True, True, True)),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_periodic_network_is_translation_equivariant(
    sides: tuple[int, ...], shift: tuple[int, ...], periodic: tuple[bool, ...], kind: str
) -> None:
    dims = tuple(range(2, len(sides) + 2))
    net = new_unet(len(sides), kind, periodic=periodic, field=1)
    x, field = randn(BATCH, 2, *sides), randn(BATCH, 1, *(n // 2 for n in sides), seed=2)
    with torch.no_grad():
        y = net(x, TIMES, text_condition(net)._replace(field=field))
        half = [n // 2 for n in shift]
        moved = net(x.roll(shift, dims), TIMES, text_condition(net)._replace(field=field.roll(half, dims)))
    torch.testing.assert_close(moved, y.roll(shift, dims), rtol=0, atol=1e-12)


# ---- conditions


def test_a_coarse_field_is_resized_and_parameters_belong_to_their_sample() -> None:
    net, x, field, values = new_unet(field=2, parameters=3), randn(BATCH, 2, 8, 8), randn(BATCH, 2, 4, 2), randn(BATCH, 3)
    condition = Condition(field=field, parameters=values)
    with torch.no_grad():
        y = net(x, TIMES, condition)
        assert torch.equal(y, net(x, TIMES, condition._replace(field=resize(field, (8, 8)))))
        assert (y - net(x, TIMES, condition._replace(field=field + 1))).abs().max() > 1e-3
        other = net(x, TIMES, condition._replace(parameters=values.index_fill(0, torch.tensor([1]), 0.0)))
    assert torch.equal(y[0], other[0]) and (y[1] - other[1]).abs().max() > 1e-4


# ---- errors


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"attention": ("self", "cross")}, "needs tokens"),
        ({"tokens": 4}, "tokens need attention"),
        ({"heads": (2, 5)}, "not a multiple of 5 heads"),
        ({"pooled": 4}, "pooled and sizes go together"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        UNetConfig(**{**SMALL, "attention": ("self", "self"), "middle": "self", **settings})


def test_invalid_inputs_raise() -> None:
    x = randn(BATCH, 2, 8, 8)
    plain, cross, tokens = new_unet(), new_unet(kind="cross"), Condition(tokens=randn(BATCH, 5, 6), pooled=randn(BATCH, 3))
    coarse = new_unet(field=1, periodic=(True, False))
    cases: list[tuple[UNet, tuple[Any, ...], str]] = [
        (plain, (x, TIMES[:2]), r"UNet: time is \[2\], expected \[3\]"),
        (plain, (x, TIMES, tokens), "no use for condition.tokens"),
        (new_unet(kind="cross", pooled=3, sizes=4), (x, TIMES, tokens), r"needs condition.sizes \[3, 6\]; give it"),
        (cross, (x, TIMES), r"needs condition.tokens \[3, N, 6\]; give it"),
        (coarse, (x[:, :, :7], TIMES, Condition(field=randn(BATCH, 1, 4, 4))), "7 along a periodic dim; expected a multiple of 2"),
    ]
    for net, args, text in cases:
        with pytest.raises(DataError, match=text):
            net(*args)
