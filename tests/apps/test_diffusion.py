"""The diffusion app from its command line: on one process, on ranks, resumed, with each reader, and with bad input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from apps.diffusion.__main__ import main
from apps.diffusion.data import complete_network
from apps.diffusion.latents import EncodedImages, layouts, read_metadata
from apps.diffusion.settings import Config
from data_prep import fields
from hpcai import config
from hpcai.data import Rows
from hpcai.errors import DataError
from hpcai.models.diffusion import VAE, Batch, Condition, Diffusion, VAEConfig, save_folder, score
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import ROOT, metric_by_step, resumed_from
from tests.apps.small_apps import DIFFUSION as APP
from tests.apps.small_apps import simulator
from tests.captions import WORDS, save_text_encoders


def damage_data(data: Path, kind: str) -> None:
    index = data / "train/index.json"
    if kind == "periodic":
        content = json.loads(index.read_text())
        content["periodic"] = [False, True]
        index.write_text(json.dumps(content))


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        if name.startswith(("sd2", "flux")):  # a constant learning rate and no weight average, as in MLPerf
            assert cfg.step.schedule.decay == "none" and cfg.step.ema_decay is None
            rate = {"sd2": 8e-6, "sd2-node": 6.4e-5, "sd2-64gpus": 1.2288e-4, "flux": 2.5e-4}[name]
            assert cfg.step.lr == rate and cfg.benchmark == {"sd2": None, "flux": "flux1"}.get(name, "stable_diffusion")


def test_ensembles_are_those_of_the_saved_weights(data: Path) -> None:
    run = APP.cached_run(data)
    ensembles = np.load(run / "ensembles.npz", allow_pickle=False)
    shapes = {"truth": (3, 1, 16, 16), "members": (3, 4, 1, 16, 16), "field": (3, 1, 4, 4)}
    assert {name: ensembles[name].shape for name in shapes} == shapes
    with h5py.File(data / "validation/fields_000000.h5") as file:
        assert np.array_equal(ensembles["truth"], file["high"][:3]) and np.array_equal(ensembles["field"], file["low"][:3])
    assert set(metric_by_step(run, "evaluate", "loss_8")) and 0 < metric_by_step(run, "evaluate", "loss").popitem()[1] < 3

    model = Diffusion.load(run)
    assert model.cfg.size == (1, 16, 16) and model.cfg.fields is not None and model.cfg.fields.names == ("density",)
    low = torch.from_numpy(ensembles["field"])
    members = model.sample(Condition(field=low), 4)
    np.testing.assert_allclose(members.transpose(0, 1).numpy(), ensembles["members"], atol=1e-5)
    single = model.sample(Condition(field=low[1:2]), 4, indices=torch.tensor([1]))
    torch.testing.assert_close(single[:, 0], members[:, 1], rtol=0, atol=1e-5)
    density = model.to_physical(torch.from_numpy(ensembles["truth"]))
    torch.testing.assert_close(model.standardize(density), torch.from_numpy(ensembles["truth"]), rtol=1e-4, atol=1e-5)
    assert density.min() > -0.05 and 0.5 < float(density.mean()) < 2


def test_two_commands_go_from_a_users_file_to_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xarray", reason="xarray, of the extra fields, is not installed")
    wind = np.random.default_rng(0).normal(5.0, 2.0, (24, 3, 16, 32)).astype("f4")
    np.save(tmp_path / "wind.npy", wind)
    options = "--variables u v --inputs w --periodic x --validation 0.25 --workers 1"
    assert fields.main(["convert", str(tmp_path / "wind.npy"), str(tmp_path / "data"), *options.split()]) == 0

    def train() -> int:
        _, *overrides = APP.overrides(tmp_path / "data", tmp_path / "run", "model.unet.attention=[none,none]")
        with pytest.raises(SystemExit) as end:
            config.run(Config, main, [str(ROOT / "apps/diffusion/configs/fields.yaml"), *overrides])
        return int(end.value.code or 0)

    assert train() == 0
    model, ensembles = Diffusion.load(tmp_path / "run"), np.load(tmp_path / "run/ensembles.npz", allow_pickle=False)
    assert model.cfg.unet is not None and model.cfg.unet.periodic == (False, True) and model.cfg.unet.field == 2
    assert ensembles["members"].shape == (3, 4, 2, 16, 32) and model.cfg.unet.fine == 1
    truth, fine = (torch.from_numpy(ensembles[name]) for name in ("truth", "fine"))
    np.testing.assert_allclose(model.to_physical(truth), wind[18:21, :2], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(model.to_physical(fine, "fine"), wind[18:21, 2:], rtol=1e-4, atol=1e-4)
    index = tmp_path / "data/train/index.json"
    own = config.load(Config, None, ["model.unet={inputs: 2, outputs: 2, periodic: [false, true]}"])
    assert complete_network(own, json.loads(index.read_text()) | {"fine": None}) == own, "an unconditional network of the user's"
    index.write_text(json.dumps({key: value for key, value in json.loads(index.read_text()).items() if key != "box"}))
    capsys.readouterr()
    assert train() == 1
    error = capsys.readouterr().err
    assert "has no box, which describe fields; make it with: python -m data_prep.fields convert SOURCE OUT" in error, error


def run_config(name: str, data: Path, run: Path, *overrides: str) -> int:
    small = ["data.batch=2", "data.evaluation_batch=4", "data.drawn=2", "data.members=2", "model.sampler.steps=2", "train.steps=2",
             "step.schedule.decay=none", "step.schedule.warmup=0", "data.workers=1", "step.precision=fp32"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(APP), "small_config", property(lambda self: ROOT / f"apps/diffusion/configs/{name}.yaml"))
        return replace(APP, quick_settings=small).run(data, run, *overrides)


KINDS = {
    "small3d": ("volumes --size 8", ["model.unet.channels=[8,16]", "model.unet.heads=[1,2]", "model.unet.groups=4"]),
    "parameters": ("matter --size 16 --slabs 1", [
        "model.unet.channels=[8,8,8]", "model.unet.groups=4", "model.unet.heads=[1,1,1]",
    ]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_volumes_and_parameters_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kind, settings), run = KINDS[name], tmp_path / "run"
    simulator("fields", f"--samples 12 --validation 0.4 --rows 6 --kind {kind}")(tmp_path / "data")
    assert run_config(name, tmp_path / "data", run, *settings) == 0
    ensembles, model = np.load(run / "ensembles.npz"), Diffusion.load(run)
    assert np.isfinite(ensembles["members"]).all() and ensembles["members"].shape[2:] == model.cfg.size
    assert ("field" in ensembles) == (name != "parameters") == ("parameters" not in ensembles)

    from hpcai.cli.report import draw_run, theme

    monkeypatch.setattr(theme, "DPI", 30)
    assert "Ensembles beside one field" in draw_run(run).read_text()


NARROW = ["model.unet.channels=[8,8]", "model.unet.heads=[1,1]", "model.unet.groups=4", "model.unet.attention=[none,none]"]


def test_residuals_of_a_regression_mean_are_generated(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config("small", data, tmp_path / "mean", *NARROW, "model.objective.prediction_type=regression") == 0
    start = f"start.mean={tmp_path / 'mean'}"
    assert run_config("small", data, tmp_path / "run", *NARROW, start, "model.residual=null", "data.scored=2") == 0
    model, mean = Diffusion.load(tmp_path / "run"), Diffusion.load(tmp_path / "mean")
    for name, x in mean.state_dict().items():
        assert torch.equal(model.state_dict()[f"mean.{name}"], x), "the mean is frozen"
    ensembles = np.load(tmp_path / "run/ensembles.npz")
    low, truth = (torch.from_numpy(ensembles[name]) for name in ("field", "truth"))
    np.testing.assert_allclose(ensembles["mean"], mean.sample(Condition(field=low))[0], atol=1e-5)
    with h5py.File(data / "train/fields_000000.h5") as first, h5py.File(sorted((data / "train").glob("*.h5"))[-1]) as last:
        high, coarse = (torch.from_numpy(np.concatenate([first[name], last[name]])) for name in ("high", "low"))
    rms = (high - mean.sample(Condition(field=coarse))[0]).square().mean().sqrt()
    assert isinstance(model.cfg.residual, tuple) and abs(model.cfg.residual[0] / float(rms) - 1) < 0.2
    assert 0 < metric_by_step(tmp_path / "run", "evaluate", "dressed_crps").popitem()[1] < float(truth.abs().mean())
    capsys.readouterr()
    assert run_config("small", data, tmp_path / "other", *NARROW, "model.residual=[0.1, 0.2]") == 1
    assert "model.residual has 2 values for 1 channels; give one for each" in capsys.readouterr().err
    assert run_config("small", data, tmp_path / "other", *NARROW, f"start.mean={tmp_path / 'run'}") == 1
    assert "is another model; expected one with objective.prediction_type regression" in capsys.readouterr().err


def test_forecasts_of_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    simulator("fields", "--samples 24 --validation 0.4 --rows 6 --kind turbulence --size 16 --frames 6")(data)
    assert run_config("turbulence", data, run, *NARROW, "data.leads=3", "data.scored=2") == 0
    model, ensembles = Diffusion.load(run), np.load(run / "ensembles.npz")
    with h5py.File(data / "validation/fields_000000.h5") as file:
        assert np.array_equal(ensembles["start"][0], file["high"][0]) and np.array_equal(ensembles["truth"][0], file["high"][1:4])
    start, index = (torch.from_numpy(ensembles[name]) for name in ("start", "index"))
    members = model.roll_out(Condition(fine=start), 3, 2, indices=index)
    np.testing.assert_allclose(members.permute(2, 0, 1, 3, 4, 5), ensembles["members"], atol=1e-4)
    metrics = {name: metric_by_step(run, "evaluate", name).popitem()[1] for name in ("crps_1", "crps_3", "persistence_1")}
    assert all(0 < value < 3 for value in metrics.values()), metrics
    capsys.readouterr()
    assert run_config("turbulence", data, tmp_path / "other", *NARROW, "data.leads=6") == 1
    assert "no 7 states in a row; set data.leads to less" in capsys.readouterr().err


def test_static_fields_and_weights_are_those_of_the_data(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    random = np.random.default_rng(0)
    arrays = {name: random.random((1, 16, 16), np.float32) for name in ("static", "weights")}
    arrays["weights"][:, 4:] = 0
    save_file(arrays, copy / "static.safetensors")
    for index in copy.glob("*/index.json"):
        index.write_text(json.dumps({**json.loads(index.read_text()), "static": ["height"], "weighted": True}))
    assert run_config("small", copy, tmp_path / "run", *NARROW) == 0
    model, ensembles = Diffusion.load(tmp_path / "run"), np.load(tmp_path / "run/ensembles.npz")
    assert model.static is not None and np.array_equal(model.static, arrays["static"]) and model.cfg.unet.fine == 1  # type: ignore
    assert model.weights is not None and np.array_equal(model.weights, arrays["weights"])
    assert np.array_equal(ensembles["weights"], arrays["weights"]) and not ensembles["members"][..., 4:, :].any(), "masked cells"
    save_file({"static": arrays["static"]}, copy / "static.safetensors")
    capsys.readouterr()
    assert run_config("small", copy, tmp_path / "other", *NARROW) == 1
    assert "static.safetensors: weights is [0], expected [1, 16, 16], finite; convert the data again" in capsys.readouterr().err


def test_held_out_samples_are_scored_at_the_times_of_the_settings(data: Path) -> None:
    """At the start of each eighth of the time range, as in MLPerf's Flux.1, rather than at its middle."""
    run = APP.cached_run(data, "data.evaluation_place=0", "step.ema_decay=null", "step.lr=0.03", "step.precision=fp32")
    validation: dict[str, list[np.ndarray]] = {"high": [], "low": []}
    for path in sorted((data / "validation").glob("*.h5")):
        with h5py.File(path) as file:
            for name, parts in validation.items():
                parts.append(file[name][:])
    high, low = (torch.from_numpy(np.concatenate(parts)) for parts in validation.values())
    number = torch.arange(len(high))
    batch = Batch(high, number, torch.zeros_like(number), low)
    model = Diffusion.load(run)

    def compute_losses(position: float) -> dict[str, float]:
        with torch.no_grad():
            sums, finish = score(model, batch, position)["levels"]
        losses: dict[str, float] = finish(*sums)
        return losses

    names = ("loss_1", "loss_5", "loss_8")
    actual = [metric_by_step(run, "evaluate", name)[6] for name in names]
    assert actual == pytest.approx([compute_losses(0.0)[name] for name in names], rel=1e-4)
    assert all(compute_losses(0.5)[name] != pytest.approx(value, rel=1e-3) for name, value in zip(names, actual))


def test_a_shard_of_a_turned_field_equals_that_of_the_full_field_and_reads_little_else(tmp_path: Path) -> None:
    from apps.diffusion.data import Fields

    simulator("fields", "--samples 4 --validation 0.5 --rows 2 --kind volumes --size 8")(tmp_path)
    fields: dict[str, tuple] = {"high": ("float32", (1, 8, 8, 8)), "low": ("float32", (1, 2, 2, 2))}
    rows, full_range = Rows(tmp_path / "train", fields, "make them"), slice(0, 8)
    rows.read = lambda *args, read=rows.read: (row := read(*args)) | {"fine": -row["high"]}  # type: ignore[method-assign, misc]
    unsharded, read, boxes = Fields(rows, 7), 0, [(full_range, slice(2, 5), full_range), (slice(3, 8), slice(0, 4), full_range)]
    for box in boxes:
        sharded = Fields(rows, 7, box=box)
        for index, epoch in ((index, epoch) for index in range(2) for epoch in range(20)):
            shard, full = sharded.sample(index, epoch), unsharded.sample(index, epoch)
            assert np.array_equal(shard.sample, full.sample[(slice(None), *box)]) and np.array_equal(shard.field, full.field)
            assert np.array_equal(shard.fine, -shard.sample) and np.array_equal(full.fine, -full.sample)
            selection = sharded.selection(index, epoch)
            read += selection is not None and selection["high"][1].stop - selection["high"][1].start < 8
    assert read > 20, "often only the shard is read"
    unturned = Fields(rows, box=boxes[1])
    assert unturned.selection(1, 0) == dict.fromkeys(("high", "fine"), (slice(None), slice(3, 8)))
    assert np.array_equal(unturned.sample(1, 0).sample, Fields(rows).sample(1, 3).sample[:, 3:8, 0:4])


BUCKETS = """model.unet={channels: [8,8], heads: [1,1], groups: 4, attention: [none,cross], middle: none, tokens: 28, inputs: 2,
 outputs: 2, field: 0, patch: 1, periodic: []}; model.residual=null; model.unconditional=0.3; data.batch=4; data.epoch=20;
 train.epochs=null; step.precision=fp64"""


@pytest.mark.slow
def test_buckets_train_alike_on_ranks_and_after_a_resume(tmp_path: Path, capsys: Any, quiet_hugging_face: None) -> None:
    """Images of three aspect ratios, with texts of SDXL's encoders, and a resume within an epoch on another number of ranks."""
    pytest.importorskip("transformers", reason="transformers is not installed: buckets of images with texts are NOT tested")
    from data_prep import latents

    torch.manual_seed(0)
    model, data, alone, two, images = (tmp_path / name for name in ("model", "data", "alone", "two", "images"))
    images.mkdir()
    vae = VAEConfig(latents=2, channels=(8, 8, 8), blocks=1, groups=2)
    save_folder(VAE(vae).state_dict(), vae, model / "vae")
    save_text_encoders(model, "sdxl")
    (model / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline", "force_zeros_for_empty_prompt": true}')
    random, exif, shapes = np.random.default_rng(0), Image.Exif(), [(33, 33), (40, 66), (90, 50)]
    exif[0x0112] = 6  # rows are columns of the file
    for number in range(24):
        height, width = shapes[number % 7 % 3]
        image = Image.fromarray(random.integers(0, 256, (width, height, 3), np.uint8))
        image.save(images / f"{number:02}.png", exif=exif)
        (images / f"{number:02}.txt").write_text(WORDS[number % len(WORDS)])
    options = ["--size", "32", "--buckets", "8", "--validation", "7", "--device", "cpu", "--model", str(model)]
    assert latents.main(["convert", str(images), str(data), *options]) == latents.main(["check", str(data), "--no-picture"]) == 0
    sizes = {(8, 8): [33, 33, 0, 0, 32, 32], (6, 10): [40, 66, 0, 0, 24, 40], (10, 6): [90, 50, 1, 0, 40, 24]}
    for path in data.glob("*/*.h5"):
        with h5py.File(path) as file:
            assert (file["sizes"][:] == sizes[file["moments"].shape[2:]]).all()
    assert not np.load(data / "nothing.npz")["tokens"].any(), "as force_zeros_for_empty_prompt has it"

    app = replace(APP, quick_settings=[*APP.quick_settings, *BUCKETS.replace("\n", "").split("; ")])
    assert app.run(data, alone, "train.steps=7") == 0 and app.on_ranks(2, data, two, "train.steps=3", "step.accumulate=2")
    assert app.run(data, two, "train.steps=7") == 0 and resumed_from(two) == 3 and len(metric_by_step(alone)) == 7
    assert metric_by_step(two) == pytest.approx(metric_by_step(alone), rel=1e-9)
    assert metric_by_step(two, "evaluate")[7] == pytest.approx(metric_by_step(alone, "evaluate")[7], rel=1e-9)
    assert np.load(alone / "ensembles.npz")["truth"].shape[0] == 3
    network, cfg, folder = SimpleNamespace(inputs=2, tokens=28, sizes=6), Config(), data / "train"
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"unet": network})})
    rows = Rows(folder, layouts(cfg, folder, metadata := read_metadata(folder)))
    assert EncodedImages(rows).sample(len(rows) - 1, 0).condition.sizes.tolist() in sizes.values()
    del metadata["fields"]["sizes"]  # as in data of earlier versions
    with pytest.raises(DataError, match=r"no sizes of images, which the network of model takes; .*: python -m data_prep\.latents"):
        layouts(cfg, folder, metadata)
    capsys.readouterr()
    for setting, text in {"data.order=ready": "order is ready", "data.scored=2": "data.scored is for one"}.items():
        app.check_refused(data, tmp_path / "other", [setting], text, capsys)
