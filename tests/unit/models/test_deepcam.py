"""DeepCAM as a scientist meets it: weights of three lineages, named fields with units, clear refusals; and its objective."""

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


def new(cfg: DeepCamConfig = SMALL, seed: int = 0) -> DeepCam:
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


def same(a: DeepCam, b: DeepCam) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ---- weights


def vendors(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """``state`` under the names of NVIDIA's submissions: rectifiers fused (indices close up), or batch-norm groups."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if kind == "group":
            found[name] = tensor
            if ".bn." in name:
                found["run_handle.0.".join(name.rsplit("bn.", 1))] = tensor
            continue
        fused = re.sub(r"\.rep\.(\d)\.", lambda m: f".rep.{[0, 1, 1, 2, 3, 3, 4, 5][int(m[1])]}.", name)
        found[re.sub(r"\.bn\.(weight|bias|running|num)", r".0.\1" if kind == "fused" else r".\1", fused)] = tensor
    return found


@pytest.mark.parametrize("kind", ["plain", "fused", "group"])
def test_nvidia_weights_load_with_the_skip_before_relu(tmp_path: Path, kind: str) -> None:
    model = new()
    state = vendors(model.state_dict(), kind)
    assert set(state) != set(model.state_dict())
    torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}, "step": 1}, tmp_path / "w.cpt")
    again = DeepCam.load(tmp_path / "w.cpt")
    assert again.cfg.skip == "before" and same(again, model)
    x = torch.rand(1, 16, 32, 48)
    with torch.no_grad():
        assert not torch.equal(again(x), model(x))
    asked = DeepCam.load(tmp_path / "w.cpt", SMALL)
    assert asked.cfg.skip == "after" and torch.equal(asked(x), model(x)), "given settings have the say"


def test_other_channels_and_classes_get_names(tmp_path: Path) -> None:
    cfg = DeepCamConfig(
        variables=("a", "b"), units=("", ""), classes=("none", "front"), frequencies=None, divide=16, middle=0
    )  # fmt: skip
    torch.save(new(cfg).state_dict(), tmp_path / "w.pt")
    again = DeepCam.load(tmp_path / "w.pt")
    assert again.cfg.variables == ("variable_0", "variable_1") and again.cfg.classes == ("class_0", "class_1")
    assert again(torch.rand(1, 2, 32, 32)).shape == (1, 2, 32, 32)


def test_the_two_initialisations() -> None:
    torch.manual_seed(0)
    reference, vendor = DeepCam(DeepCamConfig(divide=2, middle=1)), DeepCam(DeepCamConfig(divide=2, middle=1, init="vendor"))
    name = "xception_features.block4.rep.0.conv1.weight"  # depthwise: [364, 1, 3, 3]
    assert reference.state_dict()[name].std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.1)
    assert vendor.state_dict()[name].std().item() == pytest.approx((2 / (9 * 364)) ** 0.5, rel=0.1)
    name = "upsample.deconv1.0.weight"
    assert vendor.state_dict()[name].std().item() == pytest.approx(reference.state_dict()[name].std().item(), rel=0.1)


# ---- named fields


def test_masks_of_named_fields(one_thread: None) -> None:
    model, given = new(), fields()
    masks = model.segment(given)
    assert list(masks) == list(CLASSES) and all(mask.shape == (32, 48) and mask.dtype == bool for mask in masks.values())
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()
    low, high = np.array(SMALL.low), np.array(SMALL.high)
    x = (np.stack([given[name] for name in VARIABLES], -1) - low) / (high - low)
    with torch.no_grad():
        guess = model(torch.from_numpy(x).float().permute(2, 0, 1)[None]).argmax(1)[0].numpy()
    assert (masks["tropical cyclone"] == (guess == 1)).mean() > 0.999
    several = model.segment({name: np.stack([values, values + 1]) for name, values in given.items()})
    assert several["background"].shape == (2, 32, 48) and (several["background"][0] == masks["background"]).all()
    shuffled = dict(reversed(list(given.items()))) | {"extra": np.zeros(3)}
    assert (model.segment(shuffled)["background"] == masks["background"]).all(), "by name, in any order"


def test_maps_of_any_size_are_padded_at_their_edges() -> None:
    model, given = new(), fields(37, 50)
    masks = model.segment(given)
    assert masks["background"].shape == (37, 50)
    pad_fields = {name: np.pad(values, ((0, 11), (0, 14)), mode="edge") for name, values in given.items()}
    assert (model.segment(pad_fields)["background"][:37, :50] == masks["background"]).all()
    with pytest.raises(ValueError, match=r"37 x 50 cells; expected multiples of 16"):
        model(torch.rand(1, 16, 37, 50))


class InMillibars(np.ndarray):
    attrs = {"units": "mb"}


def test_units_are_converted() -> None:
    cfg = SMALL.model_copy(update={"low": None, "high": None})
    ones: dict[str, Any] = {name: np.ones((1, 1)) for name in VARIABLES} | {"PSL": np.ones((1, 1)).view(InMillibars)}
    theirs = {"TS": "celsius", "QREFHT": "g kg-1", "PRECT": "mm/d", "U850": "kt", "Z200": "km", "TMQ": "mm"}
    expected = {"PSL": 100, "TS": 274.15, "QREFHT": 1e-3, "PRECT": 1e-3 / 86400, "U850": 0.514444, "Z200": 1000, "TMQ": 1}
    found = dict(zip(VARIABLES, stack_fields(ones, cfg, theirs).flatten().tolist()))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    for wrong, text in (({"PSL": "psi"}, "PSL is in 'psi'; expected Pa, or one of hPa, mbar"),
                        ({"PLS": "hPa"}, "units contains PLS; expected names of")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            new().segment(fields(), units=wrong)


def test_invalid_fields_raise() -> None:
    model, given = new(), fields()
    poles, renamed = given["T500"].copy(), {name.replace("TMQ", "TMQ1"): values for name, values in given.items()}
    poles[-2:] = np.nan
    for wrong, text in (
        (renamed, r"fields lack TMQ \(is it 'TMQ1'\?\); expected TMQ"),
        (given | {"V850": given["V850"][:, 1:]}, r"V850 has shape \[32, 47\], TMQ \[32, 48\]"),
        ({name: np.zeros((0, 48)) for name in given}, r"TMQ has shape .*the same for all and not empty"),
        (given | {"T500": given["T500"] * 1j}, "T500 is of dtype complex64; expected real numbers"),
        (given | {"T500": poles}, "T500: 96 values are not finite, in rows 30 to 31 of 32; fill them"),
        (given | {"TS": given["TS"] + 273.15}, r"TS goes from .* but from 11 to 32 in training; is it in another unit"),
    ):
        with pytest.raises(DataError, match=text):
            model.segment(wrong)
    with pytest.raises(ValueError, match="no ranges of its variables"):
        new(DeepCamConfig(divide=8, middle=0)).segment(given)


# ---- objective


def batch(height: int = 32, width: int = 48, count: int = 2) -> Batch:
    torch.manual_seed(1)
    return Batch(torch.rand(count, height, width, 16) * 10, torch.randint(0, 3, (count, height, width), dtype=torch.uint8))


def test_background_map_trains_and_scores() -> None:
    model = new().train()
    given = Batch(batch().fields, torch.zeros(2, 32, 48, dtype=torch.uint8))
    value = deepcam.loss(model, given)["loss"]
    value.backward()
    assert bool(value.isfinite()) and all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert numbers(deepcam.score(model, given))["recall"] == 1, "nothing is there to be found"


def numbers(*scores: Any, samples: int = 1) -> dict[str, float]:
    measured = MetricSums()
    for score in scores:
        measured.add(score, samples)
    return measured.reduce(dist.single_process()["replicate"], torch.device("cpu"))


def test_recall_and_precision_are_of_the_cells_of_all_maps() -> None:
    model, given = new().requires_grad_(False), batch(count=5)
    guess, truth = model(model.scaled(given.fields)).argmax(1).numpy().ravel(), given.mask.numpy().ravel()
    found = numbers(deepcam.score(model, given))
    for k, name in ((1, "tropical_cyclone"), (2, "atmospheric_river")):
        right = np.sum((guess == k) & (truth == k))
        assert found[f"recall_{name}"] == right / np.sum(truth == k)
        assert found[f"precision_{name}"] == (right / np.sum(guess == k) if (guess == k).any() else 1)
    for kind in ("recall", "precision"):
        both = found[f"{kind}_tropical_cyclone"], found[f"{kind}_atmospheric_river"]
        assert found[kind] == pytest.approx(sum(both) / 2, rel=1e-15)
    parts = [deepcam.score(model, Batch(given.fields[a:b], given.mask[a:b])) for a, b in ((0, 2), (2, 3), (3, 5))]
    assert numbers(*parts) == pytest.approx(found, rel=1e-4)
