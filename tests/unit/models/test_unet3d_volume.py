"""CT volumes to the space of the network: shapes, values that must not move, refusals."""

import re
from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.unet3d import volume
from hpcai.models.unet3d.volume import LEAST, normalise, pad, prepare, resample, resampled_shape


def ramp(shape: tuple[int, ...], kind: Any = np.float32) -> np.ndarray:
    """Linear along every dim, so that trilinear interpolation is exact."""
    z, y, x = np.meshgrid(*[np.linspace(-50, 250, n) for n in shape], indexing="ij")
    return ((z + 2 * y - x) / 2).astype(kind)


def test_the_shape_is_cut_off_in_float64_and_never_zero() -> None:
    assert resampled_shape((20, 60, 50), (3.0, 0.8, 0.9), (1.6, 1.2, 1.2)) == (37, 40, 37)
    assert resampled_shape((1, 2, 500), (1.0, 0.3, 1.2), (4.8, 3.6, 1.2)) == (1, 1, 500)


def test_linear_keeps_corners_and_lines_and_the_input_is_left_alone() -> None:
    assert np.allclose(resample(ramp((9, 8, 7)), (17, 5, 20), "linear"), ramp((17, 5, 20)), atol=1e-4)
    image = np.array([[[-1000, -79, 101, 304, 3000]]], np.float32)
    before = image.copy()
    assert np.allclose(normalise(image), np.array([-180, -180, 0, 203, 203]) / 76.9) and (image == before).all()


@pytest.mark.parametrize("kind", ["u1", "<i4", ">i2", "f4", ">f4", "?"])
def test_every_dtype_stays_what_it_is(kind: str) -> None:
    values = (ramp((9, 8, 7)) > 90).astype(kind) if kind in "u1?" else ramp((9, 8, 7), kind)
    linear, nearest = (resample(values, (17, 5, 20), how) for how in ("linear", "nearest"))  # type: ignore[arg-type]
    assert linear.dtype == values.dtype.newbyteorder("=") and nearest.dtype == values.dtype
    if kind not in "u1?":
        assert np.abs(linear.astype(float) - ramp((17, 5, 20), float)).max() <= {"f": 0.2, "i": 1.5}[values.dtype.kind]
    assert resample(values[::-1].swapaxes(0, 2), (5, 6, 4), "linear").shape == (5, 6, 4)      # strides that torch does not take


def test_padding_repeats_edges_with_the_odd_voxel_at_the_far_side() -> None:
    padded = pad(np.arange(6).reshape(1, 2, 3), (1, 5, 2))
    assert padded.shape == (1, 5, 3) and padded[0, :, 0].tolist() == [0, 0, 3, 3, 3]


def test_a_case_is_prepared() -> None:
    image, label = ramp((20, 30, 40), np.int16), np.zeros((20, 30, 40), np.int64)
    label[5:9, 10:20, 10:20] = 2
    ready, classes = prepare(image, label, (3.2, 1.2, 2.4))
    assert ready.shape == LEAST == (128, 128, 128) and ready.dtype == np.float32
    assert classes is not None and classes.shape == LEAST and classes.dtype == np.uint8 and set(np.unique(classes)) == {0, 2}
    inner = ready[44:84, 49:79, 24:104]
    assert np.allclose(inner, normalise(resample(image.astype(np.float32), (40, 30, 80), "linear")))
    assert (classes == 2).sum() == 8 * 10 * 20
    alone, none = prepare(image, None, (1.6, 1.2, 1.2), least=(1, 1, 1))
    assert none is None and (alone == normalise(image)).all()
    skipped = prepare(image, label, (4.8, 3.6, 3.6), (4.8, 3.6, 3.6), (1, 1, 1))[0]
    assert (skipped == alone).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "four dims": ({"image": np.zeros((1, 4, 5, 6), np.float32)}, "shape (1, 4, 5, 6), expected (D, H, W), the slices first"),
    "no voxels": ({"image": np.zeros((4, 0, 5), np.float32)}, "shape (4, 0, 5)"),
    "NaN": ({"image": np.full((4, 5, 6), np.nan, np.float32)}, "120 of 120 voxels of the image are NaN"),
    "another shape": ({"label": np.zeros((4, 5, 7), np.uint8)}, "label of shape (4, 5, 7) with an image of (4, 5, 6)"),
    "half a label": ({"label": np.full((4, 5, 6), 0.5)}, "holds [0.5], expected only 0 background, 1 kidney, 2 tumour"),
    "spacing 0": ({"spacing_mm": (1, 0, 1)}, "spacing (1, 0, 1), expected three lengths of 0.01 to 100 mm"),
    "NaN spacing": ({"spacing_mm": (1, float("nan"), 1)}, "nan"),
    "metres": ({"spacing_mm": (0.0025, 0.0007, 0.0007)}, "check the unit"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused(fault: str) -> None:
    what, text = REFUSED[fault]
    words: dict[str, Any] = {"image": np.zeros((4, 5, 6), np.float32), "label": None, "spacing_mm": (1, 1, 1), **what}
    with pytest.raises(DataError, match=re.escape(text)):
        prepare(**words)


def test_a_large_volume_takes_no_copy_of_itself() -> None:
    """A float32 volume and its label cost only what they become."""
    import tracemalloc

    image, label = np.zeros((60, 256, 256), np.float32), np.zeros((60, 256, 256), np.uint8)
    tracemalloc.start()                                             # numpy's memory; torch's result is counted by its size
    volume.prepare(image, label, (1.6, 0.6, 0.6), least=(1, 1, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.75 * image.nbytes
