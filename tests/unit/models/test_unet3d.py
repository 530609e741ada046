"""3D U-Net: preprocessing and segmentation of volumes, sliding windows, settings, scores and slices."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.errors import ConfigError, DataError
from hpcai.models import unet3d
from hpcai.models.unet3d import Batch, SlidingWindow, UNet3D, UNet3DConfig, volume
from hpcai.models.unet3d.objective import dice
from hpcai.models.unet3d.volume import preprocess, resample

SMALL = UNet3DConfig(filters=(4, 6), window=(8, 16, 16), spacing_mm=(4.0, 2.0, 2.0))


def model() -> UNet3D:
    torch.manual_seed(0)
    net = UNet3D(SMALL)
    torch.nn.init.zeros_(net.output.conv.bias)  # or one class wins everywhere
    return net.eval()


def test_a_volume_is_segmented_on_its_own_grid() -> None:
    net = model()
    volume = np.random.default_rng(0).normal(40, 100, (11, 60, 47)).astype(np.int16)
    masks = net.segment(volume, spacing_mm=(5.0, 0.9, 0.8))
    assert list(masks) == ["background", "kidney", "tumour"]
    assert all(mask.shape == volume.shape and mask.dtype == bool for mask in masks.values())
    total = sum(mask.astype(int) for mask in masks.values())
    assert np.array_equal(total, np.ones(volume.shape, int)), "each voxel has one class"
    assert 0 < masks["kidney"].mean() < 1 or 0 < masks["tumour"].mean() < 1
    # At the network's spacing nothing is resampled: the masks are those of the windows.
    native = net.segment(volume, spacing_mm=SMALL.spacing_mm)
    image = torch.from_numpy((np.clip(volume, -79, 304).astype(np.float32) - 101) / np.float32(76.9))
    with torch.no_grad():
        logits, _ = net.sliding_window(net, image[None, None], crop=False)
    assert (np.stack(list(native.values())).argmax(0) == logits[0].argmax(0).numpy()).all()


def test_a_mask_does_not_depend_on_mode_or_memory_layout() -> None:
    net, volume = model(), np.random.default_rng(1).normal(40, 100, (9, 33, 35))
    expected = net.segment(volume, (4, 2, 2))
    assert net.training is False
    net.train()
    actual = net.segment(np.asfortranarray(volume), (4, 2, 2))
    assert all(np.array_equal(actual[name], expected[name]) for name in expected)
    actual = net.segment(np.ma.masked_greater(volume, 1e4), (4, 2, 2))  # masks nothing
    assert all(np.array_equal(actual[name], expected[name]) for name in expected)
    with pytest.raises(DataError, match="volume: 10,395 of 10,395 values are masked"):
        net.segment(np.ma.masked_less(volume, 1e4), (4, 2, 2))
    net.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        net.segment(volume, (4, 2, 2))
    assert net.training, "the mode is restored after an error"


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"window": (128, 100, 128)}, "multiples of 32"), ({"window": (32, 32, 32)}, "one voxel without statistics")],
)
def test_invalid_settings_raise(settings: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=text):
        UNet3DConfig(**settings)


def test_window_weights_sum_to_one_at_every_voxel() -> None:
    """The identity network returns the volume."""
    rng = np.random.default_rng(2)
    for _ in range(40):
        size, window = rng.integers(3, 70, 3).tolist(), rng.choice([8, 16, 24, 32], 3).tolist()
        overlap = float(rng.choice([0.0, 0.25, 0.5, 0.75]))
        x = torch.from_numpy(rng.normal(size=(1, 2, *size)))
        for crop in (False, True):
            y, ranges = SlidingWindow(window, overlap)(lambda part: part, x, crop)
            torch.testing.assert_close(y, x[(..., *ranges)], rtol=1e-11, atol=1e-11)
            for n, w, part in zip(size, window, ranges):
                assert n - (part.stop - part.start) < max(crop * int(w * (1 - overlap)) // 2, 1)


def test_dice_of_an_absent_class_is_one() -> None:
    label = torch.zeros(2, 2, 2, 2, dtype=torch.uint8)
    label[1, 0] = 1
    predicted = label.long().clone()
    predicted[1, 1, 0, 0] = 1
    scores = dice(predicted, label, 3)
    torch.testing.assert_close(scores, torch.tensor([[1.0, 1.0], [8 / 9, 1.0]]).double(), rtol=1e-6, atol=0)


@torch.no_grad()
def test_the_score_is_a_mean_over_volumes() -> None:
    net, image = model(), torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(3))
    label = (image > 1).to(torch.uint8) + (image > 2).to(torch.uint8)
    mean = unet3d.score(net, [Batch(image[:1], label[:1]), Batch(image[1:], label[1:])])
    separate = [unet3d.score(net, [Batch(image[b : b + 1], label[b : b + 1])]) for b in (0, 1)]
    for name, (value, count) in mean.items():
        assert count == 2 and float(value) == pytest.approx(sum(float(scores[name][0]) for scores in separate))
    assert float(mean["mean_dice"][0]) == pytest.approx((float(mean["dice_kidney"][0]) + float(mean["dice_tumour"][0])) / 2)


def test_slices_with_most_tumour_are_selected() -> None:
    net = model()
    label = torch.zeros(1, 12, 40, 30, dtype=torch.uint8)
    label[0, 5, 10:14, 4:9], label[0, 7, 11:13, 5:9] = 1, 2
    empty = torch.zeros_like(label)
    with torch.no_grad():
        slices = unet3d.slices(net, [Batch(torch.zeros(label.shape), label), Batch(torch.ones(label.shape), empty)])
    assert slices["fields"].shape == (2, 24, 24, 1) and slices["true"].shape == slices["predicted"].shape == (2, 24, 24)
    assert slices["true"][0].unique().tolist() == [0, 2] and (slices["true"][0] == 2).sum() == 8 and not slices["true"][1].any()
    assert slices["fields"][0].nan_to_num(-1).unique().tolist() == [-1, 101], "nothing is drawn beyond the volume"


# ---- preprocessing


def ramp(shape: tuple[int, ...], kind: Any = np.float32) -> np.ndarray:
    """Return values that are linear along every dim, so that trilinear interpolation is exact."""
    z, y, x = np.meshgrid(*[np.linspace(-50, 250, n) for n in shape], indexing="ij")
    return ((z + 2 * y - x) / 2).astype(kind)


@pytest.mark.parametrize("kind", ["u1", "<i4", ">i2", "f4", ">f4", "?"])
def test_dtype_is_preserved(kind: str) -> None:
    values = (ramp((9, 8, 7)) > 90).astype(kind) if kind in "u1?" else ramp((9, 8, 7), kind)
    linear, nearest = (resample(values, (17, 5, 20), mode) for mode in ("linear", "nearest"))  # type: ignore[arg-type]
    assert linear.dtype == values.dtype.newbyteorder("=") and nearest.dtype == values.dtype
    if kind not in "u1?":
        assert np.abs(linear.astype(float) - ramp((17, 5, 20), float)).max() <= {"f": 0.2, "i": 1.5}[values.dtype.kind]
    assert resample(values[::-1].swapaxes(0, 2), (5, 6, 4), "linear").shape == (5, 6, 4)      # strides that torch does not take


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "four dims": ({"image": np.zeros((1, 4, 5, 6), np.float32)}, "shape (1, 4, 5, 6), expected (D, H, W), slices first"),
    "NaN": ({"image": np.full((4, 5, 6), np.nan, np.float32)}, "120 of 120 voxels of the image are NaN"),
    "another shape": ({"label": np.zeros((4, 5, 7), np.uint8)}, "label of shape (4, 5, 7) and an image of (4, 5, 6)"),
    "metres": ({"spacing_mm": (0.0025, 0.0007, 0.0007)}, "check the unit"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_invalid_volumes_raise(fault: str) -> None:
    change, text = INVALID[fault]
    kwargs: dict[str, Any] = {"image": np.zeros((4, 5, 6), np.float32), "label": None, "spacing_mm": (1, 1, 1), **change}
    with pytest.raises(DataError, match=re.escape(text)):
        preprocess(**kwargs)


def test_no_copy_of_a_large_volume() -> None:
    """Preprocessing a float32 volume and its label allocates only the results."""
    import tracemalloc

    image, label = np.zeros((60, 256, 256), np.float32), np.zeros((60, 256, 256), np.uint8)
    tracemalloc.start()                                             # numpy's memory; torch's result is counted by its size
    volume.preprocess(image, label, (1.6, 0.6, 0.6), min_shape=(1, 1, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.75 * image.nbytes
