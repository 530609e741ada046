"""The 3D U-Net and its preprocessing agree with stored results of the reference implementation (tests/data/unet3d)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.dist.mesh import Mesh
from hpcai.models import unet3d
from hpcai.models.unet3d import Batch, UNet3D, UNet3DConfig
from hpcai.models.unet3d.objective import dice
from hpcai.models.unet3d.volume import normalise, pad, preprocess, resample, resampled_shape
from hpcai.settings import ScheduleConfig
from hpcai.train.schedule import make_lr_schedule
from tests.hash_values import hash_values
from tests.ranks.launch import on_ranks
from tests.reference_data import check_subsample, digest, load_arrays, load_json

NARROW = UNet3DConfig(filters=(8, 16, 32, 64, 80), window=(64, 64, 64))
STORED = "div4_64x64x32_b2"


def read(name: str) -> Any:
    return load_json(f"unet3d/{name}")


def make_volume(shape: tuple[int, ...], tag: str, batch: int, case: dict[str, Any]) -> Batch:
    """Return input and labels of a case: two nested balls with added noise."""
    labels = []
    for b in range(batch):
        sides = [x - (0.4 + 0.1 * b) * n for x, n in zip(np.ogrid[tuple(slice(0, n) for n in shape)], shape)]
        square = sum(side * side for side in sides)
        labels.append(sum((square <= (radius * min(shape)) ** 2).astype(np.uint8) for radius in (0.3, 0.12)))
    label = np.stack(labels)
    assert digest(label) == case["label_sha256"]
    noise = (np.sqrt(3) * (2 * hash_values(label.size, f"unet_x_{tag}") - 1)).astype(np.float32)
    image = noise.reshape(label.shape) + np.float32(0.5) * label
    assert digest(image) == case["x_sha256"]
    return Batch(torch.from_numpy(image), torch.from_numpy(label))


def check_gradients(model: torch.nn.Module, norms: dict[str, float]) -> None:
    largest = max(norms.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert abs(parameter.grad.norm().item() - norms[name]) < 1e-3 * (norms[name] + 1e-4 * largest), name


def narrow_network() -> UNet3D:
    torch.manual_seed(0)
    return UNet3D(NARROW)


def test_a_seed_draws_the_references_weights_and_its_state_dict_loads(tmp_path: Path) -> None:
    state = narrow_network().state_dict()
    assert [(name, digest(tensor.numpy())) for name, tensor in state.items()] == [*read(STORED)["state_sha256"].items()]
    for saved in (state, {"epoch": 3, "best_model_state_dict": {f"module.{name}": t for name, t in state.items()}}):
        torch.save(saved, tmp_path / "weights.pt")
        model = UNet3D.load(tmp_path / "weights.pt")
        assert model.cfg.filters == NARROW.filters and all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    assert sum(p.numel() for p in UNet3D().parameters()) == 31190243 and len(UNet3D().state_dict()) == 78


def test_the_narrow_network_gives_the_references_outputs_loss_and_gradients() -> None:
    case, stored = read(STORED), load_arrays(f"unet3d/{STORED}")
    model, batch = narrow_network(), make_volume((64, 64, 32), STORED, 2, case)
    logits = model(batch.image[:, None])
    check_subsample(logits, stored, "out_train", 2e-5)
    values = unet3d.loss(model, batch)
    values["loss"].backward()
    assert values["loss"].item() == pytest.approx(case["loss"], rel=1e-6)
    assert values["entropy"].item() == pytest.approx(case["ce"], rel=1e-6)
    assert values["dice"].item() == pytest.approx(np.mean(case["soft_dice_per_sample_class"]), rel=1e-5)
    assert dice(logits.argmax(1), batch.label, 3).mean(0).tolist() == pytest.approx(case["dice_score_argmax"], abs=1e-5)
    check_gradients(model, case["grad_l2"])


def random_volume(tag: str) -> Batch:
    """Return an uncropped volume [D, H, W] of noise, with a random label for each voxel."""
    case, shape = read("sliding_window")[tag], [int(side) for side in tag.rpartition("_")[2].split("x")]
    image = (2 * hash_values(math.prod(shape), tag) - 1).astype(np.float32).reshape(shape)
    label = (3 * hash_values(math.prod(shape), f"{tag}l")).astype(np.uint8).reshape(shape)
    assert digest(image) == case["vol_sha256"] and digest(label) == case["label_sha256"]
    return Batch(torch.from_numpy(image), torch.from_numpy(label))


@pytest.mark.parametrize("shape", ["64x64x64", "70x64x101", "100x96x79"])
def test_windows_give_the_references_logits_on_the_same_crop(shape: str) -> None:
    tag, model = f"sw_roi64_{shape}", narrow_network().eval()
    case, volume = read("sliding_window")[tag], random_volume(tag)
    with torch.no_grad():
        logits, crop = model.sliding_window(model, volume.image[None, None])
    assert list(logits.shape) == case["out_shape"]
    check_subsample(logits, load_arrays("unet3d/sliding_window"), tag, 2e-5)
    assert digest(volume.label[crop].numpy()) == case["label_out_sha256"]
    scores = unet3d.score(model, [Batch(volume.image[None], volume.label[None])])
    dice_scores = [float(scores[f"dice_{name}"][0]) for name in ("kidney", "tumour")]
    assert dice_scores == pytest.approx(case["dice"], abs=1e-4)


def check_logits(mesh: Mesh, tag: str) -> None:
    model = unet3d.parallelize(narrow_network().eval(), mesh, mesh["replicate"].size)
    with torch.no_grad():
        logits, _ = model.sliding_window(model, random_volume(tag).image[None, None])
    check_subsample(logits, load_arrays("unet3d/sliding_window"), tag, 2e-5)


def test_windows_sharded_over_ranks_give_the_references_logits() -> None:
    """There are two windows: one of the three ranks has none."""
    on_ranks({"replicate": 3}, check_logits, "sw_roi64_70x64x101")


WARM_UPS = [("reference", 0.8, 200), ("nvidia_gbs56", 2.0, 1000), ("nvidia_gbs84", 1.5, 1500)]


@pytest.mark.parametrize(("schedule", "lr", "warmup"), WARM_UPS)
def test_the_warm_up_is_the_references(schedule: str, lr: float, warmup: int) -> None:
    """The reference counts epochs from 1."""
    cfg = ScheduleConfig(unit="epochs", warmup=warmup, start=1e-4, first_step=1, held=True)
    lr_at = make_lr_schedule(cfg, lr, 1, 10_000)
    for epoch, value in read("lr_schedules")["lr"][schedule].items():
        assert lr_at(int(epoch) - 1) == pytest.approx(value, rel=1e-6), epoch


def test_a_volume_is_prepared_as_the_reference_does() -> None:
    stored, expected = load_arrays("unet3d/preprocess"), load_json("unet3d/preprocess")
    image, label, spacing = stored["image"][0], stored["label"][0], stored["spacing"]
    shape = resampled_shape(image.shape, spacing, (1.6, 1.2, 1.2))
    assert [1, *shape] == expected["after_resample"]
    normalised = normalise(resample(image, shape, "linear"))
    np.testing.assert_allclose(normalised, stored["image_resampled_normalised"][0], rtol=0, atol=2e-6)
    assert (resample(label, shape, "nearest") == stored["label_resampled"][0]).all()
    stats = expected["image_stats"]
    assert float(normalised.astype(np.float64).sum()) == pytest.approx(stats["sum"], abs=1e-5 * stats["abs_sum"])
    padded, classes = preprocess(image, label, spacing)
    assert classes is not None and [1, *padded.shape] == expected["after_pad"] and str(classes.dtype) == expected["pad_label_dtype"]
    assert float(padded.astype(np.float64).sum()) == pytest.approx(expected["padded_image_sum"], rel=1e-6)
    assert int(classes.astype(np.int64).sum()) == expected["padded_label_sum"]
    assert (pad(normalised, (128, 128, 128)) == padded).all()
