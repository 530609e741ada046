"""Preprocessing of CT volumes: dtypes, interpolation, errors, memory."""

import re
from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.unet3d import volume
from hpcai.models.unet3d.volume import preprocess, resample


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
