"""A patient as the voxels of a scan: soft shapes painted in Hounsfield units, in mm, on a slightly bent body.

D slices from head to feet (z, mm)   H rows from front to back (y)   W columns from the patient's right to the left (x)"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Box = tuple[slice, slice, slice]
Point = Sequence[float] | Array
CAVITY = (85.0, 125.0)                                              # mm: half of the depth and of the width of the standard cavity


@dataclass
class Patient:
    """The voxels of a scan; each organ is painted over the earlier ones."""

    random: np.random.Generator
    z: Array                                                        # mm, positions of the slices, rows and columns
    y: Array
    x: Array
    enhancement: dict[str, float]                                   # HU that the contrast agent adds to each tissue
    bends: list[Array] = field(default_factory=list)                # mm, two wave numbers and phase of three waves
    image: Array = field(init=False)
    label: NDArray[np.uint8] = field(init=False)
    edge: float = 1.0                                               # mm, width of the transition between tissues
    scale: tuple[float, float] = (1.0, 1.0)                         # depth and width over those of the standard cavity

    def __post_init__(self) -> None:
        shape = (self.z.size, self.y.size, self.x.size)
        self.image, self.label = np.full(shape, -1000, np.float32), np.zeros(shape, np.uint8)
        for _ in range(3):                                          # a shift along each axis, waves along the other two
            low, high = (0.5, -1 / 45, -1 / 45, 0), (2.5, 1 / 45, 1 / 45, 7)
            self.bends.append(self.random.uniform(low, high, (3, 4)).astype(np.float32))

    def hu(self, tissue: str, base: float = 35) -> float:
        return base + self.enhancement[tissue]

    def partial_volume(self, depth: Array) -> Array:
        """Return the fraction of a voxel within a surface, from its depth in mm."""
        return np.clip(depth / np.float32(self.edge) + np.float32(0.5), 0, 1)

    def coordinates(self, box: Box) -> tuple[Array, Array, Array]:
        """Return the bent coordinates of the voxels of a box."""
        z, y, x = self.z[box[0], None, None], self.y[None, box[1], None], self.x[None, None, box[2]]

        def bend(waves: Any, first: Array, second: Array) -> Any:
            return sum(a * np.sin(i * first + j * second + s) for a, i, j, s in waves)

        return z + bend(self.bends[0], y, x), y + bend(self.bends[1], z, x), x + bend(self.bends[2], z, y)

    def box(self, low: Point, high: Point) -> Box | None:
        """Return the voxels between two corners, with a margin for the bends, or None if there are none."""
        slices = []
        for axis, a, b in zip((self.z, self.y, self.x), low, high):
            first, last = np.searchsorted(axis, (a - 8, b + 8))
            if first >= last:
                return None
            slices.append(slice(int(first), int(last)))
        return slices[0], slices[1], slices[2]

    def scale_point(self, point: Point) -> NDArray[np.float64]:
        """Return the position in this cavity of a point of the standard one."""
        return np.array(point) * (1, *self.scale)

    def paint(self, box: Box, inside: Array, value: Any, label: int = 0) -> None:
        values = self.image[box]
        values += inside * (value - values)
        self.label[box][inside > 0.5] = label

    def local_coordinates(self, box: Box, centre: Point, axes: Any) -> list[Array]:
        """Return coordinates relative to a point along three unit vectors, the rows of ``axes``."""
        z, y, x = self.coordinates(box)
        z, y, x = z - np.float32(centre[0]), y - np.float32(centre[1]), x - np.float32(centre[2])
        return [np.float32(a) * z + np.float32(b) * y + np.float32(c) * x for a, b, c in axes]

    def bounding_box(self, centre: Point, radii: Point, axes: Any) -> Box | None:
        reach = np.sqrt(((np.array(radii)[:, None] * np.array(axes)) ** 2).sum(0))
        return self.box(centre - reach, centre + reach)

    def random_field(self, parts: Sequence[Array], length: float, count: int = 4) -> Array:
        """Return a smooth random field of about -1 to 1 with structures of ``length`` mm."""
        total = np.zeros(parts[0].shape, np.float32)
        for _ in range(count):
            wave = self.random.normal(size=3)
            wave *= 2 * np.pi / length / np.linalg.norm(wave) * self.random.uniform(0.6, 1.4)
            total += np.sin(sum(np.float32(k) * p for k, p in zip(wave, parts)) + np.float32(self.random.uniform(0, 7)))
        return total * np.float32(1.5 / count)

    def paint_ellipsoid(
        self, centre: Point, radii: Point, value: Any, label: int = 0, axes: Any = None, lobes: float = 0.0,
        margin: float | None = 0.0,
    ) -> tuple[Box, Array, list[Array]] | None:  # fmt: skip
        """Paint an ellipsoid with a lobed surface, within the cavity minus ``margin`` mm. Returns its box, and the depth in mm and
        local coordinates of the voxels."""
        axes = np.eye(3) if axes is None else axes
        box = self.bounding_box(np.array(centre), np.array(radii) * (1 + lobes), axes)
        if box is None:
            return None
        parts = self.local_coordinates(box, centre, axes)
        r = np.sqrt(sum((p / np.float32(radius)) ** 2 for p, radius in zip(parts, radii)))
        if lobes:
            r -= np.float32(lobes) * self.random_field(parts, 1.6 * min(radii))
        depth = (1 - r) * np.float32(min(radii))
        if margin is not None:
            depth = np.minimum(depth, self.cavity_depth(box) - np.float32(margin))
        if value is not None:
            self.paint(box, self.partial_volume(depth), value, label)
        return box, depth, parts

    def cavity_depth(self, box: Box) -> Array:
        """Return the depth in mm within the inner side of the wall of the trunk."""
        _, y, x = self.coordinates(box)
        return (1 - trunk_radius(y / np.float32(CAVITY[0] * self.scale[0]), x / np.float32(CAVITY[1] * self.scale[1]))) * 85

    def paint_tube(self, start: Point, end: Point, radius: float, value: float) -> None:
        a, b = self.scale_point(start), self.scale_point(end)
        box = self.box(np.minimum(a, b) - radius, np.maximum(a, b) + radius)
        if box is None:
            return
        parts, axis = self.local_coordinates(box, a, np.eye(3)), (b - a).astype(np.float32)
        along = np.clip(sum(p * d for p, d in zip(parts, axis)) / (axis @ axis), 0, 1)
        distance = np.sqrt(sum((p - along * d) ** 2 for p, d in zip(parts, axis)))
        self.paint(box, self.partial_volume(np.float32(radius) - distance), np.float32(value))


def trunk_radius(y: Array, x: Array) -> Array:
    """Return the radius relative to an ellipse with filled-out corners, the shape of the trunk: 1 on its outline."""
    y, x = y * y, x * x
    return np.sqrt(y + x - np.float32(0.5) * np.minimum(y * x, 0.4))


def rotation_matrix(about: Point, degrees: float) -> NDArray[np.float64]:
    """Return the rotation about an axis (Rodrigues)."""
    k = np.array(about, float) / np.linalg.norm(about)
    cross = np.array([[0, -k[2], k[1]], [k[2], 0, -k[0]], [-k[1], k[0], 0]])
    angle = math.radians(degrees)
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
