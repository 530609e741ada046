"""Images of galaxies: their light, arms and encounters, the camera, and the data set."""

import math

import numpy as np
import pytest

from data_prep import galaxies, galaxy_models, images, store
from data_prep.galaxy_models import Camera, Grid, Plane
from tests.data_prep.prep_contract import PrepContract, check_fails, columns, read_json, runner, set_to
from tests.reference_data import load_json

SMALL = ["--size", "32", "--samples", "80", "--rows", "30", "--no-check"]
run = runner(galaxies)
GRID = Grid(320, 0.25)
CAMERA = Camera(64, 0.5, 1.2, 54.0)


@pytest.mark.parametrize(("n", "radius", "total"), [(0.5, 4.0, 1e-3), (1.0, 4.0, 2e-3), (2.5, 2.5, 4e-3), (4.0, 1.0, 0.012)])
def test_a_sersic_profile_has_its_flux_and_half_light_radius(n, radius, total):
    light = galaxy_models.sersic(plane := Plane(GRID, (0.31, -0.17), 0.6, galaxy_models.axis_ratio(1.0, 0.3)), radius, n)
    order = np.argsort(distance := np.hypot(*plane.coordinates).ravel())
    assert light.sum() == pytest.approx(1, abs=total) and light.min() >= 0
    assert np.interp(0.5, np.cumsum(light.ravel()[order]), distance[order]) == pytest.approx(radius, rel=0.02)
    x, y = GRID.axis[None] - 0.31, GRID.axis[:, None] + 0.17
    small, large = np.linalg.eigvalsh([[(light * a * b).sum() for a in (x, y)] for b in (x, y)])
    assert n > 1 or math.sqrt(small / large) == pytest.approx(math.hypot(math.cos(1), 0.3 * math.sin(1)), rel=0.01)


@pytest.mark.parametrize("case", ["n1", "n4"])
def test_an_image_is_that_of_galsim(case):
    reference = load_json("galaxies/galsim")[case]
    plane = Plane(CAMERA.grid, (0, 0), reference["angle"], reference["ratio"])
    image = CAMERA.blur(galaxy_models.sersic(plane, reference["radius"], reference["n"]))[1, 24:40, 24:40]
    assert image == pytest.approx(np.array(reference["image"]), abs=0.01 * image.max(), rel=0)


def test_bars_rings_arms_and_points_keep_the_flux():
    disc = galaxy_models.sersic(plane := Plane(GRID, (0, 0), 0.5, 0.7), 5.0, 1.0)
    assert galaxy_models.bar(plane, 5.0, 0.3, 0.8).sum() == pytest.approx(1, abs=5e-3)
    assert galaxy_models.ring(plane, 8.0, 1.0).sum() == pytest.approx(1, abs=5e-3)
    assert (disc * galaxy_models.spiral_arms(plane, 2, 0.4, 0.3, 2.0, 3.0)).sum() == pytest.approx(disc.sum(), rel=3e-3)
    points = GRID.add_points(np.array([[0.1, 0.2], [39.8, 3.0], [99.0, 0.0]]), np.array([1.0, 2.0, 4.0]))
    assert points.sum() == 3 and points[160, 160] == 1 and points[172, 319] == 2


@pytest.mark.parametrize("pitch", [12.0, -25.0])
def test_the_phase_of_the_second_mode_has_the_pitch_angle(pitch):
    light = galaxy_models.spiral_arms(Plane(GRID), 2, math.radians(pitch), 0.3, 2.0, 3.0)
    (radius, phi), edges = Plane(GRID).polar, np.geomspace(5, 30, 60)
    rings = [(radius > low) & (radius < high) for low, high in zip(edges, edges[1:])]
    phase = np.unwrap([np.angle((light[ring] * np.exp(2j * phi[ring])).sum()) for ring in rings]) / 2
    slope = np.polyfit(np.log(edges[1:] * edges[:-1]) / 2, phase, 1)[0]
    assert math.degrees(math.atan(1 / slope)) == pytest.approx(pitch, abs=0.3)


def test_an_edge_on_disc_is_that_of_van_der_kruit_and_its_dust_lane_is_red():
    light = galaxy_models.edge_on_disc(plane := Plane(GRID), math.pi / 2, scale := 5.0, height := 1.0)
    law = {0.5: 0.5 * 1.656441, 1.0: 0.601907, 2.0: 2 * 0.139866}             # x K1(x), the modified Bessel function
    middle = [np.interp(x * scale, GRID.axis, light[160]) / light[160].max() for x in law]
    assert light.sum() == pytest.approx(1, abs=0.02) and middle == pytest.approx([*law.values()], rel=0.03)
    tilted = galaxy_models.edge_on_disc(plane, 1.4, scale, height)
    moment = scale**2 * 3 * math.cos(1.4) ** 2 + (height * math.sin(1.4)) ** 2 * math.pi**2 / 12
    assert (tilted * GRID.axis[:, None] ** 2).sum() / tilted.sum() == pytest.approx(moment, rel=0.01)
    left = galaxy_models.dust_lane(plane, math.pi / 2, 0.5, 6.0, 0.3)
    assert (left[:, 160, 160] < 0.3).all() and (left[:, 170, 160] > 0.98).all() and (np.diff(left[:, 160, 160]) > 0).all()
    assert np.allclose(galaxy_models.dust_lane(plane, 1.4, 0.0, 6.0, 0.3), 1, atol=1e-5)


def test_an_encounter_draws_tails_from_prograde_discs():
    times, h = np.array([-3.0, -1.0, 0.0, 2.0]), 1e-3
    before, track, after = (galaxy_models.parabola(times + shift, 1.5) for shift in (-h, 0, h))
    acceleration = (after - 2 * track + before) / h**2
    assert acceleration == pytest.approx(-1.5 * track / np.linalg.norm(track, axis=1, keepdims=True) ** 3, abs=1e-5)
    spread = []
    for turn in (np.eye(3), np.diag([1.0, -1, -1])):
        bodies, stars = galaxy_models.encounter(np.random.default_rng(1), (1.0, 1.0), (0.2, 0.2), (turn, turn), (800, 0), 3.0)
        spread.append(np.quantile(np.linalg.norm(stars - bodies[0], axis=1), 0.9))
    assert spread[0] > 1.3 * spread[1]


def test_the_image_of_a_star_has_the_seeing_and_its_flux():
    camera = Camera(65, 0.2, 1.4, 54.0)
    points = camera.grid.step / 2 * np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)])      # around the middle of a pixel
    image = camera.blur(camera.grid.add_points(points, np.full(4, 2500.0)))
    fwhm = [0.4 * np.interp(0.5, profile[::-1] / profile[0], np.arange(32, -1, -1)) for profile in image[:2, 32, 32:]]
    assert fwhm == pytest.approx([1.4 * (0.477 / 0.623) ** -0.2, 1.4], rel=0.03)
    assert image.sum((1, 2)) == pytest.approx(1e4, rel=0.03) and np.allclose(image, image[:, ::-1, ::-1], atol=1e-6)


def test_the_noise_is_that_of_photons_and_of_reading():
    image = np.zeros((3, 64, 64)) + np.array([0.0, 300.0, 3000.0])[:, None, None]
    exposed, sky = CAMERA.expose(np.tile(image, (1, 3, 3)), np.random.default_rng(0)), CAMERA.sky[:, 0, 0]
    assert exposed.mean((1, 2)) == pytest.approx(image[:, 0, 0], abs=2.0)
    assert exposed.var((1, 2)) == pytest.approx(image[:, 0, 0] + sky + galaxy_models.READ_NOISE**2, rel=0.03)
    assert sky == pytest.approx(54 * 10 ** (0.4 * np.array([4.0, 4.8, 5.1])) * 0.25, rel=1e-5)


def test_files_have_the_format_that_the_loader_expects(dataset):
    parts = [columns(dataset / name) for name in store.SPLITS]
    split, labels = parts[0], [part["label"] for part in parts]
    assert read_json(dataset / "train" / "index.json")["classes"] == list(galaxies.NAMES) and [*map(len, labels)] == [64, 8, 8]
    first = images.decode_image(split["image"][: split["bytes"][0]].tobytes(), "first")
    assert first.shape == (32, 32, 3) and split["bytes"].sum() == len(split["image"])
    assert np.bincount(np.concatenate(labels)).tolist() == [10] * 8


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


def test_images_prefer_no_direction():
    recipe = galaxies.Recipe(size=32)
    mean = np.mean([recipe.sample(index)["pixels"] for index in range(104)], axis=(0, 3))
    assert max(np.abs(mean - turned).mean() for turned in (mean[::-1], mean[:, ::-1], mean.T)) < 0.1 * np.ptp(mean)


def test_the_check_compares_images_with_the_simulation(dataset, tmp_path, capsys):
    assert run("check", dataset, "--no-picture") == 0 and "40 images compared" in capsys.readouterr().out
    assert check_fails(run, dataset, tmp_path / "out", set_to("label", 0, 7), "differs from the simulation")
