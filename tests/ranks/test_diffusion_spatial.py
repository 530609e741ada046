"""A U-Net with sharded samples equals that of one rank: outputs, gradients, keys, training and samples."""

from copy import deepcopy
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.launch import single_process
from hpcai.dist.mesh import Mesh
from hpcai.models import diffusion
from hpcai.models.diffusion import Batch, Condition, Diffusion, DiffusionConfig, FieldsConfig, ObjectiveConfig, UNetConfig
from hpcai.models.diffusion.unet import UNet
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

SMALL: dict[str, Any] = {"inputs": 2, "outputs": 2, "tokens": None, "blocks": 1, "groups": 2, "zero": False, "middle": "self"}
MAPS = UNetConfig(
    **SMALL, field=1, channels=(8, 8, 12), attention=("self", "none", "self"), heads=(2, 2, 3), patch=2, periodic=(True, True)
)
GLOBE = UNetConfig(
    **SMALL | {"tokens": 5, "middle": "cross"}, channels=(8, 12), attention=("cross", "cross"), heads=(2, 3), pooled=3, sizes=4,
    transformer_layers=(2, 1), periodic=(False, True), recompute="selective",
)  # fmt: skip
VOLUMES = UNetConfig(
    **SMALL, dims=3, field=2, parameters=3, channels=(6, 8), attention=("none", "self"), heads=(2, 2),
    periodic=(True, False, True), recompute="layers",
)  # fmt: skip
OPEN = UNetConfig(**SMALL | {"middle": "none"}, dims=3, classes=4, channels=(6, 8), attention=("none", "none"), heads=(2, 2))
STATES = UNetConfig(
    **SMALL | {"middle": "none"}, fine=3, channels=(6, 8), attention=("none", "none"), heads=(2, 2), periodic=(True, False)
)
SIZES = {MAPS: (32, 16), GLOBE: (24, 8), VOLUMES: (16, 8, 4), OPEN: (8, 12, 4), STATES: (16, 8)}


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new_condition(cfg: UNetConfig, count: int, seed: int = 5) -> Condition:
    coarse = [n // 4 for n in SIZES[cfg]]
    return Condition(
        torch.arange(count) % (cfg.classes + 1) if cfg.classes else None,
        normal(seed, count, cfg.parameters) if cfg.parameters else None,
        normal(seed + 1, count, 3, cfg.tokens) if cfg.tokens else None,
        normal(seed + 3, count, cfg.pooled) if cfg.pooled else None,
        normal(seed + 2, count, cfg.field, *coarse) if cfg.field else None,
        sizes=torch.arange(6 * count).view(count, 6) if cfg.sizes else None,
    )


def network(cfg: UNetConfig) -> UNet:
    model = UNet(cfg)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(number, *parameter.shape) * 0.2)
    return model.double()


def compare(mesh: Mesh, cfg: UNetConfig) -> None:
    full, size = network(cfg), SIZES[cfg]
    model = diffusion.parallelize(deepcopy(full), mesh, size)
    assert list(model.state_dict()) == list(full.state_dict())
    x, time, condition = normal(7, 2, cfg.inputs, *size), torch.linspace(10, 500, 2).double(), new_condition(cfg, 2)
    local = model.grid.shard(x).clone().requires_grad_()
    x.requires_grad_()
    y_full, y = full(x, time, condition), model(local, time, condition)
    torch.testing.assert_close(y, model.grid.shard(y_full), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.grid.gather(y), y_full, rtol=1e-10, atol=1e-10)
    grad_output = normal(9, *y_full.shape)
    for model_ in (full, model):
        model_.zero_grad()
    (y_full * grad_output).sum().backward()
    (y * model.grid.shard(grad_output)).sum().backward()
    assert local.grad is not None and x.grad is not None
    torch.testing.assert_close(local.grad, model.grid.shard(x.grad), rtol=1e-9, atol=1e-10)
    largest = max(float(p.grad.abs().max()) for p in full.parameters() if p.grad is not None)
    pairs: list[Any] = [(a.grad, b.grad, getattr(b, "sum_axes", ())) for a, b in zip(full.parameters(), model.parameters())]
    for axes in dict.fromkeys(pair[2] for pair in pairs):  # concatenated: one all-reduce for each set of axes
        expected, actual = (torch.cat([pair[kind].flatten() for pair in pairs if pair[2] == axes]) for kind in (0, 1))
        assert float((all_reduce_(actual, *axes) - expected).abs().max()) < 1e-10 * largest


CASES = [(MAPS, {"height": 4}), (GLOBE, {"replicate": 2, "height": 2}), (OPEN, {"height": 3})]  # gradients of others: TRAINED
NAMES = {MAPS: "maps", GLOBE: "globe", VOLUMES: "volumes", OPEN: "open", STATES: "states"}


def case_id(value: Any) -> str:
    return NAMES[value] if isinstance(value, UNetConfig) else str(value)


@pytest.mark.parametrize(("cfg", "axes"), CASES, ids=case_id)
def test_a_network_with_sharded_samples_equals_the_full_one(cfg: UNetConfig, axes: dict[str, int]) -> None:
    on_ranks(axes, compare, cfg)


def build_model(cfg: UNetConfig, mesh: Mesh) -> Diffusion:
    size = (cfg.inputs, *SIZES[cfg])
    shape = DiffusionConfig(
        unet=cfg, size=size, objective={"prediction_type": "flow"},
        sampler={"method": "heun", "steps": 2, "guidance": 2.0, "rescale": 0.7},
        residual=0.5 if cfg.field else None, unconditional=0.3 if cfg.field else 0.0,
    )  # fmt: skip
    if cfg == STATES:  # forecasts, with a regression mean, a static field and weights of cells
        units: dict[str, Any] = {"names": ("u", "v"), "units": ("", ""), "mean": (0.0, 0.0), "deviation": (1.0, 1.0)}
        fields = FieldsConfig(**units, static=("z",), weighted=True, interval=(1.0, "hours"))
        mean = shape.model_copy(update={"fields": fields, "residual": (0.5, 0.7), "sampler": EULER, "unconditional": 0.0})
        mean = mean.model_copy(update={"objective": ObjectiveConfig(prediction_type="regression")})
        shape = mean.model_copy(update={"objective": shape.objective, "mean": mean.model_dump()})
    model = Diffusion(shape, seed=3)
    for part in filter(None, (model, model.mean)):
        part.network = network(cfg)
        for buffer in (x for x in (part.static, part.weights) if x is not None):
            buffer.copy_(normal(30, *buffer.shape).relu())  # half of the cells are masked
    if model.mean is not None:
        model.mean.requires_grad_(False)
    diffusion.parallelize(model, mesh)
    torch.manual_seed(0)
    return diffusion.adapt(model, diffusion.DiffusionLoRAConfig()) if cfg == GLOBE else model


def batch(mesh: Mesh, cfg: UNetConfig, model: Diffusion, step: int) -> Batch:
    axis, count = mesh["replicate"], 2
    samples = slice(count * axis.rank // axis.size, count * (axis.rank + 1) // axis.size)
    condition = Condition(*(None if x is None else x[samples] for x in new_condition(cfg, count, 20 + step)))
    sample, number = normal(40 + step, count, cfg.inputs, *SIZES[cfg]), torch.arange(count) + 2 * step
    kwargs = {name: getattr(condition, name) for name in ("field", "parameters", "classes", "tokens", "pooled", "sizes")}
    if cfg == STATES:
        states = [sample, *normal(50 + step, 2, count, 2, *SIZES[cfg])]
        sample, before, later = (model.grid.shard(x) for x in states)
        kwargs |= {"fine": before[samples], "shift": torch.tensor([[3, 0], [5, 0]])[samples]}
        kwargs["future"] = torch.stack((sample, later), 1)[samples] if step == 9 else None
        return Batch(sample[samples], number[samples], torch.zeros(count, dtype=torch.long)[samples], **kwargs)
    return Batch(model.grid.shard(sample[samples]), number[samples], torch.zeros(count, dtype=torch.long)[samples], **kwargs)


def train(mesh: Mesh, cfg: UNetConfig, shard: Any) -> tuple[Diffusion, list[float]]:
    model = build_model(cfg, mesh)
    settings: dict[str, Any] = {"precision": "fp64", "lr": 0.01, "clip": 1.0, "ema_decay": 0.9, "shard": shard, "eps": 1e-3}
    step = Step(model, diffusion.loss, StepConfig(**settings), mesh)
    return model, [step(batch(mesh, cfg, model, number))["loss"].item() for number in range(2)]


def train_and_sample(mesh: Mesh, cfg: UNetConfig) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    model, losses = train(mesh, cfg, "none")
    held_out = batch(mesh, cfg, model, 9)
    with torch.no_grad():
        score = diffusion.score(model, held_out)
        rows = {"loss": score["loss"][0], **(diffusion.draw_ensemble(model, held_out, members=2) if cfg.field + cfg.fine else {})}
        if cfg != STATES:  # static fields are of one size
            wider = [2 * SIZES[cfg][0], *SIZES[cfg][1:]]
            condition = Condition(*(None if x is None else x[:1] for x in new_condition(cfg, 1)))
            rows["wider"] = model.sample(condition, 2, size=(cfg.inputs, *wider), sampler={MAPS: None}.get(cfg, EULER))
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    return losses, state, {name: value.double().numpy() for name, value in rows.items()}


EULER = diffusion.SamplerConfig(method="euler", steps=2)


@cache
def train_unsharded(cfg: UNetConfig) -> Any:
    return train_and_sample(single_process(), cfg)


TRAINED = [
    (MAPS, {"replicate": 2, "height": 2}), (VOLUMES, {"depth": 2, "height": 2}), (STATES, {"height": 2}), (GLOBE, {"height": 2}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("cfg", "axes"), TRAINED, ids=case_id)
def test_sharded_samples_train_and_are_generated_as_on_one_rank(cfg: UNetConfig, axes: dict[str, int]) -> None:
    losses, weights, rows = train_unsharded(cfg)
    ranks = on_ranks(axes, train_and_sample, cfg)
    per_replica = {"loss", "index", "truth", "members", "field", "parameters"} if "replicate" in axes else set()
    for own_losses, own_weights, own_rows in ranks:
        if not per_replica:
            assert own_losses == pytest.approx(losses, rel=1e-9)
        for name, tensor in weights.items():
            assert own_weights[name] == pytest.approx(tensor, rel=1e-8, abs=1e-9), name
        for name in rows.keys() - per_replica:
            assert own_rows[name] == pytest.approx(rows[name], rel=1e-7, abs=1e-9), name


def train_sharded_weights(mesh: Mesh, cfg: UNetConfig) -> list[float]:
    return train(mesh, cfg, "weights")[1]


def test_sharded_weights_of_recomputed_blocks_train_as_on_one_rank() -> None:
    ranks = on_ranks({"replicate": 2}, train_sharded_weights, VOLUMES)
    assert [sum(pair) / 2 for pair in zip(*ranks)] == pytest.approx(train_unsharded(VOLUMES)[0], rel=1e-9)


LARGE = UNetConfig(
    **SMALL, dims=3, field=1, channels=(8, 16), attention=("none", "self"), heads=(2, 2), periodic=(True, True, True)
)  # fmt: skip


def saved_and_sent_bytes(mesh: Mesh) -> tuple[int, int]:
    """Return the bytes of saved tensors of a rank, and the bytes that it sends."""
    size, saved, start = (32, 16, 16), dict[int, int](), torch_dist.batch_isend_irecv
    model = diffusion.parallelize(UNet(LARGE), mesh, size)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    condition, exchange = Condition(field=torch.zeros(1, 1, 8, 4, 4)), mock.patch.object(torch_dist, start.__name__, wraps=start)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), exchange as calls:
        model(model.grid.shard(torch.zeros(1, 2, *size)), torch.zeros(1), condition).sum().backward()
    sent = (op.tensor.nbytes for call in calls.call_args_list for op in call.args[0] if op.op is torch_dist.isend)
    return sum(saved.values()), sum(sent)


def test_a_rank_saves_no_more_than_its_shard() -> None:
    full, _ = saved_and_sent_bytes(single_process())
    for axes, share in (({"depth": 2}, 0.45), ({"depth": 2, "height": 2}, 0.27)):
        for saved, sent in on_ranks(axes, saved_and_sent_bytes):
            assert saved < share * full and 0 < sent < saved, (axes, saved / full, sent / saved)
