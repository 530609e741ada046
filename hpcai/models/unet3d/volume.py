"""CT volumes in the space of the network: resampled to one spacing, clipped, normalised, padded.

This is how the MLPerf reference prepares KiTS19, so that its weights and its score mean the same here. Hounsfield units (HU): air
is -1000, water 0. D H W the volume: D along the body, H rows, W columns, in the order of the public set.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from hpcai.errors import DataError

TARGET_MM = (1.6, 1.2, 1.2)
MIN_SHAPE = (128, 128, 128)
SPACINGS_MM = (0.01, 100.0)
"""What voxels of a body may measure: scanners make 0.1 to 10 mm, so metres and micrometres are outside."""
CLIP_HU = (-79.0, 304.0)
MEAN_HU, STD_HU = 101.0, 76.9
CLASSES = ("background", "kidney", "tumour")


def resampled_shape(shape: Sequence[int], spacing_mm: Sequence[float], target_mm: Sequence[float]) -> tuple[int, int, int]:
    """Voxels at the target spacing, cut off and not rounded, as the reference has it; at least 1 in each dim."""
    # In this order of operations: 0.8 / 1.2 * 60 must not become 39.
    size = (np.asarray(spacing_mm, np.float64) / np.asarray(target_mm, np.float64) * np.asarray(shape)).astype(int)
    depth, height, width = (max(1, int(n)) for n in size)
    return depth, height, width


def resample(volume: NDArray[Any], shape: Sequence[int], kind: Literal["linear", "nearest"]) -> NDArray[Any]:
    """[D, H, W] to another shape, in the dtype that it has; whole numbers are rounded. ``linear`` is trilinear with the centres
    of the corner voxels held in place; ``nearest`` takes the voxel at floor(i * old / new), as torch does both."""
    if tuple(shape) == volume.shape:
        return volume
    if kind == "nearest":
        # One dim at a time: torch would make float32 of all voxels.
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
    """Clip HU to what the network sees, and bring them to about mean 0 and deviation 1."""
    values = np.clip(image, *CLIP_HU).astype(np.float32, copy=False)
    values -= np.float32(MEAN_HU)
    values /= np.float32(STD_HU)
    return values


def pad(array: NDArray[Any], min_shape: Sequence[int]) -> NDArray[Any]:
    """Pad a volume to at least so many voxels, on both sides of a dim, with the values of its edge; an odd voxel goes to the far
    side."""
    padding = [max(0, minimum - size) for size, minimum in zip(array.shape, min_shape)]
    if not any(padding):
        return array
    return np.pad(array, [(voxels // 2, voxels - voxels // 2) for voxels in padding], "edge")


def preprocess(
    image: NDArray[Any], label: NDArray[Any] | None, spacing_mm: Sequence[float], target_mm: Sequence[float] = TARGET_MM,
    min_shape: Sequence[int] = MIN_SHAPE,
) -> tuple[NDArray[np.float32], NDArray[np.uint8] | None]:  # fmt: skip
    """A CT image in HU and its label, with the distance of voxels in mm, to what the network takes.   image, label [D, H, W]

    Raises DataError for shapes that differ or are not three-dimensional, values that are not finite, spacings that are not
    three lengths of voxels in mm, and labels other than 0 background, 1 kidney, 2 tumour.
    """
    validate(image, label, spacing_mm, target_mm)
    if tuple(spacing_mm) != tuple(target_mm):
        shape = resampled_shape(image.shape, spacing_mm, target_mm)
        image = resample(image if image.dtype.kind == "f" else image.astype(np.float32), shape, "linear")
        label = None if label is None else resample(label, shape, "nearest")
    padded_label = None if label is None else pad(label.astype(np.uint8, copy=False), min_shape)
    return pad(normalise(image), min_shape), padded_label


def validate(image: NDArray[Any], label: NDArray[Any] | None, *spacings: Sequence[float]) -> None:
    """Raises DataError for what ``prepare`` does not take."""
    for spacing in spacings:
        lengths = np.asarray(spacing, float)
        if lengths.shape != (3,) or not ((lengths >= SPACINGS_MM[0]) & (lengths <= SPACINGS_MM[1])).all():
            low, high = SPACINGS_MM
            raise DataError(f"spacing {spacing}, expected three lengths of {low:g} to {high:g} mm along D, H, W; check the unit")
    if image.ndim != 3 or 0 in image.shape:
        raise DataError(f"an image of shape {image.shape}, expected (D, H, W), the slices first, with voxels in each dim")
    if image.dtype.kind == "f" and not all(np.isfinite(part).all() for part in image):
        count = sum(int(np.count_nonzero(~np.isfinite(part))) for part in image)
        fault = f"{count:,} of {image.size:,} voxels of the image are NaN or infinite"
        raise DataError(f"{fault}; fill them (-1024 HU is air), or leave the case out")
    if label is None:
        return
    if label.shape != image.shape:
        raise DataError(f"a label of shape {label.shape} with an image of {image.shape}; expected one label for each voxel")
    if not all(np.isin(part, (0, 1, 2)).all() for part in label):
        others = sorted(set(np.unique(label).tolist()) - {0, 1, 2})[:5]
        raise DataError(f"the label holds {others}, expected only 0 background, 1 kidney, 2 tumour")
