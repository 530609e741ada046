"""Grids of latitude and longitude on the Earth: derivatives, geostrophic wind, distances.

H, W rows (south to north) and columns (eastward)"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Box = tuple[NDArray[np.intp], ...]

RADIUS, OMEGA, GRAVITY = 6.371e6, 7.292e-5, 9.80665
DEGREE = float(np.radians(RADIUS))                  # metres
MIN_COS_LATITUDE = np.cos(np.radians(85))           # lower bound of cos(latitude) in a derivative along a parallel
MIN_CORIOLIS = 2 * OMEGA * np.sin(np.radians(3))    # 1/f becomes f / (f^2 + MIN_CORIOLIS^2), finite at the equator


@dataclass(frozen=True)
class Grid:
    """Latitudes [H] and longitudes [W] in degrees; ``periodic`` if the columns cover the full circle."""

    latitude: Array
    longitude: Array
    periodic: bool

    @classmethod
    def region(cls, height: int, width: int, spacing: float, south: float, west: float) -> "Grid":
        """Return the centres of square cells, from the south-western corner."""
        latitude = south + (np.arange(height, dtype=np.float64) + 0.5) * spacing
        longitude = west + (np.arange(width, dtype=np.float64) + 0.5) * spacing
        return cls(latitude, longitude, bool(np.isclose(width * spacing, 360)))

    @classmethod
    def globe(cls, height: int, width: int) -> "Grid":
        """Return a global grid with rows at both poles, as in the public data."""
        return cls(np.linspace(-90, 90, height), np.arange(width, dtype=np.float64) * (360 / width), True)

    @cached_property
    def phi(self) -> Array:
        return np.radians(self.latitude)[:, None]

    @cached_property
    def lam(self) -> Array:
        return np.radians(self.longitude)[None, :]

    @cached_property
    def coriolis(self) -> Array:
        return 2 * OMEGA * np.sin(self.phi)

    def gradient(self, z: Array) -> tuple[Array, Array]:
        """Return the derivatives per metre, eastward and northward, by second-order differences.   [H, W] each"""
        step = float(np.radians(self.longitude[1] - self.longitude[0]))
        if self.periodic:
            around = np.concatenate((z[:, -1:], z, z[:, :1]), axis=1)
            east = (around[:, 2:] - around[:, :-2]) / (2 * step)
        else:
            east = np.gradient(z, step, axis=1, edge_order=2)
        north = np.gradient(z, self.phi[:, 0], axis=0, edge_order=2)
        return east / (RADIUS * np.maximum(np.cos(self.phi), MIN_COS_LATITUDE)), north / RADIUS

    def geostrophic(self, z: Array) -> tuple[Array, Array]:
        """Return the wind (u, v) of a height field."""
        east, north = self.gradient(z)
        inverse = self.coriolis / (self.coriolis**2 + MIN_CORIOLIS**2)
        return -GRAVITY * inverse * north, GRAVITY * inverse * east

    def nearby(self, latitude: float, longitude: float, radius: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the rows and columns, for np.ix_, of a box that contains all cells within ``radius`` metres."""
        reach = np.degrees(radius / RADIUS)
        rows = np.flatnonzero(np.abs(self.latitude - latitude) <= reach)
        difference = np.abs((self.longitude - longitude + 180) % 360 - 180)
        highest = min(float(np.abs(latitude)) + reach, 89.9)
        return rows, np.flatnonzero(difference <= reach / np.cos(np.radians(highest)))

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Return south, north, west, east."""
        return float(self.latitude[0]), float(self.latitude[-1]), float(self.longitude[0]), float(self.longitude[-1])


def polar_coordinates(
    grid: Grid, rows: NDArray[np.intp], columns: NDArray[np.intp], latitude: float, longitude: float
) -> tuple[Array, ...]:
    """Return the great-circle distance from a point in metres, and the unit vector (east, north) away from it."""
    phi, difference = grid.phi[rows], grid.lam[:, columns] - np.radians(longitude)
    centre = np.radians(latitude)
    east = np.cos(centre) * np.sin(difference)
    north = np.sin(phi) * np.cos(centre) * np.cos(difference) - np.cos(phi) * np.sin(centre)
    along = np.sin(phi) * np.sin(centre) + np.cos(phi) * np.cos(centre) * np.cos(difference)
    chord = np.hypot(east, north)
    safe = np.maximum(chord, 1e-12)
    return RADIUS * np.arctan2(chord, along), east / safe, north / safe
