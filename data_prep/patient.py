"""A patient as the voxels of a scan: soft shapes painted in Hounsfield units, in mm, on a body that is gently bent.

D slices from head to feet (z, mm)   H rows from front to back (y)   W columns from the patient's right to the left (x)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Box = tuple[slice, slice, slice]
Point = Sequence[float] | Array
CAVITY = (85.0, 125.0)                                              # mm: half of its depth and of its width, as anatomy is laid out


@dataclass
class Patient:
    """The voxels of a scan, painted one organ after another."""

    random: np.random.Generator
    z: Array                                                        # mm of the slices, rows and columns
    y: Array
    x: Array
    enhanced: dict[str, float]                                      # HU that the contrast agent adds to each tissue
    bends: list[Array] = field(default_factory=list)                # mm, two wave numbers and phase of three waves
    image: Array = field(init=False)
    label: NDArray[np.uint8] = field(init=False)
    edge: float = 1.0                                               # mm over which one tissue becomes another
    scale: tuple[float, float] = (1.0, 1.0)                         # depth and width over those of the standard cavity

    def __post_init__(self) -> None:
        shape = (self.z.size, self.y.size, self.x.size)
        self.image, self.label = np.full(shape, -1000, np.float32), np.zeros(shape, np.uint8)
        for _ in range(3):                                          # a shift along each axis, waves along the other two
            low, high = (0.5, -1 / 45, -1 / 45, 0), (2.5, 1 / 45, 1 / 45, 7)
            self.bends.append(self.random.uniform(low, high, (3, 4)).astype(np.float32))

    def hu(self, tissue: str, base: float = 35) -> float:
        return base + self.enhanced[tissue]

    def soft(self, depth: Array) -> Array:
        """Share of a voxel within a surface, from its depth in mm: partial volume."""
        return np.clip(depth / np.float32(self.edge) + np.float32(0.5), 0, 1)

    def at(self, box: Box) -> tuple[Array, Array, Array]:
        """Bent coordinates of the voxels of a box."""
        z, y, x = self.z[box[0], None, None], self.y[None, box[1], None], self.x[None, None, box[2]]

        def bend(waves: Any, one: Array, other: Array) -> Any:
            return sum(a * np.sin(i * one + j * other + s) for a, i, j, s in waves)

        return z + bend(self.bends[0], y, x), y + bend(self.bends[1], z, x), x + bend(self.bends[2], z, y)

    def box(self, low: Point, high: Point) -> Box | None:
        """The voxels between two corners, with room for the bends; None where there is none."""
        found = []
        for axis, a, b in zip((self.z, self.y, self.x), low, high):
            first, last = np.searchsorted(axis, (a - 8, b + 8))
            if first >= last:
                return None
            found.append(slice(int(first), int(last)))
        return found[0], found[1], found[2]

    def place(self, point: Point) -> NDArray[np.float64]:
        """The place in this cavity of a point of the standard one."""
        return np.array(point) * (1, *self.scale)

    def paint(self, box: Box, inside: Array, value: Any, kind: int = 0) -> None:
        part = self.image[box]
        part += inside * (value - part)
        self.label[box][inside > 0.5] = kind

    def local(self, box: Box, centre: Point, axes: Any) -> list[Array]:
        """Coordinates about a point along three unit vectors, which are the rows of ``axes``."""
        z, y, x = self.at(box)
        z, y, x = z - np.float32(centre[0]), y - np.float32(centre[1]), x - np.float32(centre[2])
        return [np.float32(a) * z + np.float32(b) * y + np.float32(c) * x for a, b, c in axes]

    def around(self, centre: Point, radii: Point, axes: Any) -> Box | None:
        reach = np.sqrt(((np.array(radii)[:, None] * np.array(axes)) ** 2).sum(0))
        return self.box(centre - reach, centre + reach)

    def waves(self, parts: Sequence[Array], length: float, count: int = 4) -> Array:
        """A smooth random field of about -1 to 1 with structures of ``length`` mm."""
        total = np.zeros(parts[0].shape, np.float32)
        for _ in range(count):
            way = self.random.normal(size=3)
            way *= 2 * np.pi / length / np.linalg.norm(way) * self.random.uniform(0.6, 1.4)
            total += np.sin(sum(np.float32(k) * p for k, p in zip(way, parts)) + np.float32(self.random.uniform(0, 7)))
        return total * np.float32(1.5 / count)

    def ellipsoid(
        self, centre: Point, radii: Point, value: Any, kind: int = 0, axes: Any = None, lobes: float = 0.0, room: float | None = 0.0
    ) -> tuple[Box, Array, list[Array]] | None:
        """Paints an ellipsoid with a lobed surface, within the cavity less ``room`` mm; gives its voxels and their depth in mm."""
        axes = np.eye(3) if axes is None else axes
        box = self.around(np.array(centre), np.array(radii) * (1 + lobes), axes)
        if box is None:
            return None
        parts = self.local(box, centre, axes)
        r = np.sqrt(sum((p / np.float32(radius)) ** 2 for p, radius in zip(parts, radii)))
        if lobes:
            r -= np.float32(lobes) * self.waves(parts, 1.6 * min(radii))
        depth = (1 - r) * np.float32(min(radii))
        if room is not None:
            depth = np.minimum(depth, self.cavity(box) - np.float32(room))
        if value is not None:
            self.paint(box, self.soft(depth), value, kind)
        return box, depth, parts

    def cavity(self, box: Box) -> Array:
        """Depth in mm within the inner side of the wall of the trunk."""
        _, y, x = self.at(box)
        return (1 - roundness(y / np.float32(CAVITY[0] * self.scale[0]), x / np.float32(CAVITY[1] * self.scale[1]))) * 85

    def tube(self, start: Point, end: Point, radius: float, value: float) -> None:
        a, b = self.place(start), self.place(end)
        box = self.box(np.minimum(a, b) - radius, np.maximum(a, b) + radius)
        if box is None:
            return
        parts, way = self.local(box, a, np.eye(3)), (b - a).astype(np.float32)
        along = np.clip(sum(p * d for p, d in zip(parts, way)) / (way @ way), 0, 1)
        away = np.sqrt(sum((p - along * d) ** 2 for p, d in zip(parts, way)))
        self.paint(box, self.soft(np.float32(radius) - away), np.float32(value))


def roundness(s: Array, t: Array) -> Array:
    """1 on an ellipse with filled-out corners, as the trunk has them."""
    s, t = s * s, t * t
    return np.sqrt(s + t - np.float32(0.5) * np.minimum(s * t, 0.4))


def turned(about: Point, degrees: float) -> NDArray[np.float64]:
    """Rotation about an axis (Rodrigues)."""
    k = np.array(about, float) / np.linalg.norm(about)
    cross = np.array([[0, -k[2], k[1]], [k[2], 0, -k[0]], [-k[1], k[0], 0]])
    angle = math.radians(degrees)
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
