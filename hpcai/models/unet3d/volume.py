"""Preprocessing of CT volumes: resampling to one spacing, clipping, normalisation, padding.

It is that of the MLPerf reference for KiTS19, so that its weights and its score carry over. Hounsfield units (HU): air
is -1000, water 0. D H W the volume: D along the body, H rows, W columns, in the order of the public set.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError

TARGET_MM = (1.6, 1.2, 1.2)
MIN_SHAPE = (128, 128, 128)
SPACINGS_MM = (0.01, 100.0)
"""Valid voxel sizes: scanners make 0.1 to 10 mm, so metres and micrometres are outside."""
CLIP_HU = (-79.0, 304.0)
MEAN_HU, STD_HU = 101.0, 76.9
CLASSES = ("background", "kidney", "tumour")


def resampled_shape(shape: Sequence[int], spacing_mm: Sequence[float], target_mm: Sequence[float]) -> tuple[int, int, int]:
    """Return the voxels at the target spacing, truncated and not rounded, as in the reference; at least 1 in each dim."""
    # In this order of operations: 0.8 / 1.2 * 60 must not become 39.
    size = (np.asarray(spacing_mm, np.float64) / np.asarray(target_mm, np.float64) * np.asarray(shape)).astype(int)
    depth, height, width = (max(1, int(n)) for n in size)
    return depth, height, width


def resample(volume: NDArray[Any], shape: Sequence[int], kind: Literal["linear", "nearest"]) -> NDArray[Any]:
    """Resample [D, H, W] to another shape, in the same dtype; integers are rounded. ``linear`` is trilinear with aligned corners;
    ``nearest`` reads the voxel at floor(i * old / new), both as in torch."""
    if tuple(shape) == volume.shape:
        return volume

    import torch
    import torch.nn.functional as F

    if kind == "nearest":
        # One dim at a time: torch would convert all voxels to float32.
        rows = [F.interpolate(torch.arange(old, dtype=torch.float32)[None, None], new)[0, 0].long().numpy()
                for old, new in zip(volume.shape, shape)]  # fmt: skip
        return volume[np.ix_(*rows)]
    exact = volume.dtype.itemsize > (2 if volume.dtype.kind in "iub" else 4)
    # No copy of a float32 volume.
    tensor = torch.from_numpy(np.ascontiguousarray(volume, np.float64 if exact else np.float32))
    resampled = F.interpolate(tensor[None, None], tuple(shape), mode="trilinear", align_corners=True)[0, 0].numpy()
    if volume.dtype.kind in "iub":
        np.rint(resampled, out=resampled)
    return resampled.astype(volume.dtype.newbyteorder("="), copy=False)


def normalise(image: NDArray[Any]) -> NDArray[np.float32]:
    """Clip HU to the range of the network, and scale them to about mean 0 and deviation 1."""
    values = np.clip(image, *CLIP_HU).astype(np.float32, copy=False)
    values -= np.float32(MEAN_HU)
    values /= np.float32(STD_HU)
    return values


def pad(array: NDArray[Any], min_shape: Sequence[int]) -> NDArray[Any]:
    """Pad a volume to at least ``min_shape``, on both sides of a dim, by replication; an odd voxel goes to the far side."""
    padding = [max(0, minimum - size) for size, minimum in zip(array.shape, min_shape)]
    if not any(padding):
        return array
    return np.pad(array, [(voxels // 2, voxels - voxels // 2) for voxels in padding], "edge")


def preprocess(
    image: NDArray[Any], label: NDArray[Any] | None, spacing_mm: Sequence[float], target_mm: Sequence[float] = TARGET_MM,
    min_shape: Sequence[int] = MIN_SHAPE,
) -> tuple[NDArray[np.float32], NDArray[np.uint8] | None]:  # fmt: skip
    """Return a CT image in HU and its label, with voxel sizes in mm, as the network reads them.   image, label [D, H, W]

    Raises DataError for shapes that differ or are not three-dimensional, values that are not finite, spacings that are not three
    voxel sizes in mm, and labels other than 0 background, 1 kidney, 2 tumour.
    """
    validate(image, label, spacing_mm, target_mm)
    if tuple(spacing_mm) != tuple(target_mm):
        shape = resampled_shape(image.shape, spacing_mm, target_mm)
        image = resample(image if image.dtype.kind == "f" else image.astype(np.float32), shape, "linear")
        label = None if label is None else resample(label, shape, "nearest")
    padded_label = None if label is None else pad(label.astype(np.uint8, copy=False), min_shape)
    return pad(normalise(image), min_shape), padded_label


def validate(image: NDArray[Any], label: NDArray[Any] | None, *spacings: Sequence[float]) -> None:
    """Raise DataError if ``preprocess`` does not support the arguments."""
    for spacing in spacings:
        lengths = np.asarray(spacing, float)
        if lengths.shape != (3,) or not ((lengths >= SPACINGS_MM[0]) & (lengths <= SPACINGS_MM[1])).all():
            low, high = SPACINGS_MM
            raise DataError(f"spacing {spacing}, expected three lengths of {low:g} to {high:g} mm along D, H, W; check the unit")
    if image.ndim != 3 or 0 in image.shape:
        raise DataError(f"an image of shape {image.shape}, expected (D, H, W), slices first, none of them 0")
    if image.dtype.kind == "f" and not all(np.isfinite(part).all() for part in image):
        count = sum(int(np.count_nonzero(~np.isfinite(part))) for part in image)
        fault = f"{count:,} of {image.size:,} voxels of the image are NaN or infinite"
        raise DataError(f"{fault}; fill them (-1024 HU is air), or leave the case out")
    if label is None:
        return
    if label.shape != image.shape:
        raise DataError(f"a label of shape {label.shape} and an image of {image.shape}; expected the same shape")
    if not all(np.isin(part, (0, 1, 2)).all() for part in label):
        others = sorted(set(np.unique(label).tolist()) - {0, 1, 2})[:5]
        raise DataError(f"the label contains {others}, expected only 0 background, 1 kidney, 2 tumour")
