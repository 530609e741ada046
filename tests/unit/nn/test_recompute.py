"""Recomputation of cheap results: bitwise equal gradients with fewer saved tensors."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.nn.recompute import cheap, recompute_cheap


def silu(x: Tensor) -> Tensor:
    silu.calls += 1  # type: ignore[attr-defined]
    return x * x.sigmoid()


class Net(nn.Module):
    """A network in which three layers read one cheap result, and a product reads two results of one cheap function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.parts = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = cheap(silu, self.up(x))
        a, b, c = (part(y) for part in self.parts)
        a, b = cheap(lambda x, y: (x + y, x - y), a, b)
        return (a * b).tanh() @ c.T


silu.calls = 0  # type: ignore[attr-defined]


def train(recompute: bool, **autocast: Any) -> tuple[list[Tensor], int]:
    silu.calls = 0  # type: ignore[attr-defined]
    net, x = Net(), torch.arange(20.0).view(5, 4) / 10
    with torch.autocast("cpu", **{"enabled": False, **autocast}), recompute_cheap(recompute):
        y = net(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)], silu.calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("autocast", [{}, {"enabled": True, "dtype": torch.bfloat16}], ids=["wide", "narrow"])
def test_gradients_are_bitwise_equal_and_each_result_is_recomputed_once(autocast: dict[str, Any]) -> None:
    (actual, calls), (expected, calls_without) = train(True, **autocast), train(False, **autocast)
    assert len(actual) == 9 and all(map(torch.equal, actual, expected))
    assert calls == 2 and calls_without == 1, "three layers read it"


def test_results_are_freed_after_the_forward_pass_and_after_the_backward_pass() -> None:
    net, storages = nn.Linear(4, 4), []

    def double(x: Tensor) -> Tensor:
        y = x * 2
        storages.append(weakref.ref(y.untyped_storage()))
        return y

    up = nn.Linear(4, 4)
    with recompute_cheap():
        y = net(cheap(double, up(torch.ones(3, 4))))
    assert storages[0]() is None, "after the forward pass"
    y.sum().backward()
    assert len(storages) == 2 and storages[1]() is None, "after the backward pass"


def test_recompute_cheap_has_no_effect_under_torch_compile() -> None:
    net, x = Net(), torch.ones(5, 4)

    def run(x: Tensor) -> Tensor:
        with recompute_cheap():
            return net(x)

    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x))
