"""CosmoFlow in a notebook: shapes, weights in and out, predictions, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.errors import DataError
from hpcai.models import cosmoflow
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig

SMALL = CosmoFlowConfig(size=32, filters=2, dropout=0.0, low=(0.1, 0.5, 0.8, 50.0), high=(0.5, 1.0, 1.1, 90.0))


def counts(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).poisson(3, shape).astype(np.int16)


def test_the_benchmark_network_has_its_size_and_names() -> None:
    model = CosmoFlow(CosmoFlowConfig())
    assert sum(p.numel() for p in model.parameters()) == 8_907_556
    names = [f"conv_seq.{i}.conv.{what}" for i in range(5) for what in ("weight", "bias")]
    names += [f"{layer}.{what}" for layer in ("dense1", "dense2", "output") for what in ("weight", "bias")]
    assert list(model.state_dict()) == names
    assert all(p.abs().sum() == 0 for n, p in model.named_parameters() if n.endswith("bias"))
    bound = (6 / (128 * 27 + 256 * 27)) ** 0.5  # Xavier uniform
    assert model.state_dict()["conv_seq.3.conv.weight"].abs().max().item() == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("size, channels, blocks", [(32, 4, 5), (48, 1, 5), (40, 2, 3), (33, 3, 5)])
def test_any_cube_and_any_number_of_redshifts(size: int, channels: int, blocks: int) -> None:
    cfg = CosmoFlowConfig(size=size, channels=channels, filters=2, blocks=blocks)
    out = CosmoFlow(cfg)(torch.randn(2, channels, size, size, size))
    assert out.shape == (2, 4) and out.abs().max() <= 1.2


def test_pooling_first_changes_nothing() -> None:
    torch.manual_seed(0)
    model = CosmoFlow(SMALL)
    x = torch.randn(2, 4, 32, 32, 32)
    y = x
    for block in model.conv_seq:
        y = torch.nn.functional.max_pool3d(torch.nn.functional.leaky_relu(block.conv(y), 0.3), 2)
    assert torch.equal(model.conv_seq(x), y)


@pytest.mark.parametrize("size, batch", [(32, 1), (32, 3), (64, 1)])
def test_layouts_and_halves_agree_with_float64(size: int, batch: int) -> None:
    torch.manual_seed(0)
    model = CosmoFlow(SMALL.model_copy(update={"size": size}))
    batch_ = cosmoflow.Batch(torch.from_numpy(counts(batch, size, size, size, 4)), torch.rand(batch, 4))
    cosmoflow.loss(model, batch_)["loss"].backward()
    exact = CosmoFlow(model.cfg).double()
    exact.load_state_dict(model.state_dict())
    cosmoflow.loss(exact, batch_)["loss"].backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters()):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-5 * float(q.grad.abs().max()), msg=name)


def test_whitened_input_is_a_setting_and_not_a_weight() -> None:
    torch.manual_seed(0)
    plain = CosmoFlow(SMALL)
    mix = ((2.0, 0.0, 0.0, -1.0), (0.0, 1.0, 0.0, 0.5), (0.0, 0.0, 0.5, 0.0), (-1.0, 0.5, 0.0, 3.0))
    cfg = SMALL.model_copy(update={"mean": (1.0, 2.0, 3.0, 4.0), "mix": mix})
    model = CosmoFlow(cfg)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(1, 4, 32, 32, 32)
    mixed = torch.einsum("ncdhw,ck->nkdhw", x - torch.tensor(cfg.mean).view(4, 1, 1, 1), torch.tensor(mix))
    torch.testing.assert_close(model(x), plain(mixed))
    with pytest.raises(ValueError, match="mean has 2 entries, but there are 4 channels"):
        CosmoFlowConfig(mean=(1.0, 2.0), mix=mix)
    with pytest.raises(ValueError, match="given together"):
        CosmoFlowConfig(mix=mix)


def test_predictions_have_names_and_physical_units() -> None:
    torch.manual_seed(0)
    model = CosmoFlow(SMALL)
    one, two = counts(32, 32, 32, 4), counts(2, 32, 32, 32, 4)
    guess = model.predict(one)
    with torch.no_grad():
        scaled = model.eval()(cosmoflow.log_density(torch.from_numpy(one)[None]))[0].double().numpy()
    expected = np.array(SMALL.low) + (scaled + 1) / 2 * (np.array(SMALL.high) - np.array(SMALL.low))
    assert list(guess) == ["Omega_m", "sigma_8", "n_s", "H_0"]
    np.testing.assert_allclose(list(guess.values()), expected, rtol=1e-6)
    assert model.predict(torch.from_numpy(two))["H_0"].shape == (2,)
    small = np.minimum(one, 100)
    for dtype in ("u1", "u2", "u4", "u8", "i1", ">i2", ">f4", "f2", "f8"):
        assert model.predict(small.astype(dtype)) == pytest.approx(model.predict(small)), dtype
    assert model.predict(small[::-1, :, ::2].repeat(2, 2)), "memory that is not in order"
    model.train()
    model.predict(one)
    assert model.training


@pytest.mark.parametrize(
    "volume, text",
    [
        (np.zeros((16, 16, 16, 4)), r"shape \[16, 16, 16, 4\]; expected \[32, 32, 32, 4\]"),
        (np.full((32, 32, 32, 4), np.nan), "holds nan, as one of 131,072 values"),
        (np.full((32, 32, 32, 4), -1), "holds -1, .* expected particle counts"),
        (np.full((32, 32, 32, 4), 1e300), r"holds 1e\+300, "),
        (np.full((32, 32, 32, 4), np.inf), "holds inf, "),
        (np.zeros((32, 32, 32, 4), np.complex64), "dtype complex64; expected particle counts"),
        (torch.zeros((32, 32, 32, 4), dtype=torch.complex64), "dtype torch.complex64; expected particle counts"),
        (np.zeros((32, 32, 32, 4), np.longdouble), "dtype float128; .* 64 bits"),
        (np.full((32, 32, 32, 4), "x"), "dtype <U1; expected particle counts"),
        ([[1.0], [1.0, 2.0]], "volume: .*give an array"),
    ],
)
def test_volumes_that_make_no_sense(volume: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        CosmoFlow(SMALL).predict(volume)


def test_a_model_without_ranges_says_so() -> None:
    model = CosmoFlow(SMALL.model_copy(update={"low": None, "high": None}))
    with pytest.raises(ValueError, match="no physical range"):
        model.predict(counts(32, 32, 32, 4))


def test_the_objective() -> None:
    torch.manual_seed(0)
    model = CosmoFlow(SMALL)
    batch = cosmoflow.Batch(torch.from_numpy(counts(3, 32, 32, 32, 4)), torch.rand(3, 4))
    guess = model(cosmoflow.log_density(batch.counts))
    assert cosmoflow.loss(model, batch)["loss"].item() == pytest.approx((guess - batch.target).square().mean().item())
    total, count = cosmoflow.error(model, batch)["mae"]
    assert count == 12 and total.item() == pytest.approx((guess - batch.target).abs().sum().item())
    assert torch.equal(cosmoflow.pairs(model, batch)["true"], batch.target)


def test_it_cannot_be_cut_into_stages() -> None:
    from hpcai.errors import MeshError

    mesh = dist.alone()
    mesh.sizes["pipeline"] = 2
    with pytest.raises(MeshError, match="mesh.pipeline is 2, but CosmoFlow can be spread over replicate, depth, height only"):
        cosmoflow.parallelize(CosmoFlow(SMALL), mesh)


def test_log_density_leaves_the_counts_alone_and_copies_once() -> None:
    x = torch.from_numpy(counts(1, 8, 8, 8, 4))
    before = x.clone()
    y = cosmoflow.log_density(x)
    assert torch.equal(x, before) and y.is_contiguous(memory_format=torch.channels_last_3d)
    z = torch.rand(1, 8, 8, 8, 4)
    before = z.clone()
    cosmoflow.log_density(z)
    assert torch.equal(z, before)
