"""The 3D U-Net app from its command line: on one process, sharded, resumed, with each reader, and with bad input."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.unet3d.data import FIELDS, Crops, Volumes, normal
from apps.unet3d.settings import AugmentConfig, Config
from hpcai import config, log
from hpcai.data import Rows
from hpcai.models.unet3d import UNet3D
from tests.apps.app_contract import AppContract
from tests.apps.small_apps import UNET3D as APP

WINDOW = (16, 32, 32)


class TestContract(AppContract):
    test_the_mlperf_log_of_a_run_passes_the_checker = None  # there is none in MLPerf HPC

    def check_config(self, name: str, cfg: Any) -> None:
        assert cfg.train.better == "higher" and cfg.train.metric == "mean_dice"
        if name != "small":  # the benchmark: network, optimizer, schedule of evaluations
            assert cfg.model == Config().model and cfg.train.target == 0.908 and cfg.data.augment.foreground == 0.4
            assert (cfg.step.optimizer, cfg.step.nesterov, cfg.step.momentum, cfg.step.weight_decay) == ("sgd", True, 0.9, 0)
            assert cfg.train.evaluate_from == 1000 and cfg.train.evaluate_every == 20  # 168 divides by these batches
            assert 168 % cfg.data.batch == 0
        if name == "spatial8":
            assert cfg.mesh.depth == 8 and cfg.mesh.replicate * 8 + cfg.mesh.evaluate == 768 == 96 * 8
            assert (cfg.data.batch, cfg.step.lr, cfg.step.schedule.warmup) == (84, 1.5, 1500)


def test_slices_and_scores_of_a_run_and_masks_of_its_weights(data: Path) -> None:
    run = APP.cached_run(data)
    maps = np.load(run / "maps.npz", allow_pickle=False)
    assert maps["fields"].shape == (2, 48, 48, 1) and maps["true"].shape == maps["predicted"].shape == (2, 48, 48)
    assert np.nanmin(maps["fields"]) >= -79 and np.nanmax(maps["fields"]) <= 304.1 and maps["true"].max() > 0
    scores = [e for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == "evaluate"]
    assert len(scores) == 2
    for score in scores:
        assert score["mean_dice"] == pytest.approx((score["dice_kidney"] + score["dice_tumour"]) / 2)

    model = UNet3D.load(run / "model.safetensors")
    masks = model.segment(np.random.default_rng(0).normal(0, 200, (20, 41, 33)), spacing_mm=(14, 9, 9))
    assert {name: mask.shape for name, mask in masks.items()} == dict.fromkeys(model.cfg.classes, (20, 41, 33))
    assert np.array_equal(sum(mask.astype(int) for mask in masks.values()), np.ones((20, 41, 33)))


# ---- crops


OPENED: list[Rows] = []


@pytest.fixture(autouse=True)
def closed_rows() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def open_rows(folder: Path, reader: str = "direct") -> Rows:
    OPENED.append(Rows(folder, FIELDS, reader=reader))
    return OPENED[-1]


def open_crops(data: Path, box: tuple[slice, ...] = (slice(None),) * 3, repeat: int = 1, **augmentation: Any) -> Crops:
    return Crops(open_rows(data / "train"), WINDOW, AugmentConfig(**augmentation), 7, box, repeat)


def test_a_shard_of_a_crop_equals_that_of_the_full_crop_and_reads_no_more(data: Path) -> None:
    augmentation = {"foreground": 0.5, "flip": 0.5, "brighter": 0.5, "noisy": 0.5}
    for box in ((slice(0, 8),), (slice(8, 16), slice(16, 32)), (slice(5, 16), slice(0, 11), slice(3, 20))):
        full, shard = open_crops(data, **augmentation), open_crops(data, (*box, *(slice(None),) * (3 - len(box))), **augmentation)
        for index in range(len(full)):
            for epoch in range(4):
                expected, actual = full.sample(index, epoch), shard.sample(index, epoch)
                assert np.array_equal(expected.label[box], actual.label)
                np.testing.assert_array_equal(expected.image[box], actual.image)
        if len(box) == 1:
            assert shard.rows.reader.transferred < 0.8 * full.rows.reader.transferred


def test_a_crop_is_a_function_of_seed_epoch_and_index(data: Path) -> None:
    first, second = open_crops(data, repeat=2), open_crops(data, repeat=2)
    assert len(first) == 12 and first.draw_crop(3, 1) == second.draw_crop(3, 1)
    assert len({first.draw_crop(index, epoch) for index in (3, 9) for epoch in (0, 1)}) == 4, "crops of one volume differ"
    assert first.describe(3) == first.describe(9)


def test_frequencies_of_foreground_and_augmentations_in_crops(data: Path) -> None:
    source = open_crops(data, foreground=0.4)
    draws = [source.draw_crop(index, epoch) for epoch in range(400) for index in range(6)]
    n = len(draws)
    for dim in range(3):
        assert abs(sum(dim in c.flips for c in draws) / n - 1 / 3) < 0.04
    factors, noises = [c.factor for c in draws if c.factor != 1], [c.noise for c in draws if c.noise]
    assert abs(len(factors) / n - 0.1) < 0.025 and 1.7 <= min(factors) < 1.75 and 2.25 < max(factors) <= 2.3
    assert abs(len(noises) / n - 0.1) < 0.025 and max(noises) <= 0.1 and abs(np.mean(noises) - 0.05) < 0.01
    shapes = [source.rows.shape(index, "image") for index in range(6)]
    for k, crop in enumerate(draws):
        assert all(0 <= start <= n - w for start, n, w in zip(crop.corner, shapes[k % 6], WINDOW))

    always = open_crops(data, foreground=1.0, flip=0, brighter=0, noisy=0)
    assert all((always.sample(index, epoch).label > 0).any() for index in range(6) for epoch in range(20))


def test_crops_contain_the_components_of_the_boxes(data: Path) -> None:
    source = open_crops(data, foreground=1.0)
    for index in range(6):
        boxes = [box for box in source.rows.read(index)["boxes"].reshape(-1, 6) if box[3] > box[0]]
        for epoch in range(15):
            corner = source.draw_crop(index, epoch).corner
            inside = [all((c <= b[d] and b[d + 3] <= c + w) or (c >= b[d] and c + w <= b[d + 3])
                          for d, (c, w) in enumerate(zip(corner, WINDOW))) for b in boxes]  # fmt: skip
            assert any(inside), (corner, boxes)


def test_noise_is_normal_and_a_function_of_position() -> None:
    full = np.stack([normal(seed, (32, 32, 32), [(0, 32)] * 3) for seed in (4, 2**61 + 7)])
    part = normal(4, (32, 32, 32), [(3, 9), (0, 32), (30, 32)])
    assert np.array_equal(part, full[0, 3:9, :, 30:32])
    assert abs(full.mean()) < 0.01 and abs(full.std() - 1) < 0.01 and abs((full**4).mean() - 3) < 0.15
    flat = full.reshape(2, -1)
    assert abs(np.corrcoef(flat)[0, 1]) < 0.02, "two seeds are independent"
    for shift in (1, 32, 1024):
        assert abs((flat[:, :-shift] * flat[:, shift:]).mean()) < 0.02, shift


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reader", ["direct", "memory"])
def test_writing_to_a_batch_of_volumes_does_not_change_cached_rows(data: Path, reader: str) -> None:
    source = Volumes(open_rows(data / "validation", reader))
    for _ in range(2):
        (batch,) = source.collate([source.sample(0, 0)])
        assert (batch.image >= -9).all() and batch.image.shape == (1, *source.rows.shape(0, "image"))
        batch.image.fill_(-10)


def test_the_largest_volumes_are_evaluated_first(data: Path) -> None:
    from hpcai.data.sampler import LargestFirst

    source = Volumes(open_rows(data / "validation"))
    model = config.load(Config, APP.small_config, [*APP.quick_settings]).model
    counts = [source.windows(index, model) for index in range(3)]
    for index, count in enumerate(counts):  # the number of sliding windows
        sides = zip(source.rows.shape(index, "image"), WINDOW)
        assert count == np.prod([n // (w // 2) - 1 + (n % (w // 2) >= w // 4) for n, w in sides])
    sampler = LargestFirst([3, 9, 1, 5, 4, 2], replicas=4, group=2)
    assigned = [sorted(sampler.order(0)[sampler.assign(sampler.order(0), rank, 4)]) for rank in range(4)]
    assert assigned == [[0, 1], [0, 1], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert sampler.order(0)[:2].tolist() == [1, 3]
