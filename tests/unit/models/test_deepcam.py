"""DeepCAM: weights of other codes, named fields with units, errors, and the objective."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.errors import DataError
from hpcai.models import deepcam
from hpcai.models.deepcam import CLASSES, VARIABLES, Batch, DeepCam, DeepCamConfig
from hpcai.models.deepcam.fields import stack_fields
from hpcai.nn import BatchNorm
from hpcai.train.metrics import MetricSums

LOW = tuple(float(i) for i in range(16))
SMALL = DeepCamConfig(divide=8, middle=1, low=LOW, high=tuple(2 * x + 10 for x in LOW))


def new_model(cfg: DeepCamConfig = SMALL, seed: int = 0) -> DeepCam:
    torch.manual_seed(seed)
    model = DeepCam(cfg)
    for norm in model.modules():
        if isinstance(norm, BatchNorm):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(1, 3)
            norm.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    return model.eval()


def fields(height: int = 32, width: int = 48) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.uniform(low, 2 * low + 9, (height, width)).astype(np.float32) for name, low in zip(VARIABLES, LOW)}


def equal_weights(a: DeepCam, b: DeepCam) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ---- weights


def nvidia_state(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Return ``state`` under the names of NVIDIA's submissions: with renumbered layers (fused ReLUs), or with batch-norm groups."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if kind == "group":
            renamed[name] = tensor
            if ".bn." in name:
                renamed["run_handle.0.".join(name.rsplit("bn.", 1))] = tensor
            continue
        fused = re.sub(r"\.rep\.(\d)\.", lambda m: f".rep.{[0, 1, 1, 2, 3, 3, 4, 5][int(m[1])]}.", name)
        renamed[re.sub(r"\.bn\.(weight|bias|running|num)", r".0.\1" if kind == "fused" else r".\1", fused)] = tensor
    return renamed


@pytest.mark.parametrize("kind", ["plain", "fused", "group"])
def test_nvidia_weights_load_with_the_skip_before_relu(tmp_path: Path, kind: str) -> None:
    model = new_model()
    state = nvidia_state(model.state_dict(), kind)
    assert set(state) != set(model.state_dict())
    torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}, "step": 1}, tmp_path / "w.cpt")
    loaded = DeepCam.load(tmp_path / "w.cpt")
    assert loaded.cfg.skip == "before" and equal_weights(loaded, model)
    x = torch.rand(1, 16, 32, 48)
    with torch.no_grad():
        assert not torch.equal(loaded(x), model(x))
    configured = DeepCam.load(tmp_path / "w.cpt", SMALL)
    assert configured.cfg.skip == "after" and torch.equal(configured(x), model(x)), "given settings take precedence"


def test_other_channels_and_classes_get_names(tmp_path: Path) -> None:
    cfg = DeepCamConfig(
        variables=("a", "b"), units=("", ""), classes=("none", "front"), frequencies=None, divide=16, middle=0
    )  # fmt: skip
    torch.save(new_model(cfg).state_dict(), tmp_path / "w.pt")
    loaded = DeepCam.load(tmp_path / "w.pt")
    assert loaded.cfg.variables == ("variable_0", "variable_1") and loaded.cfg.classes == ("class_0", "class_1")
    assert loaded(torch.rand(1, 2, 32, 32)).shape == (1, 2, 32, 32)


def test_the_two_initialisations() -> None:
    torch.manual_seed(0)
    reference, vendor = DeepCam(DeepCamConfig(divide=2, middle=1)), DeepCam(DeepCamConfig(divide=2, middle=1, init="vendor"))
    name = "xception_features.block4.rep.0.conv1.weight"  # depthwise: [364, 1, 3, 3]
    assert reference.state_dict()[name].std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.1)
    assert vendor.state_dict()[name].std().item() == pytest.approx((2 / (9 * 364)) ** 0.5, rel=0.1)
    name = "upsample.deconv1.0.weight"
    assert vendor.state_dict()[name].std().item() == pytest.approx(reference.state_dict()[name].std().item(), rel=0.1)


# ---- named fields


def test_masks_of_named_fields() -> None:
    model, inputs = new_model(), fields()
    masks = model.segment(inputs)
    assert list(masks) == list(CLASSES) and all(mask.shape == (32, 48) and mask.dtype == bool for mask in masks.values())
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()
    low, high = np.array(SMALL.low), np.array(SMALL.high)
    x = (np.stack([inputs[name] for name in VARIABLES], -1) - low) / (high - low)
    with torch.no_grad():
        predicted = model(torch.from_numpy(x).float().permute(2, 0, 1)[None]).argmax(1)[0].numpy()
    assert (masks["tropical cyclone"] == (predicted == 1)).mean() > 0.999
    batched = model.segment({name: np.stack([values, values + 1]) for name, values in inputs.items()})
    assert batched["background"].shape == (2, 32, 48) and (batched["background"][0] == masks["background"]).all()
    shuffled = dict(reversed(list(inputs.items()))) | {"extra": np.zeros(3)}
    assert (model.segment(shuffled)["background"] == masks["background"]).all(), "by name, in any order"


def test_maps_of_any_size_are_padded_at_their_edges() -> None:
    model, inputs = new_model(), fields(37, 50)
    masks = model.segment(inputs)
    assert masks["background"].shape == (37, 50)
    padded = {name: np.pad(values, ((0, 11), (0, 14)), mode="edge") for name, values in inputs.items()}
    assert (model.segment(padded)["background"][:37, :50] == masks["background"]).all()
    with pytest.raises(ValueError, match=r"37 x 50 cells; expected multiples of 16"):
        model(torch.rand(1, 16, 37, 50))


class InMillibars(np.ndarray):
    attrs = {"units": "mb"}


def test_units_are_converted() -> None:
    cfg = SMALL.model_copy(update={"low": None, "high": None})
    ones: dict[str, Any] = {name: np.ones((1, 1)) for name in VARIABLES} | {"PSL": np.ones((1, 1)).view(InMillibars)}
    units = {"TS": "celsius", "QREFHT": "g kg-1", "PRECT": "mm/d", "U850": "kt", "Z200": "km", "TMQ": "mm"}
    expected = {"PSL": 100, "TS": 274.15, "QREFHT": 1e-3, "PRECT": 1e-3 / 86400, "U850": 0.514444, "Z200": 1000, "TMQ": 1}
    converted = dict(zip(VARIABLES, stack_fields(ones, cfg, units).flatten().tolist()))
    assert {name: converted[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    for invalid, text in (({"PSL": "psi"}, "PSL is in 'psi'; expected Pa, or one of hPa, mbar"),
                          ({"PLS": "hPa"}, "units contains PLS; expected names of")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            new_model().segment(fields(), units=invalid)


def test_invalid_fields_raise() -> None:
    model, inputs = new_model(), fields()
    poles, renamed = inputs["T500"].copy(), {name.replace("TMQ", "TMQ1"): values for name, values in inputs.items()}
    poles[-2:] = np.nan
    for invalid, text in (
        (renamed, r"fields lack TMQ \(is it 'TMQ1'\?\); expected TMQ"),
        (inputs | {"V850": inputs["V850"][:, 1:]}, r"V850 has shape \[32, 47\], TMQ \[32, 48\]"),
        ({name: np.zeros((0, 48)) for name in inputs}, r"TMQ has shape .*the same for all and not empty"),
        (inputs | {"T500": inputs["T500"] * 1j}, "T500 is of dtype complex64; expected real numbers"),
        (inputs | {"T500": poles}, "T500: 96 values are not finite, in rows 30 to 31 of 32; fill them"),
        (inputs | {"PS": np.ma.masked_invalid(poles)}, r"PS: 96 of 1,536 values are masked, the first at \[30, 0\]"),
        (inputs | {"TS": np.nan_to_num(poles, nan=-9999)}, r"TS goes .* in training \(96 hold the fill value -9999\); is it"),
    ):
        with pytest.raises(DataError, match=text):
            model.segment(invalid)
    with pytest.raises(ValueError, match="no ranges of its variables"):
        new_model(DeepCamConfig(divide=8, middle=0)).segment(inputs)


# ---- objective


def batch(height: int = 32, width: int = 48, count: int = 2) -> Batch:
    torch.manual_seed(1)
    return Batch(torch.rand(count, height, width, 16) * 10, torch.randint(0, 3, (count, height, width), dtype=torch.uint8))


def test_background_map_trains_and_scores() -> None:
    model = new_model().train()
    background = Batch(batch().fields, torch.zeros(2, 32, 48, dtype=torch.uint8))
    value = deepcam.loss(model, background)["loss"]
    value.backward()
    assert bool(value.isfinite()) and all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert reduce_scores(deepcam.score(model, background))["recall"] == 1, "the mask has no events"


def reduce_scores(*scores: Any, samples: int = 1) -> dict[str, float]:
    sums = MetricSums()
    for score in scores:
        sums.add(score, samples)
    return sums.reduce(dist.single_process()["replicate"], torch.device("cpu"))


def test_recall_and_precision_count_the_pixels_of_all_maps() -> None:
    model, maps = new_model().requires_grad_(False), batch(count=5)
    predicted, target = model(model.scaled(maps.fields)).argmax(1).numpy().ravel(), maps.mask.numpy().ravel()
    scores = reduce_scores(deepcam.score(model, maps))
    for k, name in ((1, "tropical_cyclone"), (2, "atmospheric_river")):
        correct = np.sum((predicted == k) & (target == k))
        assert scores[f"recall_{name}"] == correct / np.sum(target == k)
        assert scores[f"precision_{name}"] == (correct / np.sum(predicted == k) if (predicted == k).any() else 1)
    for kind in ("recall", "precision"):
        per_class = scores[f"{kind}_tropical_cyclone"], scores[f"{kind}_atmospheric_river"]
        assert scores[kind] == pytest.approx(sum(per_class) / 2, rel=1e-15)
    parts = [deepcam.score(model, Batch(maps.fields[a:b], maps.mask[a:b])) for a, b in ((0, 2), (2, 3), (3, 5))]
    assert reduce_scores(*parts) == pytest.approx(scores, rel=1e-4)
