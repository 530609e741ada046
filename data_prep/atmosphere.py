"""An idealised atmosphere at one instant, on a region or the full sphere, with the 16 fields of the public DeepCAM data.

Every disturbance is a pattern of height A(latitude, longitude) times a function F(x) of x = ln(1000 hPa / p). Its temperature is
then (g/R) A dF/dx, so height and temperature agree hydrostatically at every pressure, and its wind follows from A by balance:

* zonal mean: prescribed winds, heights integrated from f u = -g dZ/dy, so surface pressure, jets and temperatures are in thermal
  balance
* travelling baroclinic waves (wavenumbers 4 to 9, tilted westward with height), turbulence and fronts: geostrophic wind
* vortices: gradient wind V^2/r + f V = g dZ/dr. Tropical cyclones have the pressure of Holland (1980, Mon. Wea. Rev. 108, 1212),
  p = pc + dp exp(-(Rm/r)^B), and a warm core, since F falls with height, to a tenth at 200 hPa

A front is a step of height and temperature whose geostrophic wind is a low-level jet; an atmospheric river is the moisture along
it. Below 850 hPa friction slows and turns the wind; moisture, rain and surface temperatures are fitted to the usual climate.

All patterns are functions of position, not of the grid, so that two grids of one region show the same weather. Units are SI, angles
of the interface are in degrees, variables named phi and lam in radians.

H, W rows (south to north) and columns (eastward)"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.sphere import GRAVITY, OMEGA, RADIUS, Array, Box, Grid, polar_coordinates


class Variable(NamedTuple):
    """The unit, the range of all values of any climate sample, and a lower bound of the largest value in a sample."""

    units: str
    minimum: float
    maximum: float
    least_maximum: float


_FILE = Path(__file__).with_suffix(".json")
VARIABLES = {name: Variable(**entry) for name, entry in json.loads(_FILE.read_text(encoding="utf-8")).items()}
"""in the order of the public data; values far outside have other units"""

GAS = 287.04                    # J/kg/K, of dry air
P0, T0 = 1e5, 288.0             # PSL = P0 exp(g Z1000 / (R T0))
AMBIENT = 101000.0              # pressure far from a vortex, the reference of its depth
FADE = 6.0                      # widths of a river from its axis to the end of the step of its front


# ---- vertical structure: F(x) and dF/dx, x = ln(1000 hPa / p)

TOP = 2.0                       # x where the warm core of a cyclone ends, 135 hPa
CORE = 0.9 / (1 - np.cos(np.pi * np.log(5.0) / TOP))                     # F(200 hPa) = 0.1
WAVE_GROWTH = 0.7, 0.8          # amplitude of the waves at x = 0, and its growth with x


def _tilted_wave(x: float, turn: float) -> tuple[float, float]:
    """Return F and dF/dx of a wave whose phase advances a radian per unit of x, with a lag of ``turn`` radians."""
    size = WAVE_GROWTH[0] + WAVE_GROWTH[1] * x
    return size * float(np.cos(x - turn)), WAVE_GROWTH[1] * float(np.cos(x - turn)) - size * float(np.sin(x - turn))


PROFILES: dict[str, Callable[[float], tuple[float, float]]] = {
    "barotropic": lambda x: (1.0, 0.0),
    "jet": lambda x: (float(np.sin(np.pi * x / 3)), float(np.pi / 3 * np.cos(np.pi * x / 3))),          # strongest at 223 hPa
    "cosine": lambda x: _tilted_wave(x, 0),
    "sine": lambda x: _tilted_wave(x, np.pi / 2),
    "turbulence": lambda x: (0.6 + 0.9 * x, 0.9),
    "front": lambda x: (0.9 + 0.6 * x, 0.6),
    "warm": lambda x: (1 - CORE * (1 - float(np.cos(np.pi * x / TOP))), -CORE * np.pi / TOP * float(np.sin(np.pi * x / TOP))),
    "cold": lambda x: (1 + 0.9 * float(np.sin(x)), 0.9 * float(np.cos(x))),
    "neutral": lambda x: (1 + 0.15 * x, 0.15),
}


def _x(pressure: float) -> float:
    return float(np.log(P0 / pressure))


def sounding(x: float) -> tuple[float, float]:
    """Return height and temperature over the equator without disturbances: 300 K at 1000, 268 K at 500, 220 K at 200 hPa."""
    return GAS / GRAVITY * (300 * x - 43.5 * x**2 / 2 - 3.87 * x**3 / 3), 300 - 43.5 * x - 3.87 * x**2


# ---- components of a sample


@dataclass(frozen=True)
class Noise:
    """A smooth random function with mean 0 and variance 1: plane waves in space, evaluated on the sphere."""

    wave: Array                 # [K, 3] radians per radius of the Earth
    phase: Array                # [K]
    weight: Array               # [K]

    @classmethod
    def draw(cls, random: np.random.Generator, longest: float, shortest: float, slope: float, count: int) -> "Noise":
        """Draw ``count`` waves with lengths between two in km; amplitudes grow as wavelength to the power ``slope``."""
        length = longest * (shortest / longest) ** ((np.arange(count) + random.random(count)) / count)
        direction = random.standard_normal((count, 3))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        weight = (length / longest) ** slope * (0.5 + random.random(count))
        wave = direction * (2 * np.pi * RADIUS / 1000 / length)[:, None]
        return cls(wave, 2 * np.pi * random.random(count), weight * np.sqrt(2 / (weight**2).sum()))

    def __call__(self, phi: Array, lam: Array) -> Array:
        total = np.zeros(np.broadcast_shapes(phi.shape, lam.shape))
        high, wide, east, north = np.sin(phi), np.cos(phi), np.cos(lam), np.sin(lam)
        for (x, y, z), phase, weight in zip(self.wave, self.phase, self.weight):
            total += weight * np.cos(wide * (x * east + y * north) + (z * high + phase))
        return total


@dataclass(frozen=True)
class Vortex:
    """A closed low: a Holland profile if ``shape`` is given, otherwise a Gaussian of standard deviation ``radius``."""

    latitude: float
    longitude: float
    depth: float                            # Pa below AMBIENT, at the centre
    radius: float                           # m, of maximum wind for a Holland profile
    shape: float | None                     # B of Holland
    core: Literal["warm", "cold", "neutral"]
    drift: tuple[float, float] = (0.0, 0.0)     # m/s eastward, northward
    moisture: float = 0.0                   # kg/m2 at the centre, above the surroundings

    @property
    def coriolis(self) -> float:
        return float(2 * OMEGA * np.sin(np.radians(self.latitude)))

    @property
    def reach(self) -> float:
        """Return the radius in metres beyond which it is zero."""
        return 1.5e6 if self.shape else 3.5 * self.radius

    def height(self, r: Array) -> tuple[Array, Array]:
        """Return the fall of the 1000-hPa surface in m, and its slope dZ/dr, at distance r in m."""
        r = np.maximum(r, 1.0)
        if self.shape:
            power = (self.radius / r) ** self.shape
            profile, slope = -np.expm1(-power), np.exp(-power) * power * self.shape / r
        else:
            profile = np.exp(-0.5 * (r / self.radius) ** 2)
            slope = profile * r / self.radius**2
        pressure_ratio = 1 - self.depth / AMBIENT * profile
        fade = 0.5 * (1 + np.cos(np.pi * np.clip((r / self.reach - 0.6) / 0.4, 0, 1)))
        scale = GAS * T0 / GRAVITY
        return scale * np.log(pressure_ratio) * fade, scale * self.depth / AMBIENT * slope / pressure_ratio * fade

    def wind(self, r: Array, slope: Array) -> Array:
        """Return the gradient wind in m/s, cyclonic positive."""
        half = r * abs(self.coriolis) / 2
        return np.sqrt(half**2 + r * GRAVITY * slope) - half


@dataclass(frozen=True)
class River:
    """A front with its jet at 850 hPa, and a filament of moisture along it, from the first to the last point of a curve."""

    latitude: tuple[float, float, float]    # control points of a quadratic Bezier curve
    longitude: tuple[float, float, float]
    width: float                            # m, half of it
    jet: float                              # m/s at 850 hPa
    moisture: float                         # kg/m2 on the axis, above the surroundings

    def curve(self, count: int = 48) -> tuple[Array, Array, Array, Array]:
        """Return points of the curve, unit vectors along it and to its right [K, 3], and the arc length up to each in m [K]."""
        t = np.linspace(0, 1, count)[:, None]
        weights = np.concatenate(((1 - t) ** 2, 2 * t * (1 - t), t**2), axis=1)
        phi, lam = (np.radians((weights * np.array(values)).sum(1)) for values in (self.latitude, self.longitude))
        point = np.stack((np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)), axis=1)
        along = np.gradient(point, axis=0)
        along -= (along * point).sum(1, keepdims=True) * point
        along /= np.linalg.norm(along, axis=1, keepdims=True)
        step = np.linalg.norm(np.diff(point, axis=0), axis=1)
        return point, along, np.cross(along, point), RADIUS * np.concatenate(([0.0], np.cumsum(step)))

    def coordinates(self, grid: Grid) -> tuple[Box, Array, Array]:
        """Return the box that it covers, its distance to the right of the curve in m, and its strength along it (1, and 0 past its
        ends)."""
        point, along, right, length = self.curve()
        middle = point[len(point) // 2]
        reach = float(np.hypot(0.85 * length[-1], FADE * self.width))
        centre = np.degrees((np.arcsin(middle[2]), np.arctan2(middle[1], middle[0])))
        rows, columns = grid.nearby(float(centre[0]), float(centre[1]), reach)
        phi, lam = grid.phi[rows], grid.lam[:, columns]
        position = np.stack(np.broadcast_arrays(np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)), axis=-1)
        # not BLAS: its rounding depends on the number of threads
        nearest = np.einsum("...i,ki->...k", position, point).argmax(-1)
        across = RADIUS * np.einsum("...i,...i->...", position, right[nearest])
        s = length[nearest] + RADIUS * np.einsum("...i,...i->...", position, along[nearest])
        return np.ix_(rows, columns), across, np.exp(-((2 * s / length[-1] - 1) ** 6))


@dataclass(frozen=True)
class Scene:
    """All random variables of one sample."""

    season: float                           # -1 northern winter, 1 northern summer
    hour: float                             # radians of local time at longitude 0
    wave_height: float                      # m, standard deviation at 1000 hPa of the baroclinic waves
    waves: Array                            # [2, 6, 3] per hemisphere and wavenumber 4..9: amplitude, phase, tilt
    turbulence: float                       # m, standard deviation at 1000 hPa
    eddies: Noise
    continents: Noise
    mountains: Noise
    humidity: Noise
    rain: Noise
    vortices: tuple[Vortex, ...] = ()
    rivers: tuple[River, ...] = ()


# ---- the fields of a scene


def balanced_height(wind: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return latitudes in radians, and the height in m whose geostrophic wind is ``wind``, 0 at the equator."""
    phi = np.linspace(-np.pi / 2, np.pi / 2, 3601)
    slope = -RADIUS / GRAVITY * 2 * OMEGA * np.sin(phi) * wind(phi)
    height = np.concatenate(([0.0], np.cumsum((slope[1:] + slope[:-1]) / 2 * np.diff(phi))))
    return phi, height - height[1800]


def _bump(degrees: Array, centre: float, width: float) -> Array:
    return np.exp(-(((degrees - centre) / width) ** 2))


class Weather:
    """A scene on a grid: heights and temperatures at any pressure, winds near the surface, and the 16 fields."""

    def __init__(self, grid: Grid, scene: Scene) -> None:
        self.grid, self.scene = grid, scene
        phi, lam = grid.phi, grid.lam
        self.shape = (phi.size, lam.size)
        self.components: dict[str, Array] = {
            "jet": np.interp(phi, *balanced_height(self.jet)),
            "barotropic": 93.0 + np.interp(phi, *balanced_height(self.surface_wind)),
            "turbulence": scene.turbulence * np.sin(phi) ** 2 * self.eddies,
        }
        # Heights at 1000 hPa and in quadrature: their sum with cos(x) and sin(x) tilts westward with height.
        cosine, sine = np.zeros((2, *self.shape))
        for sign, waves in zip((1, -1), scene.waves):
            envelope = scene.wave_height * np.cos(phi) * np.exp(-(((sign * np.degrees(phi) - 47) / 13) ** 2))
            for number, (amplitude, phase, tilt) in enumerate(waves, start=4):
                angle = number * lam + (phase + tilt * phi)
                cosine += envelope * amplitude * np.cos(angle)
                sine -= envelope * amplitude * np.sin(angle)
        self.components |= {"cosine": cosine, "sine": sine}
        self.rivers = [(river, *river.coordinates(grid)) for river in scene.rivers]
        for river, box, across, along in self.rivers:
            # Its geostrophic wind is the jet, sech^2 across; the wider bell brings the step back to zero.
            size = grid.coriolis[box[0][:, 0]] / GRAVITY * river.jet / PROFILES["front"](_x(85000))[0] * river.width
            bell = 0.5 * (1 + np.cos(np.pi * np.minimum(np.abs(across) / (FADE * river.width), 1)))
            self._add("front", size * np.tanh(across / river.width) * bell * along, box)
        self.vortices: list[tuple[Vortex, Box, Array, Array, Array, Array]] = []
        for vortex in scene.vortices:
            rows, columns = grid.nearby(vortex.latitude, vortex.longitude, vortex.reach)
            if rows.size and columns.size:
                r, east, north = polar_coordinates(grid, rows, columns, vortex.latitude, vortex.longitude)
                z, slope = vortex.height(r)
                box = np.ix_(rows, columns)
                self._add(vortex.core, z, box)
                self.vortices.append((vortex, box, r, east, north, slope))

    def _add(self, name: str, z: Array, box: Box) -> None:
        self.components.setdefault(name, np.zeros(self.shape))[box] += z

    def _season(self, phi: Array) -> Array:
        """Return the season at each latitude: -1 in winter, 1 in summer."""
        return self.scene.season * np.tanh(np.degrees(phi) / 5)

    def jet(self, phi: Array) -> Array:
        """Return the zonal-mean wind at 223 hPa minus that at the surface, m/s: one jet per hemisphere, strong in its winter."""
        season, degrees = self._season(phi), np.degrees(np.abs(phi))
        return (33 - 9 * season) * np.exp(-(((degrees - 39 - 6 * season) / 14) ** 2)) - 5 * _bump(degrees, 0, 8)

    def surface_wind(self, phi: Array) -> Array:
        """Return the zonal-mean wind at 1000 hPa, m/s: trade winds, westerlies, polar easterlies."""
        degrees = np.degrees(np.abs(phi))
        return -6 * _bump(degrees, 14, 9) + 5 * _bump(degrees, 47, 10) - 2 * _bump(degrees, 72, 8)

    def height(self, pressure: float) -> Array:
        """Return the geopotential height in m.   [H, W]"""
        x = _x(pressure)
        return sounding(x)[0] + sum((PROFILES[name](x)[0] * z for name, z in self.components.items()), np.zeros(self.shape))

    def temperature(self, pressure: float) -> Array:
        """Return the hydrostatic temperature in kelvin, T = (g/R) dZ/dx.   [H, W]"""
        x = _x(pressure)
        slope = sum((PROFILES[name](x)[1] * z for name, z in self.components.items()), np.zeros(self.shape))
        return sounding(x)[1] + GRAVITY / GAS * slope

    def wind(self, pressure: float) -> tuple[Array, Array]:
        """Return the balanced wind (u, v) in m/s: zonal mean, geostrophic wind of waves and fronts, gradient wind of vortices.
        [H, W]"""
        x, phi = _x(pressure), self.grid.phi
        eddy = ("cosine", "sine", "turbulence", "front")
        parts = (PROFILES[name](x)[0] * self.components[name] for name in eddy if name in self.components)
        u, v = self.grid.geostrophic(sum(parts, np.zeros(self.shape)))
        u = u + self.surface_wind(phi) + PROFILES["jet"](x)[0] * self.jet(phi)
        for vortex, box, r, east, north, slope in self.vortices:
            speed = vortex.wind(r, np.maximum(PROFILES[vortex.core](x)[0], 0) * slope)
            turn, most = np.sign(vortex.coriolis), max(float(speed.max()), 1e-9)
            u[box] += -turn * north * speed + 0.5 * vortex.drift[0] * speed / most
            v[box] += turn * east * speed + 0.5 * vortex.drift[1] * speed / most
        return u, v

    def pressure(self) -> Array:
        """Return the pressure at sea level in Pa.   [H, W]"""
        return P0 * np.exp(GRAVITY * self.height(P0) / (GAS * T0))

    def water(self) -> Array:
        """Return the precipitable water in kg/m2: near saturation in the tropics and storm tracks, dry in between.   [H, W]"""
        phi, texture = self.grid.phi, self.humidity
        degrees = np.degrees(phi)
        moist = 0.5 + 0.38 * _bump(degrees, 8 * self.scene.season, 12) + 0.22 * _bump(np.abs(degrees), 52, 16)
        water = 60 * moist * np.exp(0.062 * (self.temperature(85000) - 293)) * np.maximum(1 + 0.2 * texture, 0.2)
        for river, box, across, along in self.rivers:
            filament = along * np.exp(-((across / (1.3 * river.width)) ** 2))
            water[box] += river.moisture * filament * np.maximum(1 + 0.15 * texture[box], 0.3)
        for vortex, box, r, *_ in self.vortices:
            water[box] += vortex.moisture * np.exp(-0.5 * (r / 3.5e5) ** 2)
        return 82 * np.tanh(water / 82) * np.exp(-self.terrain / 2400)

    def precipitation(self, water: Array) -> Array:
        """Return the rain rate in m/s of water: showers in moist air, along rivers, in rings and spirals of cyclones.   [H, W]"""
        degrees, texture = np.degrees(self.grid.phi), self.scene.rain(*self.advected_coordinates)
        climate = _bump(degrees, 9 * self.scene.season, 7) + 0.5 * _bump(np.abs(degrees), 46, 14) + 0.08
        rain = 1.2e-7 * climate * np.maximum(texture - 0.3, 0) ** 2 * water / 30
        for river, box, across, along in self.rivers:
            filament = along * np.exp(-((across / river.width) ** 2))
            rain[box] += 1.2e-8 * river.moisture * filament * (0.4 + np.maximum(texture[box], 0))
        for vortex, box, r, east, north, _ in self.vortices:
            if vortex.core != "warm":
                continue
            ratio = np.maximum(r / vortex.radius, 0.1)
            bands = 1 + 0.7 * np.cos(2 * np.arctan2(north, east) + 4 * np.sign(vortex.latitude) * np.log(ratio))
            rain[box] += 5e-10 * vortex.depth * (np.exp(-(((ratio - 1.1) / 0.6) ** 2)) + 0.25 * bands * np.exp(-ratio / 3))
        return rain

    @cached_property
    def advected_coordinates(self) -> tuple[Array, Array]:
        """Return the approximate origin of the air, which stretches moisture and rain into curved bands.   phi, lam [H, W]"""
        phi, lam = self.grid.phi, self.grid.lam
        return phi + 0.09 * self.eddies * np.cos(phi), lam + 0.11 * self.scene.mountains(phi, lam)

    @cached_property
    def eddies(self) -> Array:
        return self.scene.eddies(self.grid.phi, self.grid.lam)

    @cached_property
    def humidity(self) -> Array:
        return self.scene.humidity(*self.advected_coordinates)

    @cached_property
    def land(self) -> Array:
        """Return 1 on land, 0 on sea, with smooth coasts.   [H, W]"""
        return 1 / (1 + np.exp(-(self.scene.continents(self.grid.phi, self.grid.lam) - 0.55) / 0.05))

    @cached_property
    def terrain(self) -> Array:
        """Return the height of the ground in m.   [H, W]"""
        rough = np.maximum(self.scene.mountains(self.grid.phi, self.grid.lam), 0)
        return self.land * (120 + 4500 * rough**2 / (3 + rough**2))

    def fields(self) -> NDArray[np.float32]:
        """Return the 16 variables.   [H, W, 16]"""
        grid, land, ground = self.grid, self.land, self.terrain
        sea_level, warmth, water = self.pressure(), self.temperature(P0), self.water()
        u850, v850 = self.wind(85000)
        degrees, season = np.degrees(grid.phi), self._season(grid.phi)
        day = np.cos(grid.lam + self.scene.hour) * np.cos(grid.phi)
        equator = np.radians(6 * self.scene.season)
        sea = np.maximum(301.5 - 34 * np.sin(grid.phi - equator) ** 2 + 0.8 * self.scene.mountains(grid.phi, grid.lam), 271.4)
        above_land = warmth + 4 * season * np.abs(np.sin(2 * grid.phi)) - 0.0055 * ground + 3 * day
        air = land * above_land + (1 - land) * (0.5 * (sea - 1) + 0.5 * warmth)
        skin = land * (above_land + 6 * np.maximum(day, 0) - 1.5) + (1 - land) * sea
        surface = sea_level * np.exp(-GRAVITY * ground / (GAS * (warmth - 0.00325 * ground)))
        wet = np.clip(0.5 + 0.008 * water * np.exp(-0.055 * (warmth - 295)) + 0.05 * self.humidity - 0.12 * land, 0.15, 0.98)
        # Specific humidity of saturated air, kg/kg: Bolton 1980, Mon. Wea. Rev. 108, 1046.
        vapour = 611.2 * np.exp(17.67 * (air - 273.15) / (air - 29.65))
        moisture = wet * (0.622 * vapour / (surface - 0.378 * vapour))
        u, v = self.wind(P0)
        # Ekman: the surface turns wind towards low pressure and slows it, land more than the sea.
        angle = np.radians(18 + 12 * land) * np.tanh(degrees / 8)
        slower = (0.82 - 0.27 * land) * np.exp(-ground / 5000)
        aloft = np.exp(-np.maximum(ground - 800, 0) / 1500)                 # 850 hPa is below the ground
        layer = GAS / GRAVITY * 0.00753 * air * (1 + 0.608 * moisture)      # the lowest level is at 0.9925 of the surface pressure
        named = {
            "TMQ": water, "U850": aloft * u850, "V850": aloft * v850,
            "UBOT": slower * (u * np.cos(angle) - v * np.sin(angle)), "VBOT": slower * (u * np.sin(angle) + v * np.cos(angle)),
            "QREFHT": moisture, "PS": surface, "PSL": sea_level, "T200": self.temperature(20000), "T500": self.temperature(50000),
            "PRECT": self.precipitation(water), "TS": skin, "TREFHT": air, "Z1000": self.height(P0), "Z200": self.height(20000),
            "ZBOT": layer,
        }  # fmt: skip
        return np.stack([named[name] for name in VARIABLES], axis=-1).astype(np.float32)
