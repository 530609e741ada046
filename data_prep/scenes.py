"""Random scenes of the idealised atmosphere: cyclones, rivers, and objects that look like them and are neither.

The density of objects is that of a globe with about 6 tropical cyclones and 8 rivers.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.atmosphere import Noise, River, Scene, Vortex, Weather
from data_prep.sphere import RADIUS, Grid

Three = tuple[float, float, float]


def _random_positions(
    random: np.random.Generator, grid: Grid, globe: float, low: float, high: float, inset: float
) -> list[tuple[float, float]]:
    """Draw latitudes and longitudes of objects: on average ``globe`` of them between two latitudes of the full sphere."""
    south, north, west, east = grid.bounds
    if grid.periodic:
        east = west + 360
    else:
        west, east = west + inset, east - inset
    if north - south < 170:
        south, north = south + inset, north - inset
    bands = []                                             # south, north, area as a fraction of the sphere
    for a, b in ((low, high), (-high, -low)):
        a, b = max(a, south), min(b, north)
        if a < b and west < east:
            bands.append((a, b, float(np.sin(np.radians(b)) - np.sin(np.radians(a))) / 2 * (east - west) / 360))
    areas = np.array([area for *_, area in bands])
    full_area = float(np.sin(np.radians(high)) - np.sin(np.radians(low)))
    mean = globe * float(areas.sum()) / full_area
    count = min(int(random.poisson(mean)), max(3, round(2 * mean)))
    positions = []
    for _ in range(count):
        south, north, _ = bands[int(random.choice(len(bands), p=areas / areas.sum()))]
        sines = np.sin(np.radians((south, north)))
        positions.append((float(np.degrees(np.arcsin(random.uniform(*sines)))), float(random.uniform(west, east))))
    return positions


def _curve(latitude: float, longitude: float, length: float, angle: float, bend: float) -> tuple[Three, Three]:
    """Return the control points of a river about a point, poleward and eastward; length in m, angle from the east in degrees."""
    sign = 1 if latitude > 0 else -1
    half = length / 2 / RADIUS * 180 / np.pi
    north, east = half * np.sin(np.radians(angle)), half * np.cos(np.radians(angle)) / np.cos(np.radians(latitude))
    middle = (latitude - sign * bend * east, longitude + bend * north)
    return (latitude - sign * north, middle[0], latitude + sign * north), (longitude - east, middle[1], longitude + east)


def draw(grid: Grid, random: np.random.Generator) -> Scene:
    """Draw a random scene. The numbers of objects are those of a globe, in proportion to area."""
    season = float(random.uniform(-1, 1))
    hour = float(random.uniform(0, 2 * np.pi))
    spectrum = np.array((0.5, 0.9, 1.0, 0.9, 0.7, 0.5)) * random.uniform(0.4, 1.6, (2, 6))
    spectrum *= np.sqrt(2 / (spectrum**2).sum(1, keepdims=True))
    waves = np.stack((spectrum, random.uniform(0, 2 * np.pi, (2, 6)), random.uniform(-2, 2, (2, 6))), axis=-1)
    wave_height, turbulence = float(random.uniform(35, 75)), float(random.uniform(10, 22))
    eddies = Noise.draw(random, 5000, 900, 1.6, 24)
    continents = Noise.draw(random, 9000, 500, 1.0, 24)
    mountains = Noise.draw(random, 5000, 250, 0.7, 24)
    humidity = Noise.draw(random, 4000, 200, 0.6, 40)
    rain = Noise.draw(random, 2500, 120, 0.3, 40)
    uniform = random.uniform
    vortices: list[Vortex] = []
    for latitude, longitude in _random_positions(random, grid, 10.5, 9, 30, 4):
        dry = float(continents(np.radians([latitude]), np.radians([longitude]))[0]) > 0.4       # on land, or near its coast
        if dry or any(_distance(latitude, longitude, other) < 1.6e6 for other in vortices):
            continue
        depth = 600 + 6900 * float(random.beta(1.6, 2.2))
        drift = (float(uniform(-7, -2)) if abs(latitude) < 24 else float(uniform(-2, 6)), float(np.sign(latitude) * uniform(1, 5)))
        radius, shape = float(uniform(6e4, 1.2e5)), float(uniform(1.1, 1.9))
        vortices.append(Vortex(latitude, longitude, depth, radius, shape, "warm", drift, float(uniform(12, 22))))
    cyclones = len(vortices)
    rivers = []
    for latitude, longitude in _random_positions(random, grid, 9.5, 30, 42, 9):
        length, angle = float(uniform(2.6e6, 4.6e6)), float(uniform(22, 55))
        lat, lon = _curve(latitude, longitude, length, angle, float(uniform(-0.05, 0.25)))
        rivers.append(River(lat, lon, float(uniform(1.5e5, 2.6e5)), float(uniform(18, 32)), float(uniform(13, 24))))
        if random.random() < 0.8:                      # the low of this cold front, on the poleward side
            at = lat[2] + np.sign(latitude) * uniform(-2, 2), lon[2] - uniform(5, 10)
            vortices.append(Vortex(float(at[0]), float(at[1]), float(uniform(800, 2800)), float(uniform(4e5, 7e5)), None, "cold"))
    # The following objects resemble a cyclone or a river, and are neither.
    for latitude, longitude in _random_positions(random, grid, 6, 26, 50, 2):
        vortices.append(Vortex(latitude, longitude, float(uniform(800, 3000)), float(uniform(2.5e5, 5e5)), None, "cold"))
    for latitude, longitude in _random_positions(random, grid, 5, 9, 24, 3):
        shallow = random.random() < 0.4
        depth = uniform(150, 350) if shallow else uniform(450, 1100)
        core: Literal["warm", "neutral"] = "warm" if shallow else "neutral"
        radius, moisture = float(uniform(1.6e5, 2.6e5)), float(uniform(4, 12))
        vortices.append(Vortex(latitude, longitude, float(depth), radius, None, core, moisture=moisture))
    for latitude, longitude in _random_positions(random, grid, 6, 24, 46, 4):
        lat, lon = _curve(latitude, longitude, float(uniform(6e5, 1.2e6)), float(uniform(0, 70)), 0)
        rivers.append(River(lat, lon, float(uniform(1.8e5, 3.2e5)), float(uniform(5, 22)), float(uniform(12, 24))))
    for latitude, longitude in _random_positions(random, grid, 4, 9, 15, 2):
        lat, lon = _curve(latitude, longitude, float(uniform(2e6, 3.5e6)), float(uniform(-8, 8)), 0)
        rivers.append(River(lat, lon, float(uniform(2e5, 3e5)), float(uniform(-12, 2)), float(uniform(8, 16))))
    strong = vortices[:cyclones]
    lows = [low for low in vortices[cyclones:] if all(_distance(low.latitude, low.longitude, other) > 1.2e6 for other in strong)]
    noise = eddies, continents, mountains, humidity, rain
    return Scene(season, hour, wave_height, waves, turbulence, *noise, (*strong, *lows), tuple(rivers))


def _distance(latitude: float, longitude: float, other: Vortex) -> float:
    a, b, turn = np.radians((latitude, other.latitude, longitude - other.longitude))
    return float(RADIUS * np.arccos(np.clip(np.sin(a) * np.sin(b) + np.cos(a) * np.cos(b) * np.cos(turn), -1, 1)))


def sample(grid: Grid, random: np.random.Generator) -> NDArray[np.float32]:
    """Return the fields of a random scene.   Shape: [H, W, 16]"""
    return Weather(grid, draw(grid, random)).fields()
