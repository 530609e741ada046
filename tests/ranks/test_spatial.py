"""A network on a sharded volume equals that of one process in values, gradients and state-dict keys."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.nn import BatchNorm, Conv3d, InstanceNorm
from hpcai.parallel.axial import ReplicatedOnce
from hpcai.parallel.spatial import GatherFull, SpatialSum, parallelize_spatial, plan_size
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json

MESHES: list[dict[str, int]] = [
    {"depth": 1}, {"depth": 2}, {"depth": 4}, {"depth": 2, "height": 2}, {"replicate": 2, "depth": 2}, {"height": 3},
]  # fmt: skip


def randomize(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model.double()


def compare(mesh: Mesh, make: Any, size: tuple[int, ...], channels: int, kwargs: dict[str, Any], passes: int = 2,
            tolerance: float = 1e-10) -> None:  # fmt: skip
    """Compare a sharded network with the full one, forward and backward, on every rank, over several passes."""
    full = randomize(make())
    model = deepcopy(full)
    keys = list(model.state_dict())
    names = ("depth", "height", "width")[-len(size) :]
    partition = parallelize_spatial(model, {n: mesh[n] for n in names if n != "width"}, size, **kwargs)
    assert list(model.state_dict()) == keys
    x = torch.randn(passes, channels, *size, generator=torch.Generator().manual_seed(7 + mesh["replicate"].rank)).double()
    local = partition.take_shard(x).clone().requires_grad_()
    x.requires_grad_()
    for _ in range(passes):  # no state may remain for the next pass
        y_full, y = full(x), model(local)
        slices = partition.local_slices(y_full.shape[2:])
        assert y.shape == y_full[(..., *slices)].shape
        torch.testing.assert_close(y, y_full[(..., *slices)], rtol=tolerance, atol=tolerance)
        weights = torch.randn(y_full.shape, generator=torch.Generator().manual_seed(3)).double()
        share = 1.0
        for dim, axis in partition.axes.items():  # a replicated output counts once over all ranks
            share /= axis.size if not partition.is_sharded(dim, y_full.shape[dim]) else 1
        for model_, x_ in ((full, x), (model, local)):
            model_.zero_grad()
            x_.grad = None
        (y_full * weights).square().sum().backward()
        ((y * weights[(..., *slices)]).square().sum() * share).backward()
        worst = ("x", float((local.grad - partition.take_shard(x.grad)).abs().max() / x.grad.abs().max()))
        largest = max(float(p.grad.abs().max()) for p in full.parameters())  # a bias before a norm has a gradient of 0
        for (name, a), b in zip(full.named_parameters(), model.parameters()):
            axes = getattr(b, "sum_axes", ())
            assert [axis.name for axis in axes] == [axis.name for axis in partition.axes.values()]
            gradient = all_reduce_(b.grad.clone(), *axes)
            worst = max(worst, (name, float((gradient - a.grad).abs().max()) / largest), key=lambda v: v[1])
        assert worst[1] < tolerance, worst
        for (name, a), b in zip(full.named_buffers(), model.buffers()):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=name)


class Unet(nn.Module):
    """A network with two downsamplings, a deep level too small for many ranks, skips, and every kind of norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Conv3d(2, 6, 3, padding=1, bias=False), InstanceNorm(6, "relu"))
        self.down = nn.Sequential(nn.Conv3d(6, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU())
        deep = (nn.Conv3d(8, 8, 3, 2, 1), nn.BatchNorm3d(8), nn.Conv3d(8, 8, 3, padding=1), BatchNorm(8, relu=True))
        self.deep = nn.Sequential(*deep)
        self.up = nn.ConvTranspose3d(8, 8, 2, 2)
        self.middle = nn.Sequential(nn.Conv3d(16, 6, 3, padding=1), nn.InstanceNorm3d(6, affine=True))
        self.up2 = nn.ConvTranspose3d(6, 6, 3, 2, 1, output_padding=1)
        self.last = nn.Conv3d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.down(a)
        c = self.middle(torch.cat((self.up(self.deep(b)), b), 1))
        return self.last(torch.cat((self.up2(c), a), 1))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_sharded_network_equals_the_full_one(axes: dict[str, int]) -> None:
    for overlap in (False, True):
        on_ranks(axes, compare, Unet, (16, 12, 8), 2, {"overlap": overlap})


CONVOLUTIONS = load_json("convolutions")["forward"]
TRANSPOSED = load_json("convolutions")["transposed"]
OTHER_LAYERS = [
    nn.MaxPool3d(2), nn.MaxPool3d(3, 2, 1), nn.AvgPool3d(3, 1, 1), nn.AvgPool3d(2), nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=3, mode="trilinear"), nn.MaxPool3d(3, 1, 1, dilation=1), nn.AdaptiveAvgPool3d(1),
]  # fmt: skip


class Single(nn.Module):
    """A layer between two distinguishable ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.factor = layer, nn.Conv3d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.factor(x))


class MakeLayer:
    """Constructs a network from a layer, or from its class and arguments; it can be pickled."""

    def __init__(self, kind: Any, kwargs: dict[str, Any]) -> None:
        self.kind, self.kwargs = kind, kwargs

    def __call__(self) -> nn.Module:
        layer = self.kind(4, 4, **self.kwargs) if isinstance(self.kind, type) else deepcopy(self.kind)
        return Single(layer)


def compare_layers(mesh: Mesh, size: tuple[int, ...]) -> None:
    cases = [MakeLayer(nn.Conv3d, kw) for kw in CONVOLUTIONS] + [MakeLayer(nn.ConvTranspose3d, kw) for kw in TRANSPOSED]
    for case in cases + [MakeLayer(layer, {}) for layer in OTHER_LAYERS]:
        for kwargs in ({"overlap": True}, {"min_size": 1})[: 2 if size[0] < 12 else 1]:  # ``min_size`` concerns short slabs
            try:
                compare(mesh, case, size, 4, kwargs, passes=1)
            except AssertionError as problem:
                raise AssertionError(f"{case.kind} {case.kwargs} {kwargs} {size}: {problem}") from problem


EVEN, UNEVEN, SHORT = (24, 12, 5), (19, 11, 5), (10, 13, 5)
SLABS: list[tuple[dict[str, int], tuple[int, ...]]] = [
    ({"depth": 2}, EVEN), ({"depth": 2}, UNEVEN), ({"depth": 4}, UNEVEN), ({"depth": 4}, SHORT),
    ({"depth": 2, "height": 2}, UNEVEN),
]  # fmt: skip


@pytest.mark.parametrize("axes, size", SLABS, ids=str)
def test_every_layer_on_slabs_of_any_size(axes: dict[str, int], size: tuple[int, ...]) -> None:
    on_ranks(axes, compare_layers, size)


class Flat(nn.Module):
    """A network on a map, with a global pooling branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), BatchNorm(8, relu=True)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Conv2d(8, 8, 1), nn.ReLU())
        self.holes, self.out = nn.Conv2d(8, 8, 3, padding=6, dilation=6), nn.ConvTranspose2d(16, 2, 3, 2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return self.out(torch.cat((self.holes(x), self.pool(x).expand_as(x)), 1))


@pytest.mark.parametrize("axes", [{"height": 2}, {"height": 4}, {"replicate": 2, "height": 2}], ids=str)
def test_a_map_is_sharded_along_its_height(axes: dict[str, int]) -> None:
    on_ranks(axes, compare, Flat, (22, 6), 3, {})


class Regressor(nn.Module):
    """A network with dense layers after the volume, and a loss of sums over it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.MaxPool3d(2), nn.LeakyReLU(), nn.Conv3d(4, 4, 3, padding=1))
        self.gather_volume: nn.Module = nn.Identity()
        self.dense = nn.Sequential(nn.Linear(4 * 8 * 4 * 2, 6), nn.Tanh(), nn.Linear(6, 2))
        self.once: nn.Module = nn.Identity()
        self.total: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.dense(self.gather_volume(self.conv(x)).flatten(1)))

    def loss(self, x: Tensor) -> Tensor:
        sums = self.total(torch.cat((x.square().sum((1, 2, 3, 4)), self.conv(x).exp().sum((1, 2, 3, 4)))))
        return self(x).square().sum() + (sums[1:] / sums[:1]).sum()


def losses(mesh: Mesh) -> None:
    full = randomize(Regressor())
    model: Any = deepcopy(full)
    partition = parallelize_spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, (16, 8, 4))
    model.gather_volume, model.total = GatherFull(partition, (8, 4, 2)), SpatialSum(partition)
    model.once = ReplicatedOnce(mesh.model_parallel)
    x = torch.randn(2, 2, 16, 8, 4, generator=torch.Generator().manual_seed(5)).double()
    expected, actual = full.loss(x), model.loss(partition.take_shard(x))
    expected.backward()
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=0)
    for (name, a), b in zip(full.named_parameters(), model.parameters()):
        torch.testing.assert_close(all_reduce_(b.grad, *b.sum_axes), a.grad, rtol=1e-10, atol=1e-12, msg=name)
    with partition.disabled():
        torch.testing.assert_close(model(x), full(x), rtol=1e-12, atol=0)
    shard, full_input = partition.take_shard(x).clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(6)).double()
    ((partition.gather(shard, x.shape[2:]) + full_input) * weights).sum().backward()  # both get one gradient: never modify it
    assert shard.grad is not None and full_input.grad is not None
    torch.testing.assert_close(full_input.grad, weights, rtol=0, atol=0)
    torch.testing.assert_close(shard.grad, partition.take_shard(weights) * mesh.model_parallel.size, rtol=1e-12, atol=0)
    twin = deepcopy(model)
    torch.testing.assert_close(twin(partition.take_shard(x)), model(partition.take_shard(x)), rtol=0, atol=0)


@pytest.mark.parametrize("axes", [{"depth": 2}, {"depth": 4}, {"depth": 2, "height": 2}], ids=str)
def test_replicated_results_count_once(axes: dict[str, int]) -> None:
    on_ranks(axes, losses)


# ---- unsupported models


def error_text(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except MeshError as problem:
        return str(problem)
    return "done"


def refusal_texts(mesh: Mesh) -> list[str]:
    class Functional(nn.Module):
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv3d(2, 4, 3, padding=1), act

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.conv(x))

    axes = {"depth": mesh["depth"]}
    layers = [
        nn.Conv3d(2, 4, 3, padding=1, padding_mode="reflect"), nn.MaxPool3d(2, ceil_mode=True), nn.LayerNorm(8),
    ]  # fmt: skip
    functions = [
        lambda x: torch.nn.functional.max_pool3d(x, 2), lambda x: x - x.mean((2, 3, 4), keepdim=True), lambda x: x.flip(2),
    ]  # fmt: skip
    models: list[nn.Module] = [nn.Sequential(nn.Conv3d(2, 2, 1), layer) for layer in layers]
    models += [Functional(function) for function in functions]
    texts = [error_text(parallelize_spatial, model, axes, (8, 8, 8)) for model in models]
    parallelize_spatial(Functional(lambda x: x.relu() / x.mean(1, keepdim=True)), axes, (8, 8, 8))  # over channels, for each voxel
    model = Functional(nn.ReLU())
    partition = parallelize_spatial(model, axes, (8, 8, 8))
    texts.append(error_text(model, torch.zeros(1, 2, 8, 8, 8)))
    texts += [error_text(parallelize_spatial, Functional(nn.ReLU()), axes, size) for size in ((2, 8, 8), (8, 8))]
    texts.append(error_text(plan_size, model, partition, (9, 8, 8)))
    plan_size(model, partition, (12, 8, 6))
    for size in ((8, 8, 8), (12, 8, 6)):
        model(partition.take_shard(torch.zeros(1, 2, *size)))
    return texts


def test_unsupported_models_are_refused_before_any_computation() -> None:
    first, second = on_ranks({"depth": 2}, refusal_texts)
    assert first == second, "all ranks refuse the same"
    for text, part in zip(first, load_json("refused/spatial_models"), strict=True):
        assert part in text, text
