"""Preprocessing of a CT volume equals that of the MLPerf reference (tests/data/unet3d/preprocess)."""

import numpy as np
import pytest

from hpcai.models.unet3d.volume import normalise, pad, preprocess, resample, resampled_shape
from tests.reference_data import load_arrays, load_json


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
