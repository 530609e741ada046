"""Fields of a sky survey: boxes enclose the light of objects, independent of the noise; the data set."""



import numpy as np
import pytest

from data_prep import coco, survey
from data_prep.galaxies import Galaxy
from data_prep.galaxy_models import Camera
from tests.data_prep.prep_contract import PrepContract, columns, read_json, runner

SMALL = ["--size", "64", "--samples", "16", "--galaxies", "4", "--stars", "4", "--rows", "8", "--test", "0.1", "--no-check"]
run = runner(survey)


def test_a_box_is_the_isophote_of_an_object():
    camera, rng = Camera(64, 0.5, 1.2, 54.0), np.random.default_rng(0)
    light = survey.draw(rng, "elliptical", Galaxy(17.0, 2.0, 0.05, (0.0, 0.0)), camera)[1]
    into, threshold = np.s_[:, 3:67, 0:64], 40.0
    label, (left, top, right, bottom), area = survey.find_box(1, into, light, np.pad(light, ((3, 0), (0, 0))), threshold)
    inside = light[top - 3 : bottom - 3, left:right] > threshold
    assert inside.sum() == area == (light > threshold).sum() and label == 1
    assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
    faint = np.where(light > np.sort(light.ravel())[-survey.LEAST], light, 0)
    assert survey.find_box(1, into, faint, light, threshold) is None, "too few pixels"
    glare = np.pad((1.1 + survey.HIDDEN) * light, ((3, 0), (0, 0)))
    assert survey.find_box(1, into, light, glare, threshold) is None, "hidden by another object"


def test_the_truth_does_not_depend_on_the_noise(monkeypatch):
    recipe = survey.Recipe(size=64, galaxies=9.0, stars=9.0)
    sample = recipe.sample(3)
    monkeypatch.setattr(Camera, "expose", lambda self, image, rng: image)
    clear = recipe.sample(3)
    assert (sample["pixels"] != clear["pixels"]).any()
    np.testing.assert_array_equal(sample["boxes"], clear["boxes"])
    assert sample["objects"] >= 4 and (np.bincount(sample["labels"], minlength=5)[[0, 1]] > 0).all()
    sky = clear["pixels"].min()
    for left, top, right, bottom in clear["boxes"].astype(int):
        assert clear["pixels"][top:bottom, left:right].max() > 2 * sky + 10
    assert (clear["boxes"] >= 0).all() and (clear["boxes"] <= 64).all()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survey") / "once"
    assert run("simulate", folder, *SMALL) == 0
    return folder


def test_truth_is_beside_the_held_out_splits(dataset):
    assert not (dataset / "train" / coco.TRUTH).exists()
    for split in ("validation", "test"):
        truth, values = read_json(dataset / split / coco.TRUTH), columns(dataset / split)
        assert [image["id"] for image in truth["images"]] == values["id"].tolist()
        assert [each["name"] for each in truth["categories"]] == read_json(dataset / split / "index.json")["classes"]
        boxes = np.array([each["bbox"] for each in truth["annotations"]])
        np.testing.assert_array_equal(boxes, np.c_[values["boxes"][:, :2], values["boxes"][:, 2:] - values["boxes"][:, :2]])
        assert [each["category_id"] - 1 for each in truth["annotations"]] == values["labels"].tolist()
        assert np.bincount([each["image_id"] for each in truth["annotations"]])[values["id"]].tolist() == values["objects"].tolist()


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL
