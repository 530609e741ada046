"""The idealised atmosphere is balanced, and the detection finds its cyclones and rivers and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage

from data_prep import detection, scenes
from data_prep.atmosphere import AMBIENT, GAS, T0, VARIABLES, River, Vortex, Weather
from data_prep.sphere import GRAVITY, OMEGA, RADIUS, Grid, polar_coordinates

REGION = Grid.region(96, 144, 0.5, 8, 0)
SOUTH = Grid.region(96, 144, 0.5, -56, 0)
GLOBE = Grid.globe(180, 360)


def random_scene(grid=REGION, index=0):
    return scenes.draw(grid, np.random.default_rng(index))


def calm_scene(**changes):
    """Return a scene without waves, noise and land: the zonal mean, with ``changes``."""
    scene = random_scene()
    quiet = {name: replace(getattr(scene, name), weight=getattr(scene, name).weight * 0)
             for name in ("eddies", "continents", "mountains", "humidity", "rain")}  # fmt: skip
    return replace(scene, **{**quiet, "season": 0.0, "wave_height": 0.0, "vortices": (), "rivers": (), **changes})


def fields_by_name(fields):
    return {name: fields[..., channel].astype(float) for channel, name in enumerate(VARIABLES)}


def detect(grid, **planted):
    return detection.detect(grid, Weather(grid, calm_scene(**planted)).fields())


def centres(grid, mask, kind):
    """Return the mean latitude and longitude of each object of a kind."""
    labels, count = ndimage.label(mask == kind, np.ones((3, 3)))
    rows_columns = ndimage.center_of_mass(labels > 0, labels, range(1, count + 1))
    return [tuple(np.interp(at, range(len(axis)), axis) for at, axis in zip(centre, (grid.latitude, grid.longitude)))
            for centre in rows_columns]  # fmt: skip


CYCLONE = Vortex(20, 40, 5000, 8e4, 1.5, "warm", (-5, 2), 15)
LATITUDES, LONGITUDES = (25, 33, 44), (20, 34, 46)
FILAMENT = River(LATITUDES, LONGITUDES, 2e5, 26, 20)


# ---- balance


@pytest.mark.parametrize("latitude", [12.0, -28.0])
def test_a_cyclone_is_that_of_holland(latitude):
    cyclone = replace(CYCLONE, latitude=latitude)
    r = np.linspace(1e4, 8e5, 100)
    power = (8e4 / r) ** 1.5
    pressure = AMBIENT - 5000 + 5000 * np.exp(-power)
    f = abs(2 * OMEGA * np.sin(np.radians(latitude)))
    wind = np.sqrt(1.5 * 5000 / (pressure / (GAS * T0)) * power * np.exp(-power) + (r * f / 2) ** 2) - r * f / 2
    z, slope = cyclone.height(r)
    assert AMBIENT * np.exp(GRAVITY * z / (GAS * T0)) == pytest.approx(pressure, rel=1e-9)
    assert cyclone.wind(r, slope) == pytest.approx(wind, rel=1e-9) and 40 < wind.max() < 60


@pytest.mark.parametrize("grid, latitude", [(REGION, 20), (SOUTH, -20)])
def test_a_cyclone_in_the_fields(grid, latitude):
    calm_fields, fields = (fields_by_name(Weather(grid, calm_scene(vortices=vortices)).fields())
                           for vortices in ((), (replace(CYCLONE, latitude=latitude, drift=(0, 0)),)))  # fmt: skip
    row = np.flatnonzero(np.abs(grid.latitude - latitude) < 0.3)         # on either side of the centre
    east, west = (int(np.abs(grid.longitude - at).argmin()) for at in (40.9, 39.1))
    turn = np.sign(latitude)
    wind = {name: fields[name] - calm_fields[name] for name in ("U850", "V850", "UBOT", "VBOT")}
    assert (turn * wind["V850"][row, east] > 30).all() and (turn * wind["V850"][row, west] < -30).all()
    assert wind["UBOT"][row, east].mean() < -5 and wind["UBOT"][row, west].mean() > 5    # friction: inward on both sides
    middle = row[0], int(np.abs(grid.longitude - 40).argmin())
    change = {name: fields[name][middle] - calm_fields[name][middle] for name in ("PSL", "T500", "T200", "Z1000", "Z200")}
    assert change["PSL"] < -3500 and 6 < change["T500"] < 14 and 3 < change["T200"] < change["T500"]
    assert change["Z1000"] < -300 and change["Z200"] == pytest.approx(0.1 * change["Z1000"], rel=0.02)
    assert fields["PRECT"][row, east].min() > 10 * calm_fields["PRECT"].max()


@pytest.mark.parametrize("grid, pressure", [(GLOBE, 1e5), (GLOBE, 85000.0), (GLOBE, 20000.0), (REGION, 85000.0), (REGION, 1e5)])
def test_the_zonal_mean_waves_and_fronts_are_geostrophic(grid, pressure):
    weather = Weather(grid, calm_scene() if grid is GLOBE else replace(random_scene(), vortices=(), rivers=(FILAMENT,)))
    (u, v), z, f = weather.wind(pressure), weather.height(pressure), 2 * OMEGA * np.sin(grid.phi)
    east = np.gradient(z, grid.lam[0], axis=1) / np.cos(grid.phi) / RADIUS
    north = np.gradient(z, grid.phi[:, 0], axis=0) / RADIUS
    inside = np.s_[3:-3, 1:-1] if grid is GLOBE else np.s_[34:-1, 1:-1]                  # north of 25 degrees
    assert (f * v)[inside] == pytest.approx(GRAVITY * east[inside], abs=5e-5)
    assert (f * u)[inside] == pytest.approx(-GRAVITY * north[inside], abs=5e-5)
    if pressure == 20000:
        jet, latitude = u[100:, 0], grid.latitude[100:]
        assert 25 < jet.max() < 45 and 30 < latitude[jet.argmax()] < 50
    assert np.hypot(u, v).max() > 4 and (grid is GLOBE or np.hypot(u, v).max() > 20)


@pytest.mark.parametrize("index", range(3))
def test_height_and_temperature_are_hydrostatic(index):
    weather = Weather(REGION, random_scene(index=index))
    for pressure in (85000.0, 50000.0, 20000.0):
        rise = (weather.height(pressure * 0.999) - weather.height(pressure * 1.001)) / np.log(1.001 / 0.999)
        assert weather.temperature(pressure) == pytest.approx(GRAVITY / GAS * rise, rel=1e-5)
    fields = fields_by_name(weather.fields())
    assert fields["PSL"] == pytest.approx(1e5 * np.exp(GRAVITY * fields["Z1000"] / (GAS * T0)), rel=1e-5)
    high = weather.terrain > 1000
    assert high.any() and (fields["PS"][high] < 0.9 * fields["PSL"][high]).all() and (fields["PS"] <= fields["PSL"]).all()


def test_samples_are_in_the_climate_range():
    for grid in (REGION, SOUTH, GLOBE):
        fields = Weather(grid, random_scene(grid, 5)).fields()
        assert fields.shape == (*grid.phi.shape[:1], grid.lam.size, 16) and fields.dtype == np.float32
        for variable, values in zip(VARIABLES.values(), np.moveaxis(fields, -1, 0)):
            assert variable.minimum <= values.min() and variable.least_maximum <= values.max() <= variable.maximum


def test_the_globe_is_periodic_and_single_at_the_poles():
    scene = random_scene(GLOBE, 1)
    rotated = Grid(GLOBE.latitude, GLOBE.longitude + 180, True)
    fields, other = Weather(GLOBE, scene).fields(), Weather(rotated, scene).fields()
    np.testing.assert_allclose(fields, np.roll(other, 180, axis=1), rtol=1e-4, atol=1e-4)
    scalars = [channel for channel, name in enumerate(VARIABLES) if name[0] not in "UV"]
    poles = fields[[0, -1]][..., scalars].astype(float)
    assert (poles.std(1) <= 1e-5 * np.abs(poles.mean(1)) + 1e-12).all()


# ---- detection


@pytest.mark.parametrize("grid, sign", [(REGION, 1), (SOUTH, -1)])
def test_a_cyclone_and_a_river_are_found(grid, sign):
    river = replace(FILAMENT, latitude=tuple(sign * at for at in LATITUDES))
    wide = replace(CYCLONE, latitude=14 * sign, longitude=60, depth=6000, radius=1.4e5, shape=1.2)
    mask = detect(grid, vortices=(wide,), rivers=(river,))
    (cyclone,), (filament,) = centres(grid, mask, 1), centres(grid, mask, 2)
    assert cyclone == pytest.approx((14 * sign, 60), abs=1.5)
    distance = polar_coordinates(grid, np.arange(96), np.arange(144), 14 * sign, 60)[0][mask == 1]
    assert 5.3e5 < distance.max() < 5.5 * RADIUS * np.pi / 180
    row, column = (int(np.abs(axis - at).argmin()) for axis, at in ((grid.latitude, 14 * sign), (grid.longitude, 60)))
    assert (mask[row - 1 : row + 2, column - 1 : column + 2] == 1).all()         # with its eye
    assert abs(filament[0] - 34 * sign) < 4 and abs(filament[1] - 33) < 5


LOOK_ALIKES = {
    "a cold low": Vortex(30, 40, 2500, 4e5, None, "cold"),
    "a low without a core": Vortex(16, 40, 1000, 2.5e5, None, "neutral", moisture=10),
    "a shallow warm low": Vortex(16, 40, 300, 2.2e5, None, "warm", moisture=10),
    "a warm low of high latitude": Vortex(48, 40, 5000, 8e4, 1.5, "warm"),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_lookalikes_of_cyclones_are_rejected(name):
    low = LOOK_ALIKES[name]
    assert not (detect(REGION, vortices=(low,)) == 1).any()


@pytest.mark.parametrize(
    "names, factor",
    [("", 1), ("PSL", 0), ("U850 V850", 0.3), ("U850 V850", -1), ("T500 T200", 0), ("T500", 0), ("V850 U850", 9)],
)
def test_every_condition_for_cyclones_is_necessary(names, factor):
    calm_fields, fields = (Weather(REGION, calm_scene(vortices=vortices)).fields() for vortices in ((), (CYCLONE,)))
    for channel in map(list(VARIABLES).index, names.split()):
        weakened = calm_fields[..., channel] + (fields - calm_fields)[..., channel] * factor
        fields[..., channel] = 15 if factor == 9 else weakened                  # a gale without vorticity, weaker, or turned
    assert len(centres(REGION, detection.detect(REGION, fields), 1)) == (not names)


NOT_RIVERS = {
    "nothing": {"jet": 0.0, "moisture": 0.0}, "too short": {"latitude": (31, 34, 37), "longitude": (30, 34, 37)},
    "tropical": {"latitude": (11, 12, 13), "longitude": (20, 34, 46)}, "moving equatorward": {"latitude": LATITUDES[::-1]},
    "dry": {"moisture": -15.0}, "without wind": {"jet": 3.0},
}


@pytest.mark.parametrize("name", NOT_RIVERS)
def test_lookalikes_of_rivers_are_rejected(name):
    assert not detect(REGION, rivers=(replace(FILAMENT, **NOT_RIVERS[name]),)).any()


@pytest.mark.parametrize("half_width, water, wind, background, count", [
    (4e5, 40, 12, 0, 1), (1.2e6, 40, 12, 0, 0), (4e5, 19, 30, 0, 0), (4e5, 40, 12, 12, 0),
])  # fmt: skip
def test_a_patch_that_is_round_or_dry_or_not_above_background_is_no_river(half_width, water, wind, background, count):
    fields = Weather(REGION, calm_scene()).fields()
    r, east, north = polar_coordinates(REGION, np.arange(96), np.arange(144), 38, 36)
    patch = np.hypot(r * (east + north) / 1.2e6, r * (east - north) / half_width) < np.sqrt(2)
    for name, inside, outside in (("TMQ", water, 25), ("U850", wind, background), ("V850", wind, background)):
        fields[..., list(VARIABLES).index(name)] = np.where(patch, inside, outside)
    mask = detection.detect(REGION, fields)
    assert ((mask == 2) == (patch & bool(count))).all()
    if count:
        cells = np.nonzero(patch)
        assert detection._length(REGION, cells, np.cos(REGION.phi[cells[0], 0])) == pytest.approx(2.4e6, rel=0.05)


def test_objects_are_connected_across_the_seam():
    rivers = [replace(FILAMENT, longitude=tuple(x - 34 + shift for x in LONGITUDES)) for shift in (180, 0)]
    inside, seam = (detect(GLOBE, vortices=(replace(CYCLONE, latitude=14, longitude=r.longitude[1]),), rivers=(r,)) for r in rivers)
    assert len(centres(GLOBE, inside, 1)) == len(centres(GLOBE, inside, 2)) == 1
    assert (np.roll(inside, 180, axis=1) == seam).mean() > 0.9999
    corner = np.array([[1, 0, 0], [0, 0, 2]])
    detection._merge_across_seam(corner)
    assert corner[0, 0] == corner[1, 2]


def test_planted_and_detected_objects_agree_over_many_scenes():
    planted = hits = false_positives = rivers = 0
    for index in range(40):
        scene = random_scene(REGION, index)
        mask = detection.detect(REGION, Weather(REGION, scene).fields())
        storms = [(v.latitude, v.longitude) for v in scene.vortices if v.shape]
        is_planted = [any(np.hypot(y - a, x - b) < 2.5 for a, b in storms) for y, x in centres(REGION, mask, 1)]
        planted, hits, false_positives = planted + len(storms), hits + sum(is_planted), false_positives + is_planted.count(False)
        rivers += len(centres(REGION, mask, 2))
    assert planted > 10 and hits > 0.8 * planted and false_positives <= 1 and 10 < rivers < 40
