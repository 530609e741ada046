"""CosmoFlow: whitened inputs, predictions in physical units, errors."""

from typing import Any

import numpy as np
import pytest
import torch

from hpcai.errors import DataError
from hpcai.models import cosmoflow
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig

SMALL = CosmoFlowConfig(size=32, filters=2, dropout=0.0, low=(0.1, 0.5, 0.8, 50.0), high=(0.5, 1.0, 1.1, 90.0))


def random_counts(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).poisson(3, shape).astype(np.int16)


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
    with pytest.raises(ValueError, match="must both be given"):
        CosmoFlowConfig(mix=mix)


def test_predictions_have_names_and_physical_units() -> None:
    torch.manual_seed(0)
    model, volume, volumes = CosmoFlow(SMALL), random_counts(32, 32, 32, 4), random_counts(2, 32, 32, 32, 4)
    predictions = model.predict(volume)
    assert model.training, "the mode is restored"
    with torch.no_grad():
        scaled = model.eval()(cosmoflow.log_density(torch.from_numpy(volume)[None]))[0].double().numpy()
    expected = np.array(SMALL.low) + (scaled + 1) / 2 * (np.array(SMALL.high) - np.array(SMALL.low))
    assert list(predictions) == ["Omega_m", "sigma_8", "n_s", "H_0"]
    np.testing.assert_allclose(list(predictions.values()), expected, rtol=1e-6)
    assert model.predict(torch.from_numpy(volumes))["H_0"].shape == (2,)
    small = np.minimum(volume, 100)
    for dtype in ("u1", "u8", ">i2", "f2", "f8"):
        assert model.predict(small.astype(dtype)) == pytest.approx(model.predict(small)), dtype
    assert model.predict(small[::-1, :, ::2].repeat(2, 2)), "non-contiguous memory"
    with pytest.raises(ValueError, match="no physical range"):
        CosmoFlow(SMALL.model_copy(update={"low": None, "high": None})).predict(volume)


@pytest.mark.parametrize(
    "volume, text",
    [
        (np.zeros((16, 16, 16, 4)), r"shape \[16, 16, 16, 4\]; expected \[32, 32, 32, 4\]"),
        (np.full((32, 32, 32, 4), np.nan), "contains nan, one of 131,072 invalid values"),
        (np.zeros((32, 32, 32, 4), np.complex64), "dtype complex64; expected particle counts"),
        (np.full((32, 32, 32, 4), 9.96921e36, np.float32), r"invalid values \(131,072 hold the fill value 9.96921e\+36\); exp"),
        (np.ma.masked_equal(np.arange(4), 2), r"volume: 1 of 4 values are masked, the first at \[2\]; fill them"),
    ],
)
def test_invalid_volumes_raise(volume: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        CosmoFlow(SMALL).predict(volume)


@pytest.mark.parametrize("x", [torch.from_numpy(random_counts(1, 8, 8, 8, 4)), torch.rand(1, 8, 8, 8, 4)], ids=["int16", "float32"])
def test_log_density_does_not_modify_counts(x: torch.Tensor) -> None:
    before = x.clone()
    assert cosmoflow.log_density(x).is_contiguous(memory_format=torch.channels_last_3d) and torch.equal(x, before)
