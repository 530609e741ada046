"""One CT case in NIfTI, in the layout of KiTS19: the image, its label, the voxel spacing.

    case_00000/imaging.nii.gz       HU [D, H, W], slices along the body first
    case_00000/segmentation.nii.gz  0 background, 1 kidney, 2 tumour

Files with another order of axes, such as x, y, z, are transposed by their affine, and never flipped. A file may be of NIfTI-1 or
NIfTI-2, end in .nii without gzip, and have further dims of length 1.

D slices along the body   H rows, front to back   W columns, from side to side"""

import gzip
import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.data.layout import parse_errors
from hpcai.durable import replace_file
from hpcai.errors import DataError
from hpcai.gzip_file import read_decompressed
from hpcai.lazy import import_optional

IMAGE, LABEL = "imaging.nii.gz", "segmentation.nii.gz"
MAX_TILT = 1e-3          # fraction of an axis along another one
MAX_BYTES = 1 << 32       # bytes of a volume: 2,000 slices of 512 x 512 voxels in float64
MAX_SHIFT = 0.5             # voxels between the same corner of image and label
MAX_MISMATCH = 0.01         # relative difference of the distance of voxels by pixdim and by the affine
MAX_ROUNDING = 0.03         # of a label that was stored as a float, or with a slope in float32
MILLIMETRES = {1: 1e3, 2: 1.0, 3: 1e-3}     # of a unit, by the code of xyzt_units: metre, millimetre, micrometre
Array = NDArray[Any]
_nibabel = partial(import_optional, "nibabel", "reading and writing NIfTI needs", "unet3d")


def read(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.uint8], tuple[float, float, float]]:
    """Return image in HU and label [D, H, W], and the mm between voxels along D, H, W. Raises DataError for invalid files."""
    image, affine, spacing = _open(path := find(folder, IMAGE))
    # The axes of the file that run along the body (z), from front to back (y) and from side to side (x).
    along = np.abs(affine[:3, :3]) / np.linalg.norm(affine[:3, :3], axis=0).clip(1e-9)             # [xyz, axis of the file]
    main = along.argmax(0)
    _, middle, most = np.sort(along, 0)                                         # a length of 0 has no direction
    if not np.isfinite(affine).all() or sorted(main) != [0, 1, 2] or most.min() < 0.9 or middle.max() > MAX_TILT:
        text = f"its affine {affine[:3, :3].round(4).tolist()} is rotated or sheared against the axes of the body"
        raise DataError(f"{path}: {text}, expected within {MAX_TILT:g}; resample it to an axis-aligned grid first")
    order = [int(np.flatnonzero(main == axis)[0]) for axis in (2, 1, 0)]
    values = image.get_fdata(dtype=np.float32)
    if not all(np.isfinite(part).all() for part in values):
        raise DataError(f"{path}: holds NaN or infinity, expected HU of every voxel; repair it, or move the case away")
    label = _read_label(folder / LABEL, values.shape, affine).transpose(order)
    depth, height, width = (spacing[axis] for axis in order)
    return values.transpose(order), label, (depth, height, width)


def _read_label(path: Path, shape: tuple[int, ...], affine: Array) -> NDArray[np.uint8]:
    file, other, _ = _open(path := find(path.parent, path.name))
    if file.shape != shape:
        raise DataError(f"{path}: {file.shape} voxels, {IMAGE} has {shape}; give the label on the grid of its image")
    corners = np.array(np.meshgrid(*[(0, n - 1) for n in shape], (1,))).reshape(4, -1)
    offset = float(np.abs(np.linalg.solve(affine, other @ corners) - corners).max())
    if not offset <= MAX_SHIFT:
        text = f"its affine puts a corner {offset:.3g} voxels from its position by {IMAGE}, expected at most {MAX_SHIFT:g}"
        raise DataError(f"{path}: {text}; resample the label to the grid of its image, or correct the wrong affine")
    values = np.asanyarray(file.dataobj)
    labels = np.empty(values.shape, np.uint8)
    for part, rounded in zip(values, labels):
        rounded[...] = np.rint(part).clip(0, 255)
        unknown = part[(rounded > 2) | (np.abs(part - rounded) > MAX_ROUNDING)]
        if unknown.size:
            text = f"holds the labels {np.unique(unknown)[:5].tolist()}, expected only 0 background, 1 kidney, 2 tumour"
            raise DataError(f"{path}: {text}; map them to these")
    return labels


def find(folder: Path, name: str) -> Path:
    """Return the path of a file, which may be stored without gzip."""
    plain = folder / name.removesuffix(".gz")
    return plain if plain.is_file() and not (folder / name).is_file() else folder / name


def _open(path: Path) -> tuple[Any, Array, tuple[float, ...]]:
    """Return a three-dimensional image after reading all bytes and testing their checksum, its affine, and the mm along each
    axis."""
    nibabel, advice = _nibabel(), "fetch it again, or move the case away"
    with parse_errors(path, advice, "cannot be read as NIfTI compressed by gzip"):
        if not path.is_file():
            raise DataError(f"{path}: no such file; {advice}")
        raw = read_decompressed(path, MAX_BYTES)
        if raw[344:348] != b"n+1\0" and raw[4:8] != b"n+2\0":
            raise ValueError("the header is not of single-file NIfTI")
        image_class = nibabel.Nifti1Image if raw[344:348] == b"n+1\0" else nibabel.Nifti2Image
        header = image_class.header_class.from_fileobj(io.BytesIO(raw), check=False)    # a check replaces a spacing of 0 by 1 mm
        shape, unit = header.get_data_shape(), int(header["xyzt_units"]) & 7
        if len(shape) < 3 or any(n != 1 for n in shape[3:]):
            raise DataError(f"{path}: {len(shape)} dimensions {tuple(shape)}, expected 3; make each volume a separate case")
        pixdim = header["pixdim"][1:4].astype(np.float64) * MILLIMETRES.get(unit, 1.0)
        least, most = (0.01, 100) if unit in MILLIMETRES else (0.05, 20)
        if not ((pixdim >= least) & (pixdim <= most)).all():
            text = f"the header has voxels {tuple(pixdim.tolist())} mm apart, expected {least:g} to {most:g}"
            raise DataError(f"{path}: {text}; correct pixdim, or its unit in xyzt_units")
        image = image_class.from_bytes(raw)
        if len(raw) < int(image.dataobj.offset) + int(np.prod(shape)) * image.get_data_dtype().itemsize:
            raise DataError(f"{path}: ends before the last of its {tuple(shape)} voxels; {advice}")
    affine = np.diag([*[MILLIMETRES.get(unit, 1.0)] * 3, 1.0]) @ image.affine
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if (np.abs(lengths / pixdim - 1) > MAX_MISMATCH).any():
        by_pixdim, by_affine = (tuple(values.round(6).tolist()) for values in (pixdim, lengths))
        text = f"voxels are {by_pixdim} mm apart by pixdim and {by_affine} mm by the affine"
        raise DataError(f"{path}: {text}; correct the wrong one")
    return nibabel.funcs.squeeze_image(image), affine, tuple(pixdim.tolist())


def write(folder: Path, image: Array, label: Array, spacing: tuple[float, float, float]) -> None:
    """Write a volume in the layout of the public set: int16, axis 0 along the body from head to feet, 1 front to back, 2 from the
    right to the left."""
    affine = np.diag([*(-mm for mm in spacing), 1.0])[[2, 1, 0, 3]]
    for name, values, kind in ((LABEL, label, np.uint8), (IMAGE, np.rint(image), np.int16)):
        file = _nibabel().Nifti1Image(values.astype(kind), affine)
        replace_file(folder / name, gzip.compress(file.to_bytes(), 1, mtime=0))
