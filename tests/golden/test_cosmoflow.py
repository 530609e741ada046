"""CosmoFlow agrees with stored results of the reference implementations (tests/data/cosmoflow)."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcai import dist, train
from hpcai.models import cosmoflow
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.train.schedule import make_lr_schedule
from tests.hash_values import hash_values
from tests.reference_data import DATA, digest, load_arrays, load_json

WEIGHTS = DATA / "cosmoflow" / "f8_s32_b2_state_dict.pt"


def make_universes(size: int, count: int) -> torch.Tensor:
    """Return the particle counts [B, D, H, W, C] of the stored cases."""
    cubes = [np.floor(-3 * np.log(1 - hash_values(size**3 * 4, f"cosmo_x_{size}_{i}"))).astype(np.int16) for i in range(count)]
    return torch.from_numpy(np.stack(cubes).reshape(count, size, size, size, 4))


def check_model(model: CosmoFlow, case: dict, counts: torch.Tensor, rounding: float = 1e-6) -> None:
    batch = cosmoflow.Batch(counts, torch.tensor(case["target"]))
    values = cosmoflow.loss(model, batch)
    values["loss"].backward()
    model.eval()
    with torch.no_grad():
        out = model(cosmoflow.log_density(counts))
    torch.testing.assert_close(out, torch.tensor(case["out_eval"]), atol=1e-5, rtol=0)
    assert values["loss"].item() == pytest.approx(case["loss_mse"], rel=rounding)
    assert values["mae"].item() == pytest.approx(case["mae"], rel=rounding)
    assert sum(p.numel() for p in model.parameters()) == case["n_params"]
    for name, parameter in model.named_parameters():
        assert parameter.grad.double().norm().item() == pytest.approx(case["grad_l2"][name], rel=1e-4), name


def test_a_reference_state_dict_gives_its_outputs_loss_gradients_and_steps() -> None:
    case, counts = load_json("cosmoflow/f8_s32_b2"), make_universes(32, 2)
    model = CosmoFlow.load(WEIGHTS)
    assert (model.cfg.size, model.cfg.filters, model.cfg.channels) == (32, 8, 4)
    model.cfg = model.cfg.model_copy(update={"dropout": 0.0})
    assert digest(counts.numpy()) == case["x_sha256"], "the hash rule differs from the reference's"
    check_model(model.train(), case, counts)
    step = train.Step(model, cosmoflow.loss, train.StepConfig(optimizer="sgd", lr=0.01, momentum=0.9), dist.single_process())
    losses = [step(cosmoflow.Batch(counts, torch.tensor(case["target"])))["loss"].item() for _ in range(3)]
    assert losses == pytest.approx(case["sgd_lr0.01_mu0.9_losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("exactly", [False, pytest.param(True, marks=pytest.mark.claim)])
def test_the_full_benchmark_network(exactly: bool) -> None:
    case = load_json("cosmoflow/f32_s128_b1_formula")
    model = CosmoFlow(CosmoFlowConfig(dropout=0.0))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            v = 2 * hash_values(tensor.numel(), name) - 1
            fan = tensor[0].numel() if tensor.ndim > 1 else 1
            value = 0.1 * v if name.endswith("bias") else v * np.sqrt(3 / fan)
            tensor.copy_(torch.from_numpy(value).reshape(tensor.shape))
    counts = make_universes(128, 1)
    assert digest(counts[0].numpy()) == case["x_int16_sha256"]
    # oneDNN adds channels-last products in another order: float32 rounds a little more, in both directions. In float64 the loss
    # agrees to the last digit of the stored number.
    if not exactly:
        check_model(model, case, counts, rounding=3e-6)
        return
    with torch.no_grad():
        values = cosmoflow.loss(model.double(), cosmoflow.Batch(counts, torch.tensor(case["target"])))
    assert values["loss"].item() == pytest.approx(case["loss_mse"], rel=2e-7)


def test_new_weights_have_the_reference_names_shapes_and_spread() -> None:
    torch.manual_seed(0)
    state, reference = CosmoFlow(CosmoFlowConfig(size=32, filters=8)).state_dict(), torch.load(WEIGHTS, weights_only=True)
    assert list(state) == list(reference)
    for name, tensor in reference.items():  # the same Xavier-uniform distribution, other random numbers
        assert state[name].shape == tensor.shape and state[name].std().item() == pytest.approx(tensor.std().item(), rel=0.2), name


@pytest.mark.parametrize("layout", ["legacy", "keras 3"])
def test_keras_weights_give_keras_outputs(layout: str, tmp_path: Path) -> None:
    stored = load_arrays("cosmoflow/keras_f8_s32")
    names = ["conv3d", *(f"conv3d_{i}" for i in range(1, 5)), "dense", "dense_1", "dense_2"]
    with h5py.File(tmp_path / "w.h5", "w") as file:
        for i, name in enumerate(names):
            for j, kind in enumerate(("kernel:0", "bias:0")):
                key = f"model_weights/{name}/{name}/{kind}" if layout == "legacy" else f"layers/{name}/vars/{j}"
                file[key] = stored[f"w{2 * i + j}"]
        file["optimizer_weights/conv3d/momentum:0"] = np.zeros(3)
    model = CosmoFlow.load(tmp_path / "w.h5")
    with torch.no_grad():
        out = model.eval()(cosmoflow.log_density(torch.from_numpy(stored["x"])))
    torch.testing.assert_close(out, torch.from_numpy(stored["y"]), atol=2e-6, rtol=0)


REFERENCE = {"warmup": 4, "start": 1e-3, "decay_at": (32, 64), "decay_to": (0.25, 0.125), "late": True}
SCHEDULES = {
    "reference_default_gbs64": (1e-3, REFERENCE),
    "reference_default_gbs256": (4e-3, REFERENCE),
    "reference_default_gbs512": (8e-3, REFERENCE),
    "nvidia_gbs512_v3.0": (
        0.024, {"warmup": 6, "start": 6e-3, "decay_at": (20, 22, 23, 24), "decay_to": (0.5, 0.25, 0.125, 0.0625)}),
    "nvidia_gbs32_weak": (4e-3, {"warmup": 2, "start": 1e-3, "decay_at": (4, 6), "decay_to": (0.25, 0.0625)}),
    "nvidia_gbs128": (4e-3, {"warmup": 4, "start": 1e-3, "decay_at": (16, 32), "decay_to": (0.25, 0.125)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_of_every_epoch(name: str) -> None:
    expected = load_json("cosmoflow/lr_schedules")[name]
    lr, overrides = SCHEDULES[name]
    steps = 7
    lr_at = make_lr_schedule(train.ScheduleConfig(**{"decay": "steps", "held": True} | overrides), lr, steps, steps * len(expected))
    for epoch, value in enumerate(expected):
        assert [lr_at(epoch * steps), lr_at(epoch * steps + steps - 1)] == pytest.approx([value, value], rel=1e-12), epoch
